// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// Manifold-constrained hyper-connections: a token has `streams` rows of hidden states in the place of one residual
// (kernels/streams.h). A part of a layer reads a weighted sum of them, and what it makes is added to each after they
// were mixed. The weights of a part are made of the token's streams themselves,
//   logits = fn (flat / rms(flat)),   flat = all streams of the token, one behind the other.
// Parameters of a part called `name`: name.fn [streams (streams + 2), streams * hidden], name.base [streams (streams +
// 2)], name.scale [3]; of the merge: fn [streams, streams * hidden], base [streams], scale [1]. They stay f32, as a
// router's do. Source: Xie et al. 2025 (arXiv 2512.24880).
class HyperConnections {
 public:
  struct Config {
    int64_t streams = 0;  // 0: there are none, and a layer adds to one residual
    int64_t hidden = 0;
    int64_t iterations = 0;  // of the division of rows and columns
    double eps = 0;          // of the weights
    double norm_eps = 0;

    // The names of a part's parameters below its own, or of the merge's, and their shapes.
    std::vector<std::pair<std::string, Shape>> parameters(bool merges) const;
  };

  // What a part reads, [tokens, hidden], and the weights by which `write` puts its result back.
  struct Reading {
    ValueId x, weights;
  };

  explicit HyperConnections(const Config& config) : config_(config) {}

  // x [tokens, hidden] -> [tokens, streams, hidden]: each stream is x.
  ValueId start(BuildContext& context, ValueId x) const;
  Reading read(BuildContext& context, const std::string& name, ValueId streams) const;
  // The streams behind the part that made y [tokens, hidden].
  ValueId write(BuildContext& context, const std::string& name, ValueId streams, ValueId y, ValueId weights) const;
  // [tokens, streams, hidden] -> [tokens, hidden], with the parameters below `name`.
  ValueId merge(BuildContext& context, const std::string& name, ValueId streams) const;

 private:
  ValueId build_weights(BuildContext& context, ValueId streams, bool merges) const;

  Config config_;
};

}  // namespace eadem::modules
