// SPDX-License-Identifier: Apache-2.0
//
// add_bias and select_heads: what stands beside the products that ranks divide.
#include <algorithm>
#include <cstring>

#include "eadem/kernels/add_bias.h"
#include "eadem/kernels/attention/select_heads.h"
#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/tensor_parallel.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_TENSOR_PARALLEL_ROUTINES_
#define EADEM_KERNELS_CPU_TENSOR_PARALLEL_ROUTINES_
namespace eadem::kernels::cpu {
namespace {

using AddBiasRows = void (*)(float* y, const float* x, const void* bias, int64_t n, int64_t begin, int64_t end);

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// y[r, :] = x[r, :] + bias for r in [begin, end)
template <typename T>
void add_bias_rows(float* y, const float* x, const void* bias, int64_t n, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r)
    map(
        y + r * n, n, [](Vec u, Vec v) { return hn::Add(u, v); }, x + r * n, static_cast<const T*>(bias));
}

AddBiasRows add_bias_rows_of(DType bias) {
  return with_dtype(bias, [](auto* type) -> AddBiasRows { return add_bias_rows<ElementOf<decltype(type)>>; });
}

// y += x
void add_to(float* y, const float* x, int64_t n) {
  map(
      y, n, [](Vec u, Vec v) { return hn::Add(u, v); }, y, x);
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(add_bias_rows_of);
EADEM_CPU_EXPORT(add_to);

namespace {

using AddTo = void (*)(float* y, const float* x, int64_t n);

// Rows of one task: about 8192 elements.
int64_t task_rows(int64_t width) { return std::max<int64_t>(1, 8192 / std::max<int64_t>(width, 1)); }

// ---- add_bias

Verdict can_add_bias(const KernelRequest& r) {
  return Requirements(r)
      .f32("x", r.inputs[0])
      .one_of("bias", r.inputs[1], {DType::f32, DType::bf16, DType::f16})
      .f32("y", r.outputs[0])
      .verdict();
}

PlanPtr prepare_add_bias(const KernelRequest& r, Context&) {
  return make_plan(
      [add = EADEM_CPU_DISPATCH(add_bias_rows_of, cpu_device(r).isa())(r.inputs[1].dtype)](const KernelCall& call) {
        const TensorView& bias = call.inputs[1];
        const int64_t n = bias.shape[0];
        const float* x = elements<const float>(call.inputs[0]);
        float* y = elements<float>(call.outputs[0]);
        cpu_device(call).pool().parallel_ranges(call.inputs[0].shape[0], task_rows(n), [&](int64_t begin, int64_t end) {
          add(y, x, bias.data, n, begin, end);
        });
      });
}

Verdict can_add_bias_backward(const KernelRequest& r) {
  return Requirements(r).f32("dy", r.inputs[0]).f32("dx", r.outputs[0]).f32("dbias", r.outputs[1]).verdict();
}

void run_add_bias_backward(const KernelCall& call, AddTo add) {
  const float* dy = elements<const float>(call.inputs[0]);
  float *dx = elements<float>(call.outputs[0]), *dbias = elements<float>(call.outputs[1]);
  const int64_t rows = call.inputs[0].shape[0], n = call.inputs[0].shape[1];
  if (dx != nullptr) std::copy_n(dy, rows * n, dx);
  if (dbias == nullptr) return;
  // Each task owns some columns, so rows are added in token order on any thread.
  cpu_device(call).pool().parallel_for(ceil_div(n, 64), [&](int64_t block, int) {
    const int64_t begin = block * 64, width = std::min<int64_t>(64, n - begin);
    for (int64_t r = 0; r < rows; ++r) add(dbias + begin, dy + r * n + begin, width);
  });
}

PlanPtr prepare_add_bias_backward(const KernelRequest& r, Context&) {
  return make_plan([add = EADEM_CPU_DISPATCH(add_to, cpu_device(r).isa())](const KernelCall& call) {
    run_add_bias_backward(call, add);
  });
}

// ---- select_heads

Verdict can_select_heads(const KernelRequest& r) {
  return Requirements(r).f32("x", r.inputs[0]).f32("y", r.outputs[0]).verdict();
}

void run_select_heads(const KernelCall& call, const SelectHeadsAttrs& attrs) {
  const int64_t width = call.inputs[0].shape[2];
  const float* x = elements<const float>(call.inputs[0]);
  float* y = elements<float>(call.outputs[0]);
  cpu_device(call).pool().parallel_ranges(
      call.inputs[0].shape[0], task_rows(attrs.own_heads * width), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
          for (int64_t i = 0; i < attrs.own_heads; ++i)
            std::copy_n(x + (t * attrs.heads + attrs.head(i)) * width, width, y + (t * attrs.own_heads + i) * width);
      });
}

void run_select_heads_backward(const KernelCall& call, const SelectHeadsAttrs& attrs, AddTo add) {
  float* dx = elements<float>(call.outputs[0]);
  if (dx == nullptr) return;
  const int64_t width = call.inputs[0].shape[2];
  const float* dy = elements<const float>(call.inputs[0]);
  cpu_device(call).pool().parallel_ranges(
      call.inputs[0].shape[0], task_rows(attrs.heads * width), [&](int64_t begin, int64_t end) {
        std::fill(dx + begin * attrs.heads * width, dx + end * attrs.heads * width, 0.0f);
        for (int64_t t = begin; t < end; ++t)
          for (int64_t i = 0; i < attrs.own_heads; ++i)
            add(dx + (t * attrs.heads + attrs.head(i)) * width, dy + (t * attrs.own_heads + i) * width, width);
      });
}

PlanPtr prepare_select_heads(const KernelRequest& r, Context&) {
  return make_plan(
      [attrs = r.attrs.get<SelectHeadsAttrs>()](const KernelCall& call) { run_select_heads(call, attrs); });
}

PlanPtr prepare_select_heads_backward(const KernelRequest& r, Context&) {
  return make_plan([attrs = r.attrs.get<SelectHeadsAttrs>(), add = EADEM_CPU_DISPATCH(add_to, cpu_device(r).isa())](
                       const KernelCall& call) { run_select_heads_backward(call, attrs, add); });
}

constexpr Kernel kBiasForward{"cpu_rows", Pass::forward, can_add_bias, prepare_add_bias};
constexpr Kernel kBias{"cpu_rows", Pass::inference, can_add_bias, prepare_add_bias};
constexpr Kernel kBiasBackward{"cpu_columns", Pass::backward, can_add_bias_backward, prepare_add_bias_backward};
constexpr Kernel kHeadsForward{"cpu_copy", Pass::forward, can_select_heads, prepare_select_heads};
constexpr Kernel kHeads{"cpu_copy", Pass::inference, can_select_heads, prepare_select_heads};
constexpr Kernel kHeadsBackward{"cpu_add", Pass::backward, can_select_heads, prepare_select_heads_backward};

}  // namespace

KernelList add_bias_kernels() { return {&kBiasForward, &kBias, &kBiasBackward}; }
KernelList select_heads_kernels() { return {&kHeadsForward, &kHeads, &kHeadsBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
