// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/rms_norm.h"

#include <algorithm>
#include <cmath>

#include "eadem/kernels/backends.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/fusions.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/rms_norm.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_RMS_NORM_PARAMS_
#define EADEM_KERNELS_CPU_RMS_NORM_PARAMS_
namespace eadem::kernels::cpu {
namespace {

// y[r, :] = x[r, :] / rms * weight for rows [begin, end); with `residual`, x is first replaced by x + residual.
struct RmsNormRows {
  float* y;               // [rows, hidden]
  const float* x;         // [rows, hidden]
  const float* residual;  // [rows, hidden] or null
  float* sum;             // [rows, hidden]: x + residual; null without residual
  const void* weight;     // [hidden]
  DType weight_dtype;
  float* inv_rms;  // [rows] or null
  int64_t hidden;
  float eps;
};

struct RmsNormGradient {
  float* dx;           // [rows, hidden] or null
  float* dweight;      // [hidden] or null
  const float* x;      // [rows, hidden]
  const void* weight;  // [hidden]
  DType weight_dtype;
  const float* inv_rms;  // [rows]
  const float* dy;       // [rows, hidden]
  int64_t rows, hidden;
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

template <typename Function>
void with_weight(DType dtype, const void* weight, Function f) {
  switch (dtype) {
    case DType::bf16: return f(static_cast<const bf16_t*>(weight));
    case DType::f16: return f(static_cast<const f16_t*>(weight));
    default: return f(static_cast<const float*>(weight));
  }
}

void rms_norm_rows(const RmsNormRows& p, int64_t begin, int64_t end) {
  with_weight(p.weight_dtype, p.weight, [&](const auto* weight) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = p.x + r * p.hidden;

      // 1. The residual sum.
      if (p.residual != nullptr) {
        float* sum = p.sum + r * p.hidden;
        map(
            sum, p.hidden, [](Vec a, Vec b) { return hn::Add(a, b); }, x, p.residual + r * p.hidden);
        x = sum;
      }

      // 2. Mean square.
      const float squares = reduce(
          p.hidden, [](Vec acc, Vec v) { return hn::MulAdd(v, v, acc); }, x);
      const float inv_rms = 1.0f / std::sqrt(squares / static_cast<float>(p.hidden) + p.eps);
      if (p.inv_rms != nullptr) p.inv_rms[r] = inv_rms;

      // 3. Scale and store.
      map(
          p.y + r * p.hidden, p.hidden, [scale = set(inv_rms)](Vec v, Vec w) { return hn::Mul(hn::Mul(v, scale), w); },
          x, weight);
    }
  });
}

// dx = s (w dy) - x s^3 / hidden * sum(w dy x),  s = inv_rms
void rms_norm_dx(const RmsNormGradient& p, int64_t begin, int64_t end) {
  with_weight(p.weight_dtype, p.weight, [&](const auto* weight) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = p.x + r * p.hidden;
      const float* dy = p.dy + r * p.hidden;
      const float s = p.inv_rms[r];
      const float dot = reduce(
          p.hidden, [](Vec acc, Vec v, Vec w, Vec g) { return hn::MulAdd(hn::Mul(w, g), v, acc); }, x, weight, dy);
      const float along_x = s * s * s * (dot / static_cast<float>(p.hidden));
      map(
          p.dx + r * p.hidden, p.hidden,
          [scale = set(s), along = set(along_x)](Vec v, Vec w, Vec g) {
            return hn::NegMulAdd(v, along, hn::Mul(scale, hn::Mul(w, g)));
          },
          x, weight, dy);
    }
  });
}

