// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/encodings/fp8_tensor_encoding.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "eadem/core/error.h"
#include "eadem/core/lookups.h"
#include "eadem/core/tensor.h"

namespace eadem {

namespace {

const Fp8TensorEncoding* all_tensor_encodings() {
  using Kind = Fp8Format::Kind;
  static const Fp8TensorEncoding kAll[] = {{Kind::e4m3, false, "fp8_e4m3_current"},
                                           {Kind::e4m3, true, "fp8_e4m3_delayed"},
                                           {Kind::e5m2, false, "fp8_e5m2_current"},
                                           {Kind::e5m2, true, "fp8_e5m2_delayed"}};
  return kAll;
}

}  // namespace

const Fp8TensorEncoding& Fp8TensorEncoding::of(Kind kind, bool delayed) {
  return all_tensor_encodings()[(kind == Kind::e5m2 ? 2 : 0) + (delayed ? 1 : 0)];
}

const Fp8TensorEncoding* Fp8TensorEncoding::of(const Encoding* encoding) {
  count_lookup();
  for (int i = 0; i < 4; ++i)
    if (const Fp8TensorEncoding* candidate = all_tensor_encodings() + i; candidate == encoding) return candidate;
  return nullptr;
}

std::vector<PlaneSpec> Fp8TensorEncoding::planes(const Shape& shape) const {
  if (shape.rank() != 2)
    throw InvalidArgument("{}: holds matrices [rows, columns]; this is {}", name_, to_string(shape));
  return {{"codes", DType::u8, shape},
          {"transposed", DType::u8, {shape[1], padded_rows(shape[0])}},
          {"scale", DType::f32, {1}}};
}

int64_t Fp8TensorEncoding::num_pieces(const Shape&) const { return 1; }

float Fp8TensorEncoding::largest_magnitude(const TensorView& values, int64_t begin, int64_t end) {
  std::vector<float> wide(static_cast<size_t>(values.shape[1]));
  float most = 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    row_as_f32(wide.data(), values, row);
    for (const float value : wide) {
      if (!std::isfinite(value)) return std::numeric_limits<float>::quiet_NaN();
      most = std::max(most, std::fabs(value));
    }
  }
  return most;
}

uint8_t Fp8TensorEncoding::code_of(Kind kind, float value, float scale) {
  const float quotient = !std::isfinite(value) ? std::numeric_limits<float>::quiet_NaN()
                         : scale > 0.0f        ? value / scale
                                               : 0.0f;
  return fp8_from_float(kind, quotient);
}

void Fp8TensorEncoding::encode_rows(const TensorView& encoded, const TensorView& values, float scale, int64_t begin,
                                    int64_t end) const {
  const int64_t rows = values.shape[0], columns = values.shape[1], pitch = padded_rows(rows);
  std::vector<float> wide(static_cast<size_t>(columns));
  auto* transposed = static_cast<uint8_t*>(encoded.plane(1));
  for (int64_t row = begin; row < end; ++row) {
    row_as_f32(wide.data(), values, row);
    uint8_t* codes = static_cast<uint8_t*>(encoded.plane(0)) + row * columns;
    for (int64_t k = 0; k < columns; ++k)
      codes[k] = transposed[k * pitch + row] = code_of(kind_, wide[static_cast<size_t>(k)], scale);
  }
  if (end != rows || begin == end) return;
  for (int64_t k = 0; k < columns; ++k)
    std::memset(transposed + k * pitch + rows, 0, static_cast<size_t>(pitch - rows));
}

void Fp8TensorEncoding::set_scale(const TensorView& encoded, float scale) {
  std::memcpy(encoded.plane(2), &scale, sizeof(scale));  // it may be unaligned
}

float Fp8TensorEncoding::scale(const TensorView& encoded) {
  float scale;
  std::memcpy(&scale, encoded.plane(2), sizeof(scale));
  return scale;
}

void Fp8TensorEncoding::encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin,
                                      int64_t end) const {
  EADEM_CHECK(
      encoded.encoding == this && encoded.shape == values.shape && values.encoding == nullptr && values.is_contiguous(),
      "{} from {}", to_string(encoded), to_string(values));
  if (begin == end) return;
  const float scale = scale_of(largest_magnitude(values, 0, values.shape[0]));
  set_scale(encoded, scale);
  encode_rows(encoded, values, scale, 0, values.shape[0]);
}

void Fp8TensorEncoding::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  const int64_t columns = encoded.shape[1];
  const float factor = scale(encoded);
  const uint8_t* codes = static_cast<const uint8_t*>(encoded.plane(0)) + index * columns;
  for (int64_t k = 0; k < columns; ++k) row[k] = factor * fp8_to_float(kind_, codes[k]);
}

void Fp8TensorEncoding::slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const {
  EADEM_CHECK(part.encoding == this && whole.encoding == this, "{} cut from {}", to_string(part), to_string(whole));
  const int64_t first_row = axis == 0 ? begin : 0, first_column = axis == 1 ? begin : 0;
  const int64_t rows = part.shape[0], columns = part.shape[1];
  const auto copy = [](const TensorView& to, const TensorView& from, int plane, int64_t to_pitch, int64_t from_pitch,
                       int64_t first, int64_t offset, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(static_cast<uint8_t*>(to.plane(plane)) + i * to_pitch,
                  static_cast<const uint8_t*>(from.plane(plane)) + (first + i) * from_pitch + offset,
                  static_cast<size_t>(size));
  };
  const int64_t pitch = padded_rows(rows);
  if (part.num_elements() > 0) {
    copy(part, whole, 0, columns, whole.shape[1], first_row, first_column, rows, columns);
    copy(part, whole, 1, pitch, padded_rows(whole.shape[0]), first_column, first_row, columns, rows);
    for (int64_t k = 0; k < columns; ++k)
      std::memset(static_cast<uint8_t*>(part.plane(1)) + k * pitch + rows, 0, static_cast<size_t>(pitch - rows));
  }
  set_scale(part, scale(whole));
}

}  // namespace eadem
