// SPDX-License-Identifier: Apache-2.0
//
// Activations rounded to codes, and codes times weights, for one token: the bits of int8_chunks.cuh and of
// linear/integer_products.cuh.
#pragma once

#include "eadem/kernels/cuda/decoder/place.cuh"
#include "eadem/kernels/cuda/linear/integer_products.cuh"

namespace eadem::kernels::cuda::decoder {

// By a warp: rounds two chunks at once, because the reductions of one would leave the warp waiting. Lane l has columns
// 8 l to 8 l + 7. Codes go to `to` in the order of fragments; scales and the sums of codes of each half of a chunk are
// the same in all lanes.
__device__ inline void round_chunks(uint8_t* (&to)[2], float (&scales)[2], int2 (&half_sums)[2], const float (&v)[2][8],
                                    int lane) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  // Adding 1.5 * 2^23 rounds as __float2int_rn does: the code is the difference of the bits.
  constexpr float kRounder = 12582912.0f;
  constexpr uint32_t kRounderBits = 0x4b400000u;
  uint32_t most[2] = {};  // magnitudes as integers, whose order is theirs
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int n = 0; n < 8; ++n) most[k] = max(most[k], __float_as_uint(v[k][n]) & 0x7fffffffu);
#pragma unroll
  for (int k = 0; k < 2; ++k) most[k] = __reduce_max_sync(kAllLanes, most[k]);
  uint32_t codes[2][8];
  int sum[2];
  float levels[2] = {127.0f, 127.0f};
#pragma unroll 1
  for (;;) {
    uint32_t magnitudes[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float largest = __uint_as_float(most[k]);
      const bool some = most[k] < kInfinity && largest > 0x1p-119f;
      const float factor = levels[k] / largest;
      magnitudes[k] = 0;
      sum[k] = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        codes[k][n] = __float_as_uint(__fadd_rn(some ? __fmul_rn(v[k][n], factor) : 0.0f, kRounder));
        sum[k] += static_cast<int>(codes[k][n] - kRounderBits);
        magnitudes[k] = __usad(codes[k][n], kRounderBits, magnitudes[k]);
      }
    }
    bool again = false;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (__reduce_add_sync(kAllLanes, magnitudes[k]) > kMostCodeSum && levels[k] == 127.0f)
        levels[k] = 63.0f, again = true;
    if (!again) break;
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    half_sums[k].x = __reduce_add_sync(kAllLanes, lane < 16 ? sum[k] : 0);
    half_sums[k].y = __reduce_add_sync(kAllLanes, lane < 16 ? 0 : sum[k]);
    uint8_t* at = to[k] + lane / 8 * 64 + lane % 8 * 2;
#pragma unroll
    for (int n = 0; n < 4; ++n)
      *reinterpret_cast<uint16_t*>(at + n * 16) =
          static_cast<uint16_t>(__byte_perm(codes[k][2 * n], codes[k][2 * n + 1], 0x0040u));
    const float largest = __uint_as_float(most[k]);
    scales[k] = most[k] < kInfinity && !(largest > 0x1p-119f) ? 0.0f : largest * (1.0f / levels[k]);
  }
}

// Codes of a chunk as a lane's fragments.
struct Fragments {
  uint4 b[4];
  int2 half_sums;

  __device__ void load(const uint8_t* codes, int lane) {
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) b[piece] = reinterpret_cast<const uint4*>(codes)[piece * 4 + lane % 4];
  }
};

// By a warp: the terms of rows g and g + 8 of a block of W, which are Groups, in lanes 4 g.
template <typename W>
__device__ inline float2 multiply(const uint8_t* block, const Fragments& x, int lane) {
  constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
  uint4 w[4];
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) w[piece] = reinterpret_cast<const uint4*>(block)[piece * 32 + lane];
  // [2 halves][16 rows]
  const auto* scales = reinterpret_cast<const typename W::Scale*>(block + W::kLayout.scales) + lane / 4;
  const uint8_t* zeros = block + W::kLayout.zeros + lane / 4;
  // A sum begins with minus the zero point times the sum of x's codes, which subtracts the zero point from each code of
  // the weight. Codes of row g + 8 stay in the high bits of their bytes, and so are times 16.
  int sums[2][4];  // by half
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_x = half == 0 ? x.half_sums.x : x.half_sums.y;
    const int zero0 = W::kHasZeros ? zeros[half * kTileRows] : W::kLayout.zero;
    const int zero1 = W::kHasZeros ? zeros[half * kTileRows + 8] : W::kLayout.zero;
    sums[half][0] = sums[half][1] = -zero0 * of_x;
    sums[half][2] = sums[half][3] = -16 * zero1 * of_x;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // two chains take turns
      const uint4 a = w[2 * half + i], b = x.b[2 * half + i];
      mma(sums[half], {a.x & kLow, a.x & kHigh, a.y & kLow, a.y & kHigh}, b.x, b.y);
      mma(sums[half], {a.z & kLow, a.z & kHigh, a.w & kLow, a.w & kHigh}, b.z, b.w);
    }
  const auto term = [](int half0, int half1, float factor, float by0, float by1) {
    return fmaf(static_cast<float>(half1) * factor, by1, __fmul_rn(static_cast<float>(half0) * factor, by0));
  };
  const auto scale_of = [&](int half, int row) { return load(scales + half * kTileRows + row); };
  return {term(sums[0][0], sums[1][0], of_row(0), scale_of(0, 0), scale_of(1, 0)),
          term(sums[0][2], sums[1][2], of_row(1), scale_of(0, 8), scale_of(1, 8))};
}
// `to`: of row g.
__device__ inline void store_terms(float* to, float2 terms, int lane) {
  if (lane % 4 == 0) to[0] = terms.x, to[8] = terms.y;
}

// By a lane: a row's terms times the chunks' scales, in order.
template <int kNum>
__device__ inline float sum_terms(const float* terms, const float* scales) {
  float y = 0.0f;
#pragma unroll 8
  for (int c = 0; c < kNum; ++c) y = fmaf(terms[c * kTileRows], scales[c], y);
  return y;
}

}  // namespace eadem::kernels::cuda::decoder
