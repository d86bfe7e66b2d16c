// SPDX-License-Identifier: Apache-2.0
//
// y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]. Ports, dtypes and gradients: kernels/linear.h.
//
// Sharding: weight (and bias) along 0 gives y along its last axis; weight along 1 with x along its last axis gives
// partial sums, and takes no bias, which every rank would add.
#pragma once

#include "eadem/kernels/linear.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class Linear final : public Op {
 public:
  // Throws InvalidArgument unless out_dtype is f32 or bf16.
  explicit Linear(const kernels::LinearAttrs& attrs);

  std::string_view name() const override { return "linear"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  // x whole, unless the weight's columns are divided as x's are.
  Sharding wanted_sharding(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  bool has_backward() const override { return true; }
  // Beside an encoded weight, the gradient of x multiplies the weight and a dy that may be rounded as x is. Beside one
  // of an Fp8TensorEncoding so does the gradient of the weight, and only that of the bias is that of plain values.
  std::vector<int> gradient_nodes(std::span<const TensorType> inputs) const override;
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, 0}, {Saved::Kind::input, 1}}; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kX, kWeight, kBias };
  kernels::LinearAttrs attrs_;
};

}  // namespace eadem::ops
