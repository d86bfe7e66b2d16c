// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/add_rms_norm.h"

#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/rms_norm.h"

namespace eadem::fusions {

namespace {

enum Value { kTermA, kTermB, kNormWeight, kSum, kY };

ops::OpPtr make(std::span<const ops::Op* const> matched) {
  return std::make_shared<AddRmsNorm>(matched[1]->attrs().get<kernels::RmsNormAttrs>());
}

}  // namespace

const Fusion& add_rms_norm() {
  static const Fusion fusion{.name = "add_rms_norm",
                             .nodes = {{"add", {kTermA, kTermB}, {kSum}}, {"rms_norm", {kSum, kNormWeight}, {kY}}},
                             .inputs = {kTermA, kTermB, kNormWeight},
                             .outputs = {kSum, kY},
                             .in_training = true,
                             .make = make};
  return fusion;
}

AddRmsNorm::AddRmsNorm(const kernels::RmsNormAttrs& attrs)
    : FusedOp(add_rms_norm(), {std::make_shared<ops::Add>(), std::make_shared<ops::RmsNorm>(attrs)}), attrs_(attrs) {}

std::vector<TensorType> AddRmsNorm::extra_types(std::span<const TensorType> in) const {
  const TensorType normed[] = {in[kA], in[kWeight]};
  return part(1).extra_types(normed);
}

ops::Cost AddRmsNorm::cost(ops::Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                           const SymbolValues& symbols) const {
  if (pass != ops::Pass::backward) return FusedOp::cost(pass, in, out, symbols);
  const TensorType normed[] = {out[0], in[kWeight]};
  const double add = static_cast<double>(out[0].num_elements(symbols));  // of the sum's gradient
  return {part(1).cost(pass, normed, out.subspan(1, 1), symbols).flops + add,
          ops::traffic_bytes(*this, pass, in, out, symbols)};
}

void AddRmsNorm::reference(ops::Pass pass, std::span<const ops::RefTensor> in, std::span<ops::RefTensor> out) const {
  if (pass == ops::Pass::backward) {
    const ops::RefTensor saved[] = {in[0], in[1], in[2], in[4]};  // sum, weight, inv_rms, dy
    part(1).reference(pass, saved, out);
    const ops::RefTensor& dsum = in[3];
    for (size_t i = 0; i < dsum.data.size() && !out[0].data.empty(); ++i) out[0].data[i] += dsum.data[i];
    return;
  }
  part(0).reference(pass, in.first(2), out.first(1));
  const ops::RefTensor normed[] = {out[0], in[kWeight]};
  part(1).reference(pass, normed, out.subspan(1));
}

}  // namespace eadem::fusions
