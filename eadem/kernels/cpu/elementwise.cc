// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/elementwise.h"

#include <algorithm>
#include <cstring>

#include "eadem/kernels/backends.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/elementwise.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

void add(float* y, const float* a, const float* b, int64_t n) {
  map(
      y, n, [](Vec u, Vec v) { return hn::Add(u, v); }, a, b);
}

void mul(float* y, const float* a, const float* b, int64_t n) {
  map(
      y, n, [](Vec u, Vec v) { return hn::Mul(u, v); }, a, b);
}

void activation(ActivationKind kind, float* y, const float* x, int64_t n) {
  with_activation(kind, [&](auto constant) {
    constexpr ActivationKind kKind = decltype(constant)::value;
    map(
        y, n, [](Vec v) { return activate<kKind>(v); }, x);
  });
}

void activation_backward(ActivationKind kind, float* dx, const float* x, const float* dy, int64_t n) {
  with_activation(kind, [&](auto constant) {
    constexpr ActivationKind kKind = decltype(constant)::value;
    map(
        dx, n, [](Vec v, Vec g) { return hn::Mul(g, activate_derivative<kKind>(v)); }, x, dy);
  });
}

void gated_activation(ActivationKind kind, float* y, const float* gate, const float* up, int64_t n) {
  with_activation(kind, [&](auto constant) {
    constexpr ActivationKind kKind = decltype(constant)::value;
    map(
        y, n, [](Vec g, Vec u) { return hn::Mul(activate<kKind>(g), u); }, gate, up);
  });
}

void gated_activation_dgate(ActivationKind kind, float* dgate, const float* gate, const float* up, const float* dy,
                            int64_t n) {
  with_activation(kind, [&](auto constant) {
    constexpr ActivationKind kKind = decltype(constant)::value;
    map(
        dgate, n, [](Vec g, Vec u, Vec d) { return hn::Mul(hn::Mul(d, u), activate_derivative<kKind>(g)); }, gate, up,
        dy);
  });
}

template <typename To>
void cast_from(To* y, DType from, const void* x, int64_t begin, int64_t end) {
  const auto same = [](Vec v) { return v; };
  switch (from) {
    case DType::bf16: return map(y + begin, end - begin, same, static_cast<const bf16_t*>(x) + begin);
    case DType::f16: return map(y + begin, end - begin, same, static_cast<const f16_t*>(x) + begin);
    default: return map(y + begin, end - begin, same, static_cast<const float*>(x) + begin);
  }
}

