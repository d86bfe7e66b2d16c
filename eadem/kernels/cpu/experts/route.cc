// SPDX-License-Identifier: Apache-2.0
//
// route and its gradient: each row by itself.
#include <algorithm>
#include <cmath>
#include <limits>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/experts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/experts/route.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/experts/best_experts-inl.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_ROUTE_ROW_
#define EADEM_KERNELS_CPU_ROUTE_ROW_
namespace eadem::kernels::cpu {

// The values that all rows of a call share.
struct RouteRows {
  RouteAttrs attrs;
  int64_t experts;
  const float* bias;  // null: none
  // With by_token.
  const float* table = nullptr;        // [vocab, top_k]
  const int32_t* token_ids = nullptr;  // [tokens]
};

// Chooses the experts of a row and writes their weights. `scores` is scratch for two values of each expert.
using RouteRow = void (*)(int32_t* chosen, float* weights, float* scores, const float* logits, const RouteRows& rows,
                          int64_t token);
using RouteBackwardRow = void (*)(float* dlogits, float* scores, const float* logits, const int32_t* chosen,
                                  const float* dweights, const RouteRows& rows);

}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

void score_row(float* scores, const float* logits, const RouteRows& rows) {
  switch (rows.attrs.scoring) {
    case RouteAttrs::Scoring::softmax: return softmax_row(scores, logits, rows.experts);
    case RouteAttrs::Scoring::sigmoid:
      return map(
          scores, rows.experts, [](Vec v) { return sigmoid(v); }, logits);
    case RouteAttrs::Scoring::sqrt_softplus:
      for (int64_t e = 0; e < rows.experts; ++e)
        scores[e] = std::sqrt(std::max(logits[e], 0.0f) + std::log1p(std::exp(-std::fabs(logits[e]))));
  }
}

// Returns the rank value of a group of experts: its best preference, or the sum of its two best.
float group_worth(const float* preferences, int64_t group, int64_t group_best) {
  float first = preferences[0], second = -std::numeric_limits<float>::infinity();
  for (int64_t e = 1; e < group; ++e) {
    second = std::max(second, std::min(first, preferences[e]));
    first = std::max(first, preferences[e]);
  }
  return group_best == 1 ? first : first + second;
}

// A group is chosen if fewer than top_groups others are better; of equals the lower number is. Nothing is better than
// NaN, so that there are always enough groups.
bool is_chosen_group(const float* worth, int64_t g, const RouteAttrs& attrs) {
  int64_t better = 0;
  for (int64_t other = 0; other < attrs.groups; ++other)
    better += worth[other] > worth[g] || (worth[other] == worth[g] && other < g) ? 1 : 0;
  return better < attrs.top_groups;
}

// Writes the chosen experts. `preferences` is scratch for a value of each expert, as `weights` is for each chosen one.
void choose_experts(int32_t* chosen, float* weights, float* preferences, const float* logits, const float* scores,
                    const RouteRows& rows) {
  const RouteAttrs& attrs = rows.attrs;
  Best best(chosen, weights, attrs.top_k);
  if (rows.bias != nullptr) {
    map(
        preferences, rows.experts, [](Vec s, Vec b) { return hn::Add(s, b); }, scores, rows.bias);
    scores = preferences;
  }
  if (attrs.groups == 1) return best.offer(rows.bias == nullptr ? logits : scores, 0, rows.experts);
  const int64_t group = rows.experts / attrs.groups;
  float* worth = preferences + (rows.bias == nullptr ? 0 : rows.experts);
  for (int64_t g = 0; g < attrs.groups; ++g) worth[g] = group_worth(scores + g * group, group, attrs.group_best);
  for (int64_t g = 0; g < attrs.groups; ++g)
    if (is_chosen_group(worth, g, attrs)) best.offer(scores, g * group, (g + 1) * group);
}

