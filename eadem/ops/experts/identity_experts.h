// SPDX-License-Identifier: Apache-2.0
//
// What experts that give back what they read add to a token. Ports and gradients: kernels/experts.h.
//
// Sharding: every rank has whole rows, all choices and all weights.
#pragma once

#include "eadem/kernels/experts.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class IdentityExperts final : public Op {
 public:
  // Throws InvalidArgument unless `first` is not negative.
  explicit IdentityExperts(const kernels::IdentityExpertsAttrs& attrs);

  std::string_view name() const override { return "identity_experts"; }
  std::vector<Port> inputs() const override { return {{"x"}, {"experts", Port::Role::index}, {"weights"}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override { return fmt::format("first={}", attrs_.first); }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  Sharding wanted_sharding(std::span<const TensorType>, int) const override { return Sharding::replicated(); }
  int inference_alias(int /*output*/) const override { return kX; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override {
    return {{Saved::Kind::input, kX}, {Saved::Kind::input, kExperts}, {Saved::Kind::input, kWeights}};
  }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kX, kExperts, kWeights, kDy };
  kernels::IdentityExpertsAttrs attrs_;
};

}  // namespace eadem::ops
