// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/encodings/fp8_encoding.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "eadem/core/e4m3.h"
#include "eadem/core/lookups.h"
#include "eadem/core/tensor.h"

namespace eadem {

namespace {

using Kind = Fp8Format::Kind;

using Values = std::array<float, 256>;

const Values& values_of(Kind kind) {
  static const std::array<Values, 2> kValues = [] {
    std::array<Values, 2> values{};
    for (int code = 0; code < 256; ++code) {
      const auto i = static_cast<size_t>(code);
      values[0][i] = e4m3_t{static_cast<uint8_t>(code)}.to_float();
      values[1][i] = f16_t{static_cast<uint16_t>(code << 8)}.to_float();
    }
    return values;
  }();
  return kValues[static_cast<size_t>(kind)];
}

std::string name_of(const Fp8Format& format) {
  return fmt::format("fp8_{}_{}", format.kind == Kind::e4m3 ? "e4m3" : "e5m2",
                     format.block_rows == 0   ? "tensor"
                     : format.block_rows == 1 ? "channel"
                                              : "block128");
}

int64_t ceil_div(int64_t a, int64_t b) { return b == 0 ? 0 : (a + b - 1) / b; }

void* scale_at(const TensorView& encoded, int64_t index) {
  return static_cast<std::byte*>(encoded.plane(1)) + index * static_cast<int64_t>(sizeof(float));
}

}  // namespace

float fp8_to_float(Kind kind, uint8_t code) { return values_of(kind)[code]; }

float fp8_largest(Kind kind) { return kind == Kind::e4m3 ? 448.0f : 57344.0f; }

uint8_t fp8_from_float(Kind kind, float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return static_cast<uint8_t>(sign | 0x7f);
  const float magnitude = std::abs(value);
  if (kind == Kind::e4m3) {
    // Subnormals are multiples of 2^-9; eight of them are the smallest normal, whose code is 8.
    if (magnitude < 0x1p-6f)
      return static_cast<uint8_t>(sign | static_cast<uint8_t>(std::nearbyint(magnitude * 0x1p9f)));
    return static_cast<uint8_t>(sign | e4m3_t::from_float(magnitude).bits);
  }
  if (magnitude < 0x1p-14f)
    return static_cast<uint8_t>(sign | static_cast<uint8_t>(std::nearbyint(magnitude * 0x1p16f)));
  // Two bits of f32's fraction stay; the exponent's bias changes from 127 to 15.
  const uint32_t bits = std::bit_cast<uint32_t>(magnitude);
  const uint32_t rounded = ((bits + 0xfffffu + ((bits >> 21) & 1u)) >> 21) - (112u << 2);
  return static_cast<uint8_t>(sign | std::min(rounded, 0x7bu));
}

Fp8Encoding::Fp8Encoding(const Fp8Format& format) : format_(format), name_(name_of(format)) {}

std::span<const Fp8Encoding> Fp8Encoding::all() {
  static const std::vector<Fp8Encoding> kAll = [] {
    std::vector<Fp8Encoding> encodings;
    for (Kind kind : {Kind::e4m3, Kind::e5m2})
      for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{0, 0}, {1, 0}, {128, 128}})
        encodings.emplace_back(Fp8Format{kind, rows, columns});
    return encodings;
  }();
  return kAll;
}

const Fp8Encoding* Fp8Encoding::find(const Fp8Format& format) {
  for (const Fp8Encoding& encoding : all())
    if (encoding.format_ == format) return &encoding;
  return nullptr;
}

const Fp8Encoding* Fp8Encoding::find(std::string_view name) {
  for (const Fp8Encoding& encoding : all())
    if (encoding.name_ == name) return &encoding;
  return nullptr;
}

const Fp8Encoding* Fp8Encoding::of(const Encoding* encoding) {
  count_lookup();
  for (const Fp8Encoding& candidate : all())
    if (&candidate == encoding) return &candidate;
  return nullptr;
}

Shape Fp8Encoding::blocks(const Shape& shape) const {
  return {ceil_div(shape[0], block_rows(shape)), ceil_div(shape[1], block_columns(shape))};
}

std::vector<PlaneSpec> Fp8Encoding::planes(const Shape& shape) const {
  if (shape.rank() != 2) throw InvalidArgument("{}: holds matrices [out, in]; this is {}", name_, to_string(shape));
  return {{"codes", DType::u8, shape}, {"scales", DType::f32, blocks(shape)}};
}

