// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/linear/int8_chunks.h"

#include <array>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "eadem/core/tensor.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int64_t kChunk = kIntegerChunk, kHalf = 16, kHalves = kChunk / kHalf;

int64_t round_up(int64_t rows) { return (rows + 7) / 8 * 8; }

// Where the code of a column of a chunk stands in rows that launch_integer_stream multiplies.
int64_t streamed_place_of(int64_t column) {
  const int64_t in_piece = column % 64, step = in_piece / 16, half = in_piece % 16 / 8;
  return column - in_piece + column % 8 / 2 * 16 + step * 4 + half * 2 + column % 2;
}

// Where it stands in rows that launch_integer_tiles multiplies.
int64_t tiled_place_of(int64_t column) {
  return column - column % 16 + column % 8 / 2 * 4 + column % 16 / 8 * 2 + column % 2;
}

int64_t place_of(int64_t column, int64_t rows) {
  return rows <= kIntegerStreamMaxTokens ? streamed_place_of(column) : tiled_place_of(column);
}

// Where it stands among the halves.
int64_t half_place_of(int64_t column) {
  return column - column % 16 + column % 2 * 8 + column % 8 / 2 * 2 + column % 16 / 8;
}

}  // namespace

const Int8Chunks& Int8Chunks::instance() {
  static const Int8Chunks encoding;
  return encoding;
}

std::vector<PlaneSpec> Int8Chunks::planes(const Shape& shape) const {
  if (shape.rank() != 2 || shape[1] % kChunk != 0)
    throw InvalidArgument("{} of {}: expected rows of whole chunks of {} values", name(), to_string(shape), kChunk);
  const int64_t chunks = shape[1] / kChunk, padded = round_up(shape[0]);
  return {{"codes", DType::u8, shape},
          {"scales", DType::f32, Shape{chunks, padded}},
          {"halves", DType::f16, shape},
          {"sums", DType::f16, Shape{chunks, padded / 8, 2, 8, 8}}};
}

Int8ChunkPlanes int8_chunk_planes(const TensorView& encoded) {
  return {.codes = static_cast<int8_t*>(encoded.plane(0)),
          .scales = static_cast<float*>(encoded.plane(1)),
          .halves = static_cast<f16_t*>(encoded.plane(2)),
          .sums = static_cast<f16_t*>(encoded.plane(3)),
          .rows = encoded.shape[0],
          .columns = encoded.shape[1]};
}

void Int8Chunks::encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const {
  const Int8ChunkPlanes planes = int8_chunk_planes(encoded);
  const int64_t columns = planes.columns, padded = round_up(planes.rows);
  std::vector<float> wide(static_cast<size_t>(columns));
  for (int64_t row = begin; row < end; ++row) {
    row_as_f32(wide.data(), values, row);
    for (int64_t chunk = 0; chunk < columns / kChunk; ++chunk) {
      const float* x = wide.data() + chunk * kChunk;
      float largest = 0;
      for (int64_t i = 0; i < kChunk; ++i)
        if (!(std::fabs(x[i]) <= largest)) largest = std::isnan(largest) ? largest : std::fabs(x[i]);
      const bool finite = std::isfinite(largest);
      const bool some = finite && largest > 0x1p-119f;
      std::array<int, kChunk> codes{};
      const auto round = [&](float levels) {
        int magnitudes = 0;
        for (int64_t i = 0; some && i < kChunk; ++i) {
          codes[static_cast<size_t>(i)] = static_cast<int>(std::nearbyint(x[i] * (levels / largest)));
          magnitudes += std::abs(codes[static_cast<size_t>(i)]);
        }
        return magnitudes;
      };
      float levels = 127;
      if (round(levels) > kMostCodeSum) round(levels = 63);
      planes.scales[chunk * padded + row] = finite && !some ? 0.0f : largest * (1.0f / levels);
      std::array<int, kHalves> sums{};
      for (int64_t i = 0; i < kChunk; ++i) {
        const int code = codes[static_cast<size_t>(i)];
        planes.codes[row * columns + chunk * kChunk + place_of(i, planes.rows)] = static_cast<int8_t>(code);
        if (planes.rows > kIntegerStreamMaxTokens)
          planes.halves[row * columns + chunk * kChunk + half_place_of(i)] =
              f16_t::from_float(static_cast<float>(code));
        sums[static_cast<size_t>(i / kHalf)] += code;
      }
      for (int64_t i = 0; i < kHalves; ++i)
        planes.sums[((chunk * padded / 8 + row / 8) * 2 + i / 8) * 64 + row % 8 * 8 + i % 8] =
            f16_t::from_float(static_cast<float>(sums[static_cast<size_t>(i)]) * 0x1p-12f);
    }
  }
}

void Int8Chunks::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  const Int8ChunkPlanes planes = int8_chunk_planes(encoded);
  const int64_t padded = round_up(planes.rows);
  for (int64_t k = 0; k < planes.columns; ++k) {
    const int64_t chunk = k / kChunk;
    row[k] =
        planes.scales[chunk * padded + index] *
        static_cast<float>(planes.codes[index * planes.columns + chunk * kChunk + place_of(k % kChunk, planes.rows)]);
  }
}

void Int8Chunks::slice(const TensorView&, const TensorView&, int, int64_t) const {
  EADEM_UNREACHABLE("{}: rows are made and read on one rank", name());
}

}  // namespace eadem::kernels::cuda
