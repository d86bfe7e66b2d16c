// SPDX-License-Identifier: Apache-2.0
//
// route and its gradient: each row by itself.
#include <algorithm>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/experts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/experts/route.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_ROUTE_ROW_
#define EADEM_KERNELS_CPU_ROUTE_ROW_
namespace eadem::kernels::cpu {

// The values that all rows of a call share.
struct RouteRows {
  RouteAttrs attrs;
  int64_t experts;
  const float* bias;  // null: none
};

// Chooses the experts of a row and writes their weights. `scores` is scratch for the scores of all experts.
using RouteRow = void (*)(int32_t* chosen, float* weights, float* scores, const float* logits, const RouteRows& rows);
using RouteBackwardRow = void (*)(float* dlogits, float* scores, const float* logits, const int32_t* chosen,
                                  const float* dweights, const RouteRows& rows);

}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

void score_row(float* scores, const float* logits, const RouteRows& rows) {
  if (rows.attrs.scoring == RouteAttrs::Scoring::softmax) return softmax_row(scores, logits, rows.experts);
  map(
      scores, rows.experts, [](Vec v) { return sigmoid(v); }, logits);
}

// The best top_k, in falling order; of equals the lower number comes first. A NaN is better than nothing.
void choose_experts(int32_t* chosen, float* preferences, const float* logits, const float* scores,
                    const RouteRows& rows) {
  int64_t count = 0;
  const int64_t top_k = rows.attrs.top_k;
  for (int64_t e = 0; e < rows.experts; ++e) {
    const float preference = rows.bias == nullptr ? logits[e] : scores[e] + rows.bias[e];
    if (count == top_k && !(preference > preferences[top_k - 1])) continue;
    int64_t j = count < top_k ? count++ : top_k - 1;
    for (; j > 0 && preference > preferences[j - 1]; --j) {
      preferences[j] = preferences[j - 1];
      chosen[j] = chosen[j - 1];
    }
    preferences[j] = preference;
    chosen[j] = static_cast<int32_t>(e);
  }
}

void route_row(int32_t* chosen, float* weights, float* scores, const float* logits, const RouteRows& rows) {
  score_row(scores, logits, rows);
  choose_experts(chosen, weights, logits, scores, rows);
  const RouteAttrs& attrs = rows.attrs;
  float sum = 0.0f;
  for (int64_t j = 0; j < attrs.top_k; ++j) {
    weights[j] = scores[chosen[j]];
    sum += weights[j];
  }
  sum += attrs.epsilon;
  for (int64_t j = 0; j < attrs.top_k; ++j)
    weights[j] = (attrs.renormalize ? weights[j] / sum : weights[j]) * attrs.scale;
}

