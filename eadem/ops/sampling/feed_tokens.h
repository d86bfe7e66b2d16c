// SPDX-License-Identifier: Apache-2.0
//
// The tokens of a step, of which some are those that the step before sampled. Ports and dtypes: kernels/feed_tokens.h.
// Inference only.
//
// Sharding: every rank has all tokens.
#pragma once

#include "eadem/ops/op.h"

namespace eadem::ops {

class FeedTokens final : public Op {
 public:
  std::string_view name() const override { return "feed_tokens"; }
  std::vector<Port> inputs() const override { return {{"ids", Port::Role::index}, {"sampled", Port::Role::index}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();
};

}  // namespace eadem::ops
