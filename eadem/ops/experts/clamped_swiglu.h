// SPDX-License-Identifier: Apache-2.0
//
// The gated activation of GPT-OSS's experts, which limits both operands. Ports and gradients: kernels/experts.h.
#pragma once

#include "eadem/kernels/experts.h"
#include "eadem/ops/elementwise/elementwise.h"

namespace eadem::ops {

class ClampedSwiglu final : public ElementwiseOp {
 public:
  // Throws InvalidArgument unless limit is positive and all are finite.
  explicit ClampedSwiglu(const kernels::ClampedSwigluAttrs& attrs);

  std::string_view name() const override { return "clamped_swiglu"; }
  std::vector<Port> inputs() const override { return {{"gate"}, {"up"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override {
    return fmt::format("limit={} alpha={} offset={}", attrs_.limit, attrs_.alpha, attrs_.offset);
  }
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, 0}, {Saved::Kind::input, 1}}; }
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 protected:
  double flops_per_element(Pass pass) const override {
    return kTranscendentalFlops + (pass == Pass::backward ? 12 : 7);
  }

 private:
  kernels::ClampedSwigluAttrs attrs_;
};

}  // namespace eadem::ops
