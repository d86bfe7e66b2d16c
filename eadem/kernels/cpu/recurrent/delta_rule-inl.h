// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule, token by token. The columns of S stand in the lanes; sums over its rows are chains, so that a
// column's bits do not depend on how many are computed together.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_DELTA_RULE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_DELTA_RULE_INL_H_
#undef EADEM_KERNELS_CPU_DELTA_RULE_INL_H_
#else
#define EADEM_KERNELS_CPU_DELTA_RULE_INL_H_
#endif

#include <cmath>

#include "eadem/kernels/cpu/recurrent/delta_rule.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

// What one token brings to one value head: rows of scratch, [key_dim] each.
struct DeltaTokenRows {
  float* q;      // normalized
  float* k;      // normalized
  float* decay;  // exp(g)
  float* faded;  // decay * k
  float* beta;   // one number
};

// Rows for tokens 0, 1, … of a chunk, one after another in scratch.
struct DeltaChunkRows {
  static int64_t floats_per_token(int64_t key_dim) { return 4 * key_dim + 1; }
  DeltaTokenRows at(int64_t i) const {
    float* row = begin + i * floats_per_token(key_dim);
    return {row, row + key_dim, row + 2 * key_dim, row + 3 * key_dim, row + 4 * key_dim};
  }
  float* begin;
  int64_t key_dim;
};

// 1 / sqrt(sum x^2 + eps)
HWY_INLINE float inverse_length(const float* x, int64_t n, float eps) { return 1.0f / std::sqrt(dot(x, x, n) + eps); }

HWY_INLINE void scale_row(float* y, const float* x, float factor, int64_t n) {
  map(
      y, n, [f = set(factor)](Vec v) { return hn::Mul(v, f); }, x);
}

// exp(-rate softplus(a + bias))
HWY_INLINE Vec decay_of(Vec a, Vec bias, Vec rate) { return exp(hn::Neg(hn::Mul(rate, softplus(hn::Add(a, bias))))); }

HWY_INLINE void make_token_rows(const DeltaTokenRows& rows, const DeltaRule& p, int64_t token, int64_t head) {
  const int64_t n = p.attrs.key_dim;
  const float *q = p.q + p.key_row(token, head), *k = p.k + p.key_row(token, head);
  scale_row(rows.q, q, inverse_length(q, n, p.attrs.eps) / std::sqrt(static_cast<float>(n)), n);
  scale_row(rows.k, k, inverse_length(k, n, p.attrs.eps), n);
  const Vec rate = exp(set(p.a_log[head]));
  const float* a = p.a + token * p.attrs.decays();
  if (p.attrs.channel_decay) {
    map(
        rows.decay, n, [rate](Vec x, Vec bias) { return decay_of(x, bias, rate); }, a + head * n, p.dt_bias + head * n);
  } else {
    std::fill_n(rows.decay, n, hn::GetLane(decay_of(set(a[head]), set(p.dt_bias[head]), rate)));
  }
  map(
      rows.faded, n, [](Vec e, Vec key) { return hn::Mul(e, key); }, static_cast<const float*>(rows.decay),
      static_cast<const float*>(rows.k));
  *rows.beta = hn::GetLane(sigmoid(set(p.b[token * p.attrs.value_heads + head])));
}

// Where one token's step reads and writes. `read` and `d` are [value_dim] or null: S^T k of the faded state, and d.
struct DeltaStep {
  const float* before;  // S [key_dim, …]
  float* after;         // likewise; may be `before`
  int64_t stride;       // from a row of S to the next
  const float* v;
  float* y = nullptr;
  float* read = nullptr;
  float* d = nullptr;
};

// kVecs vectors of neighbouring columns; of one vector the first `lanes` columns alone.
template <int kVecs>
struct DeltaColumns {
  int64_t lanes;

  HWY_INLINE bool whole() const { return kVecs > 1 || lanes == kLanes; }
  HWY_INLINE Vec at(const float* p, int u) const { return whole() ? load(p + u * kLanes) : load_n(p, lanes); }
  HWY_INLINE void put(Vec value, float* p, int u) const {
    if (whole())
      store(value, p + u * kLanes);
    else
      store_n(value, p, lanes);
  }
};

// S^T k of columns, of the state before it fades: two chains over its rows, since one would wait for itself.
template <int kVecs>
struct DeltaReads {
  HWY_INLINE DeltaReads() {
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) even[u] = odd[u] = zero();
  }
  Vec even[kVecs], odd[kVecs];
};

