// SPDX-License-Identifier: Apache-2.0
//
// Products with weights in e4m3, and the codes that they read: rows of e4m3 with one scale, with the bits of
// fp8_stream.cu and of the kernels that round rows. wgmma multiplies codes where a tensor map put them.
//
// A box has 16 rows of the weight and four times 128 columns, which are the 64 rows of the left operand: one operand
// has four terms of each row. The right operand has eight columns, each 128 columns of the activation. So row 16 i + r
// of the result, the rows r of which are warp i's, has a term of row r in the column that belongs to its 128 columns;
// what is in other columns is not used. A slot of the ring has two boxes and as many columns of the weight as the right
// operand has: each warpgroup multiplies a box of it, and warp w has terms 8 i + w, from column w.
#pragma once

#include "eadem/kernels/cuda/decoder/ring.cuh"
#include "eadem/kernels/cuda/fp8_rows.cuh"
#include "eadem/kernels/cuda/instructions/wgmma.cuh"

namespace eadem::kernels::cuda::decoder {
namespace {

// Where column `column` of an activation stands among the codes: the right operand of 1024 columns is
// [128 columns / 16][8 terms][16 columns].
__device__ inline int code_at(int column) {
  constexpr int kPiece = 16, kTerms = kFloatSlotColumns / kFloatTermColumns;
  return column / kFloatSlotColumns * kFloatSlotColumns + column % kFloatTermColumns / kPiece * (kTerms * kPiece) +
         column / kFloatTermColumns % kTerms * kPiece + column % kPiece;
}

// The scale of a row of bf16 whose largest magnitude is `most`, which is that of e4m3_scale_of. A magnitude that is not
// infinite is a multiple of 2^-133, so that its 448th is never half-way between two numbers of f32, and the product in
// double rounds to the quotient. It has no division, whose rare cases are function calls.
__device__ inline float bf16_row_scale(uint32_t most) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  constexpr double kInverse = 1.0 / static_cast<double>(kLargestE4m3);
  return most < kInfinity ? static_cast<float>(static_cast<double>(__uint_as_float(most)) * kInverse)
                          : __uint_as_float(0x7fc00000u);
}

// By a warp that multiplies: its terms of a tile's slot, to `to`, of row 0 of term `warp`. `codes`: of the slot's
// columns.
__device__ inline void multiply_floats(float* to, uint32_t slot, const uint8_t* codes, int warp, int lane) {
  constexpr uint32_t kStep = 32;  // bytes of k of one product
  constexpr uint32_t kStepCodes = kStep * kProductWarps;
  const int warpgroup = warp / (kWarpgroup / kWarp);
  const Operand<> left(slot + static_cast<uint32_t>(warpgroup) * kRowBoxBytes, 0);
  const uint32_t right = shared_address(codes);
  float c[1][4];
  wgmma_fence();
#pragma unroll
  for (uint32_t step = 0; step < kFloatTermColumns / kStep; ++step)
    wgmma_e4m3(c, left.at(step * kStep), narrow_operand(right + step * kStepCodes), step > 0);
  wgmma_commit();
  wgmma_wait<0>();
  pin(c);
  // Lane 4 g + t has rows g and g + 8, columns 2 t and 2 t + 1.
  if (lane % 4 != warp / 2) return;
  to[lane / 4] = warp % 2 == 0 ? c[0][0] : c[0][1];
  to[lane / 4 + 8] = warp % 2 == 0 ? c[0][2] : c[0][3];
}

}  // namespace
}  // namespace eadem::kernels::cuda::decoder
