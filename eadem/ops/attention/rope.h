// SPDX-License-Identifier: Apache-2.0
//
// Rotary position embedding: rope_table makes a step's cosines and sines, rope rotates queries and keys by them.
// Ports, math and gradients: kernels/attention/rope.h.
//
// Sharding: rope's x may be divided along the heads; positions, frequencies and table are whole.
#pragma once

#include "eadem/kernels/attention/rope.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class RopeTable final : public Op {
 public:
  // Throws InvalidArgument unless the scale is finite.
  explicit RopeTable(const kernels::RopeTableAttrs& attrs);

  std::string_view name() const override { return "rope_table"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  kernels::RopeTableAttrs attrs_;
};

class Rope final : public Op {
 public:
  // Throws InvalidArgument unless rotary_dim is even and positive.
  explicit Rope(const kernels::RopeAttrs& attrs);

  std::string_view name() const override { return "rope"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
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
  kernels::RopeAttrs attrs_;
};

}  // namespace eadem::ops
