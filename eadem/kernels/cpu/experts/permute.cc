// SPDX-License-Identifier: Apache-2.0
//
// expert_order, permute and unpermute: rows into the order of their experts, and back.
#include <algorithm>
#include <cstring>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/experts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/experts/permute.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_PERMUTED_ROWS_
#define EADEM_KERNELS_CPU_PERMUTED_ROWS_
namespace eadem::kernels::cpu {

// The pairs of one token: where their rows stand and what they weigh.
struct TokenPairs {
  const int32_t* rows;   // [top_k]
  const float* weights;  // [top_k]; null: 1
  int64_t top_k;
};

// y [hidden] = the weighted sum of the token's rows of x [top_k * tokens, hidden], in the order of the pairs.
using SumPairs = void (*)(float* y, const float* x, const TokenPairs& pairs, int64_t hidden);
// Each of the token's rows of y [top_k * tokens, hidden] = weight * x [hidden]. Without weights it is a copy.
using SpreadPairs = void (*)(float* y, const float* x, const TokenPairs& pairs, int64_t hidden);
// Each of products [top_k] = x [hidden] . the pair's row of y.
using PairProducts = void (*)(float* products, const float* x, const float* y, const TokenPairs& pairs, int64_t hidden);

}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

void sum_pairs(float* y, const float* x, const TokenPairs& pairs, int64_t hidden) {
  for (int64_t j = 0; j < pairs.top_k; ++j) {
    const float* row = x + pairs.rows[j] * hidden;
    const Vec weight = set(pairs.weights[j]);
    if (j == 0)
      map(
          y, hidden, [&](Vec v) { return hn::Mul(v, weight); }, row);
    else
      map(
          y, hidden, [&](Vec v, Vec sum) { return hn::MulAdd(v, weight, sum); }, row, static_cast<const float*>(y));
  }
}

void sum_pairs_alike(float* y, const float* x, const TokenPairs& pairs, int64_t hidden) {
  std::memcpy(y, x + pairs.rows[0] * hidden, static_cast<size_t>(hidden) * sizeof(float));
  for (int64_t j = 1; j < pairs.top_k; ++j)
    map(
        y, hidden, [](Vec v, Vec sum) { return hn::Add(sum, v); }, x + pairs.rows[j] * hidden,
        static_cast<const float*>(y));
}

void spread_pairs(float* y, const float* x, const TokenPairs& pairs, int64_t hidden) {
  for (int64_t j = 0; j < pairs.top_k; ++j)
    map(
        y + pairs.rows[j] * hidden, hidden, [w = set(pairs.weights[j])](Vec v) { return hn::Mul(v, w); }, x);
}

void pair_products(float* products, const float* x, const float* y, const TokenPairs& pairs, int64_t hidden) {
  for (int64_t j = 0; j < pairs.top_k; ++j) products[j] = dot(x, y + pairs.rows[j] * hidden, hidden);
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(sum_pairs);
EADEM_CPU_EXPORT(sum_pairs_alike);
EADEM_CPU_EXPORT(spread_pairs);
EADEM_CPU_EXPORT(pair_products);

namespace {

// Calls token(t, pairs) for each token, on all threads.
template <typename Token>
void for_each_token(const KernelCall& call, const TensorView& rows, const float* weights, int64_t hidden,
                    Token&& token) {
  const int64_t top_k = rows.shape[1];
  const auto* row = elements<const int32_t>(rows);
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(top_k * hidden, 1));
  cpu_device(call).pool().parallel_ranges(rows.shape[0], grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      token(t, TokenPairs{row + t * top_k, weights == nullptr ? nullptr : weights + t * top_k, top_k});
  });
}

// ---- expert_order

Verdict can_order(const KernelRequest& r) { return accept(r); }

// Counts, then deals out; pairs of identities are not counted. It runs on one thread: all pairs of a step take less
// than waking another.
void run_expert_order(const KernelCall& call, int64_t experts) {
  const auto* expert = elements<const int32_t>(call.inputs[0]);
  auto* rows = elements<int32_t>(call.outputs[0]);
  auto* offsets = elements<int32_t>(call.outputs[1]);
  const int64_t pairs = call.inputs[0].num_elements();
  // 1. offsets[e + 1] = the number of pairs of e, then of all experts up to e.
  std::fill_n(offsets, experts + 1, 0);
  for (int64_t i = 0; i < pairs; ++i)
    if (expert[i] < experts) ++offsets[expert[i] + 1];
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  // 2. Deal out; offsets[e] moves from the begin of e to its end, where e + 1 begins.
  int32_t behind = offsets[experts];
  for (int64_t i = 0; i < pairs; ++i) rows[i] = expert[i] < experts ? offsets[expert[i]]++ : behind++;
  for (int64_t e = experts; e > 0; --e) offsets[e] = offsets[e - 1];
  offsets[0] = 0;
}

PlanPtr prepare_order(const KernelRequest& r, Context&) {
  return make_plan(
      [experts = r.attrs.get<ExpertOrderAttrs>().experts](const KernelCall& call) { run_expert_order(call, experts); });
}

constexpr Kernel kOrder{"cpu_counting_sort", Pass::inference, can_order, prepare_order};

// ---- permute and unpermute: either's gradient is the other, and each weight's the product of two rows.

void copy_pairs(float* y, const float* x, const TokenPairs& pairs, int64_t hidden) {
  for (int64_t j = 0; j < pairs.top_k; ++j)
    std::memcpy(y + pairs.rows[j] * hidden, x, static_cast<size_t>(hidden) * sizeof(float));
}

