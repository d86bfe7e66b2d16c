// SPDX-License-Identifier: Apache-2.0
//
// gated_activation_quantize: y = quantize(f(gate) * up).
// gated_gradients_quantize: dgate = quantize(dy * up * f'(gate)), dup = quantize(dy * f(gate)).
//
// Training with delayed scales: only 8-bit products read what gated activations and their gradients make, so it is
// written in codes. Nothing is rounded that the parts do not round. Ports, dtypes: kernels/fusions.h.
#pragma once

#include "eadem/fusions/fused_op.h"
#include "eadem/kernels/fusions.h"

namespace eadem::fusions {

const Fusion& gated_activation_quantize();
const Fusion& gated_gradients_quantize();

// The backward pass of gated_activation as an op of its own: inputs gate, up, dy; outputs dgate, dup.
ops::OpPtr gated_gradients(kernels::ActivationKind kind);

class GatedActivationQuantize final : public FusedOp {
 public:
  explicit GatedActivationQuantize(const kernels::GatedQuantizeAttrs& attrs);

  std::vector<ops::Port> inputs() const override;
  std::vector<ops::Port> outputs() const override;
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override { return part(0).attrs_text() + " " + part(1).attrs_text(); }
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::GatedQuantizeAttrs attrs_;
};

class GatedGradientsQuantize final : public FusedOp {
 public:
  explicit GatedGradientsQuantize(const kernels::GatedQuantizeAttrs& attrs);

  std::vector<ops::Port> inputs() const override;
  std::vector<ops::Port> outputs() const override;
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override { return part(0).attrs_text() + " " + part(1).attrs_text(); }
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::GatedQuantizeAttrs attrs_;
};

}  // namespace eadem::fusions
