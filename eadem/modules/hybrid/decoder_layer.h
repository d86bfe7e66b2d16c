// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/hybrid/causal_attention.h"
#include "eadem/modules/hybrid/dense_mlp.h"

namespace eadem::modules {

// The pre-norm decoder layer:
//   h = x + self_attn(input_layernorm(x));   y = h + mlp(post_attention_layernorm(h))
class DecoderLayer {
 public:
  struct Config {
    CausalAttention::Config attention;
    DenseMlp::Config mlp;
    double norm_eps = 1e-5;
  };

  DecoderLayer(const Config& config, int layer) : config_(config), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden]. The current scope names the layer ("model.layers.3").
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  Config config_;
  int layer_;
};

}  // namespace eadem::modules
