// SPDX-License-Identifier: Apache-2.0
//
// y[t, h, :] = weight[h] x[t, h, :]. Ports, dtypes and gradients: kernels/head_linear.h.
//
// Sharding: x along 1, the heads, with weight along 0, gives y along 1.
#pragma once

#include "eadem/kernels/head_linear.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class HeadLinear final : public Op {
 public:
  // Throws InvalidArgument unless out_dtype is f32 or bf16.
  explicit HeadLinear(const kernels::HeadLinearAttrs& attrs);

  std::string_view name() const override { return "head_linear"; }
  std::vector<Port> inputs() const override { return {{"x"}, {"weight", Port::Role::parameter}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override {
    return fmt::format("out_dtype={}{}", dtype_name(attrs_.out_dtype), matmul_input_text(attrs_.matmul_input));
  }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, kX}, {Saved::Kind::input, kWeight}}; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kX, kWeight };
  kernels::HeadLinearAttrs attrs_;
};

}  // namespace eadem::ops
