// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/hybrid/causal_attention.h"
#include "eadem/modules/hybrid/mamba2.h"

namespace eadem::modules {

// Attention and Mamba-2 side by side, as in Falcon-H1:
//   y = attention_out * attention(attention_in * x) + mamba_out * mamba(mamba_in * x)
// Parameters: those of both, below self_attn and mamba.
class ParallelMixers {
 public:
  struct Config {
    CausalAttention::Config attention;
    Mamba2::Config mamba;
    double attention_in = 1, attention_out = 1, mamba_in = 1, mamba_out = 1;
  };

  ParallelMixers(const Config& config, int layer) : config_(config), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden]
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  Config config_;
  int layer_;
};

}  // namespace eadem::modules
