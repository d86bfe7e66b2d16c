// SPDX-License-Identifier: Apache-2.0
//
// The selective state-space recurrence of Mamba-2. Ports, math and gradients: kernels/recurrent/state_space_scan.h.
// Only what is not cached has a backward pass.
//
// Sharding: along the heads, and the groups of b and c with them, of every port that has them, or none. Cost counts the
// states of the step's sequences, not all slots.
#pragma once

#include "eadem/kernels/recurrent/state_space_scan.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class StateSpaceScan final : public Op {
 public:
  // Throws InvalidArgument unless 0 <= dt_min <= dt_max.
  explicit StateSpaceScan(const kernels::StateSpaceScanAttrs& attrs);

  std::string_view name() const override { return "state_space_scan"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  bool has_backward() const override { return !attrs_.cached; }
  std::vector<Saved> saved() const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kX, kDt, kB, kC, kDtBias, kALog, kD, kQueryStart, kStateSlots, kState };
  kernels::StateSpaceScanAttrs attrs_;
};

}  // namespace eadem::ops
