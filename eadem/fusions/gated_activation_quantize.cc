// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/gated_activation_quantize.h"

#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/quantize.h"

namespace eadem::fusions {

namespace {

using Role = ops::Port::Role;

namespace gated_forward {
enum Value { kGate, kUp, kGated, kScaling, kCodes, kSeen };
}
namespace gated_backward {
enum Value { kGate, kUp, kDy, kDgate, kDup, kGateScaling, kUpScaling, kGateCodes, kGateSeen, kUpCodes, kUpSeen };
}

// The attributes of a fusion whose quantize ops are all matched ones but the first.
std::optional<kernels::GatedQuantizeAttrs> gated_attrs(std::span<const ops::Op* const> matched) {
  kernels::GatedQuantizeAttrs attrs{matched[0]->attrs().get<kernels::ActivationAttrs>().kind,
                                    matched[1]->attrs().get<kernels::QuantizeAttrs>().to};
  for (const ops::Op* op : matched.subspan(1))
    if (op->attrs().get<kernels::QuantizeAttrs>().to != attrs.to) return std::nullopt;
  return attrs;
}

template <typename Fused>
ops::OpPtr make_gated(std::span<const ops::Op* const> matched) {
  const std::optional<kernels::GatedQuantizeAttrs> attrs = gated_attrs(matched);
  return attrs ? std::make_shared<Fused>(*attrs) : nullptr;
}

ops::OpPtr quantize_to(const kernels::GatedQuantizeAttrs& attrs) {
  return std::make_shared<ops::Quantize>(kernels::QuantizeAttrs{attrs.to});
}

// The op that gated_gradients returns. Its forward pass is the backward pass of gated_activation.
class GatedGradients final : public ops::Op {
 public:
  explicit GatedGradients(kernels::ActivationKind kind) : forward_(kernels::ActivationAttrs{kind}) {}

  std::string_view name() const override { return forward_.name(); }
  std::vector<ops::Port> inputs() const override { return {{"gate"}, {"up"}, {"dy"}}; }
  std::vector<ops::Port> outputs() const override { return {{"dgate"}, {"dup"}}; }
  ops::AttrsRef attrs() const override { return forward_.attrs(); }
  std::string attrs_text() const override { return forward_.attrs_text(); }
  std::vector<TensorType> infer_types(std::span<const TensorType> in) const override {
    ops::expect_same_dims(name(), "dy", in[2], in[0], "gate");
    return forward_.backward_output_types(in.first(2));
  }
  ops::Cost cost(ops::Pass, std::span<const TensorType> in, std::span<const TensorType> out,
                 const SymbolValues& symbols) const override {
    return {forward_.cost(ops::Pass::backward, in.first(2), in.subspan(2), symbols).flops,
            ops::traffic_bytes(in, out, symbols)};
  }
  void reference(ops::Pass, std::span<const ops::RefTensor> in, std::span<ops::RefTensor> out) const override {
    forward_.reference(ops::Pass::backward, in, out);
  }

 private:
  ops::GatedActivation forward_;
};

// Rounds `values` to codes beside the state, of which `seen` is a copy.
void reference_codes(const ops::Op& quantize, ops::Pass pass, const ops::RefTensor& values,
                     const ops::RefTensor& scaling, std::span<ops::RefTensor> codes_and_seen) {
  const ops::RefTensor in[] = {values, scaling};
  quantize.reference(pass, in, codes_and_seen);
}

}  // namespace

const Fusion& gated_activation_quantize() {
  using namespace gated_forward;
  static const Fusion fusion{
      .name = "gated_activation_quantize",
      .nodes = {{"gated_activation", {kGate, kUp}, {kGated}}, {"quantize", {kGated, kScaling}, {kCodes, kSeen}}},
      .inputs = {kGate, kUp, kScaling},
      .outputs = {kCodes, kSeen},
      .in_inference = false,
      .after_rounding = true,
      .after_autograd = true,
      .make = make_gated<GatedActivationQuantize>};
  return fusion;
}

const Fusion& gated_gradients_quantize() {
  using namespace gated_backward;
  static const Fusion fusion{
      .name = "gated_gradients_quantize",
      .nodes = {{.op = "gated_activation", .inputs = {kGate, kUp, kDy}, .outputs = {kDgate, kDup}, .backward = true},
                {"quantize", {kDup, kUpScaling}, {kUpCodes, kUpSeen}},
                {"quantize", {kDgate, kGateScaling}, {kGateCodes, kGateSeen}}},
      .inputs = {kGate, kUp, kDy, kGateScaling, kUpScaling},
      .outputs = {kGateCodes, kGateSeen, kUpCodes, kUpSeen},
      .in_inference = false,
      .after_rounding = true,
      .after_autograd = true,
      .make = make_gated<GatedGradientsQuantize>};
  return fusion;
}

ops::OpPtr gated_gradients(kernels::ActivationKind kind) { return std::make_shared<GatedGradients>(kind); }

GatedActivationQuantize::GatedActivationQuantize(const kernels::GatedQuantizeAttrs& attrs)
    : FusedOp(gated_activation_quantize(),
              {std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{attrs.kind}), quantize_to(attrs)}),
      attrs_(attrs) {}

std::vector<ops::Port> GatedActivationQuantize::inputs() const { return {{"gate"}, {"up"}, {"scaling", Role::state}}; }
std::vector<ops::Port> GatedActivationQuantize::outputs() const {
  return {{"y"}, {"scaling", Role::state, /*optional=*/true}};
}

void GatedActivationQuantize::reference(ops::Pass pass, std::span<const ops::RefTensor> in,
                                        std::span<ops::RefTensor> out) const {
  ops::RefTensor gated = ref_zeros(in[0].shape);
  part(0).reference(pass, in.first(2), {&gated, 1});
  reference_codes(part(1), pass, gated, in[2], out);
}

GatedGradientsQuantize::GatedGradientsQuantize(const kernels::GatedQuantizeAttrs& attrs)
    : FusedOp(gated_gradients_quantize(), {gated_gradients(attrs.kind), quantize_to(attrs), quantize_to(attrs)}),
      attrs_(attrs) {}

std::vector<ops::Port> GatedGradientsQuantize::inputs() const {
  return {{"gate"}, {"up"}, {"dy"}, {"dgate_scaling", Role::state}, {"dup_scaling", Role::state}};
}
std::vector<ops::Port> GatedGradientsQuantize::outputs() const {
  return {{"dgate"},
          {"dgate_scaling", Role::state, /*optional=*/true},
          {"dup"},
          {"dup_scaling", Role::state, /*optional=*/true}};
}

void GatedGradientsQuantize::reference(ops::Pass pass, std::span<const ops::RefTensor> in,
                                       std::span<ops::RefTensor> out) const {
  ops::RefTensor gradients[] = {ref_zeros(in[0].shape), ref_zeros(in[0].shape)};
  part(0).reference(pass, in.first(3), gradients);
  for (size_t i : {0, 1}) reference_codes(part(1 + i), pass, gradients[i], in[3 + i], out.subspan(2 * i, 2));
}

}  // namespace eadem::fusions
