// SPDX-License-Identifier: Apache-2.0
//
// y[r, :] = exp(x[r, :] - max) / sum(exp(x[r, :] - max)). Ports, dtypes and gradients: kernels/softmax.h.
//
// Sharding: along any axis but the last.
#pragma once

#include "eadem/ops/op.h"

namespace eadem::ops {

class Softmax final : public Op {
 public:
  std::string_view name() const override { return "softmax"; }
  std::vector<Port> inputs() const override { return {{"x"}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> /*inputs*/, int /*port*/) const override { return DType::f32; }
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return 0; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override { return {{Saved::Kind::output, 0}}; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();
};

}  // namespace eadem::ops
