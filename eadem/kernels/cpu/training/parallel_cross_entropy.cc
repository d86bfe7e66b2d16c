// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/training/parallel_cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/training/parallel_cross_entropy.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"
#include "eadem/kernels/cpu/training/log_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// m and l of a row.
void part_state(float* state, const float* logits, int64_t n) {
  state[0] = max_of(logits, n);
  state[1] = static_cast<float>(sum_exp(logits, n, state[0]));
}

// dlogits = dloss * exp(logits - lse)
void part_gradient(float* dlogits, const float* logits, int64_t n, float lse, float dloss) {
  map(
      dlogits, n, [l = set(lse), g = set(dloss)](Vec v) { return hn::Mul(g, exp(hn::Sub(v, l))); }, logits);
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(part_state);
EADEM_CPU_EXPORT(part_gradient);

namespace {

// The label's place in this rank's part, or -1 where the rank does not have it.
int64_t place_in_part(int32_t label, int64_t first, int64_t part) {
  return label >= first && label < first + part ? label - first : -1;
}

Verdict can_softmax_state(const KernelRequest& r) {
  return Requirements(r)
      .f32("logits", r.inputs[0])
      .one_of("labels", r.inputs[1], {DType::i32})
      .f32("state", r.outputs[0])
      .verdict();
}

using PartState = void (*)(float* state, const float* logits, int64_t n);
using PartGradient = void (*)(float* dlogits, const float* logits, int64_t n, float lse, float dloss);

void run_softmax_state(const KernelCall& call, int64_t first, PartState task) {
  const int64_t rows = call.inputs[0].shape[0], part = call.inputs[0].shape[1];
  const float* logits = elements<const float>(call.inputs[0]);
  const int32_t* labels = elements<const int32_t>(call.inputs[1]);
  float* states = elements<float>(call.outputs[0]);
  cpu_device(call).pool().parallel_ranges(rows, std::max<int64_t>(1, 2048 / part), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* state = states + r * kSoftmaxStateWords;
      task(state, logits + r * part, part);
      const int64_t place = place_in_part(labels[r], first, part);
      state[2] = place < 0 ? 0.0f : logits[r * part + place];
    }
  });
}

PlanPtr prepare_softmax_state(const KernelRequest& r, Context&) {
  return make_plan([first = r.attrs.get<VocabularyPart>().first,
                    task = EADEM_CPU_DISPATCH(part_state, cpu_device(r).isa())](const KernelCall& call) {
    run_softmax_state(call, first, task);
  });
}

Verdict can_parallel_cross_entropy(const KernelRequest& r) {
  return Requirements(r)
      .f32("logits", r.inputs[0])
      .one_of("labels", r.inputs[1], {DType::i32})
      .f32("states", r.inputs[2])
      .f32("loss", r.outputs[0])
      .verdict();
}

void run_parallel_cross_entropy(const KernelCall& call) {
  const int64_t rows = call.inputs[2].shape[0], ranks = call.inputs[2].shape[1] / kSoftmaxStateWords;
  const int32_t* labels = elements<const int32_t>(call.inputs[1]);
  const float* states = elements<const float>(call.inputs[2]);
  float* loss = elements<float>(call.outputs[0]);
  float* lse = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr;
  for (int64_t r = 0; r < rows; ++r) {
    const auto state = [&](int64_t rank) { return states + (r * ranks + rank) * kSoftmaxStateWords; };
    float most = state(0)[0];
    for (int64_t rank = 1; rank < ranks; ++rank) most = std::max(most, state(rank)[0]);
    double sum = 0;
    float target = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      sum += state(rank)[1] * std::exp(static_cast<double>(state(rank)[0] - most));
      target += state(rank)[2];  // all but one are 0
    }
    const double log_sum = std::log(sum);
    loss[r] = labels[r] < 0 ? 0.0f : -log_probability(target, most, log_sum);
    if (lse != nullptr) lse[r] = static_cast<float>(most + log_sum);
  }
}

Verdict can_parallel_cross_entropy_backward(const KernelRequest& r) {
  return Requirements(r)
      .f32("logits", r.inputs[0])
      .one_of("labels", r.inputs[1], {DType::i32})
      .f32("lse", r.inputs[2])
      .f32("dloss", r.inputs[3])
      .f32("dlogits", r.outputs[0])
      .verdict();
}

void run_parallel_cross_entropy_backward(const KernelCall& call, int64_t first, PartGradient task) {
  float* dlogits = elements<float>(call.outputs[0]);
  if (dlogits == nullptr) return;
  const int64_t rows = call.inputs[0].shape[0], part = call.inputs[0].shape[1];
  const float* logits = elements<const float>(call.inputs[0]);
  const int32_t* labels = elements<const int32_t>(call.inputs[1]);
  const float* lse = elements<const float>(call.inputs[2]);
  const float* dloss = elements<const float>(call.inputs[3]);
  cpu_device(call).pool().parallel_ranges(rows, std::max<int64_t>(1, 2048 / part), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = dlogits + r * part;
      if (labels[r] < 0) {
        std::fill_n(row, part, 0.0f);
        continue;
      }
      task(row, logits + r * part, part, lse[r], dloss[r]);
      const int64_t place = place_in_part(labels[r], first, part);
      if (place >= 0) row[place] -= dloss[r];
    }
  });
}

PlanPtr prepare_parallel_cross_entropy(const KernelRequest&, Context&) { return make_plan(run_parallel_cross_entropy); }

PlanPtr prepare_parallel_cross_entropy_backward(const KernelRequest& r, Context&) {
  return make_plan([first = r.attrs.get<VocabularyPart>().first,
                    task = EADEM_CPU_DISPATCH(part_gradient, cpu_device(r).isa())](const KernelCall& call) {
    run_parallel_cross_entropy_backward(call, first, task);
  });
}

constexpr Kernel kStateForward{"cpu_rows", Pass::forward, can_softmax_state, prepare_softmax_state};
constexpr Kernel kState{"cpu_rows", Pass::inference, can_softmax_state, prepare_softmax_state};
constexpr Kernel kForward{"cpu_states", Pass::forward, can_parallel_cross_entropy, prepare_parallel_cross_entropy};
constexpr Kernel kInference{"cpu_states", Pass::inference, can_parallel_cross_entropy, prepare_parallel_cross_entropy};
constexpr Kernel kBackward{"cpu_rows", Pass::backward, can_parallel_cross_entropy_backward,
                           prepare_parallel_cross_entropy_backward};

}  // namespace

KernelList softmax_state_kernels() { return {&kStateForward, &kState}; }
KernelList parallel_cross_entropy_kernels() { return {&kForward, &kInference, &kBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
