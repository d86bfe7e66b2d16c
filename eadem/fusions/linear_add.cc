// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/linear_add.h"

#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/linear.h"

namespace eadem::fusions {

namespace {

enum Value { kX, kWeight, kBias, kResidual, kProduct, kY };

ops::OpPtr make(std::span<const ops::Op* const> matched) {
  return std::make_shared<LinearAdd>(matched[0]->attrs().get<kernels::LinearAttrs>());
}

}  // namespace

const Fusion& linear_add() {
  static const Fusion fusion{.name = "linear_add",
                             .nodes = {{"linear", {kX, kWeight, kBias}, {kProduct}},
                                       {"add", {kProduct, kResidual}, {kY}, /*commutative=*/true}},
                             .inputs = {kX, kWeight, kBias, kResidual},
                             .outputs = {kY},
                             .optional_inputs = {kBias},
                             .make = make};
  return fusion;
}

LinearAdd::LinearAdd(const kernels::LinearAttrs& attrs)
    : FusedOp(linear_add(), {std::make_shared<ops::Linear>(attrs), std::make_shared<ops::Add>()}), attrs_(attrs) {}

std::vector<ops::Port> LinearAdd::inputs() const {
  return {{"x"},
          {"weight", ops::Port::Role::parameter},
          {"bias", ops::Port::Role::parameter, /*optional=*/true},
          {"residual"}};
}

void LinearAdd::reference(ops::Pass pass, std::span<const ops::RefTensor> in, std::span<ops::RefTensor> out) const {
  ops::RefTensor operands[] = {ref_zeros(out[0].shape), in[3]};
  part(0).reference(pass, in.first(3), {&operands[0], 1});
  part(1).reference(pass, operands, out);
}

}  // namespace eadem::fusions
