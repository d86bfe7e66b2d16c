// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/bf16_tile_rows.h"

#include <cmath>

#include "eadem/core/tensor.h"

namespace eadem::kernels::cpu {

namespace {

constexpr int64_t kTileValues = kTileLine / static_cast<int64_t>(sizeof(bf16_t)),
                  kBlockValues = kTileBlock * kTileValues;

int64_t num_blocks(int64_t columns) { return (columns + kBlockValues - 1) / kBlockValues; }

// Where value `column` of row `row` stands.
bf16_t* value_at(const TensorView& encoded, int64_t row, int64_t column) {
  const TileRows rows = TileRows::in_order(encoded.data, encoded.shape[0]);
  return reinterpret_cast<bf16_t*>(rows.line(row, column / kTileValues)) + column % kTileValues;
}

}  // namespace

const Bf16TileRows& Bf16TileRows::instance() {
  static const Bf16TileRows encoding;
  return encoding;
}

std::vector<PlaneSpec> Bf16TileRows::planes(const Shape& shape) const {
  if (shape.rank() != 2) throw InvalidArgument("{} of {}: expected rank 2", name(), to_string(shape));
  const int64_t rows = (shape[0] + 2 * kTileRows - 1) / (2 * kTileRows) * (2 * kTileRows);
  return {{"data", DType::bf16, Shape{num_blocks(shape[1]), rows, kBlockValues}}};
}

int64_t Bf16TileRows::num_pieces(const Shape& shape) const { return shape[0]; }

void Bf16TileRows::encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin,
                                 int64_t end) const {
  const int64_t columns = values.shape[1], padded = (columns + kTileValues - 1) / kTileValues * kTileValues;
  std::vector<float> x(static_cast<size_t>(padded), 0.0f);
  for (int64_t r = begin; r < end; ++r) {
    row_as_f32(x.data(), values, r);
    for (int64_t i = 0; i < padded; ++i) {
      const float value = x[static_cast<size_t>(i)];
      const bool is_subnormal = std::fabs(value) < 0x1p-126f;
      *value_at(encoded, r, i) = bf16_t::from_float(is_subnormal ? std::copysign(0.0f, value) : value);
    }
  }
}

void Bf16TileRows::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  for (int64_t i = 0; i < encoded.shape[1]; ++i) row[i] = value_at(encoded, index, i)->to_float();
}

void Bf16TileRows::slice(const TensorView&, const TensorView&, int, int64_t) const {
  throw InvalidArgument("{}: activations are divided before they are rounded", name());
}

}  // namespace eadem::kernels::cpu
