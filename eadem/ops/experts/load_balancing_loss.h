// SPDX-License-Identifier: Apache-2.0
//
// How unevenly the routers of a model's layers choose experts; top_k where all are chosen alike. Ports, dtypes and
// gradients: kernels/experts.h.
//
// Sharding: every rank sees the logits of all experts and makes the same loss.
#pragma once

#include "eadem/kernels/experts.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class LoadBalancingLoss final : public Op {
 public:
  // Throws InvalidArgument unless `layers` and top_k are positive.
  LoadBalancingLoss(int layers, const kernels::LoadBalancingLossAttrs& attrs);

  std::string_view name() const override { return "load_balancing_loss"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override { return {{"loss"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  // Logits in f32, whatever the dtype of activations.
  DType wanted_dtype(std::span<const TensorType> /*inputs*/, int /*port*/) const override { return DType::f32; }
  Sharding wanted_sharding(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override;
  std::vector<TensorType> extra_types(std::span<const TensorType> inputs) const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  void reference_backward(std::span<const RefTensor> inputs, std::span<RefTensor> dlogits) const;

  std::vector<std::string> port_names_;  // "logits0", "logits1", …
  kernels::LoadBalancingLossAttrs attrs_;
};

}  // namespace eadem::ops
