// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/bf16_operands.h"

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/linear/transpose.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define EADEM_PAIRS __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace eadem::kernels::cpu {

namespace {

constexpr int64_t kPairs = kVnniTile / 2;  // of k, in a tile
static_assert(kPairs == kTileRows && kPanelWidth == kTileRows);

using PairWords = uint32_t __attribute__((vector_size(64)));
using HalfWords = uint16_t __attribute__((vector_size(32)));

__mmask16 lanes(int64_t n) { return static_cast<__mmask16>((1u << std::clamp<int64_t>(n, 0, kPanelWidth)) - 1); }

EADEM_PAIRS inline __m256i rounded(const float* row, __mmask16 columns) {
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(columns, row)));
}
EADEM_PAIRS inline PairWords rounded_words(const float* row, __mmask16 columns) {
  return __builtin_convertvector(reinterpret_cast<HalfWords>(rounded(row, columns)), PairWords);
}

// Transposes the 16 x 16 words of a tile.
void turn_words(void* tile, const uint32_t (&words)[kPairs][kPanelWidth]) {
  const uint8_t* lines[kPairs];
  for (int64_t i = 0; i < kPairs; ++i) lines[i] = reinterpret_cast<const uint8_t*>(words[i]);
  constexpr int64_t kFour = 4;  // words in each direction that are turned at once
  for (int64_t n = 0; n < kPanelWidth; n += kFour)
    for (int64_t i = 0; i < kPairs; i += kFour)
      transpose_words(static_cast<uint8_t*>(tile) + n * kTileLine + i * 4, lines + i, n * 4);
}

}  // namespace

EADEM_PAIRS void pack_b_of_columns(void* tile, const float* rows, int64_t stride, int64_t k, int64_t n) {
  auto* words = static_cast<uint32_t*>(tile);
  const __mmask16 mask = lanes(n);
  for (int64_t i = 0; i < kPairs; ++i, words += kPanelWidth) {
    PairWords pair{};
    if (2 * i < k) pair = rounded_words(rows + 2 * i * stride, mask);
    if (2 * i + 1 < k) pair |= rounded_words(rows + (2 * i + 1) * stride, mask) << 16;
    _mm512_storeu_si512(words, reinterpret_cast<__m512i>(pair));
  }
}

void pack_a_of_columns(void* tile, const float* rows, int64_t stride, int64_t k, int64_t m) {
  alignas(64) uint32_t words[kPairs][kPanelWidth];
  pack_b_of_columns(words, rows, stride, k, m);
  turn_words(tile, words);
}

EADEM_PAIRS void pack_b_of_rows(void* tile, const float* rows, int64_t stride, int64_t n, int64_t k) {
  alignas(64) uint32_t words[kPanelWidth][kPairs];
  const __mmask16 low = lanes(k), high = lanes(k - kPanelWidth);
  for (int64_t r = 0; r < kPanelWidth; ++r) {
    const bool is_there = r < n;
    const float* row = rows + (is_there ? r * stride : 0);
    auto* line = reinterpret_cast<__m256i*>(words[r]);
    _mm256_store_si256(line, rounded(row, is_there ? low : 0));
    _mm256_store_si256(line + 1, rounded(row + kPanelWidth, is_there ? high : 0));
  }
  turn_words(tile, words);
}

}  // namespace eadem::kernels::cpu

#else

namespace eadem::kernels::cpu {

void pack_a_of_columns(void*, const float*, int64_t, int64_t, int64_t) {
  EADEM_UNREACHABLE("products of bf16 are of x86 processors");
}
void pack_b_of_columns(void*, const float*, int64_t, int64_t, int64_t) {
  EADEM_UNREACHABLE("products of bf16 are of x86 processors");
}
void pack_b_of_rows(void*, const float*, int64_t, int64_t, int64_t) {
  EADEM_UNREACHABLE("products of bf16 are of x86 processors");
}

}  // namespace eadem::kernels::cpu

#endif
