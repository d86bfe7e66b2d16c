// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// y = x / rms(x) * weight over the last dimension. Parameter: `weight` [size]. On [tokens, heads, head_dim] it is a
// norm per head.
class RmsNorm {
 public:
  RmsNorm(int64_t size, double eps) : size_(size), eps_(eps) {}

  // Weights are kept in f32 whatever the checkpoint stores, unless activations are 16-bit: they cost nothing to read.
  static HardwareConfig default_hw_config(const Device& device, HardwareMode mode, const ModelSpec& spec);

  ValueId build(BuildContext& context, ValueId x, int layer = -1) const;

 private:
  int64_t size_;
  double eps_;
};

}  // namespace eadem::modules
