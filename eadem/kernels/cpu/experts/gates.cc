// SPDX-License-Identifier: Apache-2.0
//
// clamped_swiglu, gate_rows and identity_experts, with their gradients.
#include <algorithm>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/experts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/experts/gates.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// NaN stays.
HWY_INLINE Vec at_most(Vec v, Vec limit) { return hn::IfThenElse(hn::Gt(v, limit), limit, v); }
HWY_INLINE Vec within(Vec v, Vec limit) {
  const Vec least = hn::Neg(limit);
  return hn::IfThenElse(hn::Lt(v, least), least, at_most(v, limit));
}

void clamped_swiglu(float* y, const float* gate, const float* up, int64_t n, const ClampedSwigluAttrs& attrs) {
  const Vec limit = set(attrs.limit), alpha = set(attrs.alpha), offset = set(attrs.offset);
  map(
      y, n,
      [&](Vec gate_value, Vec up_value) {
        const Vec g = at_most(gate_value, limit), u = hn::Add(within(up_value, limit), offset);
        return hn::Mul(u, hn::Mul(g, sigmoid(hn::Mul(alpha, g))));
      },
      gate, up);
}

void clamped_swiglu_dgate(float* dgate, const float* gate, const float* up, const float* dy, int64_t n,
                          const ClampedSwigluAttrs& attrs) {
  const Vec limit = set(attrs.limit), alpha = set(attrs.alpha), offset = set(attrs.offset), one = set(1.0f);
  map(
      dgate, n,
      [&](Vec gate_value, Vec up_value, Vec d) {
        const Vec u = hn::Add(within(up_value, limit), offset), w = hn::Mul(alpha, gate_value);
        const Vec slope = hn::Mul(sigmoid(w), hn::MulAdd(w, sigmoid(hn::Neg(w)), one));
        return hn::IfThenZeroElse(hn::Gt(gate_value, limit), hn::Mul(hn::Mul(d, u), slope));
      },
      gate, up, dy);
}

void clamped_swiglu_dup(float* dup, const float* gate, const float* up, const float* dy, int64_t n,
                        const ClampedSwigluAttrs& attrs) {
  const Vec limit = set(attrs.limit), alpha = set(attrs.alpha);
  map(
      dup, n,
      [&](Vec gate_value, Vec up_value, Vec d) {
        const Vec g = at_most(gate_value, limit);
        return hn::IfThenZeroElse(hn::Gt(hn::Abs(up_value), limit), hn::Mul(d, hn::Mul(g, sigmoid(hn::Mul(alpha, g)))));
      },
      gate, up, dy);
}

void gate_row(float* y, const float* x, float gate, int64_t hidden) {
  map(
      y, hidden, [s = sigmoid(set(gate))](Vec v) { return hn::Mul(v, s); }, x);
}

void gate_row_backward(float* dx, float* dgate, const float* x, float gate, const float* dy, int64_t hidden) {
  if (dgate != nullptr) {
    const float s = hn::GetLane(sigmoid(set(gate))), rest = hn::GetLane(sigmoid(set(-gate)));
    *dgate = dot(dy, x, hidden) * s * rest;
  }
  if (dx != nullptr) gate_row(dx, dy, gate, hidden);
}

void share_row(float* y, const float* x, float share, int64_t hidden) {
  map(
      y, hidden, [s = set(share)](Vec v) { return hn::Mul(v, s); }, x);
}

float row_product(const float* a, const float* b, int64_t hidden) { return dot(a, b, hidden); }

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(clamped_swiglu);
EADEM_CPU_EXPORT(clamped_swiglu_dgate);
EADEM_CPU_EXPORT(clamped_swiglu_dup);
EADEM_CPU_EXPORT(gate_row);
EADEM_CPU_EXPORT(gate_row_backward);
EADEM_CPU_EXPORT(share_row);
EADEM_CPU_EXPORT(row_product);

