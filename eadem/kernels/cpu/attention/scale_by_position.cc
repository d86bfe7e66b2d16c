// SPDX-License-Identifier: Apache-2.0
//
// scale_by_position and its gradient, which is the same scale: token by token.
#include "eadem/kernels/attention/scale_by_position.h"

#include <algorithm>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/attention/scale_by_position.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// y [n] = factor * x [n]; y may be x.
void scale_token(float* y, const float* x, int64_t n, float factor) {
  map(
      y, n, [f = set(factor)](Vec v) { return hn::Mul(v, f); }, x);
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(scale_token);

namespace {

Verdict can_scale_by_position(const KernelRequest& r, size_t x, size_t positions) {
  return Requirements(r)
      .f32("x", r.inputs[x])
      .one_of("positions", r.inputs[positions], {DType::i32})
      .f32("y", r.outputs[0])
      .verdict();
}

Verdict can_scale_tokens(const KernelRequest& r) { return can_scale_by_position(r, 0, 1); }
Verdict can_scale_gradients(const KernelRequest& r) { return can_scale_by_position(r, 1, 0); }

PlanPtr prepare_scale_by_position(const KernelRequest& r, size_t x_port, size_t positions_port) {
  const auto attrs = r.attrs.get<ScaleByPositionAttrs>();
  return make_plan([=, task = EADEM_CPU_DISPATCH(scale_token, cpu_device(r).isa())](const KernelCall& call) {
    float* y = elements<float>(call.outputs[0]);
    if (y == nullptr) return;
    const TensorView& rows = call.inputs[x_port];
    const float* x = elements<const float>(rows);
    const auto* positions = elements<const int32_t>(call.inputs[positions_port]);
    const int64_t width = rows.shape[1] * rows.shape[2];
    cpu_device(call).pool().parallel_ranges(
        rows.shape[0], std::max<int64_t>(1, 8192 / std::max<int64_t>(width, 1)), [&](int64_t begin, int64_t end) {
          for (int64_t t = begin; t < end; ++t)
            task(y + t * width, x + t * width, width, static_cast<float>(attrs.factor(positions[t])));
        });
  });
}

PlanPtr prepare_scale_tokens(const KernelRequest& r, Context&) { return prepare_scale_by_position(r, 0, 1); }
PlanPtr prepare_scale_gradients(const KernelRequest& r, Context&) { return prepare_scale_by_position(r, 1, 0); }

constexpr Kernel kForward{"cpu_vectors", Pass::forward, can_scale_tokens, prepare_scale_tokens};
constexpr Kernel kInference{"cpu_vectors", Pass::inference, can_scale_tokens, prepare_scale_tokens};
constexpr Kernel kBackward{"cpu_vectors", Pass::backward, can_scale_gradients, prepare_scale_gradients};

}  // namespace

KernelList scale_by_position_kernels() { return {&kForward, &kInference, &kBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
