// SPDX-License-Identifier: Apache-2.0
//
// Where the pairs of a token and one of its experts stand when they are sorted by expert. Ports and the order:
// kernels/experts.h.
//
// Sharding: every rank sorts all pairs.
#pragma once

#include "eadem/kernels/experts.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class ExpertOrder final : public Op {
 public:
  // Throws InvalidArgument unless `experts` is positive and `identities` not negative.
  explicit ExpertOrder(const kernels::ExpertOrderAttrs& attrs);

  std::string_view name() const override { return "expert_order"; }
  std::vector<Port> inputs() const override { return {{"experts", Port::Role::index}}; }
  std::vector<Port> outputs() const override { return {{"rows", Port::Role::index}, {"offsets", Port::Role::index}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  kernels::ExpertOrderAttrs attrs_;
};

}  // namespace eadem::ops
