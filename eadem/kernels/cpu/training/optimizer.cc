// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/training/optimizer.h"

#include <algorithm>
#include <cmath>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/training/optimizer.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_OPTIMIZER_PARAMS_
#define EADEM_KERNELS_CPU_OPTIMIZER_PARAMS_
namespace eadem::kernels::cpu {
namespace {

struct AdamWStep {
  const float* grad;
  float *master, *m, *v;
  void* weight;  // the rounded copy, or null
  float grad_scale, learning_rate, beta1, beta2, eps, decay_rate, bias_correction1, bias_correction2;
};
using AdamWRange = void (*)(const AdamWStep& step, int64_t begin, int64_t end);

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// The sum of squares of x[0, n) in f64. The square of an f32 is exact in f64.
double sum_squares_f64(const float* x, int64_t n) {
  const hn::CappedTag<double, 8> d64;
  const hn::Rebind<float, decltype(d64)> d32;
  constexpr int64_t kWide = hn::MaxLanes(d64);
  auto a = hn::Zero(d64), b = hn::Zero(d64);
  int64_t i = 0;
  for (; i + 2 * kWide <= n; i += 2 * kWide) {
    const auto u = hn::PromoteTo(d64, hn::LoadU(d32, x + i));
    const auto v = hn::PromoteTo(d64, hn::LoadU(d32, x + i + kWide));
    a = hn::MulAdd(u, u, a);
    b = hn::MulAdd(v, v, b);
  }
  double sum = hn::GetLane(hn::SumOfLanes(d64, hn::Add(a, b)));
  for (; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

// Weight: the element type of the rounded copy; void without one.
template <typename Weight>
void adamw_range(const AdamWStep& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kLanes) {
    const int64_t n = std::min(kLanes, end - i);
    const bool full = n == kLanes;
    const auto get = [&](const float* x) { return full ? load(x + i) : load_n(x + i, n); };
    const auto put = [&](Vec value, auto* x) { full ? store(value, x + i) : store_n(value, x + i, n); };

    // 1. Moments.
    const Vec g = hn::Mul(get(p.grad), set(p.grad_scale));
    const Vec m = hn::MulAdd(set(p.beta1), get(p.m), hn::Mul(set(1.0f - p.beta1), g));
    const Vec v = hn::MulAdd(set(p.beta2), get(p.v), hn::Mul(set(1.0f - p.beta2), hn::Mul(g, g)));
    put(m, p.m);
    put(v, p.v);

    // 2. The step.
    const Vec denominator = hn::Add(hn::Sqrt(hn::Div(v, set(p.bias_correction2))), set(p.eps));
    const Vec step = hn::Div(hn::Div(m, set(p.bias_correction1)), denominator);
    Vec master = get(p.master);
    master = hn::NegMulAdd(set(p.learning_rate), hn::MulAdd(set(p.decay_rate), master, step), master);
    put(master, p.master);

    // 3. The rounded copy that the passes read.
    if constexpr (!std::is_void_v<Weight>) put(master, static_cast<Weight*>(p.weight));
  }
}

AdamWRange adamw_of(bool has_weight, DType weight) {
  if (!has_weight) return adamw_range<void>;
  return with_dtype(weight, [](auto* type) -> AdamWRange { return adamw_range<ElementOf<decltype(type)>>; });
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(sum_squares_f64);
EADEM_CPU_EXPORT(adamw_of);

namespace {

// ---- grad_norm

Verdict can_grad_norm(const KernelRequest& r) {
  Requirements requirements(r);
  for (const TensorType& type : r.inputs) requirements.f32("a gradient", type);
  return requirements.f32("norm", r.outputs[0]).verdict();
}

int64_t grad_norm_scratch_bytes(const KernelRequest& r) {
  int64_t blocks = 0;
  for (const TensorType& type : r.inputs) blocks += ceil_div(type.num_elements(r.bounds), kGradNormBlock);
  return blocks * static_cast<int64_t>(sizeof(double));
}

PlanPtr prepare_grad_norm(const KernelRequest& r, Context&) {
  const auto sum_squares = EADEM_CPU_DISPATCH(sum_squares_f64, cpu_device(r).isa());
  return make_plan(
      [sum_squares](const KernelCall& call) {
        double* sums = static_cast<double*>(call.scratch.data);
        int64_t first_block = 0;
        for (const TensorView& input : call.inputs) {
          const float* x = elements<const float>(input);
          const int64_t size = input.num_elements();
          const int64_t blocks = ceil_div(size, kGradNormBlock);
          cpu_device(call).pool().parallel_ranges(blocks, 4, [&](int64_t begin, int64_t end) {
            for (int64_t b = begin; b < end; ++b)
              sums[first_block + b] =
                  sum_squares(x + b * kGradNormBlock, std::min(kGradNormBlock, size - b * kGradNormBlock));
          });
          first_block += blocks;
        }
        double total = 0;
        for (int64_t b = 0; b < first_block; ++b) total += sums[b];
        *elements<float>(call.outputs[0]) = static_cast<float>(std::sqrt(total));
      },
      grad_norm_scratch_bytes(r));
}

// ---- adamw

enum AdamWInput { kGrad, kNorm, kHyper, kMaster, kM, kV, kWeight };

Verdict can_adamw(const KernelRequest& r) {
  return Requirements(r)
      .f32("grad", r.inputs[kGrad])
      .f32("norm", r.inputs[kNorm])
      .f32("hyper", r.inputs[kHyper])
      .f32("master", r.inputs[kMaster])
      .f32("m", r.inputs[kM])
      .f32("v", r.inputs[kV])
      .one_of("weight", r.inputs.size() > kWeight ? r.inputs[kWeight] : unconnected_port(), {DType::bf16, DType::f16})
      .verdict();
}

PlanPtr prepare_adamw(const KernelRequest& r, Context&) {
  const bool has_weight = r.inputs.size() > kWeight && !is_unconnected(r.inputs[kWeight]);
  const AdamWRange task =
      EADEM_CPU_DISPATCH(adamw_of, cpu_device(r).isa())(has_weight, has_weight ? r.inputs[kWeight].dtype : DType::f32);
  const bool decays = r.attrs.get<AdamWAttrs>().decay;
  return make_plan([=](const KernelCall& call) {
    const float* hyper = elements<const float>(call.inputs[kHyper]);
    const float norm = *elements<const float>(call.inputs[kNorm]);
    const float max_norm = hyper[kHyperMaxNorm];
    AdamWStep p{};
    p.grad = elements<const float>(call.inputs[kGrad]);
    p.master = elements<float>(call.inputs[kMaster]);
    p.m = elements<float>(call.inputs[kM]);
    p.v = elements<float>(call.inputs[kV]);
    if (has_weight) {
      const TensorView& weight = call.inputs[kWeight];
      EADEM_CHECK(weight.is_contiguous(), "weight {} is not contiguous", to_string(weight));
      p.weight = weight.data;
    }
    p.grad_scale = max_norm > 0 ? std::min(1.0f, max_norm / (norm + 1e-6f)) : 1.0f;
    p.learning_rate = hyper[kHyperLearningRate];
    p.beta1 = hyper[kHyperBeta1];
    p.beta2 = hyper[kHyperBeta2];
    p.eps = hyper[kHyperEps];
    p.decay_rate = decays ? hyper[kHyperWeightDecay] : 0.0f;
    p.bias_correction1 = hyper[kHyperBiasCorrection1];
    p.bias_correction2 = hyper[kHyperBiasCorrection2];
    cpu_device(call).pool().parallel_ranges(call.inputs[kGrad].num_elements(), 4096,
                                            [&](int64_t begin, int64_t end) { task(p, begin, end); });
  });
}

constexpr Kernel kGradNorm{"cpu_f64_blocks", Pass::inference, can_grad_norm, prepare_grad_norm};
constexpr Kernel kAdamW{"cpu_vectors", Pass::inference, can_adamw, prepare_adamw};

}  // namespace

KernelList grad_norm_kernels() { return {&kGradNorm}; }
KernelList adamw_kernels() { return {&kAdamW}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