// The formulas stand in ops/experts/route.cc.
void route_backward_row(float* dlogits, float* scores, const float* logits, const int32_t* chosen,
                        const float* dweights, const RouteRows& rows) {
  score_row(scores, logits, rows);
  const RouteAttrs& attrs = rows.attrs;
  float sum = 0.0f, weighted = 0.0f;
  for (int64_t j = 0; j < attrs.top_k; ++j) {
    sum += scores[chosen[j]];
    weighted += dweights[j] * scores[chosen[j]];
  }
  sum += attrs.epsilon;
  const auto gradient = [&](int64_t j) {
    return attrs.scale * (attrs.renormalize ? (dweights[j] - weighted / sum) / sum : dweights[j]);
  };
  if (attrs.scoring == RouteAttrs::Scoring::sigmoid) {
    std::fill_n(dlogits, rows.experts, 0.0f);
    for (int64_t j = 0; j < attrs.top_k; ++j) {
      const float s = scores[chosen[j]];
      dlogits[chosen[j]] = gradient(j) * s * (1.0f - s);
    }
    return;
  }
  float dot_product = 0.0f;
  for (int64_t j = 0; j < attrs.top_k; ++j) dot_product += gradient(j) * scores[chosen[j]];
  map(
      dlogits, rows.experts, [d = set(-dot_product)](Vec s) { return hn::Mul(s, d); },
      static_cast<const float*>(scores));
  for (int64_t j = 0; j < attrs.top_k; ++j) dlogits[chosen[j]] = scores[chosen[j]] * (gradient(j) - dot_product);
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

HWY_EXPORT(route_row);
HWY_EXPORT(route_backward_row);

namespace {

int64_t route_grain(int64_t experts) { return std::max<int64_t>(1, 4096 / experts); }

// Scores of one row for each worker, on cache lines of their own.
int64_t score_floats(int64_t experts) { return round_up(experts, 16); }
int64_t score_bytes(const KernelRequest& r) {
  return cpu_device(r).pool().num_threads() * score_floats(r.inputs[0].fixed(1)) * static_cast<int64_t>(sizeof(float));
}

Verdict can_route(const KernelRequest& r) {
  return Requirements(r)
      .f32("logits", r.inputs[0])
      .f32("bias", r.inputs[1])
      .f32("weights", r.outputs[1])
      .verdict({.flops_share = 0.2, .reason = "one row after the other"});
}

PlanPtr prepare_route(const KernelRequest& r, Context&) {
  const auto attrs = r.attrs.get<RouteAttrs>();
  const RouteRow row = EADEM_CPU_DISPATCH(route_row, cpu_device(r).isa());
  return make_plan(
      [attrs, row](const KernelCall& call) {
        const int64_t experts = call.inputs[0].shape[1], top_k = attrs.top_k;
        const RouteRows rows{attrs, experts, elements<const float>(call.inputs[1])};
        const float* logits = elements<const float>(call.inputs[0]);
        auto* chosen = elements<int32_t>(call.outputs[0]);
        float* weights = elements<float>(call.outputs[1]);
        auto* scratch = static_cast<float*>(call.scratch.data);
        cpu_device(call).pool().parallel_ranges(
            call.inputs[0].shape[0], route_grain(experts), [&](int64_t begin, int64_t end, int worker) {
              for (int64_t t = begin; t < end; ++t)
                row(chosen + t * top_k, weights + t * top_k, scratch + worker * score_floats(experts),
                    logits + t * experts, rows);
            });
      },
      score_bytes(r));
}

Verdict can_route_backward(const KernelRequest& r) {
  return Requirements(r)
      .f32("logits", r.inputs[0])
      .f32("dweights", r.inputs[2])
      .f32("dlogits", r.outputs[0])
      .verdict({.flops_share = 0.2, .reason = "one row after the other"});
}

PlanPtr prepare_route_backward(const KernelRequest& r, Context&) {
  const auto attrs = r.attrs.get<RouteAttrs>();
  const RouteBackwardRow row = EADEM_CPU_DISPATCH(route_backward_row, cpu_device(r).isa());
  return make_plan(
      [attrs, row](const KernelCall& call) {
        float* dlogits = elements<float>(call.outputs[0]);
        if (dlogits == nullptr) return;
        const int64_t experts = call.inputs[0].shape[1], top_k = attrs.top_k;
        const RouteRows rows{attrs, experts, nullptr};
        const float* logits = elements<const float>(call.inputs[0]);
        const auto* chosen = elements<const int32_t>(call.inputs[1]);
        const float* dweights = elements<const float>(call.inputs[2]);
        auto* scratch = static_cast<float*>(call.scratch.data);
        cpu_device(call).pool().parallel_ranges(
            call.inputs[0].shape[0], route_grain(experts), [&](int64_t begin, int64_t end, int worker) {
              for (int64_t t = begin; t < end; ++t)
                row(dlogits + t * experts, scratch + worker * score_floats(experts), logits + t * experts,
                    chosen + t * top_k, dweights + t * top_k, rows);
            });
      },
      score_bytes(r));
}

constexpr Kernel kForward{"cpu_rows", Pass::forward, can_route, prepare_route};
constexpr Kernel kInference{"cpu_rows", Pass::inference, can_route, prepare_route};
constexpr Kernel kBackward{"cpu_rows", Pass::backward, can_route_backward, prepare_route_backward};

}  // namespace

KernelList route_kernels() { return {&kForward, &kInference, &kBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