// The experts that the table has for a token. A number that is none, NaN too, counts as one inside.
void look_up_experts(int32_t* chosen, const RouteRows& rows, int64_t token) {
  const float* own = rows.table + rows.token_ids[token] * rows.attrs.top_k;
  for (int64_t j = 0; j < rows.attrs.top_k; ++j)
    chosen[j] = own[j] > 0 ? static_cast<int32_t>(std::min(own[j], static_cast<float>(rows.experts - 1))) : 0;
}

// The divisor of the chosen scores, whose sum is `sum`.
float divisor(float sum, const RouteAttrs& attrs) { return std::max(sum + attrs.epsilon, attrs.least_sum); }

void route_row(int32_t* chosen, float* weights, float* scores, const float* logits, const RouteRows& rows,
               int64_t token) {
  score_row(scores, logits, rows);
  if (rows.table != nullptr)
    look_up_experts(chosen, rows, token);
  else
    choose_experts(chosen, weights, scores + rows.experts, logits, scores, rows);
  const RouteAttrs& attrs = rows.attrs;
  float sum = 0.0f;
  for (int64_t j = 0; j < attrs.top_k; ++j) {
    weights[j] = scores[chosen[j]];
    sum += weights[j];
  }
  sum = divisor(sum, attrs);
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
  if (sum + attrs.epsilon < attrs.least_sum) weighted = 0;
  sum = divisor(sum, attrs);
  const auto gradient = [&](int64_t j) {
    return attrs.scale * (attrs.renormalize ? (dweights[j] - weighted / sum) / sum : dweights[j]);
  };
  if (attrs.scoring != RouteAttrs::Scoring::softmax) {
    const bool is_sigmoid = attrs.scoring == RouteAttrs::Scoring::sigmoid;
    std::fill_n(dlogits, rows.experts, 0.0f);
    for (int64_t j = 0; j < attrs.top_k; ++j) {
      const float s = scores[chosen[j]], z = logits[chosen[j]];
      const float t = std::exp(-std::fabs(z)), sigmoid_of_z = (z < 0 ? t : 1.0f) / (1.0f + t);
      // A score of 0 is that of a logit so low that its slope has vanished, too.
      const float slope = is_sigmoid ? s * (1.0f - s) : s > 0 ? 0.5f * sigmoid_of_z / s : 0.0f;
      dlogits[chosen[j]] += gradient(j) * slope;
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

EADEM_CPU_EXPORT(route_row);
EADEM_CPU_EXPORT(route_backward_row);

namespace {

int64_t route_grain(int64_t experts) { return std::max<int64_t>(1, 4096 / experts); }

// Scores and preferences of one row, and the worth of its groups, for each worker, on cache lines of their own.
int64_t score_floats(int64_t experts) { return round_up(3 * experts, 16); }
int64_t score_bytes(const KernelRequest& r) {
  return cpu_device(r).pool().num_threads() * score_floats(r.inputs[0].fixed(1)) * static_cast<int64_t>(sizeof(float));
}

Verdict can_route(const KernelRequest& r) {
  Requirements requirements(r);
  if (r.attrs.get<RouteAttrs>().by_token) requirements.f32("table", r.inputs[2]);
  return requirements.f32("logits", r.inputs[0])
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
        RouteRows rows{attrs, experts, elements<const float>(call.inputs[1])};
        if (attrs.by_token) {
          rows.table = elements<const float>(call.inputs[2]);
          rows.token_ids = elements<const int32_t>(call.inputs[3]);
        }
        const float* logits = elements<const float>(call.inputs[0]);
        auto* chosen = elements<int32_t>(call.outputs[0]);
        float* weights = elements<float>(call.outputs[1]);
        auto* scratch = static_cast<float*>(call.scratch.data);
        cpu_device(call).pool().parallel_ranges(
            call.inputs[0].shape[0], route_grain(experts), [&](int64_t begin, int64_t end, int worker) {
              for (int64_t t = begin; t < end; ++t)
                row(chosen + t * top_k, weights + t * top_k, scratch + worker * score_floats(experts),
                    logits + t * experts, rows, t);
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