// The routines of a request; those without weights are others.
struct PairRoutines {
  bool weighted;
  SpreadPairs spread;
  SumPairs sum;
  PairProducts products;

  PairRoutines(const KernelRequest& r, bool with_weights) : weighted(with_weights) {
    const Isa isa = cpu_device(r).isa();
    spread = weighted ? EADEM_CPU_DISPATCH(spread_pairs, isa) : copy_pairs;
    sum = weighted ? EADEM_CPU_DISPATCH(sum_pairs, isa) : EADEM_CPU_DISPATCH(sum_pairs_alike, isa);
    products = EADEM_CPU_DISPATCH(pair_products, isa);
  }
};

// Runs the spread or the sum from `from` to `to`, which may be undefined.
void run_pairs(const KernelCall& call, const PairRoutines& routines, bool spreads, const TensorView& to,
               const TensorView& from, const TensorView& rows) {
  float* y = elements<float>(to);
  if (y == nullptr) return;
  const int64_t hidden = from.shape[1];
  const float* x = elements<const float>(from);
  const float* weights = routines.weighted ? elements<const float>(call.inputs[2]) : nullptr;
  for_each_token(call, rows, weights, hidden, [&](int64_t t, const TokenPairs& pairs) {
    if (spreads)
      routines.spread(y, x + t * hidden, pairs, hidden);
    else
      routines.sum(y + t * hidden, x, pairs, hidden);
  });
}

// The gradients of weights, of rows by token and rows by pair.
void run_products(const KernelCall& call, const PairRoutines& routines, const TensorView& by_token,
                  const TensorView& by_pair) {
  float* products = elements<float>(call.outputs[1]);
  if (products == nullptr) return;
  const TensorView& rows = call.inputs[1];
  const int64_t hidden = by_token.shape[1], top_k = rows.shape[1];
  const float *x = elements<const float>(by_token), *y = elements<const float>(by_pair);
  for_each_token(call, rows, nullptr, hidden, [&](int64_t t, const TokenPairs& pairs) {
    routines.products(products + t * top_k, x + t * hidden, y, pairs, hidden);
  });
}

Verdict can_move_pairs(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("x", r.inputs[0]).f32("y", r.outputs[0]);
  return r.inputs.size() > 2 ? requirements.f32("weights", r.inputs[2]).verdict() : requirements.verdict();
}

// Not weighted: rows and dy are all the inputs.
Verdict can_move_gradients(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("dy", r.inputs.back()).f32("dx", r.outputs[0]);
  if (r.inputs.size() == 2) return requirements.verdict();
  return requirements.f32("x", r.inputs[0]).f32("weights", r.inputs[2]).f32("dweights", r.outputs[1]).verdict();
}

PlanPtr prepare_pairs(const KernelRequest& r, bool weighted, bool spreads) {
  return make_plan([routines = PairRoutines(r, weighted), spreads](const KernelCall& call) {
    run_pairs(call, routines, spreads, call.outputs[0], call.inputs[0], call.inputs[1]);
  });
}

PlanPtr prepare_pair_gradients(const KernelRequest& r, bool weighted, bool spreads) {
  return make_plan([routines = PairRoutines(r, weighted), spreads](const KernelCall& call) {
    const TensorView& dy = call.inputs[routines.weighted ? 3 : 1];
    run_pairs(call, routines, spreads, call.outputs[0], dy, call.inputs[routines.weighted ? 1 : 0]);
    if (!routines.weighted) return;
    const TensorView& x = call.inputs[0];
    run_products(call, routines, spreads ? dy : x, spreads ? x : dy);
  });
}

PlanPtr prepare_permute(const KernelRequest& r, Context&) {
  return prepare_pairs(r, r.attrs.get<PermuteAttrs>().weighted, true);
}
PlanPtr prepare_permute_backward(const KernelRequest& r, Context&) {
  return prepare_pair_gradients(r, r.attrs.get<PermuteAttrs>().weighted, false);
}
PlanPtr prepare_unpermute(const KernelRequest& r, Context&) {
  return prepare_pairs(r, r.attrs.get<UnpermuteAttrs>().weighted, false);
}
PlanPtr prepare_unpermute_backward(const KernelRequest& r, Context&) {
  return prepare_pair_gradients(r, r.attrs.get<UnpermuteAttrs>().weighted, true);
}

constexpr Kernel kPermuteForward{"cpu_rows", Pass::forward, can_move_pairs, prepare_permute};
constexpr Kernel kPermuteInference{"cpu_rows", Pass::inference, can_move_pairs, prepare_permute};
constexpr Kernel kPermuteBackward{"cpu_rows", Pass::backward, can_move_gradients, prepare_permute_backward};
constexpr Kernel kUnpermuteForward{"cpu_rows", Pass::forward, can_move_pairs, prepare_unpermute};
constexpr Kernel kUnpermuteInference{"cpu_rows", Pass::inference, can_move_pairs, prepare_unpermute};
constexpr Kernel kUnpermuteBackward{"cpu_rows", Pass::backward, can_move_gradients, prepare_unpermute_backward};

}  // namespace

KernelList expert_order_kernels() { return {&kOrder}; }
KernelList permute_kernels() { return {&kPermuteForward, &kPermuteInference, &kPermuteBackward}; }
KernelList unpermute_kernels() { return {&kUnpermuteForward, &kUnpermuteInference, &kUnpermuteBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
