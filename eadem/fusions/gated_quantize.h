// SPDX-License-Identifier: Apache-2.0
//
// linear_gated_activation_quantize: y = quantize(f(x gate_weight^T) * (x up_weight^T)). The gated products write their
// rows rounded, because only the down projection reads them. Ports, dtypes: kernels/fusions.h. Inference only.
#pragma once

#include "eadem/fusions/fused_op.h"
#include "eadem/kernels/fusions.h"

namespace eadem::fusions {

const Fusion& linear_gated_activation_quantize();

class LinearGatedActivationQuantize final : public FusedOp {
 public:
  explicit LinearGatedActivationQuantize(const kernels::LinearGatedActivationAttrs& attrs);

  std::vector<ops::Port> inputs() const override { return part(0).inputs(); }
  std::vector<ops::Port> outputs() const override { return {{"y"}}; }
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override { return part(0).attrs_text() + " " + part(1).attrs_text(); }
  int inference_alias(int /*output*/) const override { return -1; }
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::LinearGatedActivationAttrs attrs_;
};

}  // namespace eadem::fusions
