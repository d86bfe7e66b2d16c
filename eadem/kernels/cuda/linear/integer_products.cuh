// SPDX-License-Identifier: Apache-2.0
//
// Products of rows of 8-bit codes (int8_chunks.h) with K-quants, by chunks of 256 columns, for which both sides have a
// scale, and with codes of four bits in groups. Of output n and token t,
//
//   y = sum over chunks c of u_c * scale_c, in f32, in order of c, by one fma for each
//   u = I' * D   of q4_k
//   u = C * d    of q6_k
//   u = G_1 * s_1 + (G_0 * s_0)   of groups, by one product and one fma, of the halves of the chunk
//
//   I    of the chunk, the sum of sub-scale * code * token's code: an integer below 2^24, since the sum of the token's
//        codes is bounded (int8_chunks.h). It has one value in whatever order its terms are added
//   I'   I after one step of 16 columns of the tensor core (mma.cuh) more, which subtracts m * S for each half of a
//        group: m = sub-min * dmin / D, rounded to f16; S is the sum of the token's codes
//   D    d, unless m would be larger than an f16 can be (MinScale)
//   C    of the chunk, a chain of tensor-core products of 16 columns each: (code - 32) * sub-scale, rounded to f16,
//        times the token's code
//   d, dmin  the scales of the weight's block; scale_c is the token's
//   G    of 128 columns, the sum of (code - zero) * token's code: an integer, exact as I is
//   s    the scale of these columns
//
// The bits of a code are those of the f16 code * 2^-24, also where a code of four bits lies in its word. So all of I'
// is multiplied by 2^-19, of the minimums m by 2^-7 and S by 2^-12, and all of C by 2^-20. Rounding to f16 is not
// changed by that: what is below 2^-14 there, is a multiple of 2^-20. G is multiplied by 2^-1 where the tensor core
// subtracts zero * S from an integer, of zero * 2^11 and S * 2^-12.
//
// The halves of such a word hold columns 2 t and 2 t + 8, or 2 t + 1 and 2 t + 9, of a step. So f16 fragments have
// columns 2 t and 2 t + 8 at places 2 t and 2 t + 1, and columns 2 t + 1 and 2 t + 9 at places 2 t + 8 and 2 t + 9.
#pragma once

#include <cuda_fp16.h>

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/fragment_decode.cuh"
#include "eadem/kernels/cuda/linear/fragment_layout.h"

