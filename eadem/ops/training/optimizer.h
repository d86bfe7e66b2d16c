// SPDX-License-Identifier: Apache-2.0
//
// grad_norm: the length of all gradients as one vector. adamw: one step of AdamW on one parameter. Ports and math:
// kernels/training/optimizer.h. Neither has a gradient.
//
// Sharding: grad_norm wants whole gradients. Of parts it makes the length of this rank's parts, one element of a vector
// of all ranks' lengths, whose length is that of the whole. adamw works on any part, with its state divided alike.
#pragma once

#include "eadem/kernels/training/optimizer.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class GradNorm final : public Op {
 public:
  // Throws InvalidArgument unless num_inputs > 0. `of_parts`: the inputs are divided over the ranks.
  explicit GradNorm(int num_inputs, bool of_parts = false);

  std::string_view name() const override { return "grad_norm"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
  AttrsRef attrs() const override;
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  Sharding wanted_sharding(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  std::vector<std::string> port_names_;  // "grad0", "grad1", …
  bool of_parts_;
};

class AdamW final : public Op {
 public:
  explicit AdamW(const kernels::AdamWAttrs& attrs) : attrs_(attrs) {}

  std::string_view name() const override { return "adamw"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;  // `weight` is absent when the input is
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kGrad, kNorm, kHyper, kMaster, kM, kV, kWeight };
  kernels::AdamWAttrs attrs_;
};

}  // namespace eadem::ops
