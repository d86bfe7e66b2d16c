// SPDX-License-Identifier: Apache-2.0
//
// Sums of the values of an int8 cache by the 8-bit dot product of processors that have one:
//
//   out[r, d] += scale[r] * sum_j weight[r, j] code[j, d]          j: the keys of a chunk
//
// The weights of a row are rounded to 16 bits with one scale for a chunk. The instruction multiplies unsigned bytes by
// signed ones, so that the upper and the lower bytes of weights are multiplied apart. Sums of integers are exact, and
// so a row's bits do not depend on the rows beside it.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_CODE_VALUES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_CODE_VALUES_INL_H_
#undef EADEM_KERNELS_CPU_CODE_VALUES_INL_H_
#else
#define EADEM_KERNELS_CPU_CODE_VALUES_INL_H_
#endif

#include <limits>

#include "eadem/kernels/cpu/attention/code_scores-inl.h"

#if HWY_TARGET == HWY_AVX3

// Callers check for the instruction first.
#define EADEM_BYTE_DOTS __attribute__((target("avx512vnni")))

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

inline constexpr int64_t kQuads = kChunk / kWordCodes;  // of keys
inline constexpr int64_t kQuadBytes = kPanelWidth * kWordCodes;
inline constexpr int64_t kPanelCodes = kQuads * kQuadBytes;  // of the columns of a panel
inline constexpr int64_t kRoundedWeights = 2 * kChunk;  // bytes of a row of weights: the upper ones, the lower ones
static_assert(kLanes == kPanelWidth && kChunk == 4 * kLanes);

// The words b, 4 + b, 8 + b and 12 + b of a vector, in 128 bits of number b.
HWY_INLINE __m512i turn_blocks(__m512i words) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), words);
}

// Rounds a row of weights, none of which is negative, and returns their scale: NaN if one is NaN.
HWY_INLINE float round_weights(uint8_t* to, const float* weights) {
  constexpr float kLevels = 65535.0f;
  const __m512 weight[4] = {_mm512_loadu_ps(weights), _mm512_loadu_ps(weights + kLanes),
                            _mm512_loadu_ps(weights + 2 * kLanes), _mm512_loadu_ps(weights + 3 * kLanes)};
  const Vec largest = hn::Max(hn::Max(Vec{weight[0]}, Vec{weight[1]}), hn::Max(Vec{weight[2]}, Vec{weight[3]}));
  const float most = std::max(1e-30f, max_lanes(largest));
  const __m512 levels = _mm512_set1_ps(kLevels / most);
  const auto word = [&](int i) { return _mm512_cvtps_epi32(_mm512_mul_ps(weight[i], levels)); };
  const __m512i first = _mm512_packus_epi32(word(0), word(1)), second = _mm512_packus_epi32(word(2), word(3)),
                lower = _mm512_set1_epi16(0xff);
  // Packing goes by 128 bits: those of number b have four keys of each vector, from key 4 b on.
  const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8)),
                low = _mm512_packus_epi16(_mm512_and_si512(first, lower), _mm512_and_si512(second, lower));
  _mm512_storeu_si512(to, turn_blocks(high));
  _mm512_storeu_si512(to + kChunk, turn_blocks(low));
  const bool broken = (_mm512_cmp_ps_mask(weight[0], weight[1], _CMP_UNORD_Q) |
                       _mm512_cmp_ps_mask(weight[2], weight[3], _CMP_UNORD_Q)) != 0;
  return broken ? std::numeric_limits<float>::quiet_NaN() : most * (1 / kLevels);
}

// Writes 16 rows of `columns` codes, which lie `stride` apart, as words of four keys: [panels] of kPanelCodes, of which
// this is four quads.
HWY_INLINE void interleave_codes(uint8_t* words, const int8_t* rows, int64_t stride, int64_t columns,
                                 FetchAhead& ahead) {
  constexpr int64_t kBlock = 4 * kPanelWidth;  // columns
  for (int64_t quad = 0; quad < kKeyGroup / kWordCodes; ++quad, rows += kWordCodes * stride, words += kQuadBytes) {
    for (int64_t d = 0; d < columns; d += kBlock) {
      const int64_t left = columns - d;
      const __mmask64 mask = left >= kBlock ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
      const auto key = [&](int64_t offset) { return turn_blocks(_mm512_maskz_loadu_epi8(mask, rows + d + offset)); };
      const __m512i key0 = key(0), key1 = key(stride), key2 = key(2 * stride), key3 = key(3 * stride);
      const __m512i low01 = _mm512_unpacklo_epi8(key0, key1), low23 = _mm512_unpacklo_epi8(key2, key3),
                    high01 = _mm512_unpackhi_epi8(key0, key1), high23 = _mm512_unpackhi_epi8(key2, key3);
      uint8_t* const to = words + d / kPanelWidth * kPanelCodes;
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16(low01, low23));
      if (left > kPanelWidth) _mm512_storeu_si512(to + kPanelCodes, _mm512_unpackhi_epi16(low01, low23));
      if (left > 2 * kPanelWidth) _mm512_storeu_si512(to + 2 * kPanelCodes, _mm512_unpacklo_epi16(high01, high23));
      if (left > 3 * kPanelWidth) _mm512_storeu_si512(to + 3 * kPanelCodes, _mm512_unpackhi_epi16(high01, high23));
      ahead.fetch_part();
    }
  }
}

