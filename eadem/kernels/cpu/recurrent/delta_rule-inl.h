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

// 1 / sqrt(sum x^2 + eps)
HWY_INLINE float inverse_length(const float* x, int64_t n, float eps) { return 1.0f / std::sqrt(dot(x, x, n) + eps); }

HWY_INLINE void scale_row(float* y, const float* x, float factor, int64_t n) {
  map(
      y, n, [f = set(factor)](Vec v) { return hn::Mul(v, f); }, x);
}

// exp(-rate softplus(a + bias))
HWY_INLINE Vec decay_of(Vec a, Vec bias, Vec rate) { return exp(hn::Neg(hn::Mul(rate, softplus(hn::Add(a, bias))))); }

// Makes the rows of q, k and what the decay, already there, makes of k.
HWY_INLINE void make_key_rows(const DeltaTokenRows& rows, const DeltaRule& p, int64_t token, int64_t head) {
  const int64_t n = p.attrs.key_dim;
  const float *q = p.q + p.key_row(token, head), *k = p.k + p.key_row(token, head);
  scale_row(rows.q, q, inverse_length(q, n, p.attrs.eps) / std::sqrt(static_cast<float>(n)), n);
  scale_row(rows.k, k, inverse_length(k, n, p.attrs.eps), n);
  if (p.attrs.channel_decay)
    map(
        rows.faded, n, [](Vec e, Vec key) { return hn::Mul(e, key); }, static_cast<const float*>(rows.decay),
        static_cast<const float*>(rows.k));
  else
    scale_row(rows.faded, rows.k, *rows.decay, n);
}

// Makes the rows of tokens from `begin` on. What a token has one of, beta and a decay of all rows of S, is computed for
// several tokens at once, each in a lane.
HWY_INLINE void make_chunk_rows(const DeltaChunkRows& chunk, const DeltaRule& p, int64_t begin, int64_t tokens,
                                int64_t head) {
  const int64_t n = p.attrs.key_dim;
  const Vec rate = exp(set(p.a_log[head]));
  for (int64_t first = 0; first < tokens; first += kLanes) {
    const int64_t count = std::min(kLanes, tokens - first);
    float beta[kLanes] = {}, decay[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) {
      beta[i] = p.b[(begin + first + i) * p.attrs.value_heads + head];
      if (!p.attrs.channel_decay) decay[i] = p.a[(begin + first + i) * p.attrs.decays() + head];
    }
    store(sigmoid(load(beta)), beta);
    if (!p.attrs.channel_decay) store(decay_of(load(decay), set(p.dt_bias[head]), rate), decay);
    for (int64_t i = 0; i < count; ++i) {
      const DeltaTokenRows rows = chunk.at(first + i);
      *rows.beta = beta[i];
      if (p.attrs.channel_decay)
        map(
            rows.decay, n, [rate](Vec x, Vec bias) { return decay_of(x, bias, rate); },
            p.a + (begin + first + i) * p.attrs.decays() + head * n, p.dt_bias + head * n);
      else
        *rows.decay = decay[i];
      make_key_rows(rows, p, begin + first + i, head);
    }
  }
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

// Fetches nothing.
struct NoFetch {
  static constexpr int64_t kSteps = 1;
  HWY_INLINE void operator()(int64_t /*step*/) const {}
};

// S from `before` to `after`, which may be the same, with the correction d. `next` is the faded k of the next token.
// fetch(0), fetch(1), …, Fetch::kSteps of them, are called where the rows are divided into as many parts.
template <int kVecs, bool kHasNext, typename Fetch>
HWY_INLINE DeltaUpdate<kVecs> update_columns(DeltaColumns<kVecs> columns, const float* before, float* after,
                                             int64_t stride, const DeltaTokenRows& token, const Vec* d,
                                             const float* next, int64_t rows, const Fetch& fetch) {
  DeltaUpdate<kVecs> result;
  const auto update_row = [&](int64_t i, Vec* reads) {
    const Vec decay = set(token.decay_of_row(i)), k = set(token.k[i]), q = set(token.q[i]);
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
  for (int64_t step = 0; step < Fetch::kSteps; ++step) {
    fetch(step);
    for (const int64_t end = rows * (step + 1) / Fetch::kSteps; i + 2 <= end; i += 2) {
      update_row(i, result.reads.even);
      update_row(i + 1, result.reads.odd);
    }
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
      update_columns<kVecs, false>(columns, s.before + c, s.after + c, s.stride, token, d, nullptr, rows, NoFetch());
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
