// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/elementwise.h"

#include <algorithm>
#include <cstring>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/elementwise.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_ELEMENTWISE_ROUTINES_
#define EADEM_KERNELS_CPU_ELEMENTWISE_ROUTINES_
namespace eadem::kernels::cpu {
namespace {

using BinaryElements = void (*)(float* y, const float* a, const float* b, int64_t n);
using ScaleElements = void (*)(float* y, const float* x, int64_t n, const ScaleAttrs& attrs);
using ScaleGradient = void (*)(float* dx, const float* x, const float* dy, int64_t n, const ScaleAttrs& attrs);
using CastElements = void (*)(void* y, const void* x, int64_t begin, int64_t end);

// The routines of one activation.
struct ActivationRoutines {
  void (*activation)(float* y, const float* x, int64_t n);
  BinaryElements backward;  // dx, x, dy
  BinaryElements gated;     // y, gate, up
  void (*dgate)(float* dgate, const float* gate, const float* up, const float* dy, int64_t n);
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

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

void scale(float* y, const float* x, int64_t n, const ScaleAttrs& attrs) {
  const Vec factor = set(attrs.factor);
  if (attrs.limit > 0)
    return map(
        y, n,
        [factor, limit = set(attrs.limit)](Vec v) {
          const Vec scaled = hn::Mul(v, factor);  // NaN stays
          return hn::IfThenElse(hn::Gt(hn::Abs(scaled), limit), hn::CopySign(limit, scaled), scaled);
        },
        x);
  if (attrs.softcap > 0)
    map(
        y, n,
        [factor, cap = set(attrs.softcap), inverse = set(1.0f / attrs.softcap)](Vec v) {
          return soft_cap(hn::Mul(v, factor), cap, inverse);
        },
        x);
  else
    map(
        y, n, [factor](Vec v) { return hn::Mul(v, factor); }, x);
}

void scale_backward(float* dx, const float* x, const float* dy, int64_t n, const ScaleAttrs& attrs) {
  if (attrs.limit > 0)
    return map(
        dx, n,
        [factor = set(attrs.factor), limit = set(attrs.limit)](Vec v, Vec g) {
          return hn::IfThenZeroElse(hn::Gt(hn::Abs(hn::Mul(v, factor)), limit), hn::Mul(g, factor));
        },
        x, dy);
  if (attrs.softcap == 0) return scale(dx, dy, n, attrs);
  const Vec factor = set(attrs.factor), one = set(1.0f), inverse = set(1.0f / attrs.softcap);
  map(
      dx, n,
      [&](Vec v, Vec g) {
        const Vec t = tanh(hn::Mul(hn::Mul(v, factor), inverse));
        return hn::Mul(hn::Mul(g, factor), hn::Mul(hn::Sub(one, t), hn::Add(one, t)));
      },
      x, dy);
}

template <ActivationKind kKind>
void activation(float* y, const float* x, int64_t n) {
  map(
      y, n, [](Vec v) { return activate<kKind>(v); }, x);
}

template <ActivationKind kKind>
void activation_backward(float* dx, const float* x, const float* dy, int64_t n) {
  map(
      dx, n, [](Vec v, Vec g) { return hn::Mul(g, activate_derivative<kKind>(v)); }, x, dy);
}

template <ActivationKind kKind>
void gated_activation(float* y, const float* gate, const float* up, int64_t n) {
  map(
      y, n, [](Vec g, Vec u) { return hn::Mul(activate<kKind>(g), u); }, gate, up);
}

template <ActivationKind kKind>
void gated_activation_dgate(float* dgate, const float* gate, const float* up, const float* dy, int64_t n) {
  map(
      dgate, n, [](Vec g, Vec u, Vec d) { return hn::Mul(hn::Mul(d, u), activate_derivative<kKind>(g)); }, gate, up,
      dy);
}

ActivationRoutines activation_routines(ActivationKind kind) {
  return with_activation(kind, [](auto constant) -> ActivationRoutines {
    constexpr ActivationKind kKind = decltype(constant)::value;
    return {activation<kKind>, activation_backward<kKind>, gated_activation<kKind>, gated_activation_dgate<kKind>};
  });
}

template <typename To, typename From>
void cast(void* y, const void* x, int64_t begin, int64_t end) {
  map(
      static_cast<To*>(y) + begin, end - begin, [](Vec v) { return v; }, static_cast<const From*>(x) + begin);
}

CastElements cast_of(DType to, DType from) {
  return with_dtype(to, [from](auto* y) -> CastElements {
    return with_dtype(from,
                      [](auto* x) -> CastElements { return cast<ElementOf<decltype(y)>, ElementOf<decltype(x)>>; });
  });
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(add);
EADEM_CPU_EXPORT(mul);
EADEM_CPU_EXPORT(scale);
EADEM_CPU_EXPORT(scale_backward);
EADEM_CPU_EXPORT(activation_routines);
EADEM_CPU_EXPORT(cast_of);

namespace {

constexpr int64_t kGrain = 16384;  // elements: a few microseconds of work
constexpr int64_t kActivationGrain = kGrain / 8;

// Accepts requests whose ports are all f32.
Verdict can_all_f32(const KernelRequest& r) {
  Requirements requirements(r);
  for (const TensorType& type : r.inputs) requirements.f32("an input", type);
  for (const TensorType& type : r.outputs) requirements.f32("an output", type);
  return requirements.verdict();
}

ActivationRoutines routines_of(const KernelRequest& r) {
  return EADEM_CPU_DISPATCH(activation_routines, cpu_device(r).isa())(r.attrs.get<ActivationAttrs>().kind);
}

// output `y` = task(input `a`, input `b`), unless it is not wanted.
void run_binary(const KernelCall& call, BinaryElements task, int64_t grain, size_t y, size_t a, size_t b) {
  float* out = elements<float>(call.outputs[y]);
  if (out == nullptr) return;
  const float* left = elements<const float>(call.inputs[a]);
  const float* right = elements<const float>(call.inputs[b]);
  cpu_device(call).pool().parallel_ranges(call.inputs[0].num_elements(), grain, [&](int64_t begin, int64_t end) {
    task(out + begin, left + begin, right + begin, end - begin);
  });
}

PlanPtr prepare_add(const KernelRequest& r, Context&) {
  return make_plan([task = EADEM_CPU_DISPATCH(add, cpu_device(r).isa())](const KernelCall& call) {
    run_binary(call, task, kGrain, 0, 0, 1);
  });
}

PlanPtr prepare_mul(const KernelRequest& r, Context&) {
  return make_plan([task = EADEM_CPU_DISPATCH(mul, cpu_device(r).isa())](const KernelCall& call) {
    run_binary(call, task, kGrain, 0, 0, 1);
  });
}

PlanPtr prepare_mul_backward(const KernelRequest& r, Context&) {
  return make_plan([task = EADEM_CPU_DISPATCH(mul, cpu_device(r).isa())](const KernelCall& call) {
    run_binary(call, task, kGrain, 0, 2, 1);
    run_binary(call, task, kGrain, 1, 2, 0);
  });
}

PlanPtr prepare_scale(const KernelRequest& r, Context&) {
  const ScaleElements task = EADEM_CPU_DISPATCH(scale, cpu_device(r).isa());
  return make_plan([task, attrs = r.attrs.get<ScaleAttrs>()](const KernelCall& call) {
    float* y = elements<float>(call.outputs[0]);
    const float* x = elements<const float>(call.inputs[0]);
    cpu_device(call).pool().parallel_ranges(
        call.inputs[0].num_elements(), attrs.softcap > 0 ? kActivationGrain : kGrain,
        [&](int64_t begin, int64_t end) { task(y + begin, x + begin, end - begin, attrs); });
  });
}

PlanPtr prepare_scale_backward(const KernelRequest& r, Context&) {
  const ScaleGradient task = EADEM_CPU_DISPATCH(scale_backward, cpu_device(r).isa());
  return make_plan([task, attrs = r.attrs.get<ScaleAttrs>()](const KernelCall& call) {
    float* dx = elements<float>(call.outputs[0]);
    if (dx == nullptr) return;
    const float *x = elements<const float>(call.inputs[0]), *dy = elements<const float>(call.inputs[1]);
    cpu_device(call).pool().parallel_ranges(
        call.inputs[0].num_elements(), attrs.softcap > 0 ? kActivationGrain : kGrain,
        [&](int64_t begin, int64_t end) { task(dx + begin, x + begin, dy + begin, end - begin, attrs); });
  });
}

PlanPtr prepare_activation(const KernelRequest& r, Context&) {
  return make_plan([task = routines_of(r).activation](const KernelCall& call) {
    float* y = elements<float>(call.outputs[0]);
    const float* x = elements<const float>(call.inputs[0]);
    cpu_device(call).pool().parallel_ranges(
        call.inputs[0].num_elements(), kActivationGrain,
        [&](int64_t begin, int64_t end) { task(y + begin, x + begin, end - begin); });
  });
}

PlanPtr prepare_activation_backward(const KernelRequest& r, Context&) {
  return make_plan(
      [task = routines_of(r).backward](const KernelCall& call) { run_binary(call, task, kActivationGrain, 0, 0, 1); });
}

PlanPtr prepare_gated_activation(const KernelRequest& r, Context&) {
  return make_plan(
      [task = routines_of(r).gated](const KernelCall& call) { run_binary(call, task, kActivationGrain, 0, 0, 1); });
}

PlanPtr prepare_gated_activation_backward(const KernelRequest& r, Context&) {
  return make_plan([routines = routines_of(r)](const KernelCall& call) {
    float* dgate = elements<float>(call.outputs[0]);
    float* dup = elements<float>(call.outputs[1]);
    const float* gate = elements<const float>(call.inputs[0]);
    const float* up = elements<const float>(call.inputs[1]);
    const float* dy = elements<const float>(call.inputs[2]);
    cpu_device(call).pool().parallel_ranges(call.inputs[0].num_elements(), kActivationGrain,
                                            [&](int64_t begin, int64_t end) {
                                              const int64_t n = end - begin;
                                              if (dgate != nullptr)
                                                routines.dgate(dgate + begin, gate + begin, up + begin, dy + begin, n);
                                              if (dup != nullptr)
                                                routines.gated(dup + begin, gate + begin, dy + begin, n);
                                            });
  });
}

Verdict can_cast(const KernelRequest& r) {
  return Requirements(r).one_of("x", r.inputs[0], kStorageDTypes).one_of("y", r.outputs[0], kStorageDTypes).verdict();
}

PlanPtr prepare_cast(const KernelRequest& r, Context&) {
  const CastElements task = EADEM_CPU_DISPATCH(cast_of, cpu_device(r).isa())(r.outputs[0].dtype, r.inputs[0].dtype);
  return make_plan([task](const KernelCall& call) {
    const TensorView& x = call.inputs[0];
    const TensorView& y = call.outputs[0];
    if (!y.defined()) return;
    EADEM_CHECK(x.is_contiguous() && y.is_contiguous(), "cast of {} to {}", to_string(x), to_string(y));
    cpu_device(call).pool().parallel_ranges(x.num_elements(), kGrain,
                                            [&](int64_t begin, int64_t end) { task(y.data, x.data, begin, end); });
  });
}

constexpr Kernel kAdd{"cpu_vectors", Pass::forward, can_all_f32, prepare_add};
constexpr Kernel kAddInference{"cpu_vectors", Pass::inference, can_all_f32, prepare_add};
constexpr Kernel kMul{"cpu_vectors", Pass::forward, can_all_f32, prepare_mul};
constexpr Kernel kMulInference{"cpu_vectors", Pass::inference, can_all_f32, prepare_mul};
constexpr Kernel kMulBackward{"cpu_vectors", Pass::backward, can_all_f32, prepare_mul_backward};
constexpr Kernel kScale{"cpu_vectors", Pass::forward, can_all_f32, prepare_scale};
constexpr Kernel kScaleInference{"cpu_vectors", Pass::inference, can_all_f32, prepare_scale};
constexpr Kernel kScaleBackward{"cpu_vectors", Pass::backward, can_all_f32, prepare_scale_backward};
constexpr Kernel kActivation{"cpu_vectors", Pass::forward, can_all_f32, prepare_activation};
constexpr Kernel kActivationInference{"cpu_vectors", Pass::inference, can_all_f32, prepare_activation};
constexpr Kernel kActivationBackward{"cpu_vectors", Pass::backward, can_all_f32, prepare_activation_backward};
constexpr Kernel kGated{"cpu_vectors", Pass::forward, can_all_f32, prepare_gated_activation};
constexpr Kernel kGatedInference{"cpu_vectors", Pass::inference, can_all_f32, prepare_gated_activation};
constexpr Kernel kGatedBackward{"cpu_vectors", Pass::backward, can_all_f32, prepare_gated_activation_backward};
constexpr Kernel kCast{"cpu_vectors", Pass::forward, can_cast, prepare_cast};
constexpr Kernel kCastInference{"cpu_vectors", Pass::inference, can_cast, prepare_cast};
constexpr Kernel kCastBackward{"cpu_vectors", Pass::backward, can_cast, prepare_cast};

}  // namespace

KernelList add_kernels() { return {&kAdd, &kAddInference}; }
KernelList mul_kernels() { return {&kMul, &kMulInference, &kMulBackward}; }
KernelList scale_kernels() { return {&kScale, &kScaleInference, &kScaleBackward}; }
KernelList activation_kernels() { return {&kActivation, &kActivationInference, &kActivationBackward}; }
KernelList gated_activation_kernels() { return {&kGated, &kGatedInference, &kGatedBackward}; }
KernelList cast_kernels() { return {&kCast, &kCastInference, &kCastBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
