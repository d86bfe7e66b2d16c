// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "eadem/kernels/elementwise.h"
#include "eadem/modules/build_context.h"

namespace eadem::modules {

// What a layer adds of an embedding of its own:
//   p = (norm(model_projection(e) / sqrt(hidden)) + sqrt(size) * per_layer_embedding[token]) / sqrt(2)
//   y = h + post_per_layer_input_norm(per_layer_projection(f(per_layer_input_gate(h)) * p))
// where e are the rows of the model's embedding as its first layer reads them.
// Parameters of the layer: per_layer_embedding [vocab, size], per_layer_model_projection [size, hidden],
// per_layer_input_gate [size, hidden], per_layer_projection [hidden, size], post_per_layer_input_norm [hidden]
// (.weight); and of all layers together the norm's, kPerLayerNorm [size].
// Source: Google DeepMind 2025 (Gemma 3n, per-layer embeddings); transformers, models/gemma4.
class PerLayerInput {
 public:
  struct Config {
    int64_t hidden = 0;
    int64_t size = 0;
    int64_t vocab = 0;
    kernels::ActivationKind activation = kernels::ActivationKind::gelu_tanh;
    double norm_eps = 1e-6;

    // The names of a layer's parameters, and their shapes.
    std::vector<std::pair<std::string, Shape>> parameters() const;
  };
  static constexpr const char* kPerLayerNorm = "model.per_layer_projection_norm.weight";

  PerLayerInput(const Config& config, int layer) : config_(config), layer_(layer) {}

  // h [tokens, hidden] -> y [tokens, hidden]. Throws Unsupported where the model's embedding is in another stage of a
  // pipeline.
  ValueId build(BuildContext& context, ValueId h) const;

 private:
  ValueId project(BuildContext& context, const char* name, int64_t in, int64_t out, ValueId x) const;
  ValueId build_input(BuildContext& context) const;  // p [tokens, size]

  Config config_;
  int layer_;
};

}  // namespace eadem::modules
