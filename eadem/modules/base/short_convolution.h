// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"
#include "eadem/ops/recurrent/short_convolution.h"

namespace eadem::modules {

// A causal convolution of each channel over the last `taps` tokens of its sequence
// (kernels/recurrent/short_convolution.h). Parameters: `weight` [taps, channels], f32, and `bias` [channels] where
// there is one. Checkpoints have the weight [channels, 1, taps]: models/recurrent_recipes.h. With a cache, the state
// `conv_state` keeps taps - 1 rows of a sequence.
class ShortConvolution {
 public:
  struct Config {
    int64_t channels = 0;
    int64_t taps = 4;
    bool bias = false;
    bool silu = true;
    bool divided = false;  // tensor-parallel ranks divide the channels, which do divide; else each has all of them
  };

  explicit ShortConvolution(const Config& config) : config_(config) {}

  // x [tokens, channels] -> [tokens, channels]
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  Config config_;
};

}  // namespace eadem::modules
