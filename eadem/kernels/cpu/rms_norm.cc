// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/rms_norm.h"

#include <algorithm>
#include <cmath>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/row_rounder.h"
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
  float* y;               // rows that are y_stride apart; a stride of 0 keeps the last one only
  const float* x;         // [rows, hidden]
  const float* residual;  // [rows, hidden] or null
  float* sum;             // [rows, hidden]: x + residual; null without residual
  const void* weight;     // [groups, hidden]; row r is of group r % groups
  float* inv_rms;         // [rows] or null
  int64_t hidden;
  float eps;
  int64_t y_stride;
  int64_t groups = 1;
};

struct RmsNormGradient {
  float* dx;             // [rows, hidden] or null
  float* dweight;        // [groups, hidden] or null
  const float* x;        // [rows, hidden]
  const void* weight;    // [groups, hidden]; row r is of group r % groups
  const float* inv_rms;  // [rows]
  const float* dy;       // [rows, hidden]
  const float* dsum;     // [rows, hidden], added to dx; or null
  int64_t rows, hidden, groups;
};

// The routines for one dtype of weight.
struct RmsNormRoutines {
  void (*rows)(const RmsNormRows& p, int64_t begin, int64_t end);
  void (*dx)(const RmsNormGradient& p, int64_t begin, int64_t end);
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// sum = x + residual; y = sum * scale * weight
template <typename Weight>
void add_and_scale(float* sum, float* y, const float* x, const float* residual, const Weight* weight, float scale,
                   int64_t hidden) {
  const Vec factor = set(scale);
  int64_t h = 0;
  for (; h + kLanes <= hidden; h += kLanes) {
    const Vec added = hn::Add(load(x + h), load(residual + h));
    store(added, sum + h);
    store(hn::Mul(hn::Mul(added, factor), load(weight + h)), y + h);
  }
  if (h == hidden) return;
  const int64_t left = hidden - h;
  const Vec added = hn::Add(load_n(x + h, left), load_n(residual + h, left));
  store_n(added, sum + h, left);
  store_n(hn::Mul(hn::Mul(added, factor), load_n(weight + h, left)), y + h, left);
}

// Each row is read twice: for its mean square, then to be scaled. A sum is computed both times: a store and a load of
// it would take longer.
template <typename Weight>
void rms_norm_rows(const RmsNormRows& p, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const float* x = p.x + r * p.hidden;
    const float* residual = p.residual == nullptr ? nullptr : p.residual + r * p.hidden;
    const Weight* weight = static_cast<const Weight*>(p.weight) + r % p.groups * p.hidden;
    float* y = p.y + r * p.y_stride;

    const auto add_square = [](Vec acc, Vec v) { return hn::MulAdd(v, v, acc); };
    const float squares =
        residual == nullptr
            ? reduce(p.hidden, add_square, x)
            : reduce(
                  p.hidden, [&](Vec acc, Vec v, Vec w) { return add_square(acc, hn::Add(v, w)); }, x, residual);
    const float inv_rms = 1.0f / std::sqrt(squares / static_cast<float>(p.hidden) + p.eps);
    if (p.inv_rms != nullptr) p.inv_rms[r] = inv_rms;

    if (residual != nullptr)
      add_and_scale(p.sum + r * p.hidden, y, x, residual, weight, inv_rms, p.hidden);
    else
      map(
          y, p.hidden, [scale = set(inv_rms)](Vec v, Vec w) { return hn::Mul(hn::Mul(v, scale), w); }, x, weight);
  }
}

