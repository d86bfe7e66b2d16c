// SPDX-License-Identifier: Apache-2.0
//
// y[r, :] = weight[e] x[r, :] + bias[e, :] for the rows of each expert e. Ports, dtypes and gradients:
// kernels/experts.h.
//
// Sharding: weight along 1, its outputs, gives y along its last axis; weight along 2 with x along its last axis gives
// partial sums. The bias is divided as y is; with partial sums there is none. Weight along 0, its experts, has x,
// offsets and bias along 0, too: the rows of this rank's experts (ops/parallel/expert_exchange.h); so is y.
#pragma once

#include "eadem/kernels/experts.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class GroupedLinear final : public Op {
 public:
  // Throws InvalidArgument unless out_dtype is f32 or bf16.
  explicit GroupedLinear(const kernels::GroupedLinearAttrs& attrs);

  std::string_view name() const override { return "grouped_linear"; }
  std::vector<Port> inputs() const override {
    return {{"x"},
            {"weight", Port::Role::parameter},
            {"offsets", Port::Role::index},
            {"bias", Port::Role::parameter, /*optional=*/true}};
  }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override {
    return fmt::format("out_dtype={}{}", dtype_name(attrs_.out_dtype), matmul_input_text(attrs_.matmul_input));
  }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  // x whole, unless the weights' columns or experts are divided as x's are.
  Sharding wanted_sharding(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override {
    return {{Saved::Kind::input, kX}, {Saved::Kind::input, kWeight}, {Saved::Kind::input, kOffsets}};
  }
  // The traffic counts the weights, and their gradients, of as many experts as there are rows, at most all.
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kX, kWeight, kOffsets, kBias };
  kernels::GroupedLinearAttrs attrs_;
};

}  // namespace eadem::ops
