// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/base/norm.h"
#include "eadem/modules/build_context.h"

namespace eadem::modules {

// What the layer of a module for multi-token prediction reads: y = eh_proj [enorm(tokens), hnorm(previous)].
// Parameters: enorm.weight, hnorm.weight [hidden], and eh_proj.weight [hidden, 2 hidden].
// Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", eq. 21.
class MtpInput {
 public:
  // Both norms are like `norm`, but for their names.
  MtpInput(const NormSpec& norm, int64_t hidden, int layer);

  // tokens, previous [tokens, hidden] -> [tokens, hidden]
  ValueId build(BuildContext& context, ValueId tokens, ValueId previous) const;

  const NormSpec& token_norm() const { return token_norm_; }
  const NormSpec& previous_norm() const { return previous_norm_; }

 private:
  NormSpec token_norm_, previous_norm_;
  int64_t hidden_;
  int layer_;
};

}  // namespace eadem::modules
