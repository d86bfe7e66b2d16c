// SPDX-License-Identifier: Apache-2.0
//
// The two products of a chunk of keys and about as many query rows as a panel has, reading keys and values as they are
// stored. The rows stand in the lanes of the scores:
//
//   lane_scores      scores[j, r] = sum_d q[r, d] k[j, d]           one chain over d
//   lane_values      out[r, d]   += sum_j weights[r, j] v[j, d]     one chain over j, d as lanes
//
// A value of a key is a broadcast, so that nothing is transposed but the queries, once for all keys. Every result is
// the chain that matmul-inl.h computes, so that it has the same bits.
//
// The first cache has no room for a chunk, nor for the queries of DeepSeek beside some keys. Scores therefore take a
// part of the dimensions at a time, whose queries stay there through all keys; values a part of the columns, which
// stays through all rows. Sums of a part are read and written once for a chunk. Meanwhile the next chunk is prefetched
// into the second cache.
//
// Measured on Emerald Rapids (latents of DeepSeek-V2-Lite in f32, 8,192 keys, 16 rows, one and two threads): with the
// next part prefetched into the first cache, too, a layer takes 1.07 to 1.17 times as long, with all of the next chunk
// prefetched during the scores 1.12 to 1.17 times. With keys in the lanes of the scores, turned 96 dimensions at a
// time, it takes 1.28 and 1.19 times: 64 values take 20 operations to turn, on the ports that their 64 products need.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_ROWS_IN_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_ROWS_IN_LANES_INL_H_
#undef EADEM_KERNELS_CPU_ROWS_IN_LANES_INL_H_
#else
#define EADEM_KERNELS_CPU_ROWS_IN_LANES_INL_H_
#endif

#include "eadem/kernels/cpu/attention/attention-inl.h"
#include "eadem/kernels/cpu/linear/matmul-inl.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/linear/stream_ahead.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

inline constexpr int kLaneVecs = static_cast<int>(kPanelWidth / kLanes);
// Keys of a tile, which has kLaneVecs sums of each, and as many vectors of q, in registers.
#if HWY_TARGET == HWY_AVX3
inline constexpr int kLaneKeys = 16;  // 16 + 1 of 32; a broadcast is part of its product
#elif HWY_TARGET == HWY_AVX2
inline constexpr int kLaneKeys = 4;  // 8 + 2 + 1 of 16
#elif HWY_TARGET == HWY_NEON
inline constexpr int kLaneKeys = 4;  // 16 + 4 + 1 of 32
#elif HWY_TARGET == HWY_SSE4
inline constexpr int kLaneKeys = 2;  // 8 + 4 + a product + a broadcast of 16
#else
inline constexpr int kLaneKeys = 1;
#endif
static_assert(kChunk % kLaneKeys == 0);

// Dimensions of a part: 12 KB of q, and of the keys of a tile.
inline constexpr int64_t kLaneDims = 192;
// Columns of a part: 16 KB of a chunk's values.
inline constexpr int64_t kLaneColumns = kTilePanels * kPanelWidth;

// Rows to prefetch line by line, of `bytes` bytes each.
struct RowFetch {
  template <typename T>
  RowFetch(const T* const* rows, int64_t count, int64_t bytes)
      : rows(reinterpret_cast<const void* const*>(rows)), left(count), bytes(bytes) {}

  HWY_INLINE void next() {
    if (left == 0) return;
    __builtin_prefetch(static_cast<const char*>(*rows) + at, 0, 2);
    at += kLine;
    if (at < bytes) return;
    at = 0;
    ++rows;
    --left;
  }

  static constexpr int64_t kLine = 64;

  const void* const* rows;
  int64_t left, bytes, at = 0;
};

// The rows of a chunk, and of the next one. Past the last key, the first one takes its place.
template <typename T>
struct LaneChunk {
  LaneChunk(const KvRows<T>& keys, int64_t start, int64_t count, int64_t fetch_end) {
    point(rows, keys, start, count);
    std::fill(rows + count, rows + kChunk, rows[0]);
    later_count = std::clamp<int64_t>(fetch_end - (start + kChunk), 0, kChunk);
    point(later, keys, start + kChunk, later_count);
  }

