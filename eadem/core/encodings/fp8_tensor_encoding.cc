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

// Calls use(column, value) for the values of a row, in order. Kernels call this, which therefore allocates nothing.
template <typename Use>
void for_each_value(const TensorView& values, int64_t row, Use&& use) {
  constexpr int64_t kValues = 256;
  float wide[kValues];
  const int64_t columns = values.shape[1], size = static_cast<int64_t>(dtype_size(values.dtype));
  for (int64_t first = 0; first < columns; first += kValues) {
    const int64_t count = std::min(kValues, columns - first);
    std::byte* const from = static_cast<std::byte*>(values.data) + (row * columns + first) * size;
    convert_on_host(TensorView(wide, DType::f32, {count}), TensorView(from, values.dtype, {count}));
    for (int64_t i = 0; i < count; ++i) use(first + i, wide[i]);
  }
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
  EADEM_CHECK(values.encoding == nullptr, "values are {}", to_string(values));
  float most = 0.0f;
  bool finite = true;
  for (int64_t row = begin; row < end && finite; ++row)
    for_each_value(values, row, [&](int64_t, float value) {
      finite = finite && std::isfinite(value);
      most = std::max(most, std::fabs(value));
    });
  return finite ? most : std::numeric_limits<float>::quiet_NaN();
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
  EADEM_CHECK(values.encoding == nullptr, "values are {}", to_string(values));
  auto* transposed = static_cast<uint8_t*>(encoded.plane(1));
  for (int64_t row = begin; row < end; ++row) {
    uint8_t* codes = static_cast<uint8_t*>(encoded.plane(0)) + row * columns;
    for_each_value(values, row, [&](int64_t k, float value) {
      codes[k] = transposed[k * pitch + row] = code_of(kind_, value, scale);
    });
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
