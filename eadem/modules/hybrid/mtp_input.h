// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "eadem/modules/base/norm.h"
#include "eadem/modules/build_context.h"
#include "eadem/modules/hybrid/layer_spec.h"
#include "eadem/modules/hybrid/streams/hyper_connections.h"

namespace eadem::modules {

// What the layer of a module for multi-token prediction reads: y = eh_proj [enorm(tokens), hnorm(previous)], or, with
// hyper-connections, for each stream s: y_s = e_proj(enorm(tokens)) + h_proj(hnorm(previous_s)).
// Parameters: enorm.weight, hnorm.weight [hidden], and eh_proj.weight [hidden, 2 hidden], or e_proj.weight and
// h_proj.weight [hidden, hidden].
// Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", eq. 21; with hyper-connections, DeepSeek-V4's module as
// vLLM and SGLang compute it (facts only).
class MtpInput {
 public:
  // Both norms are like `norm`, but for their names.
  MtpInput(const NormSpec& norm, int64_t hidden, const HyperConnections::Config& streams, int layer);

  // tokens [tokens, hidden], previous [tokens, hidden] -> [tokens, hidden]; with hyper-connections `previous` and the
  // result are [tokens, streams, hidden].
  ValueId build(BuildContext& context, ValueId tokens, ValueId previous) const;

  // Every parameter, named below `prefix`.
  void list_parameters(const std::string& prefix, std::vector<ParameterInfo>& list) const;

 private:
  ValueId project(BuildContext& context, const char* name, int64_t in, ValueId x) const;
  ValueId build_streams(BuildContext& context, ValueId tokens, ValueId previous) const;

  NormSpec token_norm_, previous_norm_;
  int64_t hidden_;
  HyperConnections::Config streams_;  // of 0: there are none
  int layer_;
};

}  // namespace eadem::modules
