// SPDX-License-Identifier: Apache-2.0
//
// Norms that write their rows rounded, because only products read them: y = quantize(rms_norm(x, weight)), and
// sum = a + b; y = quantize(rms_norm(sum, weight)). Ports, dtypes: kernels/fusions.h. Inference only.
#pragma once

#include "eadem/fusions/fused_op.h"
#include "eadem/kernels/fusions.h"

namespace eadem::fusions {

const Fusion& rms_norm_quantize();
const Fusion& add_rms_norm_quantize();

class RmsNormQuantize final : public FusedOp {
 public:
  explicit RmsNormQuantize(const kernels::RmsNormQuantizeAttrs& attrs);

  std::vector<ops::Port> inputs() const override { return {{"x"}, {"weight", ops::Port::Role::parameter}}; }
  std::vector<ops::Port> outputs() const override { return {{"y"}}; }
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override { return part(0).attrs_text() + " " + part(1).attrs_text(); }
  int inference_alias(int /*output*/) const override { return -1; }
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::RmsNormQuantizeAttrs attrs_;
};

// The sum may be written over a.
class AddRmsNormQuantize final : public FusedOp {
 public:
  explicit AddRmsNormQuantize(const kernels::RmsNormQuantizeAttrs& attrs);

  std::vector<ops::Port> inputs() const override { return {{"a"}, {"b"}, {"weight", ops::Port::Role::parameter}}; }
  std::vector<ops::Port> outputs() const override { return {{"sum"}, {"y"}}; }
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override { return part(0).attrs_text() + " " + part(1).attrs_text(); }
  int inference_alias(int output) const override { return output == 0 ? 0 : -1; }
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::RmsNormQuantizeAttrs attrs_;
};

}  // namespace eadem::fusions