void cast(DType to, void* y, DType from, const void* x, int64_t begin, int64_t end) {
  switch (to) {
    case DType::bf16: return cast_from(static_cast<bf16_t*>(y), from, x, begin, end);
    case DType::f16: return cast_from(static_cast<f16_t*>(y), from, x, begin, end);
    default: return cast_from(static_cast<float*>(y), from, x, begin, end);
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

HWY_EXPORT(add);
HWY_EXPORT(mul);
HWY_EXPORT(activation);
HWY_EXPORT(activation_backward);
HWY_EXPORT(gated_activation);
HWY_EXPORT(gated_activation_dgate);
HWY_EXPORT(cast);

namespace {

constexpr int64_t kGrain = 16384;  // elements: a few microseconds of work

// Accepts requests whose ports are all f32, at `flops_per_element` for each element of the first input.
Verdict can_all_f32(const KernelRequest& r, double flops_per_element) {
  Requirements requirements(r);
  for (const TensorType& type : r.inputs) requirements.f32("an input", type);
  for (const TensorType& type : r.outputs) requirements.f32("an output", type);
  return requirements.at_cost(flops_per_element * elements_of(r, r.inputs[0]));
}

Verdict can_arithmetic(const KernelRequest& r) { return can_all_f32(r, 2); }
Verdict can_activation(const KernelRequest& r) { return can_all_f32(r, 30); }

using BinaryFunction = void (*)(float*, const float*, const float*, int64_t);

void run_binary(const KernelCall& call, BinaryFunction task, int y, int a, int b) {
  float* out = elements<float>(call.outputs[static_cast<size_t>(y)]);
  if (out == nullptr) return;
  const float* left = elements<const float>(call.inputs[static_cast<size_t>(a)]);
  const float* right = elements<const float>(call.inputs[static_cast<size_t>(b)]);
  cpu_device(call).pool().parallel_ranges(call.inputs[0].num_elements(), kGrain, [&](int64_t begin, int64_t end) {
    task(out + begin, left + begin, right + begin, end - begin);
  });
}

void run_add(const KernelCall& call) { run_binary(call, EADEM_CPU_DISPATCH(add, cpu_device(call).isa()), 0, 0, 1); }

void run_mul(const KernelCall& call) { run_binary(call, EADEM_CPU_DISPATCH(mul, cpu_device(call).isa()), 0, 0, 1); }

void run_mul_backward(const KernelCall& call) {
  const BinaryFunction task = EADEM_CPU_DISPATCH(mul, cpu_device(call).isa());
  run_binary(call, task, 0, 2, 1);
  run_binary(call, task, 1, 2, 0);
}

void run_activation(const KernelCall& call) {
  const auto task = EADEM_CPU_DISPATCH(activation, cpu_device(call).isa());
  const ActivationKind kind = call.attrs.get<ActivationAttrs>().kind;
  float* y = elements<float>(call.outputs[0]);
  const float* x = elements<const float>(call.inputs[0]);
  cpu_device(call).pool().parallel_ranges(call.inputs[0].num_elements(), kGrain / 8, [&](int64_t begin, int64_t end) {
    task(kind, y + begin, x + begin, end - begin);
  });
}

void run_activation_backward(const KernelCall& call) {
  const auto task = EADEM_CPU_DISPATCH(activation_backward, cpu_device(call).isa());
  const ActivationKind kind = call.attrs.get<ActivationAttrs>().kind;
  float* dx = elements<float>(call.outputs[0]);
  if (dx == nullptr) return;
  const float* x = elements<const float>(call.inputs[0]);
  const float* dy = elements<const float>(call.inputs[1]);
  cpu_device(call).pool().parallel_ranges(call.inputs[0].num_elements(), kGrain / 8, [&](int64_t begin, int64_t end) {
    task(kind, dx + begin, x + begin, dy + begin, end - begin);
  });
}

void run_gated_activation(const KernelCall& call) {
  const auto task = EADEM_CPU_DISPATCH(gated_activation, cpu_device(call).isa());
  const ActivationKind kind = call.attrs.get<ActivationAttrs>().kind;
  float* y = elements<float>(call.outputs[0]);
  const float* gate = elements<const float>(call.inputs[0]);
  const float* up = elements<const float>(call.inputs[1]);
  cpu_device(call).pool().parallel_ranges(call.inputs[0].num_elements(), kGrain / 8, [&](int64_t begin, int64_t end) {
    task(kind, y + begin, gate + begin, up + begin, end - begin);
  });
}

void run_gated_activation_backward(const KernelCall& call) {
  const auto dgate_task = EADEM_CPU_DISPATCH(gated_activation_dgate, cpu_device(call).isa());
  const auto dup_task = EADEM_CPU_DISPATCH(gated_activation, cpu_device(call).isa());
  const ActivationKind kind = call.attrs.get<ActivationAttrs>().kind;
  float* dgate = elements<float>(call.outputs[0]);
  float* dup = elements<float>(call.outputs[1]);
  const float* gate = elements<const float>(call.inputs[0]);
  const float* up = elements<const float>(call.inputs[1]);
  const float* dy = elements<const float>(call.inputs[2]);
  cpu_device(call).pool().parallel_ranges(call.inputs[0].num_elements(), kGrain / 8, [&](int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    if (dgate != nullptr) dgate_task(kind, dgate + begin, gate + begin, up + begin, dy + begin, n);
    if (dup != nullptr) dup_task(kind, dup + begin, gate + begin, dy + begin, n);
  });
}

Verdict can_cast(const KernelRequest& r) {
  return Requirements(r)
      .one_of("x", r.inputs[0], {DType::f32, DType::bf16, DType::f16})
      .one_of("y", r.outputs[0], {DType::f32, DType::bf16, DType::f16})
      .at_cost(elements_of(r, r.inputs[0]));
}

void run_cast(const KernelCall& call) {
  const TensorView& x = call.inputs[0];
  const TensorView& y = call.outputs[0];
  if (!y.defined()) return;
  EADEM_CHECK(x.is_contiguous() && y.is_contiguous(), "cast of {} to {}", to_string(x), to_string(y));
  const auto task = EADEM_CPU_DISPATCH(cast, cpu_device(call).isa());
  cpu_device(call).pool().parallel_ranges(x.num_elements(), kGrain, [&](int64_t begin, int64_t end) {
    task(y.dtype, y.data, x.dtype, x.data, begin, end);
  });
}

constexpr Kernel kAdd{"cpu_vectors", Pass::forward, can_arithmetic, run_add};
constexpr Kernel kAddInference{"cpu_vectors", Pass::inference, can_arithmetic, run_add};
constexpr Kernel kMul{"cpu_vectors", Pass::forward, can_arithmetic, run_mul};
constexpr Kernel kMulInference{"cpu_vectors", Pass::inference, can_arithmetic, run_mul};
constexpr Kernel kMulBackward{"cpu_vectors", Pass::backward, can_arithmetic, run_mul_backward};
constexpr Kernel kActivation{"cpu_vectors", Pass::forward, can_activation, run_activation};
constexpr Kernel kActivationInference{"cpu_vectors", Pass::inference, can_activation, run_activation};
constexpr Kernel kActivationBackward{"cpu_vectors", Pass::backward, can_activation, run_activation_backward};
constexpr Kernel kGated{"cpu_vectors", Pass::forward, can_activation, run_gated_activation};
constexpr Kernel kGatedInference{"cpu_vectors", Pass::inference, can_activation, run_gated_activation};
constexpr Kernel kGatedBackward{"cpu_vectors", Pass::backward, can_activation, run_gated_activation_backward};
constexpr Kernel kCast{"cpu_vectors", Pass::forward, can_cast, run_cast};
constexpr Kernel kCastInference{"cpu_vectors", Pass::inference, can_cast, run_cast};
constexpr Kernel kCastBackward{"cpu_vectors", Pass::backward, can_cast, run_cast};

}  // namespace

KernelList add_kernels() { return {&kAdd, &kAddInference}; }
KernelList mul_kernels() { return {&kMul, &kMulInference, &kMulBackward}; }
KernelList activation_kernels() { return {&kActivation, &kActivationInference, &kActivationBackward}; }
KernelList gated_activation_kernels() { return {&kGated, &kGatedInference, &kGatedBackward}; }
KernelList cast_kernels() { return {&kCast, &kCastInference, &kCastBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
