// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// A gated short convolution: y = out_proj(c * convolution(b * x)), where b, c and x are projections of the input and
// the convolution mixes each channel along the tokens, without an activation.
// Parameters: b_proj, c_proj, x_proj, out_proj (.weight [hidden, hidden], .bias); conv (.weight [taps, hidden], f32,
// .bias). Tensor-parallel ranks divide the channels where they divide evenly; else each computes all of them.
// Source: Liquid AI 2025 (LFM2); transformers, models/lfm2.
class GatedConvolution {
 public:
  struct Config {
    int64_t hidden = 0;
    int64_t taps = 3;   // 2 to kernels::kMaxTaps
    bool bias = false;  // of all projections and the convolution

    // The names of its parameters, and their shapes.
    std::vector<std::pair<std::string, Shape>> parameters() const;
  };

  GatedConvolution(const Config& config, int layer) : config_(config), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden]
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  Config config_;
  int layer_;
};

}  // namespace eadem::modules
