// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule by groups of tokens: rows and products of a group's tokens for a value head, and how S is read
// and updated by them. The columns of S stand in the lanes. Sums over rows are chains, so that a column's bits do not
// depend on how many are computed together.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_DELTA_GROUPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_DELTA_GROUPS_INL_H_
#undef EADEM_KERNELS_CPU_DELTA_GROUPS_INL_H_
#else
#define EADEM_KERNELS_CPU_DELTA_GROUPS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "eadem/kernels/cpu/linear/stream_ahead.h"
#include "eadem/kernels/cpu/recurrent/delta_groups.h"
#include "eadem/kernels/cpu/recurrent/delta_rule-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

// Vectors of columns that a whole group goes through together: as many as leave room in the registers for a sum of
// every token, of k and of q, beside S and what it is multiplied by.
inline constexpr int kGroupVecs = HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON ? 2 : 1;

// Calls task(std::integral_constant<int, n>()), 1 <= n <= kDeltaGroup.
template <typename Task>
HWY_INLINE void with_number(int64_t n, Task&& task) {
  static_assert(kDeltaGroup == 4);
  if (n == 4) return task(std::integral_constant<int, 4>());
  if (n == 3) return task(std::integral_constant<int, 3>());
  if (n == 2) return task(std::integral_constant<int, 2>());
  task(std::integral_constant<int, 1>());
}

// All rows of a group from element i on, a multiple of kLanes.
HWY_INLINE float* rows_from(const DeltaGroup& group, int64_t i) { return group.rows + i * kGroupRows; }

// Calls row(i, rows), rows[r * kLanes] the element i of row r of a group, for i = 0, 1, … n - 1, and, before every
// Fetch::kRows of them, fetch(0), fetch(1), …, up to Fetch::kSteps times.
template <typename Fetch, typename Row>
HWY_INLINE void for_each_row(const DeltaGroup& group, int64_t n, const Fetch& fetch, Row&& row) {
  constexpr int64_t kRowsPerFetch = std::min<int64_t>(Fetch::kRows, kLanes);
  int64_t i = 0, step = 0;
  const float* rows = group.rows;
  for (; i + kLanes <= n; i += kLanes, rows += kGroupRows * kLanes)
#pragma GCC unroll 1
    for (int64_t part = 0; part < kLanes; part += kRowsPerFetch) {
      if (step < Fetch::kSteps) fetch(step++);
#pragma GCC unroll kUnroll
      for (int64_t lane = part; lane < part + kRowsPerFetch; ++lane) row(i + lane, rows + lane);
    }
  for (; i < n; ++i, ++rows) row(i, rows);
}

// For one value head, the numbers of which each token of a chunk has one: beta, its decay, and the factors that
// normalize q and k.
struct DeltaScalars {
  // Computed for several tokens at once, each in a lane.
  HWY_INLINE DeltaScalars(const DeltaRule& p, int64_t begin, int64_t tokens, int64_t head) {
    make_gates(p, begin, tokens, head, beta, decay);
    const int64_t n = p.attrs.key_dim;
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t row = p.key_row(begin + i, head);
      q_factor[i] = dot(p.q + row, p.q + row, n);
      k_factor[i] = dot(p.k + row, p.k + row, n);
    }
    const Vec eps = set(p.attrs.eps), root = set(std::sqrt(static_cast<float>(n)));
    const auto inverse = [&](Vec squares) { return hn::Div(set(1.0f), hn::Sqrt(hn::Add(squares, eps))); };
    map(
        q_factor, tokens, [&](Vec squares) { return hn::Div(inverse(squares), root); },
        static_cast<const float*>(q_factor));
    map(k_factor, tokens, inverse, static_cast<const float*>(k_factor));
  }

  float beta[kDeltaChunk * kDeltaGroup], decay[kDeltaChunk * kDeltaGroup] = {};
  float q_factor[kDeltaChunk * kDeltaGroup], k_factor[kDeltaChunk * kDeltaGroup];
};

