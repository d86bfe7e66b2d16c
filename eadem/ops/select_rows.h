// SPDX-License-Identifier: Apache-2.0
//
// y[r, :] = x[rows[r], :]: the rows whose logits are wanted. Ports and dtypes: kernels/select_rows.h. Inference only.
//
// Sharding: x along 1 passes through. Cost counts the rows that are read.
#pragma once

#include "eadem/ops/op.h"

namespace eadem::ops {

class SelectRows final : public Op {
 public:
  std::string_view name() const override { return "select_rows"; }
  std::vector<Port> inputs() const override { return {{"x"}, {"rows", Port::Role::index}}; }
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