namespace {

// Accepts requests whose ports are all f32.
Verdict can_gate_f32(const KernelRequest& r) {
  Requirements requirements(r);
  for (const TensorType& type : r.inputs) requirements.f32("an input", type);
  for (const TensorType& type : r.outputs) requirements.f32("an output", type);
  return requirements.verdict();
}

// ---- clamped_swiglu

constexpr int64_t kSwigluGrain = 2048;  // elements: a few microseconds of work

PlanPtr prepare_swiglu(const KernelRequest& r, Context&) {
  return make_plan([task = EADEM_CPU_DISPATCH(clamped_swiglu, cpu_device(r).isa()),
                    attrs = r.attrs.get<ClampedSwigluAttrs>()](const KernelCall& call) {
    float* y = elements<float>(call.outputs[0]);
    const float *gate = elements<const float>(call.inputs[0]), *up = elements<const float>(call.inputs[1]);
    cpu_device(call).pool().parallel_ranges(
        call.inputs[0].num_elements(), kSwigluGrain,
        [&](int64_t begin, int64_t end) { task(y + begin, gate + begin, up + begin, end - begin, attrs); });
  });
}

PlanPtr prepare_swiglu_backward(const KernelRequest& r, Context&) {
  return make_plan([dgate_of = EADEM_CPU_DISPATCH(clamped_swiglu_dgate, cpu_device(r).isa()),
                    dup_of = EADEM_CPU_DISPATCH(clamped_swiglu_dup, cpu_device(r).isa()),
                    attrs = r.attrs.get<ClampedSwigluAttrs>()](const KernelCall& call) {
    float *dgate = elements<float>(call.outputs[0]), *dup = elements<float>(call.outputs[1]);
    const float *gate = elements<const float>(call.inputs[0]), *up = elements<const float>(call.inputs[1]),
                *dy = elements<const float>(call.inputs[2]);
    cpu_device(call).pool().parallel_ranges(call.inputs[0].num_elements(), kSwigluGrain,
                                            [&](int64_t begin, int64_t end) {
                                              const int64_t n = end - begin;
                                              if (dgate != nullptr)
                                                dgate_of(dgate + begin, gate + begin, up + begin, dy + begin, n, attrs);
                                              if (dup != nullptr)
                                                dup_of(dup + begin, gate + begin, up + begin, dy + begin, n, attrs);
                                            });
  });
}

constexpr Kernel kSwigluForward{"cpu_elements", Pass::forward, can_gate_f32, prepare_swiglu};
constexpr Kernel kSwigluInference{"cpu_elements", Pass::inference, can_gate_f32, prepare_swiglu};
constexpr Kernel kSwigluBackward{"cpu_elements", Pass::backward, can_gate_f32, prepare_swiglu_backward};

// ---- gate_rows

// The columns of a gate are a row.
struct GatedRows {
  int64_t rows, hidden;
};
GatedRows gated_rows(const KernelCall& call) {
  const int64_t gates = call.inputs[1].shape[1];
  return {call.inputs[0].shape[0] * gates, call.inputs[0].shape[1] / gates};
}

int64_t gated_rows_grain(int64_t hidden) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(hidden, 1)); }

PlanPtr prepare_gate_rows(const KernelRequest& r, Context&) {
  return make_plan([row = EADEM_CPU_DISPATCH(gate_row, cpu_device(r).isa())](const KernelCall& call) {
    const auto [rows, hidden] = gated_rows(call);
    float* y = elements<float>(call.outputs[0]);
    const float *x = elements<const float>(call.inputs[0]), *gate = elements<const float>(call.inputs[1]);
    cpu_device(call).pool().parallel_ranges(rows, gated_rows_grain(hidden),
                                            [&, hidden = hidden](int64_t begin, int64_t end) {
                                              for (int64_t t = begin; t < end; ++t)
                                                row(y + t * hidden, x + t * hidden, gate[t], hidden);
                                            });
  });
}

PlanPtr prepare_gate_rows_backward(const KernelRequest& r, Context&) {
  return make_plan([row = EADEM_CPU_DISPATCH(gate_row_backward, cpu_device(r).isa())](const KernelCall& call) {
    const auto [rows, hidden] = gated_rows(call);
    float *dx = elements<float>(call.outputs[0]), *dgate = elements<float>(call.outputs[1]);
    const float *x = elements<const float>(call.inputs[0]), *gate = elements<const float>(call.inputs[1]),
                *dy = elements<const float>(call.inputs[2]);
    cpu_device(call).pool().parallel_ranges(
        rows, gated_rows_grain(hidden), [&, hidden = hidden](int64_t begin, int64_t end) {
          for (int64_t t = begin; t < end; ++t)
            row(dx == nullptr ? nullptr : dx + t * hidden, dgate == nullptr ? nullptr : dgate + t, x + t * hidden,
                gate[t], dy + t * hidden, hidden);
        });
  });
}