// Makes the rows and products of token `token`, which is token kToken of its group and token `i` of `scalars`.
template <int kToken, bool kChannels>
HWY_INLINE void make_token(const DeltaGroup& group, const DeltaRule& p, int64_t token, int64_t head,
                           const DeltaScalars& scalars, int64_t i) {
  const int64_t n = p.attrs.key_dim;
  const float *q = p.q + p.key_row(token, head), *k = p.k + p.key_row(token, head);
  const Vec q_factor = set(scalars.q_factor[i]), k_factor = set(scalars.k_factor[i]);
  const float beta = scalars.beta[i], decay = scalars.decay[i];
  group.beta[kToken] = beta;
  const float *a = nullptr, *bias = nullptr;
  if constexpr (kChannels) {
    a = p.a + token * p.attrs.decays() + head * n;
    bias = p.dt_bias + head * n;
  } else {
    *group.fade = kToken == 0 ? decay : *group.fade * decay;
  }
  const Vec rate = exp(set(p.a_log[head])), same_decay = set(decay), same_fade = kChannels ? zero() : set(*group.fade);
  Vec with_k[kToken + 1], with_q[kToken + 1];
#pragma GCC unroll kUnroll
  for (int other = 0; other <= kToken; ++other) with_k[other] = with_q[other] = zero();
  const auto part = [&](int64_t c, int64_t lanes) {
    const DeltaColumns<1> columns{lanes};
    const Vec own_q = hn::Mul(columns.at(q + c, 0), q_factor), own_k = hn::Mul(columns.at(k + c, 0), k_factor);
    Vec own_decay = same_decay, fade = same_fade;
    if constexpr (kChannels) {
      own_decay = decay_of(columns.at(a + c, 0), columns.at(bias + c, 0), rate);
      fade = kToken == 0 ? own_decay : hn::Mul(columns.at(group.fade + c, 0), own_decay);
      columns.put(fade, group.fade + c, 0);
    }
    float* const rows = rows_from(group, c);
    store(hn::Mul(fade, own_k), rows + (kKeyRow + kToken) * kLanes);
    store(hn::Mul(fade, own_q), rows + (kQueryRow + kToken) * kLanes);
#pragma GCC unroll kUnroll
    for (int other = 0; other < kToken; ++other) {
      const Vec key = hn::Mul(load(rows + (kOwnKeyRow + other) * kLanes), own_decay);
      store(key, rows + (kOwnKeyRow + other) * kLanes);
      with_k[other] = hn::MulAdd(key, own_k, with_k[other]);
      with_q[other] = hn::MulAdd(key, own_q, with_q[other]);
    }
    store(own_k, rows + (kOwnKeyRow + kToken) * kLanes);
    with_q[kToken] = hn::MulAdd(own_k, own_q, with_q[kToken]);
  };
  for_each_column_block<1>(
      n, [&](int64_t c) { part(c, kLanes); }, part);
  float *k_shares = group.shares_of(0, kToken), *q_shares = group.shares_of(1, kToken);
#pragma GCC unroll kUnroll
  for (int other = 0; other < kToken; ++other) k_shares[other] = -beta * sum_lanes(with_k[other]);
#pragma GCC unroll kUnroll
  for (int other = 0; other <= kToken; ++other) q_shares[other] = sum_lanes(with_q[other]);
}

// Makes the rows and products of tokens [begin, begin + tokens). The group of the first one has `before` tokens
// already.
HWY_INLINE void make_groups(const DeltaGroupScratch& scratch, const DeltaRule& p, int64_t begin, int64_t tokens,
                            int64_t before, int64_t head) {
  const DeltaScalars scalars(p, begin, tokens, head);
  for (int64_t i = 0; i < tokens; ++i) {
    const DeltaGroup group = scratch.group((before + i) / kDeltaGroup);
    with_number((before + i) % kDeltaGroup + 1, [&](auto tokens_with_it) {
      constexpr int kToken = decltype(tokens_with_it)::value - 1;
      if (p.attrs.channel_decay)
        make_token<kToken, true>(group, p, begin + i, head, scalars, i);
      else
        make_token<kToken, false>(group, p, begin + i, head, scalars, i);
    });
  }
}

// Columns of S from `s` on, `stride` apart, and of v, y and the corrections.
struct DeltaPart {
  float* s;
  int64_t stride;
  const float* v;  // of the group's first new token
  float* y;
  int64_t token_stride;
  float* corrections;  // of the group's first token
  int64_t correction_stride;
};

// Fetches nothing.
struct NoFetch {
  static constexpr int64_t kSteps = 0, kRows = 4;
  HWY_INLINE void operator()(int64_t /*step*/) const {}
};

// Fetches what the group from `token` on has for columns from `c` on: rows of neighbouring tokens lie pages apart,
// where the processor fetches nothing by itself. Of q, k and a it fetches the same columns as of v and y, so that all
// of them are fetched by the time that the columns of S went by. Lines are spread over the rows of S, half of them
// while it is read and half while it is updated: as many at once would take all buffers of the first cache, for which
// rows wait that come from the second one.
template <int kVecs, bool kChannels>
struct GroupFetch {
  static constexpr int64_t kLine = 16;  // floats
  static constexpr int64_t kSources = kChannels ? 5 : 4, kLines = ceil_div(kVecs * kLanes, kLine),
                           kSteps = kDeltaGroup * kSources * kLines / 2, kRows = kChannels ? 4 : 8;

