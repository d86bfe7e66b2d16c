// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/quantize.h"

#include <algorithm>
#include <cmath>

namespace eadem::ops {

Quantize::Quantize(const kernels::QuantizeAttrs& attrs) : attrs_(attrs) {
  if (attrs.to == nullptr) throw InvalidArgument("quantize: no encoding given");
}

std::string Quantize::attrs_text() const { return fmt::format("to={}", attrs_.to->name()); }

std::vector<Port> Quantize::inputs() const {
  std::vector<Port> ports = {{"x"}};
  if (has_scaling(attrs_.to)) ports.push_back({"scaling", Port::Role::state});
  return ports;
}

std::vector<Port> Quantize::outputs() const {
  std::vector<Port> ports = {{"y"}};
  if (has_scaling(attrs_.to)) ports.push_back({"scaling", Port::Role::state, /*optional=*/true});
  return ports;
}

std::vector<TensorType> Quantize::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[0], 2);
  expect_dtype(name(), "x", in[0], kActivations);
  expect_plain(name(), "x", in[0]);
  std::vector<TensorType> out = {TensorType(in[0].dtype, in[0].dims(), attrs_.to)};
  if (has_scaling(attrs_.to)) {
    expect_rank(name(), "scaling", in[1], 1);
    expect_dtype(name(), "scaling", in[1], kF32);
    expect_dim(name(), "scaling", in[1], 0, 2, "a magnitude for the scale and one that was seen");
    out.push_back(scaling_type());
  }
  return out;
}

Cost Quantize::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                    const SymbolValues& symbols) const {
  // A comparison, a product and a conversion of each value.
  return {3 * static_cast<double>(in[0].num_elements(symbols)), traffic_bytes(*this, pass, in, out, symbols)};
}

void Quantize::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const Tensor values = Tensor::on_host(DType::f32, in[0].shape);
  for (size_t i = 0; i < in[0].data.size(); ++i) values.view.as<float>()[i] = static_cast<float>(in[0].data[i]);
  const Tensor encoded = Tensor::on_host(DType::f32, in[0].shape, *attrs_.to);
  if (const Fp8TensorEncoding* tensor = Fp8TensorEncoding::of(attrs_.to); tensor != nullptr && tensor->is_delayed()) {
    const float seen = Fp8TensorEncoding::largest_magnitude(values.view, 0, in[0].shape[0]);
    const float given = static_cast<float>(in[1].data[0]), scale = tensor->scale_of(given > 0 ? given : seen);
    Fp8TensorEncoding::set_scale(encoded.view, scale);
    tensor->encode_rows(encoded.view, values.view, scale, 0, in[0].shape[0]);
    if (pass == Pass::forward)
      out[1].data[1] = std::isfinite(seen) ? std::max(out[1].data[1], static_cast<double>(seen)) : NAN;
  } else {
    attrs_.to->encode(encoded.view, values.view);
  }
  attrs_.to->decode(values.view, encoded.view);
  for (size_t i = 0; i < out[0].data.size(); ++i) out[0].data[i] = static_cast<double>(values.view.as<float>()[i]);
}

}  // namespace eadem::ops
