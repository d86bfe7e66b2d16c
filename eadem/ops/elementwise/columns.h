// SPDX-License-Identifier: Apache-2.0
//
// Rows cut into two parts along the last axis, and put together again. Ports, math and gradients: kernels/columns.h.
//
// Sharding: along any axis but the last.
#pragma once

#include "eadem/kernels/columns.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class SplitColumns final : public Op {
 public:
  // Throws InvalidArgument unless first > 0.
  explicit SplitColumns(const kernels::ColumnsAttrs& attrs);

  std::string_view name() const override { return "split_columns"; }
  std::vector<Port> inputs() const override { return {{"x"}}; }
  std::vector<Port> outputs() const override { return {{"first"}, {"second"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override { return fmt::format("first={}", attrs_.first); }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  bool has_backward() const override { return true; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  kernels::ColumnsAttrs attrs_;
};

class ConcatColumns final : public Op {
 public:
  // Throws InvalidArgument unless first > 0.
  explicit ConcatColumns(const kernels::ColumnsAttrs& attrs);

  std::string_view name() const override { return "concat_columns"; }
  std::vector<Port> inputs() const override { return {{"first"}, {"second"}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override { return fmt::format("first={}", attrs_.first); }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  bool has_backward() const override { return true; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  kernels::ColumnsAttrs attrs_;
};

}  // namespace eadem::ops
