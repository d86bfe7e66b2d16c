// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/quantize.h"

namespace eadem::ops {

Quantize::Quantize(const kernels::QuantizeAttrs& attrs) : attrs_(attrs) {
  if (attrs.to == nullptr) throw InvalidArgument("quantize: no encoding given");
}

std::string Quantize::attrs_text() const { return fmt::format("to={}", attrs_.to->name()); }

std::vector<TensorType> Quantize::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[0], 2);
  expect_dtype(name(), "x", in[0], kActivations);
  expect_plain(name(), "x", in[0]);
  return {TensorType(in[0].dtype, in[0].dims(), attrs_.to)};
}

Cost Quantize::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                    const SymbolValues& symbols) const {
  // A comparison, a product and a conversion of each value.
  return {3 * static_cast<double>(in[0].num_elements(symbols)), traffic_bytes(*this, pass, in, out, symbols)};
}

void Quantize::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const Tensor values = Tensor::on_host(DType::f32, in[0].shape);
  for (size_t i = 0; i < in[0].data.size(); ++i) values.view.as<float>()[i] = static_cast<float>(in[0].data[i]);
  const Tensor encoded = Tensor::on_host(DType::f32, in[0].shape, *attrs_.to);
  attrs_.to->encode(encoded.view, values.view);
  attrs_.to->decode(values.view, encoded.view);
  for (size_t i = 0; i < out[0].data.size(); ++i) out[0].data[i] = static_cast<double>(values.view.as<float>()[i]);
}

}  // namespace eadem::ops