  HWY_INLINE GroupFetch(const DeltaRule& p, int64_t token, int64_t head, int64_t c)
      : sources{p.q + p.key_row(token, head) + c, p.k + p.key_row(token, head) + c, p.v + p.value_row(token, head) + c,
                p.y + p.value_row(token, head) + c},
        strides{p.attrs.key_heads * p.attrs.key_dim, p.attrs.key_heads * p.attrs.key_dim,
                p.attrs.value_heads * p.attrs.value_dim, p.attrs.value_heads * p.attrs.value_dim} {
    if constexpr (kChannels) {
      sources[4] = p.a + token * p.attrs.decays() + head * p.attrs.key_dim + c;
      strides[4] = p.attrs.decays();
    }
  }
  HWY_INLINE void operator()(int64_t step) const {
    step += first;
    const int64_t source = step % kSources, line = step / kSources % kLines, token = step / kSources / kLines;
    fetch_far(sources[source] + token * strides[source] + line * kLine);
  }

  // The fetch of the second half of the lines.
  HWY_INLINE GroupFetch rest() const {
    GroupFetch result = *this;
    result.first = kSteps;
    return result;
  }

  const float* sources[kSources];
  int64_t strides[kSources];
  int64_t first = 0;
};

// d and y of the kTokens tokens of a group that follow `before` others.
template <int kVecs, int kTokens, typename Fetch>
HWY_INLINE void read_part(DeltaColumns<kVecs> columns, const DeltaGroup& group, int64_t n, int64_t before,
                          const DeltaPart& part, const Fetch& fetch) {
  Vec with_k[kTokens][kVecs], with_q[kTokens][kVecs];
#pragma GCC unroll kUnroll
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) with_k[t][u] = with_q[t][u] = zero();
  for_each_row(group, n, fetch, [&](int64_t i, const float* rows) {
    const float *k = rows + (kKeyRow + before) * kLanes, *q = rows + (kQueryRow + before) * kLanes;
    Vec s[kVecs];
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) s[u] = columns.at(part.s + i * part.stride, u);
#pragma GCC unroll kUnroll
    for (int t = 0; t < kTokens; ++t) {
      const Vec key = set(k[t * kLanes]), query = set(q[t * kLanes]);
#pragma GCC unroll kUnroll
      for (int u = 0; u < kVecs; ++u) {
        with_k[t][u] = hn::MulAdd(s[u], key, with_k[t][u]);
        with_q[t][u] = hn::MulAdd(s[u], query, with_q[t][u]);
      }
    }
  });
  // d_t = beta_t (v_t - S0^T F_t k_t) + sum of shares, in which a correction waits for the one before by a single sum.
#pragma GCC unroll kUnroll
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u)
      with_k[t][u] =
          hn::Mul(set(group.beta[before + t]), hn::Sub(columns.at(part.v + t * part.token_stride, u), with_k[t][u]));
  const auto add = [&](int t, int64_t other, int u, Vec correction) {
    with_k[t][u] = hn::MulAdd(set(group.shares_of(0, before + t)[other]), correction, with_k[t][u]);
    with_q[t][u] = hn::MulAdd(set(group.shares_of(1, before + t)[other]), correction, with_q[t][u]);
  };
  for (int64_t other = 0; other < before; ++other)
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) {
      const Vec correction = columns.at(part.corrections + other * part.correction_stride, u);
#pragma GCC unroll kUnroll
      for (int t = 0; t < kTokens; ++t) add(t, other, u, correction);
    }
#pragma GCC unroll kUnroll
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) {
      const Vec correction = with_k[t][u];
      columns.put(correction, part.corrections + (before + t) * part.correction_stride, u);
#pragma GCC unroll kUnroll
      for (int later = t + 1; later < kTokens; ++later) add(later, before + t, u, correction);
      const Vec share = set(group.shares_of(1, before + t)[before + t]);
      columns.put(hn::MulAdd(share, correction, with_q[t][u]), part.y + t * part.token_stride, u);
    }
}

// S after a group.
template <bool kChannels, int kVecs, typename Fetch>
HWY_INLINE void update_part(DeltaColumns<kVecs> columns, const DeltaGroup& group, int64_t n, const DeltaPart& part,
                            const Fetch& fetch) {
  Vec d[kDeltaGroup][kVecs];
#pragma GCC unroll kUnroll
  for (int t = 0; t < kDeltaGroup; ++t)
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) d[t][u] = columns.at(part.corrections + t * part.correction_stride, u);
  const Vec same = set(*group.fade);
  for_each_row(group, n, fetch, [&](int64_t i, const float* rows) {
    float* const s = part.s + i * part.stride;
    const Vec fade = kChannels ? set(group.fade[i]) : same;
    Vec row[kVecs];
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) row[u] = hn::Mul(columns.at(s, u), fade);
#pragma GCC unroll kUnroll
    for (int t = 0; t < kDeltaGroup; ++t) {
      const Vec key = set(rows[(kOwnKeyRow + t) * kLanes]);
#pragma GCC unroll kUnroll
      for (int u = 0; u < kVecs; ++u) row[u] = hn::MulAdd(key, d[t][u], row[u]);
    }
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) columns.put(row[u], s, u);
  });
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
