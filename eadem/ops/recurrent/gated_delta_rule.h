// SPDX-License-Identifier: Apache-2.0
//
// Linear attention with the gated delta rule. Ports, math and gradients: kernels/recurrent/gated_delta_rule.h. Only
// what is not cached has a backward pass.
//
// Sharding: along the heads, of every port that has them, or none; the attributes are those of the part. Cost counts
// the states of the step's sequences.
#pragma once

#include "eadem/kernels/recurrent/gated_delta_rule.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class GatedDeltaRule final : public Op {
 public:
  // Throws InvalidArgument unless value_heads is a positive multiple of key_heads, and dimensions and eps are positive.
  explicit GatedDeltaRule(const kernels::GatedDeltaRuleAttrs& attrs);

  std::string_view name() const override { return "gated_delta_rule"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  bool has_backward() const override { return !attrs_.cached; }
  std::vector<Saved> saved() const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kQ, kK, kV, kA, kB, kALog, kDtBias, kQueryStart, kSlots, kState };
  kernels::GatedDeltaRuleAttrs attrs_;
};

}  // namespace eadem::ops