// dx = s (w dy) - x s^3 / hidden * sum(w dy x) (+ dsum),  s = inv_rms
template <typename Weight>
void rms_norm_dx(const RmsNormGradient& p, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const Weight* weight = static_cast<const Weight*>(p.weight) + r % p.groups * p.hidden;
    const float* x = p.x + r * p.hidden;
    const float* dy = p.dy + r * p.hidden;
    const float s = p.inv_rms[r];
    const float dot = reduce(
        p.hidden, [](Vec acc, Vec v, Vec w, Vec g) { return hn::MulAdd(hn::Mul(w, g), v, acc); }, x, weight, dy);
    const float along_x = s * s * s * (dot / static_cast<float>(p.hidden));
    const auto gradient = [scale = set(s), along = set(along_x)](Vec v, Vec w, Vec g) {
      return hn::NegMulAdd(v, along, hn::Mul(scale, hn::Mul(w, g)));
    };
    float* dx = p.dx + r * p.hidden;
    if (p.dsum == nullptr)
      map(dx, p.hidden, gradient, x, weight, dy);
    else
      map(
          dx, p.hidden, [&](Vec v, Vec w, Vec g, Vec d) { return hn::Add(d, gradient(v, w, g)); }, x, weight, dy,
          p.dsum + r * p.hidden);
  }
}

// dweight[group, h] += sum over the group's rows of dy x / rms, for h in [begin, end): each column is one chain over
// the rows.
void rms_norm_dweight(const RmsNormGradient& p, int64_t group, int64_t begin, int64_t end) {
  for (int64_t h = begin; h < end; h += kLanes) {
    const int64_t lanes = std::min(kLanes, end - h);
    Vec sum = zero();
    for (int64_t r = group; r < p.rows; r += p.groups) {
      const float* x = p.x + r * p.hidden + h;
      const float* dy = p.dy + r * p.hidden + h;
      const Vec scaled = hn::Mul(lanes == kLanes ? load(x) : load_n(x, lanes), set(p.inv_rms[r]));
      sum = hn::MulAdd(lanes == kLanes ? load(dy) : load_n(dy, lanes), scaled, sum);
    }
    float* dweight = p.dweight + group * p.hidden + h;
    map(
        dweight, lanes, [&](Vec d) { return hn::Add(d, sum); }, static_cast<const float*>(dweight));
  }
}

