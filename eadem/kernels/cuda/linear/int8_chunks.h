// SPDX-License-Identifier: Apache-2.0
//
// Int8Chunks: activations [rows, columns] as 8-bit codes with an f32 scale for each 256 columns of a row, a chunk,
// which products with K-quants multiply (integer_products.cuh). Columns are a multiple of 256.
//
//   value[i] = scale * code[i],  code[i] = value * (127 / largest) to nearest even,  scale = largest / 127
//
// `largest` is the largest magnitude of the chunk. Below 2^-119 it is taken as 0: scale and codes are 0. Where a value
// is not finite, neither is the scale, and the codes are 0, which decode to NaN. So does the CPU round
// (cpu/linear/int8_rows.h). Where the codes' magnitudes add up to more than kMostCodeSum, 127 becomes 63: their sum
// with the largest weights, 15 * 63, then is an integer below 2^24. Only a chunk whose values are mostly as large as
// its largest is so.
//
// Planes, for C chunks of a row and R rows, of which there is room for R8, a multiple of 8:
//   codes   i8   [R, columns]          of up to kIntegerStreamMaxTokens rows, of each 64 columns 16 bytes for lane
//                                      t = 0 ... 3 of a warp's four: of each 16 columns 2 t, 2 t + 1, 2 t + 8 and
//                                      2 t + 9, as fragments have them (mma.cuh). Of more rows, of each 16 columns 0,
//                                      1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, which wgmma multiplies with
//                                      words of fragment_layout.h
//   scales  f32  [C, R8]
//   halves  f16  [R, columns]          the codes once more, of each 16 columns 0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11,
//                                      5, 13, 7, 15 (integer_products.cuh); undefined where there are up to
//                                      kIntegerStreamMaxTokens rows
//   sums    f16  [C, R8 / 8, 2, 8, 8]  of the codes of 16 columns each, times 2^-12: [chunk][8 rows][half of the
//                                      chunk][row][sum], as wgmma reads them (narrow_operand)
#pragma once

#include "eadem/core/encoding.h"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

class Int8Chunks final : public Encoding {
 public:
  static const Int8Chunks& instance();

  std::string_view name() const override { return "int8_chunks"; }
  // Throws InvalidArgument where columns are no multiple of kIntegerChunk.
  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  int64_t num_pieces(const Shape& shape) const override { return shape[0]; }
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;
};

// The planes of encoded rows as kernels read and write them.
Int8ChunkPlanes int8_chunk_planes(const TensorView& encoded);

}  // namespace eadem::kernels::cuda
