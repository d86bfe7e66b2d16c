// SPDX-License-Identifier: Apache-2.0
//
// Rows times the sigmoids of their gates: the share that a shared expert has in each token, or a branch of attention in
// each head. Ports and gradients: kernels/experts.h.
//
// Sharding: every rank has whole rows and all gates.
#pragma once

#include "eadem/kernels/experts.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class GateRows final : public Op {
 public:
  std::string_view name() const override { return "gate_rows"; }
  std::vector<Port> inputs() const override { return {{"x"}, {"gate"}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  Sharding wanted_sharding(std::span<const TensorType>, int) const override { return Sharding::replicated(); }
  int inference_alias(int /*output*/) const override { return 0; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, 0}, {Saved::Kind::input, 1}}; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();
};

}  // namespace eadem::ops
