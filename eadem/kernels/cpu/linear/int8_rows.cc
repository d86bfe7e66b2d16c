// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/int8_rows.h"

#include <algorithm>
#include <cmath>

#include "eadem/core/tensor.h"

namespace eadem::kernels::cpu {

namespace {

constexpr int64_t kChunk = kChunkSteps * kStep, kHalf = kStep / 2;

int64_t num_chunks(int64_t columns) { return (columns + kChunk - 1) / kChunk; }
int64_t num_steps(int64_t rows, int64_t columns) { return num_chunks(columns) * rows * kChunkSteps; }

// Writes the scale of n values and returns the factor that makes codes of them.
float scale_of(float* scale, const float* x, int64_t n) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i)
    if (!(std::fabs(x[i]) <= largest)) largest = std::isnan(largest) ? largest : std::fabs(x[i]);
  if (!std::isfinite(largest)) {
    *scale = largest;
    return 0;
  }
  const bool is_zero = !(largest > 0x1p-119f);
  *scale = is_zero ? 0.0f : largest * (1.0f / 127.0f);
  return is_zero ? 0.0f : 127.0f / largest;
}

// Writes the codes of a step and the sums of its halves.
void encode_step(int8_t* codes, int32_t* sums, const float* x, float factor) {
  sums[0] = sums[1] = 0;
  for (int64_t i = 0; i < kStep; ++i) {
    const auto code = static_cast<int32_t>(factor == 0 ? 0.0f : std::nearbyint(x[i] * factor));
    codes[i] = static_cast<int8_t>(code);
    sums[i / kHalf] += code;
  }
}

}  // namespace

const Int8Rows& Int8Rows::with_scale_per_step() {
  static const Int8Rows encoding(false, "int8_rows");
  return encoding;
}
const Int8Rows& Int8Rows::with_scale_per_chunk() {
  static const Int8Rows encoding(true, "int8_rows_256");
  return encoding;
}
const Int8Rows& Int8Rows::of(const QuantizedLayout& layout) {
  return layout.whole_rows() ? with_scale_per_chunk() : with_scale_per_step();
}

std::vector<PlaneSpec> Int8Rows::planes(const Shape& shape) const {
  if (shape.rank() != 2 || shape[1] % kStep != 0)
    throw InvalidArgument("{} of {}: expected rows of whole steps of {} values", name_, to_string(shape), kStep);
  const int64_t chunks = num_chunks(shape[1]), rows = shape[0];
  return {{"codes", DType::u8, Shape{chunks, rows, kChunk}},
          {"scales", DType::f32, Shape{chunks, rows, kChunkSteps}},
          {"sums", DType::i32, Shape{chunks, rows, kChunkSteps, 2}}};
}

int64_t Int8Rows::num_pieces(const Shape& shape) const { return shape[0]; }

void Int8Rows::encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const {
  const Int8RowPlanes q = int8_row_planes(encoded);
  const int64_t columns = values.shape[1], group = scale_per_chunk_ ? kChunk : kStep;
  std::vector<float> x(static_cast<size_t>(columns));
  for (int64_t r = begin; r < end; ++r) {
    row_as_f32(x.data(), values, r);
    for (int64_t g = 0; g < columns; g += group) {
      const int64_t n = std::min(group, columns - g);
      const float factor = scale_of(&q.scales[q.step(r, g / kStep)], x.data() + g, n);
      for (int64_t i = g; i < g + n; i += kStep) {
        const int64_t step = q.step(r, i / kStep);
        encode_step(q.codes + step * kStep, q.sums + step * 2, x.data() + i, factor);
      }
    }
  }
}

void Int8Rows::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  const Int8RowPlanes q = int8_row_planes(encoded);
  for (int64_t i = 0; i < encoded.shape[1]; ++i) {
    const int64_t s = i / kStep, scale = scale_per_chunk_ ? s / kChunkSteps * kChunkSteps : s;
    row[i] = q.scales[q.step(index, scale)] * static_cast<float>(q.codes[q.step(index, s) * kStep + i % kStep]);
  }
}

void Int8Rows::slice(const TensorView&, const TensorView&, int, int64_t) const {
  throw InvalidArgument("{}: activations are divided before they are rounded", name_);
}

Int8RowPlanes int8_row_planes(const TensorView& encoded) {
  return {encoded.shape[0], static_cast<int8_t*>(encoded.plane(0)), static_cast<float*>(encoded.plane(1)),
          static_cast<int32_t*>(encoded.plane(2))};
}

int64_t int8_rows_bytes(int64_t rows, int64_t columns) {
  return num_steps(rows, columns) * (kStep + static_cast<int64_t>(sizeof(float) + 2 * sizeof(int32_t)));
}

Int8RowPlanes int8_rows_in(void* memory, int64_t rows, int64_t columns) {
  const int64_t steps = num_steps(rows, columns);
  Int8RowPlanes q{rows, static_cast<int8_t*>(memory), nullptr, nullptr};
  q.scales = reinterpret_cast<float*>(q.codes + steps * kStep);
  q.sums = reinterpret_cast<int32_t*>(q.scales + steps);
  return q;
}

}  // namespace eadem::kernels::cpu
