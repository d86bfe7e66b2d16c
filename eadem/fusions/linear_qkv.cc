// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/linear_qkv.h"

#include "eadem/ops/linear.h"

namespace eadem::fusions {

namespace {

enum Value { kX, kQWeight, kQBias, kKWeight, kKBias, kVWeight, kVBias, kQ, kK, kV };

ops::OpPtr make(std::span<const ops::Op* const> matched) {
  const kernels::LinearAttrs attrs = matched[0]->attrs().get<kernels::LinearAttrs>();
  for (const ops::Op* each : matched) {
    const auto& other = each->attrs().get<kernels::LinearAttrs>();
    if (other.has_bias != attrs.has_bias || other.out_dtype != attrs.out_dtype) return nullptr;
  }
  return std::make_shared<LinearQkv>(attrs);
}

}  // namespace

const Fusion& linear_qkv() {
  static const Fusion fusion{.name = "linear_qkv",
                             .nodes = {{"linear", {kX, kQWeight, kQBias}, {kQ}},
                                       {"linear", {kX, kKWeight, kKBias}, {kK}},
                                       {"linear", {kX, kVWeight, kVBias}, {kV}}},
                             .inputs = {kX, kQWeight, kQBias, kKWeight, kKBias, kVWeight, kVBias},
                             .outputs = {kQ, kK, kV},
                             .optional_inputs = {kQBias, kKBias, kVBias},
                             .make = make};
  return fusion;
}

LinearQkv::LinearQkv(const kernels::LinearAttrs& attrs)
    : FusedOp(linear_qkv(), {std::make_shared<ops::Linear>(attrs), std::make_shared<ops::Linear>(attrs),
                             std::make_shared<ops::Linear>(attrs)}),
      attrs_(attrs) {}

std::vector<ops::Port> LinearQkv::inputs() const {
  std::vector<ops::Port> ports = {{"x"}};
  for (const auto& [weight, bias] : {std::pair{"q_weight", "q_bias"}, {"k_weight", "k_bias"}, {"v_weight", "v_bias"}}) {
    ports.push_back({weight, ops::Port::Role::parameter});
    ports.push_back({bias, ops::Port::Role::parameter, /*optional=*/true});
  }
  return ports;
}

void LinearQkv::reference(ops::Pass pass, std::span<const ops::RefTensor> in, std::span<ops::RefTensor> out) const {
  for (size_t i = 0; i < 3; ++i) {
    const ops::RefTensor operands[] = {in[0], in[1 + 2 * i], in[2 + 2 * i]};
    part(i).reference(pass, operands, out.subspan(i, 1));
  }
}

}  // namespace eadem::fusions
