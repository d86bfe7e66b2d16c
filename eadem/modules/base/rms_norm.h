// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// y = x / rms(x) * weight over the last dimension. Parameter: `weight` [size], or with groups [groups, size]. On
// [tokens, heads, head_dim] it is a norm per head, with groups a norm of each [tokens, groups, size] by itself.
class RmsNorm {
 public:
  // `divided`: tensor-parallel ranks divide the groups.
  RmsNorm(int64_t size, double eps, int64_t groups = 0, bool divided = false)
      : size_(size), eps_(eps), groups_(groups), divided_(divided) {}

  // Weights are kept in f32 whatever the checkpoint stores, unless activations are 16-bit: they cost nothing to read.
  static HardwareConfig default_hw_config(const Device& device, HardwareMode mode, const ModelSpec& spec);

  ValueId build(BuildContext& context, ValueId x, int layer = -1) const;
  // y = x / rms(x): with weights of 1 that are no parameter.
  ValueId build_weightless(BuildContext& context, ValueId x) const;

 private:
  int64_t size_;
  double eps_;
  int64_t groups_;  // of all ranks; 0: one weight for all rows
  bool divided_;
};

}  // namespace eadem::modules
