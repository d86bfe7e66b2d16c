// SPDX-License-Identifier: Apache-2.0
//
// Each token's heads times a number that grows with its position. Ports, math and gradients:
// kernels/attention/scale_by_position.h.
//
// Sharding: x may be divided along the heads; positions are whole.
#pragma once

#include "eadem/kernels/attention/scale_by_position.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class ScaleByPosition final : public Op {
 public:
  // Throws InvalidArgument unless the rate is finite and the length positive.
  explicit ScaleByPosition(const kernels::ScaleByPositionAttrs& attrs);

  std::string_view name() const override { return "scale_by_position"; }
  std::vector<Port> inputs() const override { return {{"x"}, {"positions", Port::Role::index}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return 0; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, 1}}; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  kernels::ScaleByPositionAttrs attrs_;
};

}  // namespace eadem::ops
