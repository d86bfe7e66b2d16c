// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/scale_by.h"

#include <vector>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/scale_by.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

void scale_all(float* y, const float* x, int64_t n, float scale) {
  map(
      y, n, [factor = set(scale)](Vec v) { return hn::Mul(v, factor); }, x);
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(scale_all);

namespace {

using ScaleAll = void (*)(float* y, const float* x, int64_t n, float scale);
constexpr int64_t kScaledGrain = 16384;  // elements: a few microseconds of work

Verdict can_scale_by(const KernelRequest& r) {
  return Requirements(r).f32("x", r.inputs[0]).f32("scale", r.inputs[1]).verdict();
}

// y = x times the scales, of which `index` says which; null: the first.
void scale_elements(const KernelCall& call, ScaleAll all, const TensorView& y, const TensorView& x,
                    const TensorView& scale, const int32_t* index) {
  float* out = elements<float>(y);
  if (out == nullptr) return;
  const float *in = elements<const float>(x), *scales = elements<const float>(scale);
  cpu_device(call).pool().parallel_ranges(x.num_elements(), kScaledGrain, [&](int64_t begin, int64_t end) {
    if (index == nullptr) return all(out + begin, in + begin, end - begin, scales[0]);
    for (int64_t i = begin; i < end; ++i) out[i] = in[i] * scales[index[i]];
  });
}

// Adds the gradients of the scales, in the order of the elements.
void add_scale_gradients(const TensorView& dscale, const TensorView& x, const TensorView& dy, const int32_t* index) {
  float* gradients = elements<float>(dscale);
  if (gradients == nullptr) return;
  std::vector<double> sums(static_cast<size_t>(dscale.num_elements()), 0.0);
  const float *in = elements<const float>(x), *out = elements<const float>(dy);
  for (int64_t i = 0; i < x.num_elements(); ++i)
    sums[index == nullptr ? 0 : static_cast<size_t>(index[i])] +=
        static_cast<double>(out[i]) * static_cast<double>(in[i]);
  for (size_t j = 0; j < sums.size(); ++j) gradients[j] += static_cast<float>(sums[j]);
}

PlanPtr prepare_scale_by(const KernelRequest& r, Context&) {
  const ScaleAll task = EADEM_CPU_DISPATCH(scale_all, cpu_device(r).isa());
  return make_plan([task, indexed = r.attrs.get<ScaleByAttrs>().indexed](const KernelCall& call) {
    scale_elements(call, task, call.outputs[0], call.inputs[0], call.inputs[1],
                   indexed ? elements<const int32_t>(call.inputs[2]) : nullptr);
  });
}

PlanPtr prepare_scale_by_backward(const KernelRequest& r, Context&) {
  const ScaleAll task = EADEM_CPU_DISPATCH(scale_all, cpu_device(r).isa());
  return make_plan([task, indexed = r.attrs.get<ScaleByAttrs>().indexed](const KernelCall& call) {
    const int32_t* index = indexed ? elements<const int32_t>(call.inputs[2]) : nullptr;
    const TensorView& dy = call.inputs.back();
    scale_elements(call, task, call.outputs[0], dy, call.inputs[1], index);
    add_scale_gradients(call.outputs[1], call.inputs[0], dy, index);
  });
}

constexpr Kernel kScaleBy{"cpu_vectors", Pass::forward, can_scale_by, prepare_scale_by};
constexpr Kernel kScaleByInference{"cpu_vectors", Pass::inference, can_scale_by, prepare_scale_by};
constexpr Kernel kScaleByBackward{"cpu_vectors", Pass::backward, can_scale_by, prepare_scale_by_backward};

}  // namespace

KernelList scale_by_kernels() { return {&kScaleBy, &kScaleByInference, &kScaleByBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
