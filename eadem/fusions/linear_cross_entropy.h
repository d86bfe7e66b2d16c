// SPDX-License-Identifier: Apache-2.0
//
// loss = cross_entropy(x weight^T, labels), with the logits made and consumed in chunks of rows, so that they are never
// stored whole: at a vocabulary of 128k they would be the largest tensor of a training step. The backward pass makes
// them again, or, where the caller knows dloss before the forward pass, makes the loss too. Ports, dtypes, gradients:
// kernels/training/cross_entropy.h. Training, and inference that scores a text. Logits are f32.
#pragma once

#include "eadem/fusions/fused_op.h"
#include "eadem/kernels/training/cross_entropy.h"

namespace eadem::fusions {

const Fusion& linear_cross_entropy();

class LinearCrossEntropy final : public FusedOp {
 public:
  explicit LinearCrossEntropy(const kernels::LinearCrossEntropyAttrs& attrs = {});

  std::vector<ops::Port> inputs() const override {
    return {{"x"}, {"weight", ops::Port::Role::parameter}, {"labels", ops::Port::Role::index}};
  }
  std::vector<ops::Port> outputs() const override { return {{"loss"}}; }
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override;
  bool has_backward() const override { return true; }
  std::vector<ops::Saved> saved() const override {
    using Kind = ops::Saved::Kind;
    return {{Kind::input, 0}, {Kind::input, 1}, {Kind::input, 2}, {Kind::extra, 0}};
  }
  bool backward_makes_outputs() const override { return true; }
  // lse [rows] f32
  std::vector<TensorType> extra_types(std::span<const TensorType> inputs) const override;
  // The backward pass makes the logits, with or without a forward pass before it.
  ops::Cost cost(ops::Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
                 const SymbolValues& symbols) const override;
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::LinearCrossEntropyAttrs attrs_;
};

}  // namespace eadem::fusions
