// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/add_rms_norm.h"

#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/rms_norm.h"

namespace eadem::fusions {

namespace {

enum Value { kA, kB, kWeight, kSum, kY };

ops::OpPtr make(std::span<const ops::Op* const> matched) {
  return std::make_shared<AddRmsNorm>(matched[1]->attrs().get<kernels::RmsNormAttrs>());
}

}  // namespace

const Fusion& add_rms_norm() {
  static const Fusion fusion{.name = "add_rms_norm",
                             .nodes = {{"add", {kA, kB}, {kSum}}, {"rms_norm", {kSum, kWeight}, {kY}}},
                             .inputs = {kA, kB, kWeight},
                             .outputs = {kSum, kY},
                             .make = make};
  return fusion;
}

AddRmsNorm::AddRmsNorm(const kernels::RmsNormAttrs& attrs)
    : FusedOp(add_rms_norm(), {std::make_shared<ops::Add>(), std::make_shared<ops::RmsNorm>(attrs)}), attrs_(attrs) {}

void AddRmsNorm::reference(ops::Pass pass, std::span<const ops::RefTensor> in, std::span<ops::RefTensor> out) const {
  part(0).reference(pass, in.first(2), out.first(1));
  const ops::RefTensor normed[] = {out[0], in[2]};
  part(1).reference(pass, normed, out.subspan(1));
}

}  // namespace eadem::fusions
