// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/softmax.h"

#include <algorithm>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/softmax.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

void forward_row(float* y, const float* x, int64_t n) { softmax_row(y, x, n); }

void softmax_backward_row(float* dx, const float* y, const float* dy, int64_t n) {
  const float dot_product = dot(dy, y, n);
  map(
      dx, n, [s = set(dot_product)](Vec p, Vec g) { return hn::Mul(p, hn::Sub(g, s)); }, y, dy);
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(forward_row);
EADEM_CPU_EXPORT(softmax_backward_row);

namespace {

int64_t row_grain(int64_t n) { return std::max<int64_t>(1, 2048 / std::max<int64_t>(n, 1)); }

Verdict can_softmax(const KernelRequest& r) {
  return Requirements(r).f32("x", r.inputs[0]).f32("y", r.outputs[0]).verdict();
}

PlanPtr prepare_softmax(const KernelRequest& r, Context&) {
  return make_plan([row = EADEM_CPU_DISPATCH(forward_row, cpu_device(r).isa())](const KernelCall& call) {
    const int64_t n = call.inputs[0].shape.back();
    if (n == 0) return;
    const float* x = elements<const float>(call.inputs[0]);
    float* y = elements<float>(call.outputs[0]);
    cpu_device(call).pool().parallel_ranges(call.inputs[0].shape.num_rows(), row_grain(n),
                                            [&](int64_t begin, int64_t end) {
                                              for (int64_t r = begin; r < end; ++r) row(y + r * n, x + r * n, n);
                                            });
  });
}

Verdict can_softmax_backward(const KernelRequest& r) {
  return Requirements(r).f32("y", r.inputs[0]).f32("dy", r.inputs[1]).f32("dx", r.outputs[0]).verdict();
}

PlanPtr prepare_softmax_backward(const KernelRequest& r, Context&) {
  return make_plan([row = EADEM_CPU_DISPATCH(softmax_backward_row, cpu_device(r).isa())](const KernelCall& call) {
    const int64_t n = call.inputs[0].shape.back();
    const float* y = elements<const float>(call.inputs[0]);
    const float* dy = elements<const float>(call.inputs[1]);
    float* dx = elements<float>(call.outputs[0]);
    if (dx == nullptr) return;
    cpu_device(call).pool().parallel_ranges(call.inputs[0].shape.num_rows(), row_grain(n),
                                            [&](int64_t begin, int64_t end) {
                                              for (int64_t r = begin; r < end; ++r)
                                                row(dx + r * n, y + r * n, dy + r * n, n);
                                            });
  });
}

constexpr Kernel kForward{"cpu_rows", Pass::forward, can_softmax, prepare_softmax};
constexpr Kernel kInference{"cpu_rows", Pass::inference, can_softmax, prepare_softmax};
constexpr Kernel kBackward{"cpu_rows", Pass::backward, can_softmax_backward, prepare_softmax_backward};

}  // namespace

KernelList softmax_kernels() { return {&kForward, &kInference, &kBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