namespace eadem::kernels::cuda {

static_assert(kIntegerChunk == kFragmentBlockColumns);
inline constexpr FragmentLayout kFourBits = kKnownLayouts[kFourBitLayout], kSixBits = kKnownLayouts[kSixBitLayout];

// c += a b of integers, a unsigned: m16n8k32. As for bf16 (mma.cuh), but lane 4 g + t has columns 4 t ... 4 t + 3 and
// 16 more.
__device__ inline void mma(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// c += a b of f16.
__device__ inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- Fragments of f16.

inline constexpr float kUnit = 0x1p-19f, kSixUnit = 0x1p-20f;  // of I' and C
inline constexpr float kGroupSumUnit = 0x1p-1f;                // of G

__device__ inline const uint32_t (&words_of(const uint4& v))[4] { return *reinterpret_cast<const uint32_t(*)[4]>(&v); }

__device__ inline __half2 halves(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
__device__ inline uint32_t bits_of(__half2 value) { return *reinterpret_cast<const uint32_t*>(&value); }
__device__ inline __half2 both(float value) { return __float2half2_rn(value); }
// A byte, twice, as f16 of 1024 + itself.
__device__ inline __half2 spread(uint32_t byte) { return halves(__byte_perm(byte, 0x64646464u, 0x4040u)); }

// How sub-scales of four bits, as f16 of 1024 more, become what the bits of codes are multiplied by: 32 factor *
// sub-scale in row g, and in row g + 8, whose codes are 16 times themselves, 2 factor * sub-scale.
struct CodeFactors {
  __half2 by[2], minus[2];

  CodeFactors() = default;
  __device__ CodeFactors(float factor, float factor8)
      : by{both(32 * factor), both(2 * factor8)}, minus{both(-32768 * factor), both(-2048 * factor8)} {}
};

// How a half of a chunk is scaled and what its zero points are, in rows g and g + 8.
struct GroupScales {
  float scale[2];
  float zero[2];

  __device__ GroupScales(const FragmentLayout& layout, const uint8_t* block, int half, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int element =
          (half * kIntegerGroup >> layout.scale_shift) * kFragmentBlockRows + lane / 4 + r * (kFragmentBlockRows / 2);
      scale[r] = fragment_scale(block + layout.scales, element, layout.scale_type);
      zero[r] = static_cast<float>(layout.has_zeros ? block[layout.zeros + element] : layout.zero);
    }
  }
};

inline constexpr int kHalfPieces = kFragmentPieces / 2;  // of half a chunk
inline constexpr int kHalfSteps = kIntegerGroup / 32;    // wgmma of half a chunk
inline constexpr uint32_t kBytes = 0x01010101u;          // times a value: that value in each byte of a word

// The left operands of half a chunk: codes of rows g and g + 8 minus their zero points, as signed bytes.
__device__ inline void decode_half(uint32_t (&a)[kHalfSteps][4], const uint8_t* block, int half,
                                   const GroupScales& scales, int lane) {
  constexpr uint32_t kNibbles = 0x0f * kBytes, kTops = 0x80 * kBytes;
  uint32_t zero[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) zero[r] = static_cast<uint32_t>(scales.zero[r]) * kBytes;
  // Zero points have four bits. So a byte of 128 + code is larger than its zero point, and no byte borrows from the
  // next.
  const auto bytes_of = [&](uint32_t word, int r) { return (((word & kNibbles) | kTops) - zero[r]) ^ kTops; };
#pragma unroll
  for (int piece = 0; piece < kHalfPieces; ++piece) {
    const uint4 loaded = reinterpret_cast<const uint4*>(block)[(half * kHalfPieces + piece) * kWarp + lane];
    const uint32_t(&words)[4] = words_of(loaded);
#pragma unroll
    for (int step = 0; step < kFragmentPieceSteps; ++step)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        a[2 * piece + step / 2][step % 2 * 2 + r] = bytes_of(r == 0 ? words[step] : words[step] >> 4, r);
  }
}

// A layout that is constant needs no instructions to find its scales and their type.
template <bool kKnown>
__device__ inline GroupScales scales_of_half(const FragmentLayout& layout, const uint8_t* block, int half, int lane) {
  if constexpr (kKnown) {
    constexpr FragmentLayout kLayout = kKnownLayouts[kGroupLayout];
    const FragmentLayout known = kLayout;
    return GroupScales(known, block, half, lane);
  } else {
    return GroupScales(layout, block, half, lane);
  }
}

// What a lane holds of a piece of 64 columns of a block. `decode` makes the fragments of its steps 2 group and
// 2 group + 1.
template <IntegerCodes kCodes>
struct Codes;

// Of q4_k: codes times sub-scales, kUnit and `factors`.
template <>
struct Codes<IntegerCodes::four> {
  using Factors = CodeFactors;
  uint4 words;
  uint32_t subs[2][2];  // sub-scales of both groups, of rows g and g + 8

  Codes() = default;
  __device__ Codes(const uint8_t* block, int piece, int lane)
      : words(reinterpret_cast<const uint4*>(block)[piece * kWarp + lane]) {
    const uint8_t* from = block + kFourBits.sub_scales + piece * 2 * kFragmentBlockRows + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      subs[i][0] = from[i * kFragmentBlockRows], subs[i][1] = from[i * kFragmentBlockRows + 8];
  }

  __device__ void decode(uint32_t (&a)[2][4], int group, const CodeFactors& factors) const {
    const __half2 scale[2] = {__hfma2(spread(subs[group][0]), factors.by[0], factors.minus[0]),
                              __hfma2(spread(subs[group][1]), factors.by[1], factors.minus[1])};
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t word = words_of(words)[2 * group + step] >> (8 * h);
        a[step][2 * h] = bits_of(__hmul2(halves(word & 0x000f000fu), scale[0]));
        a[step][2 * h + 1] = bits_of(__hmul2(halves(word & 0x00f000f0u), scale[1]));
      }
  }
};

// Of q6_k: codes times sub-scales and kSixUnit, by a whole warp.
template <>
struct Codes<IntegerCodes::six> {
  struct Factors {};
  uint4 words;
  uint2 tops;
  __half2 scales;  // 16 times the sub-scales of step lane % 4, of rows g and g + 8

