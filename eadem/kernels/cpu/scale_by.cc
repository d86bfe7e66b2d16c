// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/scale_by.h"

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

// y [n] = factor * x [n]; y may be x.
void scale_values_by(float* y, const float* x, int64_t n, float factor) {
  map(
      y, n, [f = set(factor)](Vec v) { return hn::Mul(v, f); }, x);
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

HWY_EXPORT(scale_values_by);

namespace {

Verdict can_scale_by(const KernelRequest& r) {
  Requirements requirements(r);
  for (const TensorType& type : r.inputs) requirements.f32("x or factor", type);
  return requirements.f32("y", r.outputs[0]).verdict();
}

PlanPtr prepare_scale_by(const KernelRequest& r, Context&) {
  const size_t x_port = r.pass == Pass::backward ? 1 : 0;
  return make_plan([x_port, task = EADEM_CPU_DISPATCH(scale_values_by, cpu_device(r).isa())](const KernelCall& call) {
    float* y = elements<float>(call.outputs[0]);
    if (y == nullptr) return;
    const auto* x = elements<const float>(call.inputs[x_port]);
    const float factor = *elements<const float>(call.inputs[1 - x_port]);
    cpu_device(call).pool().parallel_ranges(call.inputs[x_port].num_elements(), 8192, [&](int64_t begin, int64_t end) {
      task(y + begin, x + begin, end - begin, factor);
    });
  });
}

constexpr Kernel kScaleByForward{"cpu_vectors", Pass::forward, can_scale_by, prepare_scale_by};
constexpr Kernel kScaleByInference{"cpu_vectors", Pass::inference, can_scale_by, prepare_scale_by};
constexpr Kernel kScaleByBackward{"cpu_vectors", Pass::backward, can_scale_by, prepare_scale_by};

}  // namespace

KernelList scale_by_kernels() { return {&kScaleByForward, &kScaleByInference, &kScaleByBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
