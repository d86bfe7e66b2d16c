// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/encodings/row_encoding.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "eadem/core/error.h"
#include "eadem/core/lookups.h"
#include "eadem/core/tensor.h"

namespace eadem {

namespace {

uint8_t int8_code(float quotient) {
  return static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(std::clamp(quotient, -127.0f, 127.0f))));
}

// The scale of a row, which is not aligned where planes follow an odd number of codes.
void* row_scale_at(const TensorView& encoded, int64_t row) {
  return static_cast<std::byte*>(encoded.plane(1)) + row * static_cast<int64_t>(sizeof(float));
}

}  // namespace

const RowEncoding& RowEncoding::int8() {
  static const RowEncoding encoding(Code::int8, "int8");
  return encoding;
}

const RowEncoding& RowEncoding::fp8_e4m3() {
  static const RowEncoding encoding(Code::e4m3, "fp8_e4m3");
  return encoding;
}

const RowEncoding* RowEncoding::of(const Encoding* encoding) {
  count_lookup();
  for (const RowEncoding* candidate : {&int8(), &fp8_e4m3()})
    if (candidate == encoding) return candidate;
  return nullptr;
}

std::vector<PlaneSpec> RowEncoding::planes(const Shape& shape) const {
  if (shape.rank() == 0) throw InvalidArgument("{}: a scalar has no rows", name());
  std::array<int64_t, kMaxRank> rows{};
  for (int axis = 0; axis + 1 < shape.rank(); ++axis) rows[static_cast<size_t>(axis)] = shape[axis];
  return {{"data", DType::u8, shape},
          {"scales", DType::f32, Shape(std::span<const int64_t>(rows.data(), static_cast<size_t>(shape.rank() - 1)))}};
}

int64_t RowEncoding::num_pieces(const Shape& shape) const { return shape.num_rows(); }

void RowEncoding::encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const {
  EADEM_CHECK(
      encoded.encoding == this && encoded.shape == values.shape && values.encoding == nullptr && values.is_contiguous(),
      "{} from {}", to_string(encoded), to_string(values));
  const int64_t columns = values.shape.back();
  std::vector<float> wide(static_cast<size_t>(columns));
  for (int64_t row = begin; row < end; ++row) {
    row_as_f32(wide.data(), values, row);
    float most = 0.0f;
    bool finite = true;
    for (float value : wide) {
      finite = finite && std::isfinite(value);
      most = std::max(most, std::fabs(value));
    }
    uint8_t* codes = static_cast<uint8_t*>(encoded.data) + row * columns;
    const float scale = finite ? most / largest() : std::numeric_limits<float>::quiet_NaN();
    std::memcpy(row_scale_at(encoded, row), &scale, sizeof(scale));
    for (int64_t i = 0; i < columns; ++i) {
      const float quotient = scale > 0.0f ? wide[static_cast<size_t>(i)] / scale : 0.0f;
      codes[i] = code_ == Code::int8 ? int8_code(quotient) : e4m3_t::from_float(quotient).bits;
    }
  }
}

void RowEncoding::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  const int64_t columns = encoded.shape.back();
  const uint8_t* codes = static_cast<const uint8_t*>(encoded.data) + index * columns;
  float scale;
  std::memcpy(&scale, row_scale_at(encoded, index), sizeof(scale));
  for (int64_t i = 0; i < columns; ++i)
    row[i] =
        scale * (code_ == Code::int8 ? static_cast<float>(static_cast<int8_t>(codes[i])) : e4m3_t{codes[i]}.to_float());
}

void RowEncoding::slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const {
  EADEM_CHECK(part.encoding == this && whole.encoding == this, "{} cut from {}", to_string(part), to_string(whole));
  const int rank = whole.shape.rank();
  if (axis == rank - 1) throw InvalidArgument("{}: a row has one scale; {} is cut along it", name(), to_string(whole));
  int64_t outer = 1, rows = 1;
  for (int i = 0; i < axis; ++i) outer *= whole.shape[i];
  for (int i = axis + 1; i + 1 < rank; ++i) rows *= whole.shape[i];
  const int64_t columns = whole.shape.back();
  for (int plane = 0; plane < 2; ++plane) {
    // Bytes of one index along the axis.
    const int64_t bytes = rows * (plane == 0 ? columns : static_cast<int64_t>(sizeof(float)));
    for (int64_t i = 0; i < outer; ++i)
      std::memcpy(static_cast<std::byte*>(part.plane(plane)) + i * part.shape[axis] * bytes,
                  static_cast<const std::byte*>(whole.plane(plane)) + (i * whole.shape[axis] + begin) * bytes,
                  static_cast<size_t>(part.shape[axis] * bytes));
  }
}

std::optional<WeightType> kv_cache_type(std::string_view name) {
  for (const RowEncoding* encoding : {&RowEncoding::int8(), &RowEncoding::fp8_e4m3()})
    if (encoding->name() == name) return WeightType(DType::f32, encoding);
  const std::optional<DType> dtype = dtype_from_name(name);
  if (dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16) return WeightType(*dtype);
  return std::nullopt;
}

}  // namespace eadem
