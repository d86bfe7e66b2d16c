// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/bf16_dots.h"

#include <algorithm>
#include <type_traits>

#include "eadem/core/error.h"
#include "eadem/kernels/cpu/linear/stream_ahead.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define EADEM_DOTS __attribute__((target("avx512f,avx512bw,avx512bf16")))

namespace eadem::kernels::cpu {

namespace {

constexpr int64_t kDotPanel = 16;

// Sums stay in registers: those of a block of 8 rows and 3 panels, or of few rows and 4 panels, beside the vectors of
// the panels and a pair of a. Three panels of kTileBlock tiles (24 KB) stay in the first-level cache while the rows
// pass by.
constexpr int kDotRows = 8, kDotPanels = 3, kFewDotRows = 4, kFewDotRowsPanels = 4;

// While a block is computed, it prefetches cache lines [begin, end) of each tile of the panels that follow its own.
struct NextDotPanels {
  const char* panels = nullptr;
  int64_t begin = 0, end = 0;
};

// Computes one block for `tiles` tiles of k, from c if it resumes, else from zero.
template <int kRows, int kPanels>
EADEM_DOTS __attribute__((noinline)) void dot_block(float* c, int64_t c_stride, bool resume, const TileRows& a,
                                                    const char* x, const char* b, int64_t panel_stride, int64_t tiles,
                                                    const NextDotPanels& next) {
  __m512 sum[kRows][kPanels];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p)
      sum[r][p] = resume ? _mm512_loadu_ps(c + r * c_stride + p * kDotPanel) : _mm512_setzero_ps();
  for (int64_t t = 0; t < tiles; ++t) {
    const char* pairs = x + t / kTileBlock * a.k_stride + t % kTileBlock * a.tile_stride;
    const char* lines = b + t * kTileBytes;
    for (int64_t i = 0; i < kTileRows; ++i) {
      __m512bh w[kPanels];
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        w[p] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(lines + p * panel_stride + i * 64));
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        int pair;
        __builtin_memcpy(&pair, pairs + r * kTileLine + i * 4, sizeof(pair));
        const __m512bh both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], both, w[p]);
      }
    }
    for (int64_t i = next.begin; i < next.end; ++i)
      for (int p = 0; p < kPanels; ++p) fetch_far(next.panels + p * panel_stride + t * kTileBytes + i * 64);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) _mm512_storeu_ps(c + r * c_stride + p * kDotPanel, sum[r][p]);
}

// Calls f with std::integral_constant<int, rows>, rows from 1 to kMost.
template <int kMost, typename F>
void with_dot_rows(int64_t rows, F&& f) {
  if constexpr (kMost > 1)
    if (rows < kMost) return with_dot_rows<kMost - 1>(rows, f);
  f(std::integral_constant<int, kMost>());
}

// Row `row` of a, whose 32 rows of a pair of tiles lie one after the other.
const char* dot_row(const TileRows& a, int64_t row) {
  return static_cast<const char*>(a.data) + row / (2 * kTileRows) * a.pair_stride +
         row / kTileRows % 2 * a.half_stride + row % kTileRows * a.line_stride;
}

// Few rows: whole rows of k at once, each panel read once from memory. Prefetching as stream_ahead.h does costs 6 % of
// the bandwidth here (two cores of an EPYC, Zen 5: 94 % instead of 100 % of what plain reading reaches).
template <int kPanels>
void stream_dot_panels(float* c, int64_t c_stride, const TileRows& a, const char* b, int64_t panel_stride, int64_t rows,
                       int64_t tiles) {
  with_dot_rows<kFewDotRows>(rows, [&](auto count) {
    dot_block<decltype(count)::value, kPanels>(c, c_stride, false, a, dot_row(a, 0), b, panel_stride, tiles, {});
  });
}

// Many rows: kTileBlock tiles of k of some panels for all rows, then the next tiles.
template <int kPanels>
void block_dot_panels(float* c, int64_t c_stride, const TileRows& a, const char* b, int64_t panel_stride, int64_t rows,
                      int64_t tiles, const char* next_panels) {
  const int64_t blocks = (rows + kDotRows - 1) / kDotRows;
  for (int64_t first = 0; first < tiles || first == 0; first += kTileBlock) {
    const int64_t some = std::min(kTileBlock, tiles - first);
    const char* next = first + some < tiles ? b + (first + some) * kTileBytes : next_panels;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t row = i * kDotRows;
      const char* x = dot_row(a, row) + first / kTileBlock * a.k_stride;
      const NextDotPanels fetch{next, next == nullptr ? 0 : i * kTileRows / blocks,
                                next == nullptr ? 0 : (i + 1) * kTileRows / blocks};
      with_dot_rows<kDotRows>(std::min<int64_t>(kDotRows, rows - row), [&](auto count) {
        dot_block<decltype(count)::value, kPanels>(c + row * c_stride, c_stride, first > 0, a, x,
                                                   b + first * kTileBytes, panel_stride, some, fetch);
      });
    }
  }
}

}  // namespace

void bf16_dots(float* c, int64_t c_stride, const TileRows& a, const TilePanels& b, int64_t rows, int64_t panels,
               int64_t tiles) {
  static_assert(2 * kTileRows % kDotRows == 0 && kTileRows % kDotRows == 0);
  const auto* data = static_cast<const char*>(b.data);
  const int64_t stride = b.panel_stride;
  const auto panel = [&](int64_t p) { return data + p * stride; };
  int64_t p = 0;
  if (rows <= kFewDotRows) {
    for (; p + kFewDotRowsPanels <= panels; p += kFewDotRowsPanels)
      stream_dot_panels<kFewDotRowsPanels>(c + p * kDotPanel, c_stride, a, panel(p), stride, rows, tiles);
    for (; p < panels; ++p) stream_dot_panels<1>(c + p * kDotPanel, c_stride, a, panel(p), stride, rows, tiles);
    return;
  }
  for (; p + kDotPanels <= panels; p += kDotPanels)
    block_dot_panels<kDotPanels>(c + p * kDotPanel, c_stride, a, panel(p), stride, rows, tiles,
                                 p + 2 * kDotPanels <= panels ? panel(p + kDotPanels) : nullptr);
  for (; p + 2 <= panels; p += 2)
    block_dot_panels<2>(c + p * kDotPanel, c_stride, a, panel(p), stride, rows, tiles, nullptr);
  for (; p < panels; ++p) block_dot_panels<1>(c + p * kDotPanel, c_stride, a, panel(p), stride, rows, tiles, nullptr);
}

}  // namespace eadem::kernels::cpu

#else

namespace eadem::kernels::cpu {

void bf16_dots(float*, int64_t, const TileRows&, const TilePanels&, int64_t, int64_t, int64_t) {
  EADEM_UNREACHABLE("vdpbf16ps is of x86 processors");
}

}  // namespace eadem::kernels::cpu

#endif
