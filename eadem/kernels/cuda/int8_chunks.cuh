// SPDX-License-Identifier: Apache-2.0
//
// Rows rounded to Int8Chunks, with the bits of its encode.
#pragma once

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

// By a warp: rounds a chunk of a row, of which lane l has columns 8 l ... 8 l + 7.
__device__ inline void store_chunk(const Int8ChunkPlanes& p, int64_t row, int64_t chunk, const float (&values)[8],
                                   int lane) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  uint32_t most = 0;  // magnitudes as integers, whose order is theirs; NaN is the largest
#pragma unroll
  for (int n = 0; n < 8; ++n) most = max(most, __float_as_uint(values[n]) & 0x7fffffffu);
  most = __reduce_max_sync(kAllLanes, most);
  const float largest = __uint_as_float(most);
  const bool some = most < kInfinity && largest > 0x1p-119f;
  int codes[8], sum, levels = 127;
  const auto round = [&] {
    const float factor = static_cast<float>(levels) / largest;
    int magnitudes = 0;
    sum = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      codes[n] = some ? __float2int_rn(values[n] * factor) : 0;
      sum += codes[n];
      magnitudes += abs(codes[n]);
    }
    return __reduce_add_sync(kAllLanes, magnitudes);
  };
  if (round() > kMostCodeSum) levels = 63, round();
  const int64_t padded = ceil_div(p.rows, int64_t{8}) * 8;
  if (lane == 0)
    p.scales[chunk * padded + row] = most < kInfinity && !some ? 0.0f : largest * (1.0f / static_cast<float>(levels));
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  if (lane % 2 == 0)
    store(p.sums + ((chunk * padded / 8 + row / 8) * 2 + lane / 16) * 64 + row % 8 * 8 + lane / 2 % 8,
          static_cast<float>(sum) * 0x1p-12f);
  const int64_t first = row * p.columns + chunk * kIntegerChunk;
  uint32_t pairs[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) pairs[n] = static_cast<uint32_t>((codes[2 * n] & 255) | (codes[2 * n + 1] & 255) << 8);
  if (p.rows <= kIntegerStreamMaxTokens) {
    int8_t* to = p.codes + first + lane / 8 * 64 + lane % 8 * 2;
#pragma unroll
    for (int n = 0; n < 4; ++n) *reinterpret_cast<uint16_t*>(to + n * 16) = static_cast<uint16_t>(pairs[n]);
    return;
  }
  // Of 16 columns, a pair of lanes has columns 2 t and 2 t + 1 in one, 2 t + 8 and 2 t + 9 in the other; the first lane
  // stores those with an even number.
  const bool second = lane % 2 == 1;
  const uint32_t given = second ? pairs[0] | pairs[1] << 16 : pairs[2] | pairs[3] << 16;
  const uint32_t got = __shfl_xor_sync(kAllLanes, given, 1);
  const uint2 bytes = second ? make_uint2((got & 0xffffu) | pairs[2] << 16, got >> 16 | pairs[3] << 16)
                             : make_uint2(pairs[0] | got << 16, pairs[1] | (got & 0xffff0000u));
  *reinterpret_cast<uint2*>(p.codes + first + lane * 8) = bytes;
  float halves[8];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int other = __shfl_xor_sync(kAllLanes, second ? codes[2 * t] : codes[2 * t + 1], 1);
    halves[2 * t] = static_cast<float>(second ? other : codes[2 * t]);
    halves[2 * t + 1] = static_cast<float>(second ? codes[2 * t + 1] : other);
  }
  store_vector(p.halves + first + lane * 8, halves);
}

}  // namespace eadem::kernels::cuda
