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
// The gradients of unpermute for one token; dx or dweights may be null.
using UnpermuteBackward = void (*)(float* dx, float* dweights, const float* dy, const float* x, const TokenPairs& pairs,
                                   int64_t hidden);

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

void unpermute_backward(float* dx, float* dweights, const float* dy, const float* x, const TokenPairs& pairs,
                        int64_t hidden) {
  for (int64_t j = 0; j < pairs.top_k; ++j) {
    const int64_t row = pairs.rows[j] * hidden;
    if (dx != nullptr)
      map(
          dx + row, hidden, [w = set(pairs.weights[j])](Vec g) { return hn::Mul(g, w); }, dy);
    if (dweights != nullptr) dweights[j] = dot(dy, x + row, hidden);
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

HWY_EXPORT(sum_pairs);
HWY_EXPORT(sum_pairs_alike);
HWY_EXPORT(unpermute_backward);

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

// Counts, then deals out. It runs on one thread: all pairs of a step take less than waking another.
void run_expert_order(const KernelCall& call, int64_t experts) {
  const auto* expert = elements<const int32_t>(call.inputs[0]);
  auto* rows = elements<int32_t>(call.outputs[0]);
  auto* offsets = elements<int32_t>(call.outputs[1]);
  const int64_t pairs = call.inputs[0].num_elements();
  // 1. offsets[e + 1] = the number of pairs of e, then of all experts up to e.
  std::fill_n(offsets, experts + 1, 0);
  for (int64_t i = 0; i < pairs; ++i) ++offsets[expert[i] + 1];
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  // 2. Deal out; offsets[e] moves from the begin of e to its end, where e + 1 begins.
  for (int64_t i = 0; i < pairs; ++i) rows[i] = offsets[expert[i]]++;
  for (int64_t e = experts; e > 0; --e) offsets[e] = offsets[e - 1];
  offsets[0] = 0;
}

PlanPtr prepare_order(const KernelRequest& r, Context&) {
  return make_plan(
      [experts = r.attrs.get<ExpertOrderAttrs>().experts](const KernelCall& call) { run_expert_order(call, experts); });
}

constexpr Kernel kOrder{"cpu_counting_sort", Pass::inference, can_order, prepare_order};

// ---- permute

Verdict can_permute(const KernelRequest& r) {
  return Requirements(r).f32("x", r.inputs[0]).f32("y", r.outputs[0]).verdict();
}

PlanPtr prepare_permute(const KernelRequest&, Context&) {
  return make_plan([](const KernelCall& call) {
    const int64_t hidden = call.inputs[0].shape[1];
    const float* x = elements<const float>(call.inputs[0]);
    float* y = elements<float>(call.outputs[0]);
    for_each_token(call, call.inputs[1], nullptr, hidden, [&](int64_t t, const TokenPairs& pairs) {
      for (int64_t j = 0; j < pairs.top_k; ++j)
        std::memcpy(y + pairs.rows[j] * hidden, x + t * hidden, static_cast<size_t>(hidden) * sizeof(float));
    });
  });
}

Verdict can_permute_backward(const KernelRequest& r) {
  return Requirements(r).f32("dy", r.inputs[1]).f32("dx", r.outputs[0]).verdict();
}

PlanPtr prepare_permute_backward(const KernelRequest& r, Context&) {
  return make_plan([sum = EADEM_CPU_DISPATCH(sum_pairs_alike, cpu_device(r).isa())](const KernelCall& call) {
    float* dx = elements<float>(call.outputs[0]);
    if (dx == nullptr) return;
    const int64_t hidden = call.inputs[1].shape[1];
    const float* dy = elements<const float>(call.inputs[1]);
    for_each_token(call, call.inputs[0], nullptr, hidden,
                   [&](int64_t t, const TokenPairs& pairs) { sum(dx + t * hidden, dy, pairs, hidden); });
  });
}

constexpr Kernel kPermuteForward{"cpu_rows", Pass::forward, can_permute, prepare_permute};
constexpr Kernel kPermuteInference{"cpu_rows", Pass::inference, can_permute, prepare_permute};
constexpr Kernel kPermuteBackward{"cpu_rows", Pass::backward, can_permute_backward, prepare_permute_backward};

// ---- unpermute

Verdict can_unpermute(const KernelRequest& r) {
  return Requirements(r).f32("x", r.inputs[0]).f32("weights", r.inputs[2]).f32("y", r.outputs[0]).verdict();
}

PlanPtr prepare_unpermute(const KernelRequest& r, Context&) {
  return make_plan([sum = EADEM_CPU_DISPATCH(sum_pairs, cpu_device(r).isa())](const KernelCall& call) {
    const int64_t hidden = call.inputs[0].shape[1];
    const float* x = elements<const float>(call.inputs[0]);
    float* y = elements<float>(call.outputs[0]);
    for_each_token(call, call.inputs[1], elements<const float>(call.inputs[2]), hidden,
                   [&](int64_t t, const TokenPairs& pairs) { sum(y + t * hidden, x, pairs, hidden); });
  });
}

Verdict can_unpermute_backward(const KernelRequest& r) {
  return Requirements(r)
      .f32("x", r.inputs[0])
      .f32("weights", r.inputs[2])
      .f32("dy", r.inputs[3])
      .f32("dx", r.outputs[0])
      .f32("dweights", r.outputs[1])
      .verdict();
}

PlanPtr prepare_unpermute_backward(const KernelRequest& r, Context&) {
  return make_plan([backward = EADEM_CPU_DISPATCH(unpermute_backward, cpu_device(r).isa())](const KernelCall& call) {
    const int64_t hidden = call.inputs[0].shape[1], top_k = call.inputs[1].shape[1];
    const float* x = elements<const float>(call.inputs[0]);
    const float* dy = elements<const float>(call.inputs[3]);
    float* dx = elements<float>(call.outputs[0]);
    float* dweights = elements<float>(call.outputs[1]);
    for_each_token(
        call, call.inputs[1], elements<const float>(call.inputs[2]), hidden, [&](int64_t t, const TokenPairs& pairs) {
          backward(dx, dweights == nullptr ? nullptr : dweights + t * top_k, dy + t * hidden, x, pairs, hidden);
        });
  });
}

constexpr Kernel kUnpermuteForward{"cpu_rows", Pass::forward, can_unpermute, prepare_unpermute};
constexpr Kernel kUnpermuteInference{"cpu_rows", Pass::inference, can_unpermute, prepare_unpermute};
constexpr Kernel kUnpermuteBackward{"cpu_rows", Pass::backward, can_unpermute_backward, prepare_unpermute_backward};

}  // namespace

KernelList expert_order_kernels() { return {&kOrder}; }
KernelList permute_kernels() { return {&kPermuteForward, &kPermuteInference, &kPermuteBackward}; }
KernelList unpermute_kernels() { return {&kUnpermuteForward, &kUnpermuteInference, &kUnpermuteBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
