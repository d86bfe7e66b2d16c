// SPDX-License-Identifier: Apache-2.0
//
// The scores of as many query rows as a panel has, which stand in the lanes:
//
//   scores[j, r] = sum_d q[r, d] k[j, d]           one chain over d
//
// A value of a key is a broadcast, so that keys are read as they are stored: nothing is transposed but the queries,
// once for all keys. Every score is the chain that matmul-inl.h computes, so that it has the same bits.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_ROWS_IN_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_ROWS_IN_LANES_INL_H_
#undef EADEM_KERNELS_CPU_ROWS_IN_LANES_INL_H_
#else
#define EADEM_KERNELS_CPU_ROWS_IN_LANES_INL_H_
#endif

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

// Dimensions that are widened at a time, to rows of a fixed length: the addresses of kLaneKeys rows are then one
// register and constants. They take 4 KB, of a first cache that has room for q beside them.
inline constexpr int64_t kLaneDims = 64;

// kLaneKeys rows of keys, and the memory to prefetch meanwhile: from `ahead` on, as many bytes as these keys have over
// `share`.
template <typename T>
struct LaneKeys {
  const T* rows[kLaneKeys];
  const T* ahead;
  int64_t share;
};

// Writes scores [kLaneKeys, kPanelWidth]. q_t is [head_dim, kPanelWidth].
template <typename T>
HWY_NOINLINE void lane_scores_tile(float* HWY_RESTRICT scores, const float* HWY_RESTRICT q_t, const LaneKeys<T>& keys,
                                   int64_t head_dim) {
  HWY_ALIGN float wide[kLaneKeys * kLaneDims];
  Vec acc[kLaneKeys][kLaneVecs];
#pragma GCC unroll kUnroll
  for (int j = 0; j < kLaneKeys; ++j)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kLaneVecs; ++v) acc[j][v] = zero();

  // Prefetches are spread: as many at once as keys have lines would occupy the buffers that q waits for.
  constexpr int64_t kTogether = 4, kLine = 64;
  const int64_t bytes = kTogether * kLaneKeys * static_cast<int64_t>(sizeof(T)) / keys.share;
  const char* ahead = reinterpret_cast<const char*>(keys.ahead);
  const auto add = [&](const float* q, int64_t d) {
    Vec row[kLaneVecs];
#pragma GCC unroll kUnroll
    for (int v = 0; v < kLaneVecs; ++v) row[v] = load(q + v * kLanes);
#pragma GCC unroll kUnroll
    for (int j = 0; j < kLaneKeys; ++j) {
      const Vec key = set(wide[j * kLaneDims + d]);
#pragma GCC unroll kUnroll
      for (int v = 0; v < kLaneVecs; ++v) acc[j][v] = hn::MulAdd(row[v], key, acc[j][v]);
    }
  };
  for (int64_t first = 0; first < head_dim; first += kLaneDims) {
    const int64_t dims = std::min(kLaneDims, head_dim - first);
    for (int j = 0; j < kLaneKeys; ++j)
      map(
          wide + j * kLaneDims, dims, [](Vec v) { return v; }, keys.rows[j] + first);
    int64_t d = 0;
    for (; d + kTogether <= dims; d += kTogether, q_t += kTogether * kPanelWidth, ahead += bytes) {
      for (int64_t line = 0; line < bytes; line += kLine) fetch_far(ahead + line);
#pragma GCC unroll 4
      for (int64_t i = 0; i < kTogether; ++i) add(q_t + i * kPanelWidth, d + i);
    }
    for (; d < dims; ++d, q_t += kPanelWidth) add(q_t, d);
  }

#pragma GCC unroll kUnroll
  for (int j = 0; j < kLaneKeys; ++j)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kLaneVecs; ++v) store(acc[j][v], scores + j * kPanelWidth + v * kLanes);
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
