// SPDX-License-Identifier: Apache-2.0
//
// Activations rounded to codes, with the bits of int8_chunks.cuh, and the sums of terms.
#pragma once

#include "eadem/kernels/cuda/decoder/place.cuh"

namespace eadem::kernels::cuda::decoder {
namespace {

// By a warp: rounds kNum chunks at once, because the reductions of one would leave the warp waiting. Lane l has columns
// 8 l to 8 l + 7. Codes go to `to` in the order of fragments; scales are the same in all lanes, and sums are those
// of a lane's codes.
template <int kNum>
__device__ inline void round_chunks(uint8_t* (&to)[kNum], float (&scales)[kNum], int (&sums)[kNum],
                                    const float (&v)[kNum][8], int lane) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  // Adding 1.5 * 2^23 rounds as __float2int_rn does: the code is the difference of the bits.
  constexpr float kRounder = 12582912.0f;
  constexpr uint32_t kRounderBits = 0x4b400000u;
  uint32_t most[kNum] = {};  // magnitudes as integers, whose order is theirs
#pragma unroll
  for (int k = 0; k < kNum; ++k)
#pragma unroll
    for (int n = 0; n < 8; ++n) most[k] = max(most[k], __float_as_uint(v[k][n]) & 0x7fffffffu);
#pragma unroll
  for (int k = 0; k < kNum; ++k) most[k] = __reduce_max_sync(kAllLanes, most[k]);
  uint32_t codes[kNum][8];
  float levels[kNum];
#pragma unroll
  for (int k = 0; k < kNum; ++k) levels[k] = 127.0f;
#pragma unroll 1
  for (;;) {
    uint32_t magnitudes[kNum];
#pragma unroll
    for (int k = 0; k < kNum; ++k) {
      const float largest = __uint_as_float(most[k]);
      const bool some = most[k] < kInfinity && largest > 0x1p-119f;
      const float factor = levels[k] / largest;
      magnitudes[k] = 0;
      sums[k] = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        codes[k][n] = __float_as_uint(__fadd_rn(some ? __fmul_rn(v[k][n], factor) : 0.0f, kRounder));
        sums[k] += static_cast<int>(codes[k][n] - kRounderBits);
        magnitudes[k] = __usad(codes[k][n], kRounderBits, magnitudes[k]);
      }
    }
    bool again = false;
#pragma unroll
    for (int k = 0; k < kNum; ++k)
      if (__reduce_add_sync(kAllLanes, magnitudes[k]) > kMostCodeSum && levels[k] == 127.0f)
        levels[k] = 63.0f, again = true;
    if (!again) break;
  }
#pragma unroll
  for (int k = 0; k < kNum; ++k) {
    uint8_t* at = to[k] + lane / 8 * 64 + lane % 8 * 2;
#pragma unroll
    for (int n = 0; n < 4; ++n)
      *reinterpret_cast<uint16_t*>(at + n * 16) =
          static_cast<uint16_t>(__byte_perm(codes[k][2 * n], codes[k][2 * n + 1], 0x0040u));
    const float largest = __uint_as_float(most[k]);
    scales[k] = most[k] < kInfinity && !(largest > 0x1p-119f) ? 0.0f : largest * (1.0f / levels[k]);
  }
}

// `to`: of row g.
__device__ inline void store_terms(float* to, float2 terms, int lane) {
  if (lane % 4 == 0) to[0] = terms.x, to[8] = terms.y;
}

// By a lane: a row of a product with a row of kWidth columns, from its terms and the scales of the activation, in
// order. `row_scale`: of the weight's row, if it is of floats. W: the weights.
template <typename W, int kWidth>
__device__ inline float sum_terms(const float* terms, const float* scales, float row_scale) {
  if constexpr (W::kIsBf16) return terms[0];
  float y = 0.0f;
#pragma unroll 8
  for (int c = 0; c < W::terms_of(kWidth); ++c)
    y = W::kIsFloat ? y + terms[c * kTileRows] : fmaf(terms[c * kTileRows], scales[c], y);
  return W::kIsFloat ? y * row_scale * scales[0] : y;
}

}  // namespace
}  // namespace eadem::kernels::cuda::decoder
