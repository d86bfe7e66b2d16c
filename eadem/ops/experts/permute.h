// SPDX-License-Identifier: Apache-2.0
//
// Permute brings copies of tokens into the order of their experts, Unpermute adds up what the experts made of them.
// Ports, dtypes, the order of additions and gradients: kernels/experts.h.
//
// Sharding: `rows` and `weights` are on every rank; x divided along its last axis passes through Permute that has no
// weights.
#pragma once

#include "eadem/kernels/experts.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class Permute final : public Op {
 public:
  explicit Permute(const kernels::PermuteAttrs& attrs = {}) : attrs_(attrs) {}

  std::string_view name() const override { return "permute"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override { return attrs_.weighted ? "weighted" : ""; }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  kernels::PermuteAttrs attrs_;
};

class Unpermute final : public Op {
 public:
  explicit Unpermute(const kernels::UnpermuteAttrs& attrs = {}) : attrs_(attrs) {}

  std::string_view name() const override { return "unpermute"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override { return attrs_.weighted ? "" : "not weighted"; }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  kernels::UnpermuteAttrs attrs_;
};

}  // namespace eadem::ops
