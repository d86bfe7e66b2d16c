// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/linear_cross_entropy.h"

#include "eadem/ops/linear.h"
#include "eadem/ops/training/cross_entropy.h"

namespace eadem::fusions {

namespace {

enum Value { kAbsent = -1, kX, kWeight, kLabels, kLogits, kLoss };

ops::OpPtr make(std::span<const ops::Op* const> matched) {
  // Logits that the graph rounds to bf16 have another loss than those of this op.
  const auto& linear = matched[0]->attrs().get<kernels::LinearAttrs>();
  if (linear.out_dtype != DType::f32) return nullptr;
  return std::make_shared<LinearCrossEntropy>(kernels::LinearCrossEntropyAttrs{
      linear.matmul_input, matched[1]->attrs().get<kernels::CrossEntropyAttrs>().dlogits_in_e5m2});
}

}  // namespace

const Fusion& linear_cross_entropy() {
  static const Fusion fusion{
      .name = "linear_cross_entropy",
      .nodes = {{"linear", {kX, kWeight, kAbsent}, {kLogits}}, {"cross_entropy", {kLogits, kLabels}, {kLoss}}},
      .inputs = {kX, kWeight, kLabels},
      .outputs = {kLoss},
      .in_training = true,
      .make = make};
  return fusion;
}

LinearCrossEntropy::LinearCrossEntropy(const kernels::LinearCrossEntropyAttrs& attrs)
    : FusedOp(linear_cross_entropy(),
              {std::make_shared<ops::Linear>(
                   kernels::LinearAttrs{.out_dtype = DType::f32, .matmul_input = attrs.matmul_input}),
               std::make_shared<ops::CrossEntropy>(kernels::CrossEntropyAttrs{attrs.dlogits_in_e5m2})}),
      attrs_(attrs) {}

std::string LinearCrossEntropy::attrs_text() const {
  const std::string loss = part(1).attrs_text();
  return loss.empty() ? part(0).attrs_text() : fmt::format("{} {}", part(0).attrs_text(), loss);
}

std::vector<TensorType> LinearCrossEntropy::extra_types(std::span<const TensorType> in) const {
  return {TensorType(DType::f32, {in[kX].dim(0)})};
}

ops::Cost LinearCrossEntropy::cost(ops::Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                                   const SymbolValues& symbols) const {
  ops::Cost cost = FusedOp::cost(pass, in, out, symbols);
  // The backward pass adds the products that give dx and dweight, each as large as that of the logits.
  if (pass == ops::Pass::backward)
    cost.flops += 4 * static_cast<double>(in[kX].num_elements(symbols)) * static_cast<double>(in[kWeight].fixed(0));
  return cost;
}

void LinearCrossEntropy::reference(ops::Pass pass, std::span<const ops::RefTensor> in,
                                   std::span<ops::RefTensor> out) const {
  const ops::RefTensor &x = in[kX], &weight = in[kWeight], &labels = in[kLabels];
  const ops::RefTensor operands[] = {x, weight, {}};
  ops::RefTensor logits = ref_zeros(Shape{x.shape[0], weight.shape[0]});
  part(0).reference(ops::Pass::inference, operands, {&logits, 1});
  if (pass != ops::Pass::backward) {
    const ops::RefTensor scored[] = {logits, labels};
    part(1).reference(pass, scored, out);
    return;
  }
  ops::RefTensor lse = in[3];
  if (out.size() > 2) {  // no forward pass has run
    lse = ref_zeros(labels.shape);
    const ops::RefTensor lost[] = {logits, labels};
    ops::RefTensor losses[] = {ref_zeros(labels.shape), lse};
    part(1).reference(ops::Pass::forward, lost, losses);
    out[2] = losses[0], lse = losses[1];
  }
  const ops::RefTensor scored[] = {logits, labels, lse, in[4]};  // dloss is last
  ops::RefTensor dlogits = ref_zeros(logits.shape);
  part(1).reference(pass, scored, {&dlogits, 1});
  const ops::RefTensor saved[] = {x, weight, dlogits};
  ops::RefTensor gradients[] = {out[0], out[1], {}};  // dx, dweight, no bias
  part(0).reference(pass, saved, gradients);
  for (size_t i = 0; i < 2; ++i) out[i] = gradients[i];
}

}  // namespace eadem::fusions
