// SPDX-License-Identifier: Apache-2.0
//
// A number of the model times every value. Ports and gradients: kernels/scale_by.h.
//
// Sharding: x in any way; the factor is whole.
#pragma once

#include "eadem/ops/op.h"

namespace eadem::ops {

class ScaleBy final : public Op {
 public:
  std::string_view name() const override { return "scale_by"; }
  std::vector<Port> inputs() const override { return {{"x"}, {"factor", Port::Role::constant}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return 0; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, 1}}; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();
};

}  // namespace eadem::ops
