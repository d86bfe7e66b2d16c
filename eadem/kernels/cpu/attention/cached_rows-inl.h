// SPDX-License-Identifier: Apache-2.0
//
// Attention's two products for a few query rows, reading keys and values directly from the KV cache:
//
//   key_scores       scores[r, j] = sum_d q[r, d] k[j, d]           one chain over d, keys as lanes
//   add_weighted     out[r, d]   += sum_j weights[r, j] v[j, d]     one chain over j, d as lanes
//
// Each computes the chain that matmul-inl.h computes from keys and values widened into scratch, so a row has the same
// bits on either path. For few rows, filling the scratch would cost more than the product. These functions transpose 16
// bytes of each of kLanes keys in registers, and every row uses them.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_CACHED_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_CACHED_ROWS_INL_H_
#undef EADEM_KERNELS_CPU_CACHED_ROWS_INL_H_
#else
#define EADEM_KERNELS_CPU_CACHED_ROWS_INL_H_
#endif

#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/linear/stream_ahead.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

// Keys are processed in groups of kKeyGroup. The keys of a group lie at equal distances in memory.
inline constexpr int64_t kKeyGroup = 16;

#if HWY_TARGET == HWY_AVX3
inline constexpr int kScoreGroups = 2, kScoreRows = 8;  // 2 x 8 accumulators + 8 keys' dimensions of 32 registers
#else
inline constexpr int kScoreGroups = 1, kScoreRows = 4;  // AVX2: 2 x 4 + 8 of 16
#endif
inline constexpr int kGroupVecs = static_cast<int>(kKeyGroup / kLanes);

// Keys and values are prefetched this many positions ahead: first into the second-level cache (kKeysAhead, also for
// values), then into the first (kKeysNear, kValuesNear; see stream_ahead.h). One prefetch brings kLineBytes.
inline constexpr int64_t kKeysNear = 32, kValuesNear = 16, kKeysAhead = 64;
inline constexpr int64_t kLineBytes = 64;

#if HWY_TARGET != HWY_SCALAR

// Transposes 4 x 4 matrices of 32-bit elements: in each 128-bit block, the four vectors hold the four rows of one
// matrix.
template <typename V>
HWY_INLINE void transpose_blocks_4x4(V& r0, V& r1, V& r2, V& r3) {
  const hn::DFromV<V> d;
  const hn::RepartitionToWide<decltype(d)> d64;
  const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
  const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
  const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
  const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
  r0 = hn::BitCast(d, hn::InterleaveLower(d64, low01, low23));
  r1 = hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23));
  r2 = hn::BitCast(d, hn::InterleaveLower(d64, high01, high23));
  r3 = hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23));
}

// Returns a vector of D whose 128-bit block b is loaded from p + b * distance.
template <class D, typename T>
HWY_INLINE hn::Vec<D> load_blocks(D d, const T* p, int64_t distance) {
  if constexpr (hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) <= 16) {
    return hn::LoadU(d, reinterpret_cast<const hn::TFromD<D>*>(p));
  } else {
    const hn::Half<D> half;
    constexpr int64_t kHalfBlocks = static_cast<int64_t>(hn::MaxLanes(half) * sizeof(hn::TFromD<D>) / 16);
    return hn::Combine(d, load_blocks(half, p + kHalfBlocks * distance, distance), load_blocks(half, p, distance));
  }
}

#endif

// KeyColumns<T>::load_columns reads kCount dimensions of kLanes keys, `stride` apart from `p` on: lane j of dims[i] is
// dimension i of key j.
template <typename T>
struct KeyColumns;

#if HWY_TARGET == HWY_SCALAR

template <typename T>
struct KeyColumns {
  static constexpr int64_t kCount = 1;
  static HWY_INLINE void load_columns(Vec* dims, const T* p, int64_t /*stride*/) { dims[0] = load(p); }
};

#else

template <>
struct KeyColumns<float> {
  static constexpr int64_t kCount = 4;
  static HWY_INLINE void load_columns(Vec* dims, const float* p, int64_t stride) {
    for (int i = 0; i < 4; ++i) dims[i] = load_blocks(Lanes(), p + i * stride, 4 * stride);
    transpose_blocks_4x4(dims[0], dims[1], dims[2], dims[3]);
  }
};

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2

