// SPDX-License-Identifier: Apache-2.0
//
// Rounds rows of activations to an encoding. Ports: kernels/quantize.h. Modules do not add it: the precision step puts
// it on edges whose readers want encoded rows, after the backward pass was made, so it has none of its own.
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
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;

 private:
  kernels::QuantizeAttrs attrs_;
};

}  // namespace eadem::ops
