// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// hidden[t, :] = scale * weight[token_ids[t], :]. Parameter: `weight` [vocab, hidden], its rows divided over
// tensor-parallel ranks. The scale is rounded to the dtype of the activations.
class Embedding {
 public:
  Embedding(int64_t vocab, int64_t hidden, double scale = 1) : vocab_(vocab), hidden_(hidden), scale_(scale) {}

  static HardwareConfig default_hw_config(const Device& device, HardwareMode mode, const ModelSpec& spec);

  // The current scope names the module ("model.embed_tokens").
  ValueId build(BuildContext& context, ValueId token_ids) const;

 private:
  int64_t vocab_;
  int64_t hidden_;
  double scale_;
};

}  // namespace eadem::modules
