// SPDX-License-Identifier: Apache-2.0
//
// Int8Rows: activations [rows, columns] as 8-bit codes with f32 scales, which products with quantized weights multiply.
// Each row is rounded by itself:
//
//   value[i] = scale * code[i],  code[i] = value * (127 / largest) to nearest even,  scale = largest / 127
//
// `largest` is the largest magnitude of a step of 32 values or, for weights that have one scale for each output, of a
// chunk of 256. Below 2^-119 it is taken as 0: scale and codes are 0. Where a value is not finite, neither is the
// scale, and the codes are 0, which decode to NaN.
//
// Planes, in the order in which products read them, for C = ceil(columns / 256) chunks of 8 steps:
//   codes   i8  [C, rows, 256]
//   scales  f32 [C, rows, 8]     of the steps, or of the chunk in the first place
//   sums    i32 [C, rows, 8, 2]  of the codes in each half of a step
// The steps that the last chunk lacks are not written.
#pragma once

#include "eadem/core/encoding.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_panels.h"

namespace eadem::kernels::cpu {

class Int8Rows final : public Encoding {
 public:
  // The rows for products with a weight of `layout`.
  static const Int8Rows& of(const QuantizedLayout& layout);
  static const Int8Rows& with_scale_per_step();
  static const Int8Rows& with_scale_per_chunk();

  bool scale_per_chunk() const { return scale_per_chunk_; }

  std::string_view name() const override { return name_; }
  // The shape has rank 2, and its columns are whole steps.
  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  int64_t num_pieces(const Shape& shape) const override;  // rows
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

 private:
  Int8Rows(bool scale_per_chunk, std::string_view name) : scale_per_chunk_(scale_per_chunk), name_(name) {}

  bool scale_per_chunk_;
  std::string_view name_;
};

// The planes of encoded rows as kernels read and write them.
struct Int8RowPlanes {
  int64_t rows = 0;
  int8_t* codes = nullptr;
  float* scales = nullptr;
  int32_t* sums = nullptr;

  // The index of step s of row r.
  int64_t step(int64_t r, int64_t s) const { return (s / kChunkSteps * rows + r) * kChunkSteps + s % kChunkSteps; }
};

Int8RowPlanes int8_row_planes(const TensorView& encoded);
// The bytes of rows without a tensor, and their planes in such memory (64-byte aligned).
int64_t int8_rows_bytes(int64_t rows, int64_t columns);
Int8RowPlanes int8_rows_in(void* memory, int64_t rows, int64_t columns);

}  // namespace eadem::kernels::cpu
