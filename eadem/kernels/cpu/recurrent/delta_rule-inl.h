// SPDX-License-Identifier: Apache-2.0
//
// Functions that the gated delta rule and its gradient share. The columns of S stand in the lanes; sums over its rows
// are chains, so that a column's bits do not depend on how many are computed together.
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

// beta of tokens from `begin` on, and, unless channels have their own, their decays: each computed for several tokens
// at once, each in a lane.
HWY_INLINE void make_gates(const DeltaRule& p, int64_t begin, int64_t tokens, int64_t head, float* beta, float* decay) {
  const Vec rate = exp(set(p.a_log[head]));
  for (int64_t first = 0; first < tokens; first += kLanes) {
    const int64_t count = std::min(kLanes, tokens - first);
    float b[kLanes] = {}, a[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) {
      b[i] = p.b[(begin + first + i) * p.attrs.value_heads + head];
      if (!p.attrs.channel_decay) a[i] = p.a[(begin + first + i) * p.attrs.decays() + head];
    }
    store_n(sigmoid(load(b)), beta + first, count);
    if (!p.attrs.channel_decay) store_n(decay_of(load(a), set(p.dt_bias[head]), rate), decay + first, count);
  }
}

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

// Calls columns(c, lanes) for blocks of kVecs vectors, and then of one or a part of one. `wide` is called for the
// former.
template <int kVecs, typename Wide, typename Narrow>
HWY_INLINE void for_each_column_block(int64_t columns, Wide&& wide, Narrow&& narrow) {
  int64_t c = 0;
  for (; c + kVecs * kLanes <= columns; c += kVecs * kLanes) wide(c);
  for (; c < columns; c += kLanes) narrow(c, std::min(kLanes, columns - c));
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