constexpr Kernel kGateForward{"cpu_rows", Pass::forward, can_gate_f32, prepare_gate_rows};
constexpr Kernel kGateInference{"cpu_rows", Pass::inference, can_gate_f32, prepare_gate_rows};
constexpr Kernel kGateBackward{"cpu_rows", Pass::backward, can_gate_f32, prepare_gate_rows_backward};

// ---- identity_experts

enum IdentityInput { kIdentityX, kIdentityExperts, kIdentityWeights, kIdentityDy };

Verdict can_identity(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("x", r.inputs[kIdentityX]).f32("weights", r.inputs[kIdentityWeights]);
  if (r.inputs.size() > kIdentityDy) requirements.f32("dy", r.inputs[kIdentityDy]);
  for (const TensorType& type : r.outputs) requirements.f32("an output", type);
  return requirements.verdict();
}

// Calls token(t, share) for each token, on all threads.
template <typename Token>
void for_each_share(const KernelCall& call, int64_t first, Token&& token) {
  const TensorView& experts = call.inputs[kIdentityExperts];
  const int64_t tokens = experts.shape[0], top_k = experts.shape[1];
  const auto* expert = elements<const int32_t>(experts);
  const float* weights = elements<const float>(call.inputs[kIdentityWeights]);
  cpu_device(call).pool().parallel_ranges(tokens, gated_rows_grain(call.inputs[kIdentityX].shape[1]),
                                          [&](int64_t begin, int64_t end) {
                                            for (int64_t t = begin; t < end; ++t) {
                                              float share = 0;
                                              for (int64_t j = t * top_k; j < (t + 1) * top_k; ++j)
                                                if (expert[j] >= first) share += weights[j];
                                              token(t, share);
                                            }
                                          });
}

PlanPtr prepare_identity(const KernelRequest& r, Context&) {
  return make_plan([row = EADEM_CPU_DISPATCH(share_row, cpu_device(r).isa()),
                    first = r.attrs.get<IdentityExpertsAttrs>().first](const KernelCall& call) {
    const int64_t hidden = call.inputs[kIdentityX].shape[1];
    const float* x = elements<const float>(call.inputs[kIdentityX]);
    float* y = elements<float>(call.outputs[0]);
    for_each_share(call, first, [&](int64_t t, float share) { row(y + t * hidden, x + t * hidden, share, hidden); });
  });
}

PlanPtr prepare_identity_backward(const KernelRequest& r, Context&) {
  return make_plan([row = EADEM_CPU_DISPATCH(share_row, cpu_device(r).isa()),
                    product = EADEM_CPU_DISPATCH(row_product, cpu_device(r).isa()),
                    first = r.attrs.get<IdentityExpertsAttrs>().first](const KernelCall& call) {
    const int64_t hidden = call.inputs[kIdentityX].shape[1], top_k = call.inputs[kIdentityExperts].shape[1];
    const auto* expert = elements<const int32_t>(call.inputs[kIdentityExperts]);
    const float *x = elements<const float>(call.inputs[kIdentityX]),
                *dy = elements<const float>(call.inputs[kIdentityDy]);
    float *dx = elements<float>(call.outputs[0]), *dweights = elements<float>(call.outputs[1]);
    for_each_share(call, first, [&](int64_t t, float share) {
      if (dweights != nullptr) {
        const float weight = product(x + t * hidden, dy + t * hidden, hidden);  // that of each identity
        for (int64_t j = t * top_k; j < (t + 1) * top_k; ++j) dweights[j] = expert[j] >= first ? weight : 0.0f;
      }
      if (dx != nullptr) row(dx + t * hidden, dy + t * hidden, share, hidden);
    });
  });
}

constexpr Kernel kIdentityForward{"cpu_rows", Pass::forward, can_identity, prepare_identity};
constexpr Kernel kIdentityInference{"cpu_rows", Pass::inference, can_identity, prepare_identity};
constexpr Kernel kIdentityBackward{"cpu_rows", Pass::backward, can_identity, prepare_identity_backward};

}  // namespace

KernelList clamped_swiglu_kernels() { return {&kSwigluForward, &kSwigluInference, &kSwigluBackward}; }
KernelList gate_rows_kernels() { return {&kGateForward, &kGateInference, &kGateBackward}; }
KernelList identity_experts_kernels() { return {&kIdentityForward, &kIdentityInference, &kIdentityBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