// Transposes 4 x 4 matrices of words, each a pair of bf16, within 128-bit blocks. A word whose lower half is cleared is
// its upper bf16 as f32.
template <>
struct KeyColumns<bf16_t> {
  static constexpr int64_t kCount = 8;
  static HWY_INLINE void load_columns(Vec* dims, const bf16_t* p, int64_t stride) {
    const hn::RebindToUnsigned<Lanes> d;
    hn::Vec<decltype(d)> pairs[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) pairs[i] = load_blocks(d, p + i * stride, 4 * stride);
    transpose_blocks_4x4(pairs[0], pairs[1], pairs[2], pairs[3]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      dims[2 * i] = hn::BitCast(Lanes(), hn::ShiftLeft<16>(pairs[i]));
      dims[2 * i + 1] = hn::BitCast(Lanes(), hn::And(pairs[i], hn::Set(d, 0xffff0000u)));
    }
  }
};

// Transposes 8 x 8 matrices of 16-bit values within 128-bit blocks, then widens them.
template <>
struct KeyColumns<f16_t> {
  static constexpr int64_t kCount = 8;
  static HWY_INLINE void load_columns(Vec* dims, const f16_t* p, int64_t stride) {
    const hn::Rebind<uint16_t, Lanes> d;
    const hn::Rebind<hwy::float16_t, Lanes> d16;
    const hn::RepartitionToWide<decltype(d)> d32;
    const hn::RepartitionToWide<decltype(d32)> d64;
    hn::Vec<decltype(d)> r[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = load_blocks(d, p + i * stride, 8 * stride);
    hn::Vec<decltype(d64)> quads[2][4];  // [keys 0-3 or 4-7][pair of dimensions]
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const auto* x = r + 4 * half;
      const auto low01 = hn::BitCast(d32, hn::InterleaveLower(d, x[0], x[1]));
      const auto high01 = hn::BitCast(d32, hn::InterleaveUpper(d, x[0], x[1]));
      const auto low23 = hn::BitCast(d32, hn::InterleaveLower(d, x[2], x[3]));
      const auto high23 = hn::BitCast(d32, hn::InterleaveUpper(d, x[2], x[3]));
      quads[half][0] = hn::BitCast(d64, hn::InterleaveLower(d32, low01, low23));
      quads[half][1] = hn::BitCast(d64, hn::InterleaveUpper(d32, low01, low23));
      quads[half][2] = hn::BitCast(d64, hn::InterleaveLower(d32, high01, high23));
      quads[half][3] = hn::BitCast(d64, hn::InterleaveUpper(d32, high01, high23));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      dims[2 * i] = hn::PromoteTo(Lanes(), hn::BitCast(d16, hn::InterleaveLower(d64, quads[0][i], quads[1][i])));
      dims[2 * i + 1] = hn::PromoteTo(Lanes(), hn::BitCast(d16, hn::InterleaveUpper(d64, quads[0][i], quads[1][i])));
    }
  }
};

// Transposes 4 x 4 matrices of words, each four 8-bit codes, within 128-bit blocks.
template <typename T>
struct CodeKeyColumns {
  static constexpr int64_t kCount = 16;
  static HWY_INLINE void load_columns(Vec* dims, const T* p, int64_t stride) {
    const hn::RebindToSigned<Lanes> d;
    hn::Vec<decltype(d)> words[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) words[i] = load_blocks(d, p + i * stride, 4 * stride);
    transpose_blocks_4x4(words[0], words[1], words[2], words[3]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      dims[4 * i] = level(hn::ShiftLeft<24>(words[i]), p);
      dims[4 * i + 1] = level(hn::ShiftLeft<16>(words[i]), p);
      dims[4 * i + 2] = level(hn::ShiftLeft<8>(words[i]), p);
      dims[4 * i + 3] = level(words[i], p);
    }
  }

 private:
  // Decodes the 8-bit codes in the upper 8 bits of each lane.
  static HWY_INLINE Vec level(hn::Vec<hn::RebindToSigned<Lanes> > code, const int8_t*) {
    return hn::ConvertTo(Lanes(), hn::ShiftRight<24>(code));
  }
  static HWY_INLINE Vec level(hn::Vec<hn::RebindToSigned<Lanes> > code, const e4m3_t*) {
    return e4m3_levels(hn::ShiftRight<4>(code));
  }
};
template <>
struct KeyColumns<int8_t> : CodeKeyColumns<int8_t> {};
template <>
struct KeyColumns<e4m3_t> : CodeKeyColumns<e4m3_t> {};

#else

// With four lanes, values are widened first and then transposed.
template <typename T>
struct KeyColumns {
  static constexpr int64_t kCount = 4;
  static HWY_INLINE void load_columns(Vec* dims, const T* p, int64_t stride) {
    static_assert(kLanes == 4);
    for (int i = 0; i < 4; ++i) dims[i] = load(p + i * stride);
    transpose_blocks_4x4(dims[0], dims[1], dims[2], dims[3]);
  }
};