RmsNormRoutines rms_norm_routines(DType weight) {
  return with_dtype(weight, [](auto* type) -> RmsNormRoutines {
    using Weight = ElementOf<decltype(type)>;
    return {rms_norm_rows<Weight>, rms_norm_dx<Weight>};
  });
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(rms_norm_routines);
EADEM_CPU_EXPORT(rms_norm_dweight);

namespace {

int64_t row_grain(int64_t hidden) { return std::max<int64_t>(1, 8192 / std::max<int64_t>(hidden, 1)); }

RmsNormRoutines routines_of(const KernelRequest& r, size_t weight) {
  return EADEM_CPU_DISPATCH(rms_norm_routines, cpu_device(r).isa())(r.inputs[weight].dtype);
}

int64_t groups_of(const TensorView& weight) { return weight.shape.rank() == 2 ? weight.shape[0] : 1; }

const void* contiguous_weight(const TensorView& weight) {
  EADEM_CHECK(weight.is_contiguous(), "weight {} is not contiguous", to_string(weight));
  return weight.data;
}

Verdict can_rms_norm(const KernelRequest& r) {
  return Requirements(r)
      .f32("x", r.inputs[0])
      .one_of("weight", r.inputs[1], kStorageDTypes)
      .f32("y", r.outputs[0])
      .f32("inv_rms", r.outputs.size() > 1 ? r.outputs[1] : unconnected_port())
      .verdict();
}

PlanPtr prepare_rms_norm(const KernelRequest& r, Context&) {
  const float eps = r.attrs.get<RmsNormAttrs>().eps;
  return make_plan([task = routines_of(r, 1).rows, eps](const KernelCall& call) {
    const TensorView& x = call.inputs[0];
    const RmsNormRows params{.y = elements<float>(call.outputs[0]),
                             .x = elements<const float>(x),
                             .residual = nullptr,
                             .sum = nullptr,
                             .weight = contiguous_weight(call.inputs[1]),
                             .inv_rms = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr,
                             .hidden = x.shape.back(),
                             .eps = eps,
                             .y_stride = x.shape.back(),
                             .groups = groups_of(call.inputs[1])};
    cpu_device(call).pool().parallel_ranges(x.shape.num_rows(), row_grain(params.hidden),
                                            [&](int64_t begin, int64_t end) { task(params, begin, end); });
  });
}

// The last input of each is dy; that of add_rms_norm has dsum before it.
constexpr size_t kDsum = 3;

Verdict can_rms_norm_backward(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("x", r.inputs[0]).one_of("weight", r.inputs[1], kStorageDTypes).f32("inv_rms", r.inputs[2]);
  for (size_t i = kDsum; i < r.inputs.size(); ++i) requirements.f32("the gradient of an output", r.inputs[i]);
  return requirements.f32("dx", r.outputs[0]).f32("dweight", r.outputs[1]).verdict();
}

PlanPtr prepare_rms_norm_backward(const KernelRequest& r, Context&) {
  const auto dx = routines_of(r, 1).dx;
  const auto dweight = EADEM_CPU_DISPATCH(rms_norm_dweight, cpu_device(r).isa());
  const bool adds = r.inputs.size() > kDsum + 1;
  return make_plan([dx, dweight, adds](const KernelCall& call) {
    const TensorView& x = call.inputs[0];
    const RmsNormGradient params{.dx = elements<float>(call.outputs[0]),
                                 .dweight = elements<float>(call.outputs[1]),
                                 .x = elements<const float>(x),
                                 .weight = contiguous_weight(call.inputs[1]),
                                 .inv_rms = elements<const float>(call.inputs[2]),
                                 .dy = elements<const float>(call.inputs.back()),
                                 .dsum = adds ? elements<const float>(call.inputs[kDsum]) : nullptr,
                                 .rows = x.shape.num_rows(),
                                 .hidden = x.shape.back(),
                                 .groups = groups_of(call.inputs[1])};
    ThreadPool& pool = cpu_device(call).pool();
    if (params.dx != nullptr)
      pool.parallel_ranges(params.rows, row_grain(params.hidden),
                           [&](int64_t begin, int64_t end) { dx(params, begin, end); });
    const int64_t blocks = ceil_div(params.hidden, 32);
    if (params.dweight != nullptr)
      pool.parallel_for(params.groups * blocks, [&](int64_t index, int) {
        const int64_t begin = index % blocks * 32;
        dweight(params, index / blocks, begin, std::min(params.hidden, begin + 32));
      });
  });
}

Verdict can_add_rms_norm(const KernelRequest& r) {
  return Requirements(r)
      .f32("a", r.inputs[0])
      .f32("b", r.inputs[1])
      .one_of("weight", r.inputs[2], kStorageDTypes)
      .require(r.inputs[2].rank() == 1, "there is a weight for each group")
      .f32("sum", r.outputs[0])
      .f32("y", r.outputs[1])
      .f32("inv_rms", r.outputs.size() > 2 ? r.outputs[2] : unconnected_port())
      .verdict();
}

PlanPtr prepare_add_rms_norm(const KernelRequest& r, Context&) {
  const float eps = r.attrs.get<RmsNormAttrs>().eps;
  return make_plan([task = routines_of(r, 2).rows, eps](const KernelCall& call) {
    const TensorView& a = call.inputs[0];
    const RmsNormRows params{.y = elements<float>(call.outputs[1]),
                             .x = elements<const float>(a),
                             .residual = elements<const float>(call.inputs[1]),
                             .sum = elements<float>(call.outputs[0]),
                             .weight = contiguous_weight(call.inputs[2]),
                             .inv_rms = call.outputs.size() > 2 ? elements<float>(call.outputs[2]) : nullptr,
                             .hidden = a.shape.back(),
                             .eps = eps,
                             .y_stride = a.shape.back()};
    cpu_device(call).pool().parallel_ranges(a.shape.num_rows(), row_grain(params.hidden),
                                            [&](int64_t begin, int64_t end) { task(params, begin, end); });
  });
}

// ---- Norms whose rows are rounded: each is made in a row of scratch of its thread and rounded from there.

Verdict can_quantize_norm(const KernelRequest& r) {
  const size_t weight = r.inputs.size() - 1;
  const std::string refusal = RowRounder::refusal_of(r.attrs.get<RmsNormQuantizeAttrs>().to, cpu_device(r));
  Requirements requirements(r);
  for (size_t i = 0; i < weight; ++i) requirements.f32(weight == 1 ? "x" : "a term", r.inputs[i]);
  if (weight > 1) requirements.f32("sum", r.outputs[0]);
  requirements.require(r.inputs[weight].rank() == 1, "there is a weight for each group");
  return requirements.one_of("weight", r.inputs[weight], kStorageDTypes).require(refusal.empty(), refusal).verdict();
}

PlanPtr prepare_quantize_norm(const KernelRequest& r, Context&) {
  const CpuDevice& device = cpu_device(r);
  const auto& attrs = r.attrs.get<RmsNormQuantizeAttrs>();
  const size_t weight = r.inputs.size() - 1;
  const int64_t row_floats = round_up(r.inputs[0].fixed(1), 16);
  return make_plan(
      [=, task = routines_of(r, weight).rows, eps = attrs.norm.eps,
       rounder = RowRounder(attrs.to, device)](const KernelCall& call) {
        const bool adds = weight > 1;
        const TensorView &x = call.inputs[0], &y = call.outputs.back();
        const RmsNormRows params{.y = nullptr,
                                 .x = elements<const float>(x),
                                 .residual = adds ? elements<const float>(call.inputs[1]) : nullptr,
                                 .sum = adds ? elements<float>(call.outputs[0]) : nullptr,
                                 .weight = contiguous_weight(call.inputs[weight]),
                                 .inv_rms = nullptr,
                                 .hidden = x.shape[1],
                                 .eps = eps,
                                 .y_stride = 0};
        cpu_device(call).pool().parallel_ranges(
            x.shape[0], row_grain(params.hidden), [&](int64_t begin, int64_t end, int worker) {
              RmsNormRows rows = params;
              rows.y = static_cast<float*>(call.scratch.data) + worker * row_floats;
              for (int64_t row = begin; row < end; ++row) {
                task(rows, row, row + 1);
                rounder.round(y, {.x = rows.y, .stride = 0, .columns = rows.hidden}, row, row + 1);
              }
            });
      },
      device.pool().num_threads() * row_floats * static_cast<int64_t>(sizeof(float)));
}

constexpr Kernel kForward{"cpu_rows", Pass::forward, can_rms_norm, prepare_rms_norm};
constexpr Kernel kInference{"cpu_rows", Pass::inference, can_rms_norm, prepare_rms_norm};
constexpr Kernel kBackward{"cpu_rows", Pass::backward, can_rms_norm_backward, prepare_rms_norm_backward};
constexpr Kernel kAddRmsNorm{"cpu_rows", Pass::inference, can_add_rms_norm, prepare_add_rms_norm};
constexpr Kernel kAddRmsNormForward{"cpu_rows", Pass::forward, can_add_rms_norm, prepare_add_rms_norm};
constexpr Kernel kRounded{"cpu_rows", Pass::inference, can_quantize_norm, prepare_quantize_norm};

}  // namespace

KernelList rms_norm_kernels() { return {&kForward, &kInference, &kBackward}; }
KernelList add_rms_norm_kernels() { return {&kAddRmsNorm, &kAddRmsNormForward, &kBackward}; }
KernelList rms_norm_quantize_kernels() { return {&kRounded}; }
KernelList add_rms_norm_quantize_kernels() { return {&kRounded}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
