// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/fp8_panels.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "eadem/core/lookups.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"

namespace eadem::kernels::cpu {

namespace {

// Products multiply scales by 256, which must not overflow.
constexpr float kLargestScale = 0x1p119f;

// The number of columns that share a scale, and the number of such blocks in a row.
int64_t block_columns(const Fp8Format& format, int64_t columns) {
  return format.block_columns == 0 ? std::max<int64_t>(columns, 1) : format.block_columns;
}
int64_t num_blocks(const Fp8Format& format, int64_t columns) {
  const int64_t size = block_columns(format, columns);
  return (columns + size - 1) / size;
}

}  // namespace

const Fp8Panels* Fp8Panels::of(const Encoding* encoding) {
  count_lookup();
  static const auto kAll = [] {
    std::vector<std::unique_ptr<const Fp8Panels>> all;
    for (const Fp8Encoding& stored : Fp8Encoding::all()) all.push_back(std::make_unique<const Fp8Panels>(stored));
    return all;
  }();
  for (const auto& panels : kAll)
    if (&panels->stored_ == encoding || panels.get() == encoding) return panels.get();
  return nullptr;
}

Fp8Panels::Fp8Panels(const Fp8Encoding& stored) : stored_(stored), name_("fp8_panels_" + std::string(stored.name())) {}

std::vector<PlaneSpec> Fp8Panels::planes(const Shape& shape) const {
  if (shape.rank() != 2)
    throw InvalidArgument("{} packs matrices [out, in]; the tensor is {}", name_, to_string(shape));
  const int64_t panels = num_pieces(shape);
  return {{"codes", DType::u8, Shape{panels, shape[1], kPanelWidth}},
          {"scales", DType::f32, Shape{panels, num_blocks(stored_.format(), shape[1]), kPanelWidth}}};
}

int64_t Fp8Panels::num_pieces(const Shape& shape) const { return (shape[0] + kPanelWidth - 1) / kPanelWidth; }

void Fp8Panels::encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const {
  EADEM_CHECK(values.encoding == &stored_, "{} from {}", name_, to_string(values));
  const int64_t columns = values.shape[1];
  const int64_t size = block_columns(stored_.format(), columns), blocks = num_blocks(stored_.format(), columns);
  for (int64_t p = begin; p < end; ++p) {
    uint8_t* codes = static_cast<uint8_t*>(encoded.plane(0)) + p * columns * kPanelWidth;
    float* scales = static_cast<float*>(encoded.plane(1)) + p * blocks * kPanelWidth;
    for (int64_t n = 0; n < kPanelWidth; ++n) {
      const int64_t row = p * kPanelWidth + n;
      const bool exists = row < values.shape[0];
      const uint8_t* from = static_cast<const uint8_t*>(values.plane(0)) + row * columns;
      for (int64_t k = 0; k < columns; ++k) codes[k * kPanelWidth + n] = exists ? from[k] : uint8_t{0};
      for (int64_t b = 0; b < blocks; ++b) {
        const float scale = exists ? stored_.scale(values, row, b * size) : 0.0f;
        if (!(std::abs(scale) < kLargestScale))
          throw InvalidArgument("{}: the scale of row {}, column {} is {}; products take scales below 2^119", name_,
                                row, b * size, scale);
        scales[b * kPanelWidth + n] = scale;
      }
    }
  }
}

void Fp8Panels::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  const Fp8Format& format = stored_.format();
  const int64_t columns = encoded.shape[1], p = index / kPanelWidth, n = index % kPanelWidth;
  const int64_t size = block_columns(format, columns);
  const uint8_t* codes = static_cast<const uint8_t*>(encoded.plane(0)) + p * columns * kPanelWidth + n;
  const float* scales = static_cast<const float*>(encoded.plane(1)) + p * num_blocks(format, columns) * kPanelWidth + n;
  for (int64_t k = 0; k < columns; ++k)
    row[k] = scales[k / size * kPanelWidth] * fp8_to_float(format.kind, codes[k * kPanelWidth]);
}

void Fp8Panels::slice(const TensorView&, const TensorView&, int, int64_t) const {
  EADEM_UNREACHABLE("{}: a rank packs its own part", name_);
}

}  // namespace eadem::kernels::cpu
