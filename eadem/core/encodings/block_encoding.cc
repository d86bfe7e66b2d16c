// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/encodings/block_encoding.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "eadem/core/encodings/block_types.h"
#include "eadem/core/lookups.h"
#include "eadem/core/philox.h"
#include "eadem/core/tensor.h"

namespace eadem {

namespace {

using namespace block_types;

// Those that are only read come last.
constexpr std::array<const BlockEncoding*, 22> kAllBlockEncodings = {
    &q4_0,   &q4_1,  &q5_0,  &q5_1,  &q8_0,    &q2_k,   &q3_k,  &q4_k,    &q5_k,  &q6_k,  &iq4_nl,
    &iq4_xs, &mxfp4, &iq1_s, &iq1_m, &iq2_xxs, &iq2_xs, &iq2_s, &iq3_xxs, &iq3_s, &tq1_0, &tq2_0};

// value[i] = (scale * sub_scale) * level(code[i]) - min * sub_min, in this order of roundings.
void decode_group(float* values, const uint8_t* codes, const BlockFormat& format, float scale, float min) {
  const int size = format.group_size;
  if (format.codebook != nullptr) {
    for (int i = 0; i < size; ++i) values[i] = scale * static_cast<float>(format.codebook[codes[i]]) - min;
  } else {
    const int zero = format.zero;
    for (int i = 0; i < size; ++i) values[i] = scale * static_cast<float>(codes[i] - zero) - min;
  }
}

void decode_block(float* values, const BlockParts& parts, const BlockFormat& format) {
  for (int group = 0; group < format.num_groups(); ++group) {
    const float scale = parts.scale * static_cast<float>(parts.sub_scales[group]);
    const float min = format.has_min ? parts.min * static_cast<float>(parts.sub_mins[group]) : 0.0f;
    const int begin = group * format.group_size;
    decode_group(values + begin, parts.codes.data() + begin, format, scale, min);
  }
}

void check_columns(const BlockEncoding& encoding, int64_t columns, const Shape& shape) {
  if (columns % encoding.format().block_size != 0)
    throw InvalidArgument("{}: rows of {} values ({}) are no whole number of blocks of {}", encoding.name(), columns,
                          to_string(shape), encoding.format().block_size);
}

}  // namespace

std::span<const BlockEncoding* const> BlockEncoding::all() { return kAllBlockEncodings; }

std::span<const BlockEncoding* const> BlockEncoding::writable() {
  static const auto kCount = std::count_if(kAllBlockEncodings.begin(), kAllBlockEncodings.end(),
                                           [](const auto* type) { return type->is_writable(); });
  return std::span(kAllBlockEncodings).first(static_cast<size_t>(kCount));
}

const BlockEncoding* BlockEncoding::find(std::string_view name) {
  const auto it = std::find_if(kAllBlockEncodings.begin(), kAllBlockEncodings.end(),
                               [&](const auto* type) { return type->name() == name; });
  return it == kAllBlockEncodings.end() ? nullptr : *it;
}

const BlockEncoding* BlockEncoding::of(const Encoding* encoding) {
  count_lookup();
  for (const BlockEncoding* candidate : all())
    if (candidate == encoding) return candidate;
  return nullptr;
}

std::vector<PlaneSpec> BlockEncoding::planes(const Shape& shape) const {
  if (shape.rank() == 0) throw InvalidArgument("{}: a scalar has no rows to cut into blocks", name());
  check_columns(*this, shape.back(), shape);
  Shape bytes = shape;
  bytes[shape.rank() - 1] = row_bytes(shape.back());
  return {{"data", DType::u8, bytes}};
}

int64_t BlockEncoding::num_pieces(const Shape& shape) const { return shape.num_rows(); }

void BlockEncoding::encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin,
                                  int64_t end) const {
  EADEM_CHECK(encoded.encoding == this, "encoded is not {}", name());
  EADEM_CHECK(encoded.shape == values.shape, "{} encoded from {}", to_string(encoded.shape), to_string(values.shape));
  EADEM_CHECK(values.encoding != nullptr || values.is_contiguous(), "values are strided");
  const int64_t columns = values.shape.back();
  const int64_t stride_bytes = row_bytes(columns);
  std::vector<float> wide(static_cast<size_t>(columns));
  for (int64_t row = begin; row < end; ++row) {
    uint8_t* bytes = static_cast<uint8_t*>(encoded.data) + row * stride_bytes;
    if (values.encoding == this) {
      std::memcpy(bytes, static_cast<const uint8_t*>(values.data) + row * stride_bytes,
                  static_cast<size_t>(stride_bytes));
      continue;
    }
    row_as_f32(wide.data(), values, row);
    try {
      quantize_row(bytes, wide, {});
    } catch (const InvalidArgument& error) {
      throw InvalidArgument("row {}: {}", row, error.what());
    }
  }
}

bool BlockEncoding::is_finite_by_scale(const uint8_t* block) const {
  if (format_.scale_at < 0) return false;
  const uint8_t* stored = block + format_.scale_at;
  // Levels are bytes: a scale below 2^120 keeps every value finite. An f16 is; a power of two may be larger.
  if (format_.scale == BlockFormat::Scale::power_of_two) return *stored < 248;
  const auto is_finite = [](const uint8_t* f16) { return (f16[1] & 0x7c) != 0x7c; };
  return is_finite(stored) && (!format_.has_min || is_finite(stored + 2));
}

