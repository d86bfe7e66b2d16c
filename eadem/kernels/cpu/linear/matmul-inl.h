// SPDX-License-Identifier: Apache-2.0
//
// The inner matrix product that linear and attention are built from, compiled once per instruction set.
//
//   c[r, n] = resume * c[r, n] + sum_k a[r, k] * b[k, n],   n in panels of kPanelWidth
//
// Every c[r, n] is one chain acc = fma(a[r, k], b[k, n], acc) over k in order (a product and a sum where there is no
// FMA), whatever tile it falls into; a chain that is cut at some k goes on from the stored f32. So a result depends
// neither on how many rows there are nor on how the loops are blocked.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_MATMUL_INL_H_
#undef EADEM_KERNELS_CPU_MATMUL_INL_H_
#else
#define EADEM_KERNELS_CPU_MATMUL_INL_H_
#endif

#include <algorithm>
#include <limits>

#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/linear/stream_ahead.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

// The broadcast operand: a[r, k] = data[r * row_stride + k * k_stride].
struct RowOperand {
  const float* data;
  int64_t row_stride;
  int64_t k_stride;
};

// The operand that is loaded as vectors: b[k, 16 p + i] = data[p * panel_stride + k * k_stride + i].
template <typename W>
struct PanelOperand {
  const W* data;
  int64_t panel_stride;
  int64_t k_stride;
};

// Cache lines that tiles prefetch while they multiply, one at a time: prefetching more at once would delay b, which
// streams from the second-level cache.
struct Fetch {
  Fetch() = default;

  // Prefetches `bytes` bytes of each of `panels` panels. Panels begin `stride` bytes apart, the first one at `first`.
  Fetch(const void* first, int64_t bytes, int64_t stride, int64_t panels)
      : line(static_cast<const char*>(first)),
        line_count((bytes + kLine - 1) / kLine),
        lines_left(line_count),
        panels_left(panels),
        skip(stride - line_count * kLine) {}

  // Spreads the prefetches over `tiles` tiles of k_size steps each.
  void spread(int64_t tiles, int64_t k_size) {
    if (panels_left > 0) every = std::max<int64_t>(1, tiles * k_size / std::max<int64_t>(1, panels_left * line_count));
  }

  HWY_INLINE void next() {
    if (panels_left == 0) return;
    __builtin_prefetch(line, 0, 2);
    line += kLine;
    if (--lines_left > 0) return;
    line += skip;
    lines_left = line_count;
    --panels_left;
  }

  static constexpr int64_t kLine = 64;

  const char* line = nullptr;
  int64_t line_count = 0;  // lines per panel
  int64_t lines_left = 0, panels_left = 0, skip = 0;
  int64_t every = std::numeric_limits<int64_t>::max();  // steps of k between two prefetches
};

inline constexpr int kPanelVecs = static_cast<int>(kPanelWidth / kLanes);

// Tile sizes. With V vectors a panel, a tile of R rows and P panels keeps R P V accumulators, P V panel vectors and
// a broadcast in registers.
#if HWY_TARGET == HWY_AVX3
inline constexpr int kTileRows = 6, kTilePanels = 4;  // 24 + 4 + 1 of 32
inline constexpr int kRowPanels = 4;                  // a single row: more streams are read more slowly
#elif HWY_TARGET == HWY_AVX2
inline constexpr int kTileRows = 6, kTilePanels = 1;  // 12 + 2 + 1 of 16
inline constexpr int kRowPanels = 4;                  // 8 chains
#elif HWY_TARGET == HWY_NEON
inline constexpr int kTileRows = 6, kTilePanels = 1;  // 24 + 4 + 1 of 32
inline constexpr int kRowPanels = 4;                  // 16 chains
#elif HWY_TARGET == HWY_SSE4
inline constexpr int kTileRows = 3, kTilePanels = 1;  // 12 + 1 + a product + a broadcast of 16
inline constexpr int kRowPanels = 2;                  // 8 chains
#else
inline constexpr int kTileRows = 1, kTilePanels = 1;
inline constexpr int kRowPanels = 1;
#endif

// Whether a line of 16-bit weights is prefetched once, into the first-level cache (stream_ahead.h).
inline constexpr bool kNearOnly = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4;

