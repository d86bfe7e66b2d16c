// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/rms_norm_quantize.h"

#include "eadem/fusions/add_rms_norm.h"
#include "eadem/ops/quantize.h"
#include "eadem/ops/rms_norm.h"

namespace eadem::fusions {

namespace {

kernels::RmsNormQuantizeAttrs matched_attrs(std::span<const ops::Op* const> matched) {
  return {matched[0]->attrs().get<kernels::RmsNormAttrs>(), matched[1]->attrs().get<kernels::QuantizeAttrs>().to};
}

template <typename Fused>
ops::OpPtr make_fused(std::span<const ops::Op* const> matched) {
  return std::make_shared<Fused>(matched_attrs(matched));
}

enum NormValue { kX, kWeight, kNormed, kY };
enum AddValue { kA, kB, kAddWeight, kSum, kAddNormed, kAddY };

}  // namespace

const Fusion& rms_norm_quantize() {
  static const Fusion fusion{.name = "rms_norm_quantize",
                             .nodes = {{"rms_norm", {kX, kWeight}, {kNormed}}, {"quantize", {kNormed}, {kY}}},
                             .inputs = {kX, kWeight},
                             .outputs = {kY},
                             .after_rounding = true,
                             .make = make_fused<RmsNormQuantize>};
  return fusion;
}

const Fusion& add_rms_norm_quantize() {
  static const Fusion fusion{
      .name = "add_rms_norm_quantize",
      .nodes = {{"add_rms_norm", {kA, kB, kAddWeight}, {kSum, kAddNormed}}, {"quantize", {kAddNormed}, {kAddY}}},
      .inputs = {kA, kB, kAddWeight},
      .outputs = {kSum, kAddY},
      .after_rounding = true,
      .make = make_fused<AddRmsNormQuantize>};
  return fusion;
}

RmsNormQuantize::RmsNormQuantize(const kernels::RmsNormQuantizeAttrs& attrs)
    : FusedOp(rms_norm_quantize(), {std::make_shared<ops::RmsNorm>(attrs.norm),
                                    std::make_shared<ops::Quantize>(kernels::QuantizeAttrs{attrs.to})}),
      attrs_(attrs) {}

void RmsNormQuantize::reference(ops::Pass pass, std::span<const ops::RefTensor> in,
                                std::span<ops::RefTensor> out) const {
  ops::RefTensor normed = ref_zeros(out[0].shape);
  part(0).reference(pass, in, {&normed, 1});
  part(1).reference(pass, {&normed, 1}, out);
}

AddRmsNormQuantize::AddRmsNormQuantize(const kernels::RmsNormQuantizeAttrs& attrs)
    : FusedOp(add_rms_norm_quantize(), {std::make_shared<AddRmsNorm>(attrs.norm),
                                        std::make_shared<ops::Quantize>(kernels::QuantizeAttrs{attrs.to})}),
      attrs_(attrs) {}

void AddRmsNormQuantize::reference(ops::Pass pass, std::span<const ops::RefTensor> in,
                                   std::span<ops::RefTensor> out) const {
  ops::RefTensor made[] = {out[0], ref_zeros(out[1].shape)};
  part(0).reference(pass, in, made);
  out[0] = made[0];
  part(1).reference(pass, {&made[1], 1}, out.subspan(1));
}

}  // namespace eadem::fusions