int64_t BlockEncoding::first_not_finite(const TensorView& encoded, int64_t begin, int64_t end) const {
  const int64_t blocks = encoded.shape.back() / format_.block_size;
  const auto* block = static_cast<const uint8_t*>(encoded.data) + begin * blocks * format_.block_bytes;
  BlockParts parts;
  for (int64_t b = begin * blocks; b < end * blocks; ++b, block += format_.block_bytes) {
    if (is_finite_by_scale(block)) continue;
    unpack_(parts, block);
    if (!std::isfinite(parts.scale) || (format_.has_min && !std::isfinite(parts.min))) return b * format_.block_size;
    if (std::abs(parts.scale) < 0x1p120f) continue;
    for (int i = 0; i < format_.block_size; ++i)
      if (!std::isfinite(parts.scale * static_cast<float>(format_.level(parts.codes[static_cast<size_t>(i)]))))
        return b * format_.block_size + i;
  }
  return -1;
}

void BlockEncoding::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  const int64_t columns = encoded.shape.back();
  const uint8_t* block = static_cast<const uint8_t*>(encoded.data) + index * row_bytes(columns);
  BlockParts parts;
  for (int64_t column = 0; column < columns; column += format_.block_size, block += format_.block_bytes) {
    unpack_(parts, block);
    decode_block(row + column, parts, format_);
  }
}

void BlockEncoding::fill_random(uint8_t* blocks, int64_t first, int64_t count, double size, uint64_t key) const {
  EADEM_CHECK(store_scale_ != nullptr, "{} is quantized, not drawn", name());
  constexpr size_t kDraw = sizeof(PhiloxBlock);
  BlockParts parts;
  for (int64_t b = 0; b < count; ++b, blocks += format_.block_bytes) {
    const size_t num_bytes = static_cast<size_t>(format_.block_bytes);
    for (size_t at = 0; at < num_bytes; at += kDraw) {
      const PhiloxBlock draw = philox4x32(key, static_cast<uint64_t>(first + b), at);
      std::memcpy(blocks + at, draw.words, std::min(kDraw, num_bytes - at));
    }
    store_scale_(blocks, 1);
    unpack_(parts, blocks);
    float values[kMaxBlockSize];
    decode_block(values, parts, format_);
    double squares = 0;
    for (int i = 0; i < format_.block_size; ++i) squares += static_cast<double>(values[i]) * values[i];
    store_scale_(blocks, static_cast<float>(size / std::sqrt(std::max(squares / format_.block_size, 0x1p-20))));
  }
}

TensorView BlockEncoding::rows(const TensorView& encoded, int64_t begin, int64_t count) const {
  EADEM_CHECK(encoded.encoding == this && encoded.shape.rank() == 2 && begin >= 0 && count >= 0 &&
                  begin + count <= encoded.shape[0],
              "rows [{}, {}) of {}", begin, begin + count, to_string(encoded));
  const int64_t columns = encoded.shape[1];
  return view_of_planes(static_cast<std::byte*>(encoded.data) + begin * row_bytes(columns), *this, encoded.dtype,
                        Shape{count, columns});
}

// A tensor is [outer, extent of the axis, inner] of bytes; the part is a band of the middle axis.
void BlockEncoding::slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const {
  const int rank = whole.shape.rank();
  EADEM_CHECK(part.encoding == this && whole.encoding == this, "a cut of another encoding than {}", name());
  EADEM_CHECK(axis >= 0 && axis < rank && part.shape.rank() == rank, "a cut of {} from {} along axis {}",
              to_string(part.shape), to_string(whole.shape), axis);
  for (int i = 0; i < rank; ++i)
    EADEM_CHECK(i == axis ? begin >= 0 && begin + part.shape[i] <= whole.shape[i] : part.shape[i] == whole.shape[i],
                "a cut of {} from {} at {} along axis {}", to_string(part.shape), to_string(whole.shape), begin, axis);

  if (axis == rank - 1 && (begin % format_.block_size != 0 || part.shape[axis] % format_.block_size != 0))
    throw InvalidArgument("{}: columns {} to {} of {} cut through a block of {}", name(), begin,
                          begin + part.shape[axis], to_string(whole.shape), format_.block_size);

  int64_t outer = 1, inner_bytes = 1;
  for (int i = 0; i < axis; ++i) outer *= whole.shape[i];
  for (int i = axis + 1; i < rank; ++i) inner_bytes *= i == rank - 1 ? row_bytes(whole.shape[i]) : whole.shape[i];
  const auto bytes_of = [&](int64_t extent) { return (axis == rank - 1 ? row_bytes(extent) : extent) * inner_bytes; };
  const int64_t part_bytes = bytes_of(part.shape[axis]), whole_bytes = bytes_of(whole.shape[axis]);
  const uint8_t* source = static_cast<const uint8_t*>(whole.data) + bytes_of(begin);
  uint8_t* target = static_cast<uint8_t*>(part.data);
  if (part_bytes == 0) return;
  for (int64_t i = 0; i < outer; ++i)
    std::memcpy(target + i * part_bytes, source + i * whole_bytes, static_cast<size_t>(part_bytes));
}

}  // namespace eadem
