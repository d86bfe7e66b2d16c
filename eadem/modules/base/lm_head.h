// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// logits = hidden weight^T + bias, f32. Parameters: `weight_name` [vocab, hidden], which tied models share with the
// embedding, and `bias_name` [vocab], unless that is empty. Tensor-parallel ranks divide the rows; each makes the
// logits of its words. With precision.rounded_head the product reads a rounded weight; `build` throws Unsupported for a
// bias beside it, and for several ranks.
class LmHead {
 public:
  LmHead(int64_t vocab, int64_t hidden, std::string weight_name, bool tied, std::string bias_name = "")
      : vocab_(vocab),
        hidden_(hidden),
        weight_name_(std::move(weight_name)),
        bias_name_(std::move(bias_name)),
        tied_(tied) {}

  static HardwareConfig default_hw_config(const Device& device, HardwareMode mode, const ModelSpec& spec);

  ValueId build(BuildContext& context, ValueId hidden) const;

 private:
  int64_t vocab_;
  int64_t hidden_;
  std::string weight_name_, bias_name_;
  bool tied_;
};

}  // namespace eadem::modules
