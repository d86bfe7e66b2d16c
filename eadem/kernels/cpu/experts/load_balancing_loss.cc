// SPDX-License-Identifier: Apache-2.0
//
// load_balancing_loss. Blocks of rows are summed by themselves, then the blocks in order.
#include <algorithm>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/experts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/experts/load_balancing_loss.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/experts/best_experts-inl.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// Writes the sums of a block of rows: of the probabilities of each expert, then how often each was chosen. `scratch`
// has a value for each expert, and two for each that a row chooses.
void sum_balance(double* sums, float* scratch, const float* logits, int64_t rows, int64_t experts, int64_t top_k) {
  std::fill_n(sums, 2 * experts, 0.0);
  double* counts = sums + experts;
  float* preferences = scratch + experts;
  auto* chosen = reinterpret_cast<int32_t*>(preferences + top_k);
  for (int64_t t = 0; t < rows; ++t, logits += experts) {
    softmax_row(scratch, logits, experts);
    for (int64_t e = 0; e < experts; ++e) sums[e] += static_cast<double>(scratch[e]);
    Best(chosen, preferences, top_k).offer(logits, 0, experts);
    for (int64_t j = 0; j < top_k; ++j) counts[chosen[j]] += 1;
  }
}

// The formula stands in ops/experts/load_balancing_loss.cc; `scale` is all that a call's rows share.
void balance_gradient(float* dlogits, const float* logits, const float* fractions, int64_t experts, float scale) {
  softmax_row(dlogits, logits, experts);
  float mean = 0.0f;
  for (int64_t e = 0; e < experts; ++e) mean += dlogits[e] * fractions[e];
  map(
      dlogits, experts, [s = set(scale), m = set(mean)](Vec p, Vec f) { return hn::Mul(hn::Mul(s, p), hn::Sub(f, m)); },
      static_cast<const float*>(dlogits), fractions);
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(sum_balance);
EADEM_CPU_EXPORT(balance_gradient);

namespace {

constexpr int64_t kBlockRows = 256;

// The blocks of a call: those of the first layer, then those of the next.
struct BalanceBlocks {
  int64_t layers, tokens, experts;

  int64_t of_layer() const { return ceil_div(tokens, kBlockRows); }
  int64_t count() const { return layers * of_layer(); }
  // On cache lines of their own.
  int64_t doubles_each() const { return round_up(2 * experts, 8); }
};

// For each worker, on cache lines of its own.
int64_t worker_floats(int64_t experts, int64_t top_k) { return round_up(experts + 2 * top_k, 16); }

Verdict can_balance(const KernelRequest& r) {
  Requirements requirements(r);
  for (const TensorType& type : r.inputs) requirements.f32("logits", type);
  return requirements.f32("loss", r.outputs[0]).verdict({.flops_share = 0.2, .reason = "one row after the other"});
}

PlanPtr prepare_balance(const KernelRequest& r, Context&) {
  const int64_t top_k = r.attrs.get<LoadBalancingLossAttrs>().top_k;
  const auto layers = static_cast<int64_t>(r.inputs.size());
  const auto sum = EADEM_CPU_DISPATCH(sum_balance, cpu_device(r).isa());
  const BalanceBlocks most{layers, r.inputs[0].bind(r.bounds)[0], r.inputs[0].fixed(1)};
  return make_plan(
      [=](const KernelCall& call) {
        const BalanceBlocks blocks{layers, call.inputs[0].shape[0], call.inputs[0].shape[1]};
        const int64_t experts = blocks.experts, stride = blocks.doubles_each();
        auto* sums = static_cast<double*>(call.scratch.data);
        auto* workers = reinterpret_cast<float*>(sums + blocks.count() * stride);
        cpu_device(call).pool().parallel_ranges(blocks.count(), 1, [&](int64_t begin, int64_t end, int worker) {
          for (int64_t b = begin; b < end; ++b) {
            const int64_t first = b % blocks.of_layer() * kBlockRows;
            const auto* logits = elements<const float>(call.inputs[static_cast<size_t>(b / blocks.of_layer())]);
            sum(sums + b * stride, workers + worker * worker_floats(experts, top_k), logits + first * experts,
                std::min(kBlockRows, blocks.tokens - first), experts, top_k);
          }
        });
        const double rows = static_cast<double>(std::max<int64_t>(1, layers * blocks.tokens));
        float* fractions = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr;
        double loss = 0;
        for (int64_t e = 0; e < experts; ++e) {
          double probability = 0, count = 0;
          for (int64_t b = 0; b < blocks.count(); ++b) {
            probability += sums[b * stride + e];
            count += sums[b * stride + experts + e];
          }
          loss += static_cast<double>(experts) * (count / rows) * (probability / rows);
          if (fractions != nullptr) fractions[e] = static_cast<float>(count / rows);
        }
        *elements<float>(call.outputs[0]) = static_cast<float>(loss);
      },
      most.count() * most.doubles_each() * static_cast<int64_t>(sizeof(double)) +
          cpu_device(r).pool().num_threads() * worker_floats(most.experts, top_k) *
              static_cast<int64_t>(sizeof(float)));
}

Verdict can_balance_backward(const KernelRequest& r) {
  Requirements requirements(r);
  for (const TensorType& type : r.inputs) requirements.f32("an input", type);
  for (const TensorType& type : r.outputs) requirements.f32("dlogits", type);
  return requirements.verdict({.flops_share = 0.2, .reason = "one row after the other"});
}

PlanPtr prepare_balance_backward(const KernelRequest& r, Context&) {
  const size_t layers = r.outputs.size();
  const auto gradient = EADEM_CPU_DISPATCH(balance_gradient, cpu_device(r).isa());
  return make_plan([layers, gradient](const KernelCall& call) {
    const int64_t tokens = call.inputs[0].shape[0], experts = call.inputs[0].shape[1];
    const float* fractions = elements<const float>(call.inputs[layers]);
    const double dloss = *elements<const float>(call.inputs[layers + 1]);
    const auto scale = static_cast<float>(dloss * static_cast<double>(experts) /
                                          static_cast<double>(tokens * static_cast<int64_t>(layers)));
    for (size_t layer = 0; layer < layers; ++layer) {
      float* dlogits = elements<float>(call.outputs[layer]);
      if (dlogits == nullptr) continue;
      const float* logits = elements<const float>(call.inputs[layer]);
      cpu_device(call).pool().parallel_ranges(
          tokens, std::max<int64_t>(1, 4096 / experts), [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t)
              gradient(dlogits + t * experts, logits + t * experts, fractions, experts, scale);
          });
    }
  });
}

constexpr Kernel kForward{"cpu_rows", Pass::forward, can_balance, prepare_balance};
constexpr Kernel kInference{"cpu_rows", Pass::inference, can_balance, prepare_balance};
constexpr Kernel kBackward{"cpu_rows", Pass::backward, can_balance_backward, prepare_balance_backward};

}  // namespace

KernelList load_balancing_loss_kernels() { return {&kForward, &kInference, &kBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
