// SPDX-License-Identifier: Apache-2.0
//
// Rounds a matrix to an encoding. Ports: kernels/quantize.h. The precision step puts it on edges whose readers want
// encoded rows, after the backward pass was made. A module may put it on a plain weight: products read the rounded one,
// and the gradient of that is the weight's (a straight-through estimator: Bengio et al. 2013).
#pragma once

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/kernels/quantize.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class Quantize final : public Op {
 public:
  explicit Quantize(const kernels::QuantizeAttrs& attrs);

  std::string_view name() const override { return "quantize"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  bool passes_gradient_through() const override { return true; }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;

  // Whether rounding to an encoding has a state, the input and output `scaling` of scaling_type().
  static bool has_scaling(const Encoding* to) {
    const Fp8TensorEncoding* tensor = Fp8TensorEncoding::of(to);
    return tensor != nullptr && tensor->is_delayed();
  }
  static TensorType scaling_type() { return TensorType(DType::f32, {2}); }
  // The name of the state of a value that is known by `value`.
  static std::string scaling_name(std::string_view value) { return fmt::format("{}{}", kScalingPrefix, value); }
  static constexpr std::string_view kScalingPrefix = "scaling.";

 private:
  kernels::QuantizeAttrs attrs_;
};

}  // namespace eadem::ops