#endif
#endif

// Loads one dimension of kLanes keys.
template <typename T>
HWY_INLINE Vec load_column(const T* p, int64_t stride) {
  T values[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) values[i] = p[i * stride];
  return load(values);
}

// The addresses of kScoreGroups groups of keys, and of the keys to prefetch: kKeysNear and kKeysAhead positions later.
template <typename T>
struct KeyGroups {
  const T* at[kScoreGroups];
  const T* near[kScoreGroups];
  const T* ahead[kScoreGroups];
  int64_t stride[kScoreGroups];  // from key to key
};

// Prefetches the share of the later keys that belongs to step `step` of `steps` over the dimensions. It goes key by
// key, in memory order: taking one line of every key at a time takes 1.25 times as long (bf16 from memory, one thread).
template <typename T>
HWY_INLINE void fetch_keys(const KeyGroups<T>& keys, int64_t head_dim, int64_t step, int64_t steps) {
  constexpr int64_t kKeys = kScoreGroups * kKeyGroup;
  for (int64_t j = step * kKeys / steps; j < (step + 1) * kKeys / steps; ++j) {
    const int64_t group = j / kKeyGroup, offset = j % kKeyGroup * keys.stride[group];
    for (int64_t d = 0; d < head_dim; d += kLineBytes / static_cast<int64_t>(sizeof(T))) {
      fetch_near(keys.near[group] + offset + d);
      fetch_far(keys.ahead[group] + offset + d);
    }
  }
}

// Writes scores [rows, kScoreGroups * kKeyGroup] with row stride scores_stride.
template <int kRows, typename T>
HWY_NOINLINE void key_scores_tile(float* HWY_RESTRICT scores, int64_t scores_stride, const float* HWY_RESTRICT q,
                                  int64_t q_stride, const KeyGroups<T>& keys, int64_t head_dim) {
  using Columns = KeyColumns<T>;
  constexpr int kVecs = kScoreGroups * kGroupVecs;
  constexpr int64_t kCount = Columns::kCount;
  Vec acc[kRows][kVecs];
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) acc[r][v] = zero();

  const int64_t steps = head_dim / kCount;
  int64_t d = 0;
  for (int64_t step = 0; step < steps; ++step, d += kCount) {
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) {
      const int64_t stride = keys.stride[v / kGroupVecs];
      Vec dims[kCount];
      Columns::load_columns(dims, keys.at[v / kGroupVecs] + (v % kGroupVecs) * kLanes * stride + d, stride);
#pragma GCC unroll kUnroll
      for (int i = 0; i < kCount; ++i)
#pragma GCC unroll kUnroll
        for (int r = 0; r < kRows; ++r) acc[r][v] = hn::MulAdd(set(q[r * q_stride + d + i]), dims[i], acc[r][v]);
    }
    fetch_keys(keys, head_dim, step, steps);
  }
  for (; d < head_dim; ++d)
    for (int v = 0; v < kVecs; ++v) {
      const int64_t stride = keys.stride[v / kGroupVecs];
      const Vec column = load_column(keys.at[v / kGroupVecs] + (v % kGroupVecs) * kLanes * stride + d, stride);
      for (int r = 0; r < kRows; ++r) acc[r][v] = hn::MulAdd(set(q[r * q_stride + d]), column, acc[r][v]);
    }

#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) store(acc[r][v], scores + r * scores_stride + v * kLanes);
}

template <typename T>
HWY_INLINE void key_scores(float* scores, int64_t scores_stride, const float* q, int64_t q_stride,
                           const KeyGroups<T>& keys, int64_t rows, int64_t head_dim) {
  for (; rows >= kScoreRows; rows -= kScoreRows) {
    key_scores_tile<kScoreRows>(scores, scores_stride, q, q_stride, keys, head_dim);
    scores += kScoreRows * scores_stride, q += kScoreRows * q_stride;
  }
  switch (rows) {
    case 1: return key_scores_tile<1>(scores, scores_stride, q, q_stride, keys, head_dim);
    case 2: return key_scores_tile<2>(scores, scores_stride, q, q_stride, keys, head_dim);
    case 3: return key_scores_tile<3>(scores, scores_stride, q, q_stride, keys, head_dim);
    default: break;
  }
  if constexpr (kScoreRows > 4) {
    switch (rows) {
      case 4: return key_scores_tile<4>(scores, scores_stride, q, q_stride, keys, head_dim);
      case 5: return key_scores_tile<5>(scores, scores_stride, q, q_stride, keys, head_dim);
      case 6: return key_scores_tile<6>(scores, scores_stride, q, q_stride, keys, head_dim);
      case 7: return key_scores_tile<7>(scores, scores_stride, q, q_stride, keys, head_dim);
      default: break;
    }
  }
}