// dweight[h] += sum over rows of dy x / rms, for h in [begin, end): each column is one chain over the rows.
void rms_norm_dweight(const RmsNormGradient& p, int64_t begin, int64_t end) {
  for (int64_t h = begin; h < end; h += kLanes) {
    const int64_t lanes = std::min(kLanes, end - h);
    Vec sum = zero();
    for (int64_t r = 0; r < p.rows; ++r) {
      const float* x = p.x + r * p.hidden + h;
      const float* dy = p.dy + r * p.hidden + h;
      const Vec scaled = hn::Mul(lanes == kLanes ? load(x) : load_n(x, lanes), set(p.inv_rms[r]));
      sum = hn::MulAdd(lanes == kLanes ? load(dy) : load_n(dy, lanes), scaled, sum);
    }
    map(
        p.dweight + h, lanes, [&](Vec d) { return hn::Add(d, sum); }, p.dweight + h);
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

HWY_EXPORT(rms_norm_rows);
HWY_EXPORT(rms_norm_dx);
HWY_EXPORT(rms_norm_dweight);

namespace {

int64_t row_grain(int64_t hidden) { return std::max<int64_t>(1, 8192 / std::max<int64_t>(hidden, 1)); }

void run_rows(const KernelCall& call, const RmsNormRows& params, int64_t rows) {
  const auto task = EADEM_CPU_DISPATCH(rms_norm_rows, cpu_device(call).isa());
  cpu_device(call).pool().parallel_ranges(rows, row_grain(params.hidden),
                                          [&](int64_t begin, int64_t end) { task(params, begin, end); });
}

Verdict can_rms_norm(const KernelRequest& r) {
  return Requirements(r)
      .f32("x", r.inputs[0])
      .one_of("weight", r.inputs[1], {DType::f32, DType::bf16, DType::f16})
      .f32("y", r.outputs[0])
      .f32("inv_rms", r.outputs.size() > 1 ? r.outputs[1] : absent_port())
      .at_cost(4 * elements_of(r, r.inputs[0]));
}

void run_rms_norm(const KernelCall& call) {
  const TensorView& x = call.inputs[0];
  const TensorView& weight = call.inputs[1];
  EADEM_CHECK(weight.is_contiguous(), "weight {} is not contiguous", to_string(weight));
  run_rows(call,
           {.y = elements<float>(call.outputs[0]),
            .x = elements<const float>(x),
            .residual = nullptr,
            .sum = nullptr,
            .weight = weight.data,
            .weight_dtype = weight.dtype,
            .inv_rms = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr,
            .hidden = x.shape.back(),
            .eps = call.attrs.get<RmsNormAttrs>().eps},
           x.shape.num_rows());
}

Verdict can_rms_norm_backward(const KernelRequest& r) {
  return Requirements(r)
      .f32("x", r.inputs[0])
      .one_of("weight", r.inputs[1], {DType::f32, DType::bf16, DType::f16})
      .f32("inv_rms", r.inputs[2])
      .f32("dy", r.inputs[3])
      .f32("dx", r.outputs[0])
      .f32("dweight", r.outputs[1])
      .at_cost(12 * elements_of(r, r.inputs[0]));
}

void run_rms_norm_backward(const KernelCall& call) {
  const TensorView& x = call.inputs[0];
  const RmsNormGradient params{.dx = elements<float>(call.outputs[0]),
                               .dweight = elements<float>(call.outputs[1]),
                               .x = elements<const float>(x),
                               .weight = call.inputs[1].data,
                               .weight_dtype = call.inputs[1].dtype,
                               .inv_rms = elements<const float>(call.inputs[2]),
                               .dy = elements<const float>(call.inputs[3]),
                               .rows = x.shape.num_rows(),
                               .hidden = x.shape.back()};
  CpuDevice& device = cpu_device(call);
  if (params.dx != nullptr) {
    const auto task = EADEM_CPU_DISPATCH(rms_norm_dx, device.isa());
    device.pool().parallel_ranges(params.rows, row_grain(params.hidden),
                                  [&](int64_t begin, int64_t end) { task(params, begin, end); });
  }
  if (params.dweight != nullptr) {
    const auto task = EADEM_CPU_DISPATCH(rms_norm_dweight, device.isa());
    device.pool().parallel_for(ceil_div(params.hidden, 32), [&](int64_t block, int) {
      task(params, block * 32, std::min(params.hidden, block * 32 + 32));
    });
  }
}

Verdict can_add_rms_norm(const KernelRequest& r) {
  return Requirements(r)
      .f32("a", r.inputs[0])
      .f32("b", r.inputs[1])
      .one_of("weight", r.inputs[2], {DType::f32, DType::bf16, DType::f16})
      .f32("sum", r.outputs[0])
      .f32("y", r.outputs[1])
      .at_cost(5 * elements_of(r, r.inputs[0]));
}

void run_add_rms_norm(const KernelCall& call) {
  const TensorView& a = call.inputs[0];
  const TensorView& weight = call.inputs[2];
  EADEM_CHECK(weight.is_contiguous(), "weight {} is not contiguous", to_string(weight));
  run_rows(call,
           {.y = elements<float>(call.outputs[1]),
            .x = elements<const float>(a),
            .residual = elements<const float>(call.inputs[1]),
            .sum = elements<float>(call.outputs[0]),
            .weight = weight.data,
            .weight_dtype = weight.dtype,
            .inv_rms = nullptr,
            .hidden = a.shape.back(),
            .eps = call.attrs.get<RmsNormAttrs>().eps},
           a.shape.num_rows());
}

constexpr Kernel kForward{"cpu_rows", Pass::forward, can_rms_norm, run_rms_norm};
constexpr Kernel kInference{"cpu_rows", Pass::inference, can_rms_norm, run_rms_norm};
constexpr Kernel kBackward{"cpu_rows", Pass::backward, can_rms_norm_backward, run_rms_norm_backward};
constexpr Kernel kAddRmsNorm{"cpu_rows", Pass::inference, can_add_rms_norm, run_add_rms_norm};

}  // namespace

KernelList rms_norm_kernels() { return {&kForward, &kInference, &kBackward}; }
KernelList add_rms_norm_kernels() { return {&kAddRmsNorm}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
