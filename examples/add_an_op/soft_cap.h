// SPDX-License-Identifier: Apache-2.0
//
// y = cap * tanh(x / cap): keeps values in (-cap, cap), almost unchanged where they are small.
//
//   inputs   x [...] f32.   outputs: y [...] f32 (inference may write it over x).
//   backward inputs: y, dy.  outputs: dx = dy * (1 - (y / cap)^2).
//
// Source: Gemma 2 (Gemma Team 2024), "logit soft-capping".
#pragma once

#include "eadem/ops/op.h"

namespace example {

struct SoftCapAttrs {
  float cap = 30.0f;
};

class SoftCap final : public eadem::ops::Op {
 public:
  explicit SoftCap(const SoftCapAttrs& attrs) : attrs_(attrs) {}

  std::string_view name() const override { return "soft_cap"; }
  std::vector<eadem::ops::Port> inputs() const override { return {{"x"}}; }
  std::vector<eadem::ops::Port> outputs() const override { return {{"y"}}; }
  eadem::ops::AttrsRef attrs() const override { return eadem::ops::AttrsRef(attrs_); }
  std::vector<eadem::TensorType> infer_types(std::span<const eadem::TensorType> inputs) const override;
  int inference_alias(int) const override { return 0; }
  bool has_backward() const override { return true; }
  std::vector<eadem::ops::Saved> saved() const override { return {{eadem::ops::Saved::Kind::output, 0}}; }
  eadem::ops::Cost cost(eadem::ops::Pass pass, std::span<const eadem::TensorType> inputs,
                        std::span<const eadem::TensorType> outputs, const eadem::SymbolValues& symbols) const override;
  void reference(eadem::ops::Pass pass, std::span<const eadem::ops::RefTensor> inputs,
                 std::span<eadem::ops::RefTensor> outputs) const override;
  eadem::ops::KernelList kernels(const eadem::kernels::Backend& backend) const override;

 private:
  SoftCapAttrs attrs_;
};

}  // namespace example