// `count` values that lie `stride` apart, and the addresses to prefetch: kValuesNear and kKeysAhead positions later.
template <typename T>
struct ValueRun {
  const T* at;
  const T* near;
  const T* ahead;
  int64_t stride, count;
};

// Updates kPanels * 16 columns of out. If kRagged, only `columns` columns of the last panel exist in memory.
template <int kRows, int kPanels, bool kRagged, typename T>
HWY_NOINLINE void add_weighted_tile(float* HWY_RESTRICT out, int64_t out_stride, const float* HWY_RESTRICT weights,
                                    int64_t weights_stride, const ValueRun<T>& values, int64_t columns) {
  constexpr int kVecs = static_cast<int>(kPanels * kPanelWidth / kLanes);
  Vec acc[kRows][kVecs];
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) acc[r][v] = load(out + r * out_stride + v * kLanes);
  const T *at = values.at, *near = values.near, *ahead = values.ahead;
  for (int64_t j = 0; j < values.count; ++j) {
    Vec row[kVecs];
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) {
      const int64_t left = columns - v * kLanes;
      if constexpr (kRagged)
        row[v] = left >= kLanes ? load(at + v * kLanes) : left > 0 ? load_n(at + v * kLanes, left) : zero();
      else
        row[v] = load(at + v * kLanes);
    }
    for (int64_t d = 0; d < kPanels * kPanelWidth; d += kLineBytes / static_cast<int64_t>(sizeof(T))) {
      fetch_near(near + d);
      fetch_far(ahead + d);
    }
#pragma GCC unroll kUnroll
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = set(weights[r * weights_stride + j]);
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVecs; ++v) acc[r][v] = hn::MulAdd(weight, row[v], acc[r][v]);
    }
    at += values.stride, near += values.stride, ahead += values.stride;
  }
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) store(acc[r][v], out + r * out_stride + v * kLanes);
}

// Updates all columns of out [kRows, head_dim rounded up to panels].
template <int kRows, typename T>
HWY_INLINE void add_weighted_rows(float* out, int64_t out_stride, const float* weights, int64_t weights_stride,
                                  ValueRun<T> values, int64_t head_dim) {
  // kRows x kPanels accumulators fit into registers; the remaining columns are computed one panel at a time.
#if HWY_TARGET == HWY_AVX3
  constexpr int kPanels = kRows <= 4 ? 4 : 2;
#else
  constexpr int kPanels = 1;
#endif
  int64_t left = head_dim;
  const auto advance = [&](int64_t columns) {
    out += columns, values.at += columns, values.near += columns, values.ahead += columns, left -= columns;
  };
  for (; left >= kPanels * kPanelWidth; advance(kPanels * kPanelWidth))
    add_weighted_tile<kRows, kPanels, false>(out, out_stride, weights, weights_stride, values, kPanelWidth);
  for (; kPanels > 1 && left >= kPanelWidth; advance(kPanelWidth))
    add_weighted_tile<kRows, 1, false>(out, out_stride, weights, weights_stride, values, kPanelWidth);
  if (left > 0) add_weighted_tile<kRows, 1, true>(out, out_stride, weights, weights_stride, values, left);
}

template <typename T>
HWY_INLINE void add_weighted(float* out, int64_t out_stride, const float* weights, int64_t weights_stride,
                             const ValueRun<T>& values, int64_t rows, int64_t head_dim) {
  for (; rows >= kScoreRows; rows -= kScoreRows) {
    add_weighted_rows<kScoreRows>(out, out_stride, weights, weights_stride, values, head_dim);
    out += kScoreRows * out_stride, weights += kScoreRows * weights_stride;
  }
  switch (rows) {
    case 1: return add_weighted_rows<1>(out, out_stride, weights, weights_stride, values, head_dim);
    case 2: return add_weighted_rows<2>(out, out_stride, weights, weights_stride, values, head_dim);
    case 3: return add_weighted_rows<3>(out, out_stride, weights, weights_stride, values, head_dim);
    default: break;
  }
  if constexpr (kScoreRows > 4) {
    switch (rows) {
      case 4: return add_weighted_rows<4>(out, out_stride, weights, weights_stride, values, head_dim);
      case 5: return add_weighted_rows<5>(out, out_stride, weights, weights_stride, values, head_dim);
      case 6: return add_weighted_rows<6>(out, out_stride, weights, weights_stride, values, head_dim);
      case 7: return add_weighted_rows<7>(out, out_stride, weights, weights_stride, values, head_dim);
      default: break;
    }
  }
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
