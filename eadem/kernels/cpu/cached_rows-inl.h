// SPDX-License-Identifier: Apache-2.0
//
// The two products of attention for a few rows of queries, straight from where keys and values are kept:
//
//   key_scores       scores[r, j] = sum_d q[r, d] k[j, d]           one chain over d, keys as lanes
//   add_weighted     out[r, d]   += sum_j weights[r, j] v[j, d]     one chain over j, d as lanes
//
// Each is the chain that matmul-inl.h computes from widened scratch, so that a row's bits do not depend on which of the
// two computes it. With few rows the scratch would cost more than the product: here 16 bytes of each of kLanes keys are
// turned in registers, and every row uses them.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_CACHED_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_CACHED_ROWS_INL_H_
#undef EADEM_KERNELS_CPU_CACHED_ROWS_INL_H_
#else
#define EADEM_KERNELS_CPU_CACHED_ROWS_INL_H_
#endif

#include "eadem/kernels/cpu/packed_panels.h"
#include "eadem/kernels/cpu/simd-inl.h"
#include "eadem/kernels/cpu/stream_ahead.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

// Keys are taken in groups of this many, which lie at equal distances.
inline constexpr int64_t kKeyGroup = 16;

#if HWY_TARGET == HWY_AVX3
inline constexpr int kScoreGroups = 2, kScoreRows = 8;  // 2 x 8 accumulators + 8 keys' dimensions of 32 registers
#else
inline constexpr int kScoreGroups = 1, kScoreRows = 4;  // AVX2: 2 x 4 + 8 of 16
#endif
inline constexpr int kGroupVecs = static_cast<int>(kKeyGroup / kLanes);

// How many keys or values ahead of their use they are fetched, into the first-level cache and before that into the
// second (stream_ahead.h), and the bytes that one fetch brings.
inline constexpr int64_t kKeysNear = 32, kValuesNear = 16, kKeysAhead = 64;
inline constexpr int64_t kLineBytes = 64;

#if HWY_TARGET != HWY_SCALAR

// Four vectors whose 128-bit blocks are the rows of 4 x 4 matrices of 32 bits: turned within each block.
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

// A vector of D whose b-th 128-bit block is what lies at p + b * distance.
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

// KeyColumns<T>: dims[i] = the values of dimension i of kLanes keys at `p` and `stride` apart, for kCount dimensions.
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

// 4 x 4 matrices of pairs, turned within 128-bit blocks; the halves of a pair are f32 numbers but for their lower bits.
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

// 8 x 8 matrices of 16 bits turned within 128-bit blocks, then widened.
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

// 4 x 4 matrices of four codes each, turned within 128-bit blocks.
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
  // Of the codes in the upper 8 bits.
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

// Four lanes: widened first.
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

// One dimension of kLanes keys.
template <typename T>
HWY_INLINE Vec load_column(const T* p, int64_t stride) {
  T values[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) values[i] = p[i * stride];
  return load(values);
}

// Where kScoreGroups groups of keys begin, and where those begin that come kKeysNear and kKeysAhead later.
template <typename T>
struct KeyGroups {
  const T* at[kScoreGroups];
  const T* near[kScoreGroups];
  const T* ahead[kScoreGroups];
  int64_t stride[kScoreGroups];  // from key to key
};

// The lines of what comes later that go with step `step` of `steps` through the dimensions. Key by key, as they lie in
// memory: a line of all keys at a time takes 1.25 times as long (bf16 from memory, one thread).
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

// scores [rows, kScoreGroups * kKeyGroup] with row stride scores_stride.
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

// `count` values `stride` apart, and those that come kValuesNear and kKeysAhead later.
template <typename T>
struct ValueRun {
  const T* at;
  const T* near;
  const T* ahead;
  int64_t stride, count;
};

// kPanels * 16 columns of out; `columns` of the last panel exist in memory (16 unless kRagged).
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

// All columns of out [kRows, head_dim rounded up to panels].
template <int kRows, typename T>
HWY_INLINE void add_weighted_rows(float* out, int64_t out_stride, const float* weights, int64_t weights_stride,
                                  ValueRun<T> values, int64_t head_dim) {
  // Registers for kRows x kPanels accumulators; what is left goes panel by panel.
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
