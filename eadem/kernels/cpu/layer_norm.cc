// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/layer_norm.h"

#include <algorithm>
#include <cmath>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/layer_norm.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_LAYER_NORM_PARAMS_
#define EADEM_KERNELS_CPU_LAYER_NORM_PARAMS_
namespace eadem::kernels::cpu {
namespace {

struct LayerNormRows {
  float* y;            // [rows, hidden]; may be x
  const float* x;      // [rows, hidden]
  const void* weight;  // [hidden]
  const void* bias;    // [hidden] or null
  float* mean;         // [rows] or null
  float* inv_std;      // [rows] or null
  int64_t hidden;
  float eps;
};

struct LayerNormGradient {
  float* dx;             // [rows, hidden] or null
  float* dweight;        // [hidden] or null
  float* dbias;          // [hidden] or null
  const float* x;        // [rows, hidden]
  const void* weight;    // [hidden]
  const float* mean;     // [rows]
  const float* inv_std;  // [rows]
  const float* dy;       // [rows, hidden]
  int64_t rows, hidden;
};

// The routines for one dtype of weight and bias.
struct LayerNormRoutines {
  void (*rows)(const LayerNormRows& p, int64_t begin, int64_t end);
  void (*dx)(const LayerNormGradient& p, int64_t begin, int64_t end);
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

template <typename Weight>
void layer_norm_rows(const LayerNormRows& p, int64_t begin, int64_t end) {
  const Weight* weight = static_cast<const Weight*>(p.weight);
  const Weight* bias = static_cast<const Weight*>(p.bias);
  const auto count = static_cast<float>(p.hidden);
  for (int64_t r = begin; r < end; ++r) {
    const float* x = p.x + r * p.hidden;
    float* y = p.y + r * p.hidden;

    // 1. The mean, which is subtracted.
    const float mean = reduce(
                           p.hidden, [](Vec acc, Vec v) { return hn::Add(acc, v); }, x) /
                       count;
    map(
        y, p.hidden, [m = set(mean)](Vec v) { return hn::Sub(v, m); }, x);

    // 2. The deviation.
    const float squares = reduce(
        p.hidden, [](Vec acc, Vec v) { return hn::MulAdd(v, v, acc); }, static_cast<const float*>(y));
    const float inv_std = 1.0f / std::sqrt(squares / count + p.eps);
    if (p.mean != nullptr) p.mean[r] = mean;
    if (p.inv_std != nullptr) p.inv_std[r] = inv_std;

    // 3. Scale and shift.
    const Vec scale = set(inv_std);
    if (bias == nullptr)
      map(
          y, p.hidden, [scale](Vec v, Vec w) { return hn::Mul(hn::Mul(v, scale), w); }, static_cast<const float*>(y),
          weight);
    else
      map(
          y, p.hidden, [scale](Vec v, Vec w, Vec b) { return hn::MulAdd(hn::Mul(v, scale), w, b); },
          static_cast<const float*>(y), weight, bias);
  }
}

// dx = s (g - mean(g) - z mean(g z)),  g = w dy,  z = (x - mean) s,  s = inv_std
template <typename Weight>
void layer_norm_dx(const LayerNormGradient& p, int64_t begin, int64_t end) {
  const Weight* weight = static_cast<const Weight*>(p.weight);
  const auto count = static_cast<float>(p.hidden);
  for (int64_t r = begin; r < end; ++r) {
    const float* x = p.x + r * p.hidden;
    const float* dy = p.dy + r * p.hidden;
    const Vec mean = set(p.mean[r]), s = set(p.inv_std[r]);
    const float g_mean = reduce(
                             p.hidden, [](Vec acc, Vec w, Vec g) { return hn::MulAdd(w, g, acc); }, weight, dy) /
                         count;
    const float gz_mean =
        reduce(
            p.hidden,
            [&](Vec acc, Vec v, Vec w, Vec g) { return hn::MulAdd(hn::Mul(w, g), hn::Mul(hn::Sub(v, mean), s), acc); },
            x, weight, dy) /
        count;
    map(
        p.dx + r * p.hidden, p.hidden,
        [&, along = set(gz_mean), centre = set(g_mean)](Vec v, Vec w, Vec g) {
          const Vec z = hn::Mul(hn::Sub(v, mean), s);
          return hn::Mul(s, hn::Sub(hn::Mul(w, g), hn::MulAdd(z, along, centre)));
        },
        x, weight, dy);
  }
}

// dweight[h] += sum over rows of dy z, dbias[h] += sum over rows of dy, for h in [begin, end): each column is one chain
// over the rows.
void layer_norm_columns(const LayerNormGradient& p, int64_t begin, int64_t end) {
  for (int64_t h = begin; h < end; h += kLanes) {
    const int64_t lanes = std::min(kLanes, end - h);
    const auto at = [&](const float* row) { return lanes == kLanes ? load(row) : load_n(row, lanes); };
    Vec weight_sum = zero(), bias_sum = zero();
    for (int64_t r = 0; r < p.rows; ++r) {
      const Vec dy = at(p.dy + r * p.hidden + h);
      const Vec z = hn::Mul(hn::Sub(at(p.x + r * p.hidden + h), set(p.mean[r])), set(p.inv_std[r]));
      weight_sum = hn::MulAdd(dy, z, weight_sum);
      bias_sum = hn::Add(bias_sum, dy);
    }
    const auto add_to = [&](float* gradient, Vec sum) {
      if (gradient == nullptr) return;
      map(
          gradient + h, lanes, [sum](Vec d) { return hn::Add(d, sum); }, static_cast<const float*>(gradient + h));
    };
    add_to(p.dweight, weight_sum);
    add_to(p.dbias, bias_sum);
  }
}

LayerNormRoutines layer_norm_routines(DType weight) {
  return with_dtype(weight, [](auto* type) -> LayerNormRoutines {
    using Weight = ElementOf<decltype(type)>;
    return {layer_norm_rows<Weight>, layer_norm_dx<Weight>};
  });
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(layer_norm_routines);
EADEM_CPU_EXPORT(layer_norm_columns);

namespace {

int64_t layer_norm_grain(int64_t hidden) { return std::max<int64_t>(1, 8192 / std::max<int64_t>(hidden, 1)); }

const void* layer_norm_parameter(const TensorView& view) {
  EADEM_CHECK(!view.defined() || view.is_contiguous(), "{} is not contiguous", to_string(view));
  return view.data;
}

LayerNormRoutines layer_norm_routines_of(const KernelRequest& r) {
  return EADEM_CPU_DISPATCH(layer_norm_routines, cpu_device(r).isa())(r.inputs[1].dtype);
}

Verdict can_layer_norm(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("x", r.inputs[0]).one_of("weight", r.inputs[1], kStorageDTypes);
  requirements.one_of("bias", r.inputs[2], {r.inputs[1].dtype});
  for (const TensorType& type : r.outputs) requirements.f32("an output", type);
  return requirements.verdict();
}

PlanPtr prepare_layer_norm(const KernelRequest& r, Context&) {
  const float eps = r.attrs.get<LayerNormAttrs>().eps;
  return make_plan([task = layer_norm_routines_of(r).rows, eps](const KernelCall& call) {
    const TensorView& x = call.inputs[0];
    const bool saves = call.outputs.size() > 1;
    const LayerNormRows params{.y = elements<float>(call.outputs[0]),
                               .x = elements<const float>(x),
                               .weight = layer_norm_parameter(call.inputs[1]),
                               .bias = layer_norm_parameter(call.inputs[2]),
                               .mean = saves ? elements<float>(call.outputs[1]) : nullptr,
                               .inv_std = saves ? elements<float>(call.outputs[2]) : nullptr,
                               .hidden = x.shape.back(),
                               .eps = eps};
    cpu_device(call).pool().parallel_ranges(x.shape.num_rows(), layer_norm_grain(params.hidden),
                                            [&](int64_t begin, int64_t end) { task(params, begin, end); });
  });
}

Verdict can_layer_norm_backward(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.one_of("weight", r.inputs[1], kStorageDTypes);
  for (const size_t port : {0, 2, 3, 4}) requirements.f32("x, mean, inv_std or dy", r.inputs[port]);
  for (const TensorType& type : r.outputs) requirements.f32("a gradient", type);
  return requirements.verdict();
}

PlanPtr prepare_layer_norm_backward(const KernelRequest& r, Context&) {
  const auto dx = layer_norm_routines_of(r).dx;
  const auto columns = EADEM_CPU_DISPATCH(layer_norm_columns, cpu_device(r).isa());
  return make_plan([dx, columns](const KernelCall& call) {
    const TensorView& x = call.inputs[0];
    const LayerNormGradient params{.dx = elements<float>(call.outputs[0]),
                                   .dweight = elements<float>(call.outputs[1]),
                                   .dbias = elements<float>(call.outputs[2]),
                                   .x = elements<const float>(x),
                                   .weight = layer_norm_parameter(call.inputs[1]),
                                   .mean = elements<const float>(call.inputs[2]),
                                   .inv_std = elements<const float>(call.inputs[3]),
                                   .dy = elements<const float>(call.inputs[4]),
                                   .rows = x.shape.num_rows(),
                                   .hidden = x.shape.back()};
    ThreadPool& pool = cpu_device(call).pool();
    if (params.dx != nullptr)
      pool.parallel_ranges(params.rows, layer_norm_grain(params.hidden),
                           [&](int64_t begin, int64_t end) { dx(params, begin, end); });
    if (params.dweight != nullptr || params.dbias != nullptr)
      pool.parallel_for(ceil_div(params.hidden, 32), [&](int64_t block, int) {
        columns(params, block * 32, std::min(params.hidden, block * 32 + 32));
      });
  });
}

constexpr Kernel kLayerNorm{"cpu_rows", Pass::forward, can_layer_norm, prepare_layer_norm};
constexpr Kernel kLayerNormInference{"cpu_rows", Pass::inference, can_layer_norm, prepare_layer_norm};
constexpr Kernel kLayerNormBackward{"cpu_rows", Pass::backward, can_layer_norm_backward, prepare_layer_norm_backward};

}  // namespace

KernelList layer_norm_kernels() { return {&kLayerNorm, &kLayerNormInference, &kLayerNormBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
