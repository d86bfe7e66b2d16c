// SPDX-License-Identifier: Apache-2.0
//
// Inputs of layers: besides its hidden state, each layer reads a vector of a token's own, made of the token's id and of
// its embedding. Source: transformers, models/gemma4 ("per-layer inputs").
#pragma once

#include <string>
#include <vector>

#include "eadem/modules/base/norm.h"
#include "eadem/modules/build_context.h"
#include "eadem/ops/elementwise/elementwise.h"

namespace eadem::modules {

// Makes the inputs of all layers, `width` numbers for each:
//   p = norm of each layer's part of per_layer_model_projection(x) / sqrt(hidden)
//   inputs = (p + sqrt(width) * embed_tokens_per_layer[token]) / sqrt(2)
// Parameters: embed_tokens_per_layer.weight [vocab, layers * width], per_layer_model_projection.weight
// [layers * width, hidden], per_layer_projection_norm.weight [width].
class LayerInputs {
 public:
  struct Config {
    int64_t width = 0;  // 0: layers read nothing else
    int64_t vocab = 0;
    int64_t hidden = 0;
    int64_t layers = 0;
    double eps = 1e-6;
  };

  explicit LayerInputs(const Config& config) : config_(config) {}

  // Sets context.step.layer_inputs, each [tokens, width]. x [tokens, hidden] are the embeddings of the step's tokens.
  void build(BuildContext& context, ValueId x) const;

 private:
  Config config_;
};

// The part of a layer that reads its input:  y = x + norm(per_layer_projection(f(per_layer_input_gate(x)) * input)).
// Parameters: per_layer_input_gate.weight [width, hidden], per_layer_projection.weight [hidden, width], those of the
// norm.
class LayerInputReader {
 public:
  struct Config {
    int64_t width = 0;
    int64_t hidden = 0;
    kernels::ActivationKind activation = kernels::ActivationKind::gelu_tanh;
    NormSpec norm{.name = "post_per_layer_input_norm"};
  };

  LayerInputReader(const Config& config, int layer) : config_(config), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden]. Throws Unsupported where the inputs are not in the graph.
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  const Config& config_;
  int layer_;
};

}  // namespace eadem::modules