// Computes one tile. With `kKeep`, it stores the widened vectors of b to `wide` [kPanels, k_size, 16].
template <int kRows, int kPanels, bool kKeep = false, typename W>
HWY_NOINLINE void tile(float* HWY_RESTRICT c, int64_t c_stride, bool resume, const RowOperand& a,
                       const PanelOperand<W>& b, int64_t k_size, Fetch& fetch, float* HWY_RESTRICT wide = nullptr) {
  constexpr int kVecs = kPanels * kPanelVecs;
  Vec acc[kRows][kVecs];
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) acc[r][v] = resume ? load(c + r * c_stride + v * kLanes) : zero();

  const float* a_k = a.data;
  const W* b_k = b.data;
  constexpr auto kBytes = static_cast<int64_t>(sizeof(W));
  const StreamAhead ahead(b.panel_stride * kBytes, (kPanels - 1) * b.panel_stride * kBytes);
  for (int64_t k = 0; k < k_size;) {
    const int64_t end = std::min(k_size, fetch.every < k_size - k ? k + fetch.every : k_size);
    fetch.next();
    for (; k < end; ++k) {
      Vec column[kVecs];
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVecs; ++v)
        column[v] = load(b_k + (v / kPanelVecs) * b.panel_stride + (v % kPanelVecs) * kLanes);
      if constexpr (kKeep) {
#pragma GCC unroll kUnroll
        for (int v = 0; v < kVecs; ++v)
          store(column[v], wide + (v / kPanelVecs) * k_size * kPanelWidth + (v % kPanelVecs) * kLanes);
        wide += kPanelWidth;
      } else if (kBytes == 2 && k % 2 == 0) {
        // 16-bit weights are read in place only for few rows, and are prefetched; two k share a line. f32 gains nothing
        // from it.
        const char* line = reinterpret_cast<const char*>(b_k);
        const int64_t at = k * b.k_stride * kBytes, near = ahead.offset(at, kFetchNear),
                      far = ahead.offset(at, kFetchFar);
#pragma GCC unroll kUnroll
        for (int p = 0; p < kPanels; ++p) {
          if constexpr (kNearOnly) {
            fetch_near(line + p * b.panel_stride * kBytes + far);
          } else {
            fetch_near(line + p * b.panel_stride * kBytes + near);
            fetch_far(line + p * b.panel_stride * kBytes + far);
          }
        }
      }
#pragma GCC unroll kUnroll
      for (int r = 0; r < kRows; ++r) {
        const Vec x = set(a_k[r * a.row_stride]);
#pragma GCC unroll kUnroll
        for (int v = 0; v < kVecs; ++v) acc[r][v] = hn::MulAdd(x, column[v], acc[r][v]);
      }
      a_k += a.k_stride;
      b_k += b.k_stride;
    }
  }

#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) store(acc[r][v], c + r * c_stride + v * kLanes);
}

// Computes all rows of `kPanels` panels.
template <int kPanels, typename W>
HWY_INLINE void tiles_of_rows(float* c, int64_t c_stride, bool resume, RowOperand a, const PanelOperand<W>& b,
                              int64_t rows, int64_t k_size, Fetch& fetch, float* wide) {
  if constexpr (sizeof(W) == 2) {
    if (wide != nullptr && rows >= kTileRows) {
      tile<kTileRows, kPanels, true>(c, c_stride, resume, a, b, k_size, fetch, wide);
      a.data += kTileRows * a.row_stride;
      return tiles_of_rows<kPanels>(c + kTileRows * c_stride, c_stride, resume, a,
                                    PanelOperand<float>{wide, k_size * kPanelWidth, kPanelWidth}, rows - kTileRows,
                                    k_size, fetch, nullptr);
    }
  }
  for (; rows >= kTileRows; rows -= kTileRows) {
    tile<kTileRows, kPanels>(c, c_stride, resume, a, b, k_size, fetch);
    c += kTileRows * c_stride;
    a.data += kTileRows * a.row_stride;
  }
  if constexpr (kTileRows > 1) {
    switch (rows) {
      case 1: return tile<1, kPanels>(c, c_stride, resume, a, b, k_size, fetch);
      case 2: return tile<2, kPanels>(c, c_stride, resume, a, b, k_size, fetch);
    }
  }
  if constexpr (kTileRows > 3) {
    switch (rows) {
      case 3: return tile<3, kPanels>(c, c_stride, resume, a, b, k_size, fetch);
      case 4: return tile<4, kPanels>(c, c_stride, resume, a, b, k_size, fetch);
      case 5: return tile<5, kPanels>(c, c_stride, resume, a, b, k_size, fetch);
    }
  }
}

// Computes c [rows, panels * 16] with row stride c_stride and prefetches `fetch` meanwhile. `wide` is null or has room
// for kTilePanels * k_size * 16 floats: there the first tile of rows stores its widened 16-bit weights for the other
// rows.
template <typename W>
HWY_INLINE void matmul_block(float* c, int64_t c_stride, bool resume, const RowOperand& a, PanelOperand<W> b,
                             int64_t rows, int64_t panels, int64_t k_size, Fetch fetch = {}, float* wide = nullptr) {
  fetch.spread((rows + kTileRows - 1) / kTileRows * ((panels + kTilePanels - 1) / kTilePanels), k_size);
  if (rows == 1 && kRowPanels > kTilePanels) {
    for (; panels >= kRowPanels; panels -= kRowPanels) {
      tile<1, kRowPanels>(c, c_stride, resume, a, b, k_size, fetch);
      c += kRowPanels * kPanelWidth;
      b.data += kRowPanels * b.panel_stride;
    }
  }
  for (; panels >= kTilePanels; panels -= kTilePanels) {
    tiles_of_rows<kTilePanels>(c, c_stride, resume, a, b, rows, k_size, fetch, wide);
    c += kTilePanels * kPanelWidth;
    b.data += kTilePanels * b.panel_stride;
  }
  if constexpr (kTilePanels > 2) {
    if (panels >= 2) {
      tiles_of_rows<2>(c, c_stride, resume, a, b, rows, k_size, fetch, wide);
      c += 2 * kPanelWidth;
      b.data += 2 * b.panel_stride;
      panels -= 2;
    }
  }
  for (; panels > 0; --panels) {
    tiles_of_rows<1>(c, c_stride, resume, a, b, rows, k_size, fetch, wide);
    c += kPanelWidth;
    b.data += b.panel_stride;
  }
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
