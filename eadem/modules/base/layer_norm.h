// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// y = (x - mean) / std * weight + bias over the last dimension. Parameters: `weight` [size], and `bias` [size] where
// there is one.
class LayerNorm {
 public:
  LayerNorm(int64_t size, double eps, bool bias) : size_(size), eps_(eps), bias_(bias) {}

  ValueId build(BuildContext& context, ValueId x, int layer = -1) const;

 private:
  int64_t size_;
  double eps_;
  bool bias_;
};

}  // namespace eadem::modules