template <int kRows, int kPanels>
EADEM_BYTE_DOTS HWY_NOINLINE void code_values_tile(float* HWY_RESTRICT out, int64_t out_stride,
                                                   const uint8_t* HWY_RESTRICT weights,
                                                   const float* HWY_RESTRICT scales, const uint8_t* HWY_RESTRICT words,
                                                   int64_t quads, FetchAhead& ahead) {
  const char* line = ahead.take(quads);
  const int64_t step = line == nullptr ? 0 : kLineBytes;
  if (line == nullptr) line = reinterpret_cast<const char*>(weights);
  __m512i acc[2][kRows][kPanels];
#pragma GCC unroll 2
  for (int part = 0; part < 2; ++part)
#pragma GCC unroll kUnroll
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
      for (int p = 0; p < kPanels; ++p) acc[part][r][p] = _mm512_setzero_si512();
  for (int64_t quad = 0; quad < quads; ++quad, words += kQuadBytes, weights += kWordCodes) {
    __m512i codes[kPanels];
#pragma GCC unroll kUnroll
    for (int p = 0; p < kPanels; ++p) codes[p] = _mm512_loadu_si512(words + p * kPanelCodes);
#pragma GCC unroll kUnroll
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part) {
        int32_t four;
        std::memcpy(&four, weights + r * kRoundedWeights + part * kChunk, sizeof(four));
        const __m512i weight = _mm512_set1_epi32(four);
#pragma GCC unroll kUnroll
        for (int p = 0; p < kPanels; ++p) {
          acc[part][r][p] = _mm512_dpbusd_epi32(acc[part][r][p], weight, codes[p]);
          asm("" : "+v"(acc[part][r][p]));  // GCC 12 would keep each sum in two registers
        }
      }
    fetch_far(line);
    line += step;
  }
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
    for (int p = 0; p < kPanels; ++p) {
      const Ints sum{_mm512_add_epi32(_mm512_slli_epi32(acc[0][r][p], 8), acc[1][r][p])};
      float* to = out + r * out_stride + p * kPanelWidth;
      store(hn::MulAdd(hn::ConvertTo(Lanes(), sum), set(scales[r]), load(to)), to);
    }
}

template <int kRows>
HWY_INLINE void code_values_rows(float* out, int64_t out_stride, const uint8_t* weights, const float* scales,
                                 const uint8_t* words, int64_t quads, int64_t panels, FetchAhead& ahead) {
  int64_t p = 0;
  for (; p + 2 <= panels; p += 2)
    code_values_tile<kRows, 2>(out + p * kPanelWidth, out_stride, weights, scales, words + p * kPanelCodes, quads,
                               ahead);
  if (p < panels)
    code_values_tile<kRows, 1>(out + p * kPanelWidth, out_stride, weights, scales, words + p * kPanelCodes, quads,
                               ahead);
}

// out [rows, panels * kPanelWidth] +=, of weights [rows, kRoundedWeights] and the words of interleave_codes.
HWY_INLINE void code_values(float* out, int64_t out_stride, const uint8_t* weights, const float* scales,
                            const uint8_t* words, int64_t rows, int64_t quads, int64_t panels, FetchAhead& ahead) {
  constexpr int64_t kRows = 4;  // 2 x 4 x 2 sums, a panel's words and a broadcast
  for (; rows >= kRows; rows -= kRows) {
    code_values_rows<kRows>(out, out_stride, weights, scales, words, quads, panels, ahead);
    out += kRows * out_stride, weights += kRows * kRoundedWeights, scales += kRows;
  }
  switch (rows) {
    case 1: return code_values_rows<1>(out, out_stride, weights, scales, words, quads, panels, ahead);
    case 2: return code_values_rows<2>(out, out_stride, weights, scales, words, quads, panels, ahead);
    case 3: return code_values_rows<3>(out, out_stride, weights, scales, words, quads, panels, ahead);
    default: break;
  }
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3

#endif  // per-target include guard
