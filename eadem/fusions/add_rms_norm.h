// SPDX-License-Identifier: Apache-2.0
//
// sum = a + b; y = rms_norm(sum, weight), with the sum read once for both. Ports, dtypes, gradients: kernels/fusions.h.
// In inference the sum may be written over a. In training other ops read the sum too: the backward kernel adds the
// gradient that they give it to the gradient of the norm, so that no op of its own adds the two.
#pragma once

#include "eadem/fusions/fused_op.h"
#include "eadem/kernels/fusions.h"

namespace eadem::fusions {

const Fusion& add_rms_norm();

class AddRmsNorm final : public FusedOp {
 public:
  explicit AddRmsNorm(const kernels::RmsNormAttrs& attrs);

  std::vector<ops::Port> inputs() const override { return {{"a"}, {"b"}, {"weight", ops::Port::Role::parameter}}; }
  std::vector<ops::Port> outputs() const override {
    return {{"sum", ops::Port::Role::activation, /*optional=*/true}, {"y"}};
  }
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override { return part(1).attrs_text(); }
  int inference_alias(int output) const override { return output == 0 ? 0 : -1; }
  bool has_backward() const override { return true; }
  int shares_gradient_with(int input) const override { return input == kB ? kA : input; }
  std::vector<ops::Saved> saved() const override {
    using Kind = ops::Saved::Kind;
    return {{Kind::output, 0}, {Kind::input, kWeight}, {Kind::extra, 0}};
  }
  // inv_rms, as of rms_norm
  std::vector<TensorType> extra_types(std::span<const TensorType> inputs) const override;
  ops::Cost cost(ops::Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
                 const SymbolValues& symbols) const override;
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  enum In { kA, kB, kWeight };
  kernels::RmsNormAttrs attrs_;
};

}  // namespace eadem::fusions