  Codes() = default;
  __device__ Codes(const uint8_t* block, int piece, int lane)
      : words(reinterpret_cast<const uint4*>(block)[piece * kWarp + lane]),
        tops(reinterpret_cast<const uint2*>(block + kSixBits.high)[piece * kWarp + lane]) {
    const uint8_t* from =
        block + kSixBits.sub_scales + (piece * kFragmentPieceSteps + lane % 4) * kFragmentBlockRows + lane / 4;
    const uint32_t subs = from[0] | static_cast<uint32_t>(from[8]) << 16;
    scales = __hfma2(halves((subs ^ 0x00800080u) | 0x64006400u), both(16.0f), both(-16 * 1152.0f));
  }

  __device__ void decode(uint32_t (&a)[2][4], int group, const Factors&) const {
    constexpr uint32_t kNibbles = 0x0f0f0f0fu, kTops = 0x30303030u;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const __half2 scale = halves(__shfl_sync(kAllLanes, bits_of(scales), 2 * group + step, 4));
      const __half2 minus = __hmul2(scale, both(-0x1p-19f));  // of a code of 32, which is 0
      const uint32_t top = group == 0 ? tops.x : tops.y, word = words_of(words)[2 * group + step];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int shift = 4 - 4 * step - 2 * r;
        const uint32_t bytes =
            ((r == 0 ? word : word >> 4) & kNibbles) | ((shift >= 0 ? top << shift : top >> -shift) & kTops);
        const __half2 by = r == 0 ? __low2half2(scale) : __high2half2(scale);
        const __half2 add = r == 0 ? __low2half2(minus) : __high2half2(minus);
        a[step][r] = bits_of(__hfma2(halves(bytes & 0x00ff00ffu), by, add));
        a[step][2 + r] = bits_of(__hfma2(halves(__byte_perm(bytes, 0, 0x4341u)), by, add));
      }
    }
  }
};

// Where a lane finds the rows of all tokens of a product. Tokens beyond the last are the last.
struct IntegerRows {
  const int8_t* codes;
  const uint32_t* sums;
  int chunk_sums;  // words from a chunk's sums to the next one's
  int tokens;

  __device__ IntegerRows(const LinearStreamParams& p, int tokens_, int lane)
      : codes(static_cast<const int8_t*>(p.x) + lane % 4 * 16),
        sums(reinterpret_cast<const uint32_t*>(p.x_chunks.sums) + lane % 4),
        chunk_sums((tokens_ + 7) / 8 * 64),
        tokens(tokens_) {}
};

// What a lane multiplies of a chunk, for kTiles tiles of eight tokens from `first_tile` on.
template <int kTiles>
struct IntegerTokens {
  uint4 codes[kTiles][kFragmentPieces];  // of token g
  uint32_t sums[kTiles][2];              // of token g, of the halves of groups t and t + 4: f16