  const T* rows[kChunk];
  const T* later[kChunk];
  int64_t later_count;

 private:
  static void point(const T** to, const KvRows<T>& keys, int64_t start, int64_t count) {
    const int64_t stride = keys.stride();
    for (int64_t j = 0; j < count;) {
      const T* row = keys.at(start + j);
      for (const int64_t end = j + keys.run(start + j, start + count); j < end; ++j, row += stride) to[j] = row;
    }
  }
};

// kLaneKeys rows of f32 that lie `stride` floats apart.
struct LaneKeys {
  const float* first;
  int64_t stride;
};

// Computes scores [kLaneKeys, kPanelWidth], or adds to them with `resume`. q_t is [dims, kPanelWidth]. kLines lines of
// `fetch` are prefetched for every four dimensions.
template <int kLines>
HWY_NOINLINE void lane_scores_tile(float* HWY_RESTRICT scores, bool resume, const float* HWY_RESTRICT q_t,
                                   const LaneKeys& keys, int64_t dims, RowFetch& fetch_rows) {
  // Addresses are one of a few registers and a multiple of the stride.
  constexpr int kSide = kLaneKeys < 4 ? kLaneKeys : 4, kBases = kLaneKeys / kSide;
  Vec acc[kLaneKeys][kLaneVecs];
#pragma GCC unroll kUnroll
  for (int j = 0; j < kLaneKeys; ++j)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kLaneVecs; ++v) acc[j][v] = resume ? load(scores + j * kPanelWidth + v * kLanes) : zero();

  RowFetch fetch = fetch_rows;  // in registers
  const int64_t stride = keys.stride;
  const float* base[kBases];
#pragma GCC unroll kUnroll
  for (int b = 0; b < kBases; ++b) base[b] = keys.first + b * kSide * stride;
  const auto add = [&](const float* q) {
    Vec row[kLaneVecs];
#pragma GCC unroll kUnroll
    for (int v = 0; v < kLaneVecs; ++v) row[v] = load(q + v * kLanes);
#pragma GCC unroll kUnroll
    for (int b = 0; b < kBases; ++b)
#pragma GCC unroll kUnroll
      for (int j = 0; j < kSide; ++j) {
        const Vec key = set(base[b][j * stride]);
#pragma GCC unroll kUnroll
        for (int v = 0; v < kLaneVecs; ++v) acc[b * kSide + j][v] = hn::MulAdd(row[v], key, acc[b * kSide + j][v]);
      }
#pragma GCC unroll kUnroll
    for (int b = 0; b < kBases; ++b) ++base[b];
  };
  constexpr int64_t kTogether = 4;
  int64_t d = 0;
  for (; d + kTogether <= dims; d += kTogether, q_t += kTogether * kPanelWidth) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kTogether; ++i) {
      if (i < kLines) fetch.next();
      add(q_t + i * kPanelWidth);
    }
  }
  for (; d < dims; ++d, q_t += kPanelWidth) add(q_t);
  fetch_rows = fetch;

#pragma GCC unroll kUnroll
  for (int j = 0; j < kLaneKeys; ++j)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kLaneVecs; ++v) store(acc[j][v], scores + j * kPanelWidth + v * kLanes);
}

// Writes scores [kChunk, kPanelWidth] of the first `count` keys and perhaps some after them. q_t is
// [head_dim, kPanelWidth]. For every line of keys, one over kShare lines of `fetch` are prefetched.
template <int kShare, typename T>
HWY_INLINE void lane_scores(float* scores, const float* q_t, const LaneChunk<T>& chunk, int64_t count, int64_t head_dim,
                            RowFetch& fetch) {
  HWY_ALIGN float wide[kLaneKeys * kLaneDims];
  constexpr int kLines = std::max<int>(1, 4 * kLaneKeys * sizeof(T) / RowFetch::kLine / kShare);
  for (int64_t d = 0; d < head_dim; d += kLaneDims) {
    const int64_t dims = std::min(kLaneDims, head_dim - d);
    for (int64_t first = 0; first < count; first += kLaneKeys) {
      const T* const* rows = chunk.rows + first;
      LaneKeys keys{wide, kLaneDims};
      bool in_place = false;
      if constexpr (std::is_same_v<T, float>) {
        // Rows of one block of the cache lie at equal distances.
        const int64_t stride = kLaneKeys > 1 ? rows[1] - rows[0] : 0;
        in_place = true;
        for (int64_t j = 1; j < kLaneKeys; ++j) in_place = in_place && rows[j] - rows[0] == j * stride;
        if (in_place) keys = {rows[0] + d, stride};
      }
      if (!in_place)
        for (int64_t j = 0; j < kLaneKeys; ++j)
          map(
              wide + j * kLaneDims, dims, [](Vec v) { return v; }, rows[j] + d);
      lane_scores_tile<kLines>(scores + first * kPanelWidth, d > 0, q_t + d * kPanelWidth, keys, dims, fetch);
    }
  }
}

