// SPDX-License-Identifier: Apache-2.0
//
// y = f(x gate_weight^T) * (x up_weight^T), with x read once for both products. Ports, dtypes: kernels/fusions.h.
// Inference only, without biases.
#pragma once

#include "eadem/fusions/fused_op.h"
#include "eadem/kernels/fusions.h"

namespace eadem::fusions {

const Fusion& linear_gated_activation();

class LinearGatedActivation final : public FusedOp {
 public:
  explicit LinearGatedActivation(const kernels::LinearGatedActivationAttrs& attrs);

  std::vector<ops::Port> inputs() const override;
  std::vector<ops::Port> outputs() const override { return {{"y"}}; }
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override;
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::LinearGatedActivationAttrs attrs_;
};

}  // namespace eadem::fusions