int64_t Fp8Encoding::num_pieces(const Shape& shape) const { return blocks(shape)[0]; }

float Fp8Encoding::scale(const TensorView& encoded, int64_t row, int64_t column) const {
  const Shape& shape = encoded.shape;
  float value;
  std::memcpy(&value, scale_at(encoded, row / block_rows(shape) * blocks(shape)[1] + column / block_columns(shape)),
              sizeof(value));
  return value;
}

void Fp8Encoding::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  const Values& values = values_of(format_.kind);
  const int64_t columns = encoded.shape[1], size = std::max<int64_t>(block_columns(encoded.shape), 1);
  const uint8_t* codes = static_cast<const uint8_t*>(encoded.data) + index * columns;
  for (int64_t begin = 0; begin < columns; begin += size) {
    const float block_scale = scale(encoded, index, begin);
    for (int64_t k = begin; k < std::min(begin + size, columns); ++k) row[k] = block_scale * values[codes[k]];
  }
}

int64_t Fp8Encoding::last_row(const Shape& shape, int64_t piece) const {
  return std::min((piece + 1) * block_rows(shape), shape[0]);
}

void Fp8Encoding::check(const TensorView& encoded, const TensorView& values) const {
  EADEM_CHECK(encoded.encoding == this, "encoded is not {}", name_);
  EADEM_CHECK(encoded.shape == values.shape, "{} encoded from {}", to_string(encoded.shape), to_string(values.shape));
  EADEM_CHECK(values.encoding != nullptr || values.is_contiguous(), "values are strided");
}

std::vector<float> Fp8Encoding::largest_scales(const TensorView& values, int64_t piece) const {
  const Shape& shape = values.shape;
  const int64_t columns = shape[1], size = std::max<int64_t>(block_columns(shape), 1);
  const float largest = fp8_largest(format_.kind);
  std::vector<float> scales(static_cast<size_t>(blocks(shape)[1]), 0.0f), wide(static_cast<size_t>(columns));
  for (int64_t row = first_row(shape, piece); row < last_row(shape, piece); ++row) {
    row_as_f32(wide.data(), values, row);
    for (int64_t k = 0; k < columns; ++k) {
      const float value = wide[static_cast<size_t>(k)];
      if (!std::isfinite(value))
        throw InvalidArgument("{}: {} at row {}, column {} is not finite", name_, value, row, k);
      float& most = scales[static_cast<size_t>(k / size)];
      most = std::max(most, std::abs(value) / largest);
    }
  }
  return scales;
}

void Fp8Encoding::weigh_scales(std::vector<float>& scales, const TensorView& values, std::span<const float> importance,
                               int64_t piece) const {
  // Scales at 2^(i / 16) of the least. None is so small that the largest value is clipped by a whole step.
  constexpr int kFirst = -1, kCandidates = 17;
  const Shape& shape = values.shape;
  const int64_t columns = shape[1], size = std::max<int64_t>(block_columns(shape), 1);
  const Values& levels = values_of(format_.kind);
  std::vector<double> costs(scales.size() * kCandidates, 0.0);
  std::vector<float> wide(static_cast<size_t>(columns));
  const auto candidate = [&](size_t block, int i) {
    return scales[block] * std::exp2(static_cast<float>(i + kFirst) / 16.0f);
  };
  for (int64_t row = first_row(shape, piece); row < last_row(shape, piece); ++row) {
    row_as_f32(wide.data(), values, row);
    for (size_t block = 0; block < scales.size(); ++block) {
      if (scales[block] == 0.0f) continue;
      const int64_t begin = static_cast<int64_t>(block) * size;
      for (int i = 0; i < kCandidates; ++i) {
        const float by = candidate(block, i);
        double& cost = costs[block * kCandidates + static_cast<size_t>(i)];
        for (int64_t k = begin; k < std::min(begin + size, columns); ++k) {
          const float value = wide[static_cast<size_t>(k)];
          const double error = static_cast<double>(value) - by * levels[fp8_from_float(format_.kind, value / by)];
          cost += importance[static_cast<size_t>(k)] * error * error;
        }
      }
    }
  }
  for (size_t block = 0; block < scales.size(); ++block) {
    int best = -kFirst;  // the least scale itself, unless another is better
    for (int i = 0; i < kCandidates; ++i)
      if (costs[block * kCandidates + static_cast<size_t>(i)] < costs[block * kCandidates + static_cast<size_t>(best)])
        best = i;
    scales[block] = candidate(block, best);
  }
}

