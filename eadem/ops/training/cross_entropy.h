// SPDX-License-Identifier: Apache-2.0
//
// loss[r] = logsumexp(logits[r, :]) - logits[r, labels[r]], 0 where labels[r] < 0. Ports, dtypes and gradients:
// kernels/training/cross_entropy.h.
//
// Sharding: everything whole; a divided vocabulary is refused.
#pragma once

#include "eadem/kernels/training/cross_entropy.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class CrossEntropy final : public Op {
 public:
  explicit CrossEntropy(const kernels::CrossEntropyAttrs& attrs = {}) : attrs_(attrs) {}

  std::string_view name() const override { return "cross_entropy"; }
  std::vector<Port> inputs() const override { return {{"logits"}, {"labels", Port::Role::index}}; }
  std::vector<Port> outputs() const override { return {{"loss"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override { return attrs_.dlogits_in_e5m2 ? "dlogits=e5m2" : ""; }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override {
    return {{Saved::Kind::input, 0}, {Saved::Kind::input, 1}, {Saved::Kind::extra, 0}};
  }
  std::vector<TensorType> extra_types(std::span<const TensorType> inputs) const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  kernels::CrossEntropyAttrs attrs_;
};

}  // namespace eadem::ops