// Adds to kLaneColumns columns of out, which begin at `out`. Rows of values are f32; their columns begin at
// rows[j] + column.
template <int kRows>
HWY_NOINLINE void lane_values_tile(float* HWY_RESTRICT out, int64_t out_stride, const float* HWY_RESTRICT weights,
                                   const float* const* rows, int64_t column, int64_t count, RowFetch& fetch_rows) {
  constexpr int kVecs = static_cast<int>(kLaneColumns / kLanes);
  Vec acc[kRows][kVecs];
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) acc[r][v] = load(out + r * out_stride + v * kLanes);
  RowFetch fetch = fetch_rows;  // in registers
  for (int64_t j = 0; j < count; ++j) {
    const float* row = rows[j] + column;
    Vec value[kVecs];
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) value[v] = load(row + v * kLanes);
    fetch.next();
#pragma GCC unroll kUnroll
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = set(weights[r * kChunk + j]);
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVecs; ++v) acc[r][v] = hn::MulAdd(weight, value[v], acc[r][v]);
    }
  }
  fetch_rows = fetch;
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) store(acc[r][v], out + r * out_stride + v * kLanes);
}

// Whether rows in lanes, 13 to 16, divide into tiles of the three sizes that lane_values has.
constexpr bool rows_divide_into_tiles() {
  for (int64_t rows = 13; rows <= kPanelWidth; ++rows)
    if (rows / ceil_div(rows, kTileRows) < kTileRows - 2) return false;
  return true;
}
static_assert(rows_divide_into_tiles());

// Adds to out [rows, columns], of weights [rows, kChunk], 13 to 16 rows. columns is a multiple of kLaneColumns; `wide`
// has room for kChunk * kLaneColumns floats.
template <typename T>
HWY_INLINE void lane_values(float* out, int64_t out_stride, const float* weights, const LaneChunk<T>& chunk,
                            int64_t count, int64_t rows, int64_t columns, RowFetch& fetch, float* wide) {
  constexpr bool kInPlace = std::is_same_v<T, float>;
  const float* values[kChunk];
  for (int64_t j = 0; j < count; ++j) {
    if constexpr (kInPlace)
      values[j] = chunk.rows[j];
    else
      values[j] = wide + j * kLaneColumns;
  }
  for (int64_t c = 0; c < columns; c += kLaneColumns) {
    if constexpr (!kInPlace)
      for (int64_t j = 0; j < count; ++j)
        map(
            wide + j * kLaneColumns, kLaneColumns, [](Vec v) { return v; }, chunk.rows[j] + c);
    int64_t tiles = ceil_div(rows, kTileRows);  // of rows divided evenly
    for (int64_t r = 0; r < rows; --tiles) {
      const int64_t tile_rows = ceil_div(rows - r, tiles);
      float* to = out + r * out_stride + c;
      const float* from = weights + r * kChunk;
      const int64_t column = kInPlace ? c : 0;
      const auto tile = [&]<int kRows>(std::integral_constant<int, kRows>) {
        lane_values_tile<kRows>(to, out_stride, from, values, column, count, fetch);
      };
      if (tile_rows == kTileRows) tile(std::integral_constant<int, kTileRows>());
      if constexpr (kTileRows > 1)
        if (tile_rows == kTileRows - 1) tile(std::integral_constant<int, kTileRows - 1>());
      if constexpr (kTileRows > 2)
        if (tile_rows == kTileRows - 2) tile(std::integral_constant<int, kTileRows - 2>());
      r += tile_rows;
    }
  }
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