  IntegerTokens() = default;
  __device__ IntegerTokens(const IntegerRows& rows, const LinearStreamParams& p, int chunk, int lane,
                           int first_tile = 0) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int token = min((first_tile + t) * 8 + lane / 4, rows.tokens - 1);
      const auto* from = reinterpret_cast<const uint4*>(rows.codes + token * p.in + chunk * kIntegerChunk);
#pragma unroll
      for (int piece = 0; piece < kFragmentPieces; ++piece) codes[t][piece] = __ldg(from + piece * 4);
      const uint32_t* of_chunk = rows.sums + chunk * rows.chunk_sums + token / 8 * 64 + token % 8 * 4;
      sums[t][0] = __ldg(of_chunk), sums[t][1] = __ldg(of_chunk + 32);
    }
  }
};

// How a row of a block of q4_k is scaled: d * code - dmin * min = D * (factor * code - ratio * min).
struct MinScale {
  float scale, ratio, factor;  // D, dmin / D, and a power of two or 0

  __device__ MinScale(float d, float dmin) {
    scale = d, ratio = __fdividef(dmin, d), factor = 1.0f;
    if (fabsf(ratio) > 0x1p16f) {  // a block of almost one value
      factor = 0x1p-5f, scale *= 1 / factor, ratio *= factor;
      // Codes move such a value by less than 2^-11 of dmin.
      if (fabsf(ratio) > 0x1p16f) factor = 0.0f, scale = dmin, ratio = 1.0f;
    }
    if (dmin == 0.0f) ratio = 0.0f;
  }
};
// Those of rows g and g + 8.
struct MinScales {
  MinScale row[2];

  __device__ MinScales(const uint8_t* block, int lane) : row{of(block, lane / 4), of(block, lane / 4 + 8)} {}
  __device__ static MinScale of(const uint8_t* block, int row) {
    return {__half2float(reinterpret_cast<const __half*>(block + kFourBits.scales)[row]),
            __half2float(reinterpret_cast<const __half*>(block + kFourBits.mins)[row])};
  }
};

// The fragment of a block of q4_k by which the sums of a token's codes are multiplied: columns 2 t, 2 t + 1 are -2^-7 m
// of group t, and those + 8 of group t + 4.
__device__ inline void load_minimums(uint32_t (&min)[4], const uint8_t* block, const MinScales& scales, int lane) {
  const uint8_t* subs = block + kFourBits.sub_mins + lane % 4 * kFragmentBlockRows + lane / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float m =
        static_cast<float>(subs[i % 2 * 8 + i / 2 * 4 * kFragmentBlockRows]) * (scales.row[i % 2].ratio * -0x1p-7f);
    min[i] = bits_of(both(m));
  }
}

// Codes of row g + 8 stand in the upper half of a byte, so that bytes of them are 16 times themselves, and so are
// integer sums of that row. Its floats are exact, and a sixteenth of them is, too.
__device__ inline float of_row(int r) { return r == 0 ? 1.0f : 0x1p-4f; }

// u[t][i] of row g + 8 (i / 2) and token 2 t + i % 2 of each tile, for the block of q4_k at `block`, by a warp.
template <int kTiles>
__device__ inline void multiply_four_bits(float (&u)[kTiles][4], const IntegerTokens<kTiles>& x, const uint8_t* block,
                                          int lane) {
  constexpr uint32_t kNibbles = 0x0f0f0f0fu, kTops = 0xf0f0f0f0u;
  int sum[kTiles][4] = {};
#pragma unroll
  for (int piece = 0; piece < kFragmentPieces; ++piece) {
    const uint4 loaded = reinterpret_cast<const uint4*>(block)[piece * kWarp + lane];
    const uint32_t(&words)[4] = words_of(loaded);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const uint8_t* subs = block + kFourBits.sub_scales + (piece * 2 + group) * kFragmentBlockRows + lane / 4;
      const int sub_scale[2] = {subs[0], subs[8]};
      const uint32_t first = words[2 * group], second = words[2 * group + 1];
      const uint32_t a[4] = {first & kNibbles, first & kTops, second & kNibbles, second & kTops};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        int dot[4] = {};
        const uint32_t(&b)[4] = words_of(x.codes[t][piece]);
        mma(dot, a, b[2 * group], b[2 * group + 1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[t][i] += dot[i] * sub_scale[i / 2];
      }
    }
  }
  const MinScales scales(block, lane);
  uint32_t min[4];
  load_minimums(min, block, scales, lane);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      u[t][i] = static_cast<float>(sum[t][i]) * (scales.row[i / 2].factor * (kUnit * of_row(i / 2)));
    mma_f16(u[t], min, x.sums[t][0], x.sums[t][1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) u[t][i] *= scales.row[i / 2].scale * (1 / kUnit);
  }
}

