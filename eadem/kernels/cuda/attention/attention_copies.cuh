// SPDX-License-Identifier: Apache-2.0
//
// How a warpgroup copies rows of keys, values, queries or gradients into the panels of wgmma.cuh.
#pragma once

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/instructions/wgmma.cuh"

namespace eadem::kernels::cuda {

// The rows and the piece of 16 bytes that a thread copies: rows `first`, `first` + kAtOnce, ... of a tile. Rows have
// `width` elements; zeros follow, up to kD.
template <int kD>
struct TileCopies {
  static constexpr int kRows = 64, kPieces = kD / 8, kAtOnce = kWarpgroup / kPieces, kCount = kRows / kAtOnce;
  static constexpr uint32_t kPanelBytes = kRows * kPanelRowBytes;
  static_assert(kAtOnce % 4 == 0);
  int first, piece;
  uint32_t offset;  // of the first row's piece in the panels

  __device__ explicit TileCopies(int thread) : first(thread / kPieces), piece(thread % kPieces) {
    offset = static_cast<uint32_t>(piece / 8) * kPanelBytes + panel_offset(first, piece % 8);
  }

  // The offset of row `first` + i * kAtOnce. A panel permutes the pieces of eight rows; of two times four rows, the
  // second ones have theirs four pieces further on, or back.
  __device__ uint32_t offset_of(int i) const {
    return (offset + static_cast<uint32_t>(i * kAtOnce) * kPanelRowBytes) ^ (kAtOnce % 8 == 0 || i % 2 == 0 ? 0 : 64);
  }

  // Copies a tile whose rows are `stride` elements apart. Rows outside [begin, end) are not read and become zeros;
  // begin <= end. kAtATime: of the thread's rows, for which it has addresses in registers.
  template <int kAtATime = kCount>
  __device__ void copy(uint32_t to, const __nv_bfloat16* rows, int64_t stride, int width, int32_t begin,
                       int32_t end) const {
    const __nv_bfloat16* from = rows + first * stride + piece * 8;
    if (piece * 8 >= width) end = begin;
#pragma unroll kAtATime
    for (int i = 0; i < kCount; ++i)
      copy_16_async(to + offset_of(i), from + i * kAtOnce * stride,
                    static_cast<unsigned>(first + i * kAtOnce - begin) < static_cast<unsigned>(end - begin));
  }

  // Copies a tile whose rows are anywhere: row i is `rows[i]`, counted in rows of `width` elements, or -1 for zeros.
  __device__ void gather(uint32_t to, const __nv_bfloat16* elements, int width, const int32_t (&rows)[kRows]) const {
    int32_t own[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) own[i] = piece * 8 < width ? rows[first + i * kAtOnce] : -1;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      copy_16_async(to + offset_of(i), elements + int64_t{own[i]} * width + piece * 8, own[i] != -1);
  }
};

}  // namespace eadem::kernels::cuda