void Fp8Encoding::store_piece(const TensorView& encoded, const TensorView& values, std::span<const float> scales,
                              int64_t piece) const {
  const Shape& shape = values.shape;
  const int64_t columns = shape[1], size = std::max<int64_t>(block_columns(shape), 1);
  std::memcpy(scale_at(encoded, piece * blocks(shape)[1]), scales.data(), scales.size_bytes());
  std::vector<float> wide(static_cast<size_t>(columns));
  for (int64_t row = first_row(shape, piece); row < last_row(shape, piece); ++row) {
    row_as_f32(wide.data(), values, row);
    uint8_t* codes = static_cast<uint8_t*>(encoded.data) + row * columns;
    for (int64_t k = 0; k < columns; ++k) {
      const float by = scales[static_cast<size_t>(k / size)];
      codes[k] = by == 0.0f ? uint8_t{0} : fp8_from_float(format_.kind, wide[static_cast<size_t>(k)] / by);
    }
  }
}

void Fp8Encoding::encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const {
  check(encoded, values);
  const Shape& shape = values.shape;
  const int64_t columns = shape[1], row_blocks = blocks(shape)[1];
  for (int64_t piece = begin; piece < end; ++piece) {
    if (values.encoding == this) {
      const int64_t first = first_row(shape, piece);
      std::memcpy(static_cast<uint8_t*>(encoded.data) + first * columns,
                  static_cast<const uint8_t*>(values.data) + first * columns,
                  static_cast<size_t>((last_row(shape, piece) - first) * columns));
      std::memcpy(scale_at(encoded, piece * row_blocks), scale_at(values, piece * row_blocks),
                  static_cast<size_t>(row_blocks) * sizeof(float));
    } else {
      store_piece(encoded, values, largest_scales(values, piece), piece);
    }
  }
}

void Fp8Encoding::encode_weighted(const TensorView& encoded, const TensorView& values,
                                  std::span<const float> importance, int64_t begin, int64_t end) const {
  check(encoded, values);
  EADEM_CHECK(std::ssize(importance) == values.shape[1], "{} importances of {}", importance.size(),
              to_string(values.shape));
  for (int64_t piece = begin; piece < end; ++piece) {
    std::vector<float> scales = largest_scales(values, piece);
    weigh_scales(scales, values, importance, piece);
    store_piece(encoded, values, scales, piece);
  }
}

void Fp8Encoding::slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const {
  EADEM_CHECK(part.encoding == this && whole.encoding == this, "a cut of another encoding than {}", name_);
  const int64_t extent = part.shape[axis], end = begin + extent;
  EADEM_CHECK((axis == 0 || axis == 1) && begin >= 0 && end <= whole.shape[axis] &&
                  part.shape[1 - axis] == whole.shape[1 - axis],
              "a cut of {} from {} at {} along axis {}", to_string(part.shape), to_string(whole.shape), begin, axis);
  const int64_t unit = axis == 0 ? format_.block_rows : format_.block_columns;  // 0: one scale for all
  if (unit != 0 && (begin % unit != 0 || (end % unit != 0 && end != whole.shape[axis])))
    throw InvalidArgument("{}: {} {} to {} of {} cut through a block of {}", name_, axis == 0 ? "rows" : "columns",
                          begin, end, to_string(whole.shape), unit);
  if (part.num_elements() == 0) return;
  const int64_t part_columns = part.shape[1], whole_columns = whole.shape[1];
  const auto* from = static_cast<const uint8_t*>(whole.data) + (axis == 0 ? begin * whole_columns : begin);
  for (int64_t row = 0; row < part.shape[0]; ++row)
    std::memcpy(static_cast<uint8_t*>(part.data) + row * part_columns, from + row * whole_columns,
                static_cast<size_t>(part_columns));
  const Shape part_blocks = blocks(part.shape), whole_blocks = blocks(whole.shape);
  const int64_t first = unit == 0 ? 0 : begin / unit;
  for (int64_t row = 0; row < part_blocks[0]; ++row)
    std::memcpy(scale_at(part, row * part_blocks[1]),
                scale_at(whole, (row + (axis == 0 ? first : 0)) * whole_blocks[1] + (axis == 1 ? first : 0)),
                static_cast<size_t>(part_blocks[1]) * sizeof(float));
}

}  // namespace eadem