// The same for a block of groups.
template <int kTiles>
__device__ inline void multiply_groups(float (&u)[kTiles][4], const IntegerTokens<kTiles>& x,
                                       const FragmentLayout& layout, const uint8_t* block, int lane) {
  constexpr uint32_t kNibbles = 0x0f0f0f0fu, kTops = 0xf0f0f0f0u;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int sum[kTiles][4] = {};
#pragma unroll
    for (int piece = 2 * half; piece < 2 * half + 2; ++piece) {
      const uint4 loaded = reinterpret_cast<const uint4*>(block)[piece * kWarp + lane];
      const uint32_t(&words)[4] = words_of(loaded);
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        const uint32_t first = words[2 * group], second = words[2 * group + 1];
        const uint32_t a[4] = {first & kNibbles, first & kTops, second & kNibbles, second & kTops};
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint32_t(&b)[4] = words_of(x.codes[t][piece]);
          mma(sum[t], a, b[2 * group], b[2 * group + 1]);
        }
      }
    }
    const GroupScales scales(layout, block, half, lane);
    uint32_t zero[4] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) zero[2 * half + r] = bits_of(both(scales.zero[r] * (-0x1p12f * kGroupSumUnit)));
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float g[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) g[i] = static_cast<float>(sum[t][i]) * (kGroupSumUnit * of_row(i / 2));
      mma_f16(g, zero, x.sums[t][0], x.sums[t][1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = scales.scale[i / 2] * (1 / kGroupSumUnit);
        u[t][i] = half == 0 ? __fmul_rn(g[i], scale) : fmaf(g[i], scale, u[t][i]);
      }
    }
  }
}

// The same for a block of q6_k.
template <int kTiles>
__device__ inline void multiply_six_bits(float (&u)[kTiles][4], const IntegerTokens<kTiles>& x, const uint8_t* block,
                                         int lane) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) u[t][0] = u[t][1] = u[t][2] = u[t][3] = 0.0f;
#pragma unroll
  for (int piece = 0; piece < kFragmentPieces; ++piece) {
    const Codes<IntegerCodes::six> codes(block, piece, lane);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      uint32_t a[2][4];
      codes.decode(a, group, {});
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          uint32_t bytes = words_of(x.codes[t][piece])[2 * group + step];
          asm volatile("" : "+r"(bytes));  // stays in a loop over blocks, which has no registers for all halves
          bytes ^= 0x80808080u;            // code + 128
          // As f16 of 1024 more, of which a selector names two.
          const auto half_of = [&](uint32_t selector) {
            return bits_of(__hadd2(halves(__byte_perm(bytes, 0x64646464u, selector)), both(-1152.0f)));
          };
          mma_f16(u[t], a[step], half_of(0x4240u), half_of(0x4341u));
        }
    }
  }
  const auto* d = reinterpret_cast<const __half*>(block + kSixBits.scales) + lane / 4;
  const float scale[2] = {__half2float(d[0]) * (1 / kSixUnit), __half2float(d[8]) * (1 / kSixUnit)};
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) u[t][i] *= scale[i / 2];
}

}  // namespace eadem::kernels::cuda
