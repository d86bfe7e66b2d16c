// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/linear_gated_activation.h"

#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/linear.h"

namespace eadem::fusions {

namespace {

enum Value { kAbsent = -1, kX, kGateWeight, kUpWeight, kGate, kUp, kY };

ops::OpPtr make(std::span<const ops::Op* const> matched) {
  const auto &gate = matched[0]->attrs().get<kernels::LinearAttrs>(),
             &up = matched[1]->attrs().get<kernels::LinearAttrs>();
  if (up.out_dtype != gate.out_dtype || up.matmul_input != gate.matmul_input) return nullptr;
  return std::make_shared<LinearGatedActivation>(kernels::LinearGatedActivationAttrs{
      matched[2]->attrs().get<kernels::ActivationAttrs>().kind, gate.out_dtype, gate.matmul_input});
}

kernels::LinearAttrs product_attrs(const kernels::LinearGatedActivationAttrs& attrs) {
  return {.out_dtype = attrs.out_dtype, .matmul_input = attrs.matmul_input};
}

}  // namespace

const Fusion& linear_gated_activation() {
  static const Fusion fusion{.name = "linear_gated_activation",
                             .nodes = {{"linear", {kX, kGateWeight, kAbsent}, {kGate}},
                                       {"linear", {kX, kUpWeight, kAbsent}, {kUp}},
                                       {"gated_activation", {kGate, kUp}, {kY}}},
                             .inputs = {kX, kGateWeight, kUpWeight},
                             .outputs = {kY},
                             .make = make};
  return fusion;
}

LinearGatedActivation::LinearGatedActivation(const kernels::LinearGatedActivationAttrs& attrs)
    : FusedOp(linear_gated_activation(),
              {std::make_shared<ops::Linear>(product_attrs(attrs)), std::make_shared<ops::Linear>(product_attrs(attrs)),
               std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{attrs.kind})}),
      attrs_(attrs) {}

std::vector<ops::Port> LinearGatedActivation::inputs() const {
  return {{"x"}, {"gate_weight", ops::Port::Role::parameter}, {"up_weight", ops::Port::Role::parameter}};
}

std::string LinearGatedActivation::attrs_text() const {
  return fmt::format("{} out_dtype={}", part(2).attrs_text(), dtype_name(attrs_.out_dtype));
}

void LinearGatedActivation::reference(ops::Pass pass, std::span<const ops::RefTensor> in,
                                      std::span<ops::RefTensor> out) const {
  ops::RefTensor products[] = {ref_zeros(out[0].shape), ref_zeros(out[0].shape)};
  for (size_t i = 0; i < 2; ++i) {
    const ops::RefTensor operands[] = {in[0], in[1 + i], {}};
    part(i).reference(pass, operands, {&products[i], 1});
  }
  part(2).reference(pass, products, out);
}

}  // namespace eadem::fusions
