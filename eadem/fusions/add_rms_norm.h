// SPDX-License-Identifier: Apache-2.0
//
// sum = a + b; y = rms_norm(sum, weight), with the sum read once for both. Ports, dtypes: kernels/fusions.h.
// Inference only. The sum may be written over a.
#pragma once

#include "eadem/fusions/fused_op.h"
#include "eadem/kernels/fusions.h"

namespace eadem::fusions {

const Fusion& add_rms_norm();

class AddRmsNorm final : public FusedOp {
 public:
  explicit AddRmsNorm(const kernels::RmsNormAttrs& attrs);

  std::vector<ops::Port> inputs() const override { return {{"a"}, {"b"}, {"weight", ops::Port::Role::parameter}}; }
  std::vector<ops::Port> outputs() const override { return {{"sum"}, {"y"}}; }
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override { return part(1).attrs_text(); }
  int inference_alias(int output) const override { return output == 0 ? 0 : -1; }
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::RmsNormAttrs attrs_;
};

}  // namespace eadem::fusions
