// SPDX-License-Identifier: Apache-2.0
//
// y[t, :] = x[t, :] + bias. Ports and gradients: kernels/add_bias.h. x is wanted whole: partial sums would get the bias
// from every rank.
#pragma once

#include "eadem/kernels/add_bias.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class AddBias final : public Op {
 public:
  std::string_view name() const override { return "add_bias"; }
  std::vector<Port> inputs() const override { return {{"x"}, {"bias", Port::Role::parameter}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return 0; }
  bool has_backward() const override { return true; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();
};

}  // namespace eadem::ops
