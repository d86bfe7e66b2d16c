// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/gated_quantize.h"

#include "eadem/fusions/linear_gated_activation.h"
#include "eadem/ops/quantize.h"

namespace eadem::fusions {

namespace {

enum GatedQuantizeValue { kGatedX, kGateMatrix, kUpMatrix, kGated, kRounded };

ops::OpPtr make_gated_quantize(std::span<const ops::Op* const> matched) {
  kernels::LinearGatedActivationAttrs attrs = matched[0]->attrs().get<kernels::LinearGatedActivationAttrs>();
  attrs.round_to = matched[1]->attrs().get<kernels::QuantizeAttrs>().to;
  return std::make_shared<LinearGatedActivationQuantize>(attrs);
}

kernels::LinearGatedActivationAttrs unrounded(kernels::LinearGatedActivationAttrs attrs) {
  attrs.round_to = nullptr;
  return attrs;
}

}  // namespace

const Fusion& linear_gated_activation_quantize() {
  static const Fusion fusion{.name = "linear_gated_activation_quantize",
                             .nodes = {{"linear_gated_activation", {kGatedX, kGateMatrix, kUpMatrix}, {kGated}},
                                       {"quantize", {kGated}, {kRounded}}},
                             .inputs = {kGatedX, kGateMatrix, kUpMatrix},
                             .outputs = {kRounded},
                             .after_rounding = true,
                             .make = make_gated_quantize};
  return fusion;
}

LinearGatedActivationQuantize::LinearGatedActivationQuantize(const kernels::LinearGatedActivationAttrs& attrs)
    : FusedOp(linear_gated_activation_quantize(),
              {std::make_shared<LinearGatedActivation>(unrounded(attrs)),
               std::make_shared<ops::Quantize>(kernels::QuantizeAttrs{attrs.round_to})}),
      attrs_(attrs) {}

void LinearGatedActivationQuantize::reference(ops::Pass pass, std::span<const ops::RefTensor> in,
                                              std::span<ops::RefTensor> out) const {
  ops::RefTensor gated = ref_zeros(out[0].shape);
  part(0).reference(pass, in, {&gated, 1});
  part(1).reference(pass, {&gated, 1}, out);
}

}  // namespace eadem::fusions
