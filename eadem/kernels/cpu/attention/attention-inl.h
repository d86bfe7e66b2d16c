// SPDX-License-Identifier: Apache-2.0
//
// Loads of keys, values and query rows of attention_call.h into scratch, and the range of keys that a token sees.
// Compiled once per instruction set.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_ATTENTION_INL_H_
#undef EADEM_KERNELS_CPU_ATTENTION_INL_H_
#else
#define EADEM_KERNELS_CPU_ATTENTION_INL_H_
#endif

#include "eadem/kernels/cpu/attention/attention_call.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

template <typename T>
HWY_INLINE void widen_row(float* to, const T* from, int64_t n, int64_t width) {
  map(
      to, n, [](Vec v) { return v; }, from);
  for (int64_t i = n; i < width; ++i) to[i] = 0.0f;
}

// The keys (or values) of one sequence and one head, in rows of `dim` elements.
template <typename T>
struct KvRows {
  const Attention& a;
  const T* base;
  int64_t sequence, kv_head, dim;

  // The distance in elements between neighbouring positions of a run.
  int64_t stride() const { return a.block_table == nullptr ? a.kv_heads * dim : dim; }

  const T* at(int64_t position) const {
    if (a.block_table == nullptr) return base + ((a.query_start[sequence] + position) * a.kv_heads + kv_head) * dim;
    const int64_t block = a.block_table[sequence * a.max_blocks + position / a.block_size];
    return base + ((block * a.kv_heads + kv_head) * a.block_size + position % a.block_size) * dim;
  }

  // How many positions from `position` on, before `end`, lie stride() apart.
  int64_t run(int64_t position, int64_t end) const {
    return a.block_table == nullptr ? end - position : std::min(end - position, a.block_size - position % a.block_size);
  }
  // How many positions from `position` on lie stride() apart in allocated memory, whether or not they are filled.
  int64_t memory_run(int64_t position) const {
    return a.block_table == nullptr ? a.query_start[sequence + 1] - a.query_start[sequence] - position
                                    : a.block_size - position % a.block_size;
  }
};

// Loads `data`, the keys or the values, at positions [first, first + count) of a sequence into rows of scratch: the
// first `dim` elements of rows of `row_dim`. The remaining rows of the chunk are set to 0.
template <typename T>
void load_chunk(float* rows, const Attention& a, const T* data, int64_t dim, int64_t row_dim, int64_t sequence,
                int64_t kv_head, int64_t first, int64_t count) {
  const int64_t width = Attention::padded(dim);
  const KvRows<T> from{a, data, sequence, kv_head, row_dim};
  for (int64_t j = 0; j < count;) {
    const int64_t run = from.run(first + j, first + count);
    const T* row = from.at(first + j);
    for (int64_t i = 0; i < run; ++i, ++j, row += from.stride()) widen_row(rows + j * width, row, dim, width);
  }
  std::fill(rows + count * width, rows + kChunk * width, 0.0f);
}

// t [width, kRows] = transpose of rows [kRows, width]; width is a multiple of 4.
template <int64_t kRows = kChunk>
inline void transpose_chunk(float* t, const float* rows, int64_t width) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t j = 0; j < kRows; ++j)
    for (int64_t i = 0; i < width; ++i) t[i * kRows + j] = rows[j * width + i];
#else
  // 4 x 4 blocks: pairs of rows are interleaved, then pairs of pairs.
  const hn::FixedTag<float, 4> d;
  const hn::Repartition<double, decltype(d)> d64;
  for (int64_t i = 0; i < width; i += 4) {
    for (int64_t j = 0; j < kRows; j += 4) {
      const float* from = rows + j * width + i;
      const auto r0 = hn::LoadU(d, from), r1 = hn::LoadU(d, from + width);
      const auto r2 = hn::LoadU(d, from + 2 * width), r3 = hn::LoadU(d, from + 3 * width);
      const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
      const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
      const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
      const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
      float* to = t + i * kRows + j;
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, low01, low23)), d, to);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23)), d, to + kRows);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, high01, high23)), d, to + 2 * kRows);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23)), d, to + 3 * kRows);
    }
  }
#endif
}

// Loads the rows of a block: one row for each token and head of the group, from x [tokens, heads, dim].
inline void load_rows(float* rows, const Attention& a, const float* x, int64_t dim, const TokenBlock& b,
                      int64_t kv_head) {
  const int64_t width = Attention::padded(dim);
  for (int64_t t = b.begin; t < b.end; ++t)
    for (int64_t h = 0; h < a.group(); ++h, rows += width)
      widen_row(rows, x + ((a.query_start[b.sequence] + t) * a.heads + kv_head * a.group() + h) * dim, dim, width);
}

// The keys of a chunk that a token at `position` sees: [first, last) relative to the chunk's start.
struct Seen {
  int64_t first, last;
};

HWY_INLINE Seen seen(const Attention& a, int64_t position, int64_t chunk_start) {
  return {std::clamp<int64_t>(a.first_key(position) - chunk_start, 0, kChunk),
          std::clamp<int64_t>(position + 1 - chunk_start, 0, kChunk)};
}

inline int64_t first_chunk(const Attention& a, int64_t first_position) { return a.first_key(first_position) / kChunk; }

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
