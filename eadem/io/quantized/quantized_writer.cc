// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/quantized/quantized_writer.h"

#include <algorithm>
#include <cstring>

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"

namespace eadem::io {

namespace {

const GroupFormat* group_format(const Encoding& encoding) {
  const GroupEncoding* groups = GroupEncoding::of(&encoding);
  return groups == nullptr ? nullptr : &groups->format();
}

const Fp8Format& fp8_format(const Encoding& encoding) {
  const Fp8Encoding* floats = Fp8Encoding::of(&encoding);
  EADEM_CHECK(floats != nullptr, "{} is not written by layers", encoding.name());
  return floats->format();
}

// Codes of 4 or 8 bits in words, the first in its lowest bits, are bytes in the order of GroupEncoding's.
Shape packed_shape(const GroupFormat& format, const Shape& shape) {
  const int64_t per_word = 32 / format.bits;
  return {shape[0], (shape[1] + per_word - 1) / per_word};
}

// A part of `owner` as a tensor.
Tensor part_of(const Tensor& owner, void* data, DType dtype, const Shape& shape) {
  return Tensor(TensorView(data, dtype, shape), owner.storage);
}

}  // namespace

bool can_write_layer(const Encoding& encoding) {
  if (const GroupFormat* format = group_format(encoding)) return !format->has_zeros && !format->has_order;
  const Fp8Encoding* floats = Fp8Encoding::of(&encoding);
  return floats != nullptr && floats->format().kind == Fp8Format::Kind::e4m3;
}

std::vector<TensorHeader> layer_headers(const std::string& name, const Encoding& encoding, const Shape& shape) {
  EADEM_CHECK(can_write_layer(encoding), "{} is not written by layers", encoding.name());
  const Shape scales = encoding.planes(shape)[1].shape;
  if (const GroupFormat* format = group_format(encoding)) {
    return {{name + ".weight_packed", DType::i32, packed_shape(*format, shape)},
            {name + ".weight_scale", format->scale, scales},
            {name + ".weight_shape", DType::i64, Shape{2}}};
  }
  const Fp8Format& format = fp8_format(encoding);
  const TensorHeader codes{name + ".weight", DType::u8, shape, "F8_E4M3"};
  if (format.block_rows == 128) return {codes, {name + ".weight_scale_inv", DType::f32, scales}};
  return {codes, {name + ".weight_scale", DType::f32, format.block_rows == 0 ? Shape{1} : scales}};
}

std::vector<Tensor> layer_values(const Tensor& encoded) {
  const TensorView& view = encoded.view;
  const std::vector<TensorHeader> headers = layer_headers("X", *view.encoding, view.shape);
  const TensorHeader& scale = headers[1];
  std::vector<Tensor> result = {{}, part_of(encoded, view.plane(1), scale.type.dtype, scale.shape)};
  const GroupFormat* format = group_format(*view.encoding);
  if (format == nullptr) {
    result[0] = part_of(encoded, view.plane(0), DType::u8, view.shape);
  } else {
    const Shape words = packed_shape(*format, view.shape);
    result[0] = Tensor::on_host(DType::i32, words);
    const int64_t row_bytes = view.shape[1] * format->bits / 8;
    auto* rows = static_cast<uint8_t*>(result[0].view.data);
    std::fill(rows, rows + result[0].view.size_bytes(), uint8_t{0});
    for (int64_t o = 0; o < view.shape[0]; ++o)
      std::memcpy(rows + o * words[1] * 4, static_cast<const uint8_t*>(view.plane(0)) + o * row_bytes,
                  static_cast<size_t>(row_bytes));
    result.push_back(Tensor::on_host(DType::i64, Shape{2}));
    for (int64_t i = 0; i < 2; ++i) result[2].view.as<int64_t>()[i] = view.shape[static_cast<int>(i)];
  }
  return result;
}

JsonValue quantization_config_of(const Encoding& encoding, const std::vector<std::string>& ignored) {
  EADEM_CHECK(can_write_layer(encoding), "{} is not written by layers", encoding.name());
  JsonValue names = JsonValue::array();
  for (const std::string& name : ignored) names.push_back(name);
  const GroupFormat* format = group_format(encoding);
  const bool is_block = format == nullptr && fp8_format(encoding).block_rows == 128;
  JsonValue config = JsonValue::object();
  if (is_block)
    return config.set("quant_method", "fp8")
        .set("fmt", "e4m3")
        .set("activation_scheme", "dynamic")
        .set("weight_block_size", JsonValue::array().push_back(128).push_back(128))
        .set("modules_to_not_convert", std::move(names));
  JsonValue weights = JsonValue::object();
  weights.set("num_bits", format == nullptr ? 8 : format->bits).set("type", format == nullptr ? "float" : "int");
  weights.set("symmetric", true).set("dynamic", false);
  if (format != nullptr && format->group_size != 0)
    weights.set("strategy", "group").set("group_size", format->group_size);
  else
    weights.set("strategy", format == nullptr && fp8_format(encoding).block_rows == 0 ? "tensor" : "channel");
  JsonValue scheme = JsonValue::object();
  scheme.set("targets", JsonValue::array().push_back("Linear")).set("weights", std::move(weights));
  scheme.set("input_activations", nullptr).set("output_activations", nullptr);
  return config.set("quant_method", "compressed-tensors")
      .set("format", format == nullptr ? "float-quantized" : "pack-quantized")
      .set("quantization_status", "compressed")
      .set("config_groups", JsonValue::object().set("group_0", std::move(scheme)))
      .set("ignore", std::move(names))
      .set("kv_cache_scheme", nullptr);
}

}  // namespace eadem::io
