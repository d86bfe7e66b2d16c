// SPDX-License-Identifier: Apache-2.0
//
// Rounds a matrix to an encoding. Ports: kernels/quantize.h. The precision step puts it on edges whose readers want
// encoded rows, after the backward pass was made. A module may put it on a plain weight: products read the rounded one,
// and the gradient of that is the weight's (a straight-through estimator: Bengio et al. 2013).
#pragma once

#include "eadem/kernels/quantize.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class Quantize final : public Op {
 public:
  explicit Quantize(const kernels::QuantizeAttrs& attrs);

  std::string_view name() const override { return "quantize"; }
  std::vector<Port> inputs() const override { return {{"x"}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  bool passes_gradient_through() const override { return true; }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;

 private:
  kernels::QuantizeAttrs attrs_;
};

}  // namespace eadem::ops