template <int kVecs>
HWY_INLINE DeltaReads<kVecs> read_columns(DeltaColumns<kVecs> columns, const float* row, int64_t stride,
                                          const float* faded, int64_t rows) {
  DeltaReads<kVecs> reads;
  int64_t i = 0;
  for (; i + 2 <= rows; i += 2, row += 2 * stride) {
    const Vec first = set(faded[i]), second = set(faded[i + 1]);
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) {
      reads.even[u] = hn::MulAdd(columns.at(row, u), first, reads.even[u]);
      reads.odd[u] = hn::MulAdd(columns.at(row + stride, u), second, reads.odd[u]);
    }
  }
  if (i < rows)
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) reads.even[u] = hn::MulAdd(columns.at(row, u), set(faded[i]), reads.even[u]);
  return reads;
}

// What a step makes of columns: y = S^T q, and, where there is a next token, what that reads of the new S.
template <int kVecs>
struct DeltaUpdate {
  HWY_INLINE DeltaUpdate() {
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) y[u] = zero();
  }
  Vec y[kVecs];
  DeltaReads<kVecs> reads;
};

// S from `before` to `after`, which may be the same, with the correction d. `next` is the faded k of the next token.
template <int kVecs, bool kHasNext>
HWY_INLINE DeltaUpdate<kVecs> update_columns(DeltaColumns<kVecs> columns, const float* before, float* after,
                                             int64_t stride, const DeltaTokenRows& token, const Vec* d,
                                             const float* next, int64_t rows) {
  DeltaUpdate<kVecs> result;
  const auto update_row = [&](int64_t i, Vec* reads) {
    const Vec decay = set(token.decay[i]), k = set(token.k[i]), q = set(token.q[i]);
    Vec faded;
    if constexpr (kHasNext) faded = set(next[i]);
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) {
      const Vec value = hn::MulAdd(columns.at(before + i * stride, u), decay, hn::Mul(k, d[u]));
      columns.put(value, after + i * stride, u);
      result.y[u] = hn::MulAdd(value, q, result.y[u]);
      if constexpr (kHasNext) reads[u] = hn::MulAdd(value, faded, reads[u]);
    }
  };
  int64_t i = 0;
  for (; i + 2 <= rows; i += 2) {
    update_row(i, result.reads.even);
    update_row(i + 1, result.reads.odd);
  }
  if (i < rows) update_row(i, result.reads.even);
  return result;
}

// Columns [c, c + kVecs * kLanes) of a step; with kVecs == 1 the first `lanes` of them.
template <int kVecs>
HWY_INLINE void delta_columns(const DeltaStep& s, const DeltaTokenRows& token, int64_t rows, int64_t c, int64_t lanes) {
  const DeltaColumns<kVecs> columns{lanes};
  // 1. What the state has for k.
  const DeltaReads<kVecs> reads = read_columns(columns, s.before + c, s.stride, token.faded, rows);

  // 2. The correction.
  Vec d[kVecs];
  const Vec beta = set(*token.beta);
  for (int u = 0; u < kVecs; ++u) {
    const Vec read = hn::Add(reads.even[u], reads.odd[u]);
    d[u] = hn::Mul(beta, hn::Sub(columns.at(s.v + c, u), read));
    if (s.read != nullptr) columns.put(read, s.read + c, u);
    if (s.d != nullptr) columns.put(d[u], s.d + c, u);
  }

  // 3. S, and y.
  const DeltaUpdate<kVecs> update =
      update_columns<kVecs, false>(columns, s.before + c, s.after + c, s.stride, token, d, nullptr, rows);
  if (s.y == nullptr) return;
  for (int u = 0; u < kVecs; ++u) columns.put(update.y[u], s.y + c, u);
}

// Calls columns(c, lanes) for blocks of kVecs vectors, and then of one or a part of one. `wide` is called for the
// former.
template <int kVecs = 4, typename Wide, typename Narrow>
HWY_INLINE void for_each_column_block(int64_t columns, Wide&& wide, Narrow&& narrow) {
  int64_t c = 0;
  for (; c + kVecs * kLanes <= columns; c += kVecs * kLanes) wide(c);
  for (; c < columns; c += kLanes) narrow(c, std::min(kLanes, columns - c));
}

HWY_INLINE void delta_step(const DeltaStep& step, const DeltaTokenRows& token, int64_t rows, int64_t columns) {
  for_each_column_block(
      columns, [&](int64_t c) { delta_columns<4>(step, token, rows, c, kLanes); },
      [&](int64_t c, int64_t lanes) { delta_columns<1>(step, token, rows, c, lanes); });
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
