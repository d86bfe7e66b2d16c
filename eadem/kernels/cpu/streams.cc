// SPDX-License-Identifier: Apache-2.0
//
// stream_weights, collapse_streams and expand_streams, with their gradients: each token by itself. The weights of a
// token are few, and are computed one after the other.
#include "eadem/kernels/streams.h"

#include <algorithm>
#include <cmath>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/streams.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// y += sum over i of weights[i * stride] * x[i, :], in the order of i.
void add_streams(float* y, const float* x, const float* weights, int64_t streams, int64_t stride, int64_t hidden) {
  for (int64_t i = 0; i < streams; ++i)
    map(
        y, hidden, [w = set(weights[i * stride])](Vec acc, Vec v) { return hn::MulAdd(w, v, acc); },
        static_cast<const float*>(y), x + i * hidden);
}

void scale_stream(float* y, const float* x, float factor, int64_t hidden) {
  map(
      y, hidden, [w = set(factor)](Vec v) { return hn::Mul(w, v); }, x);
}

void collapse_token(float* y, const float* x, const float* weights, int64_t streams, int64_t hidden) {
  scale_stream(y, x, weights[0], hidden);
  add_streams(y, x + hidden, weights + 1, streams - 1, 1, hidden);
}

// dx and dweights may be null.
void collapse_gradients(float* dx, float* dweights, const float* x, const float* weights, const float* dy,
                        int64_t streams, int64_t width, int64_t hidden) {
  for (int64_t i = 0; i < streams && dx != nullptr; ++i) scale_stream(dx + i * hidden, dy, weights[i], hidden);
  if (dweights == nullptr) return;
  for (int64_t i = 0; i < streams; ++i) dweights[i] = dot(x + i * hidden, dy, hidden);
  std::fill(dweights + streams, dweights + width, 0.0f);
}

void expand_token(float* z, const float* x, const float* y, const float* weights, int64_t streams, int64_t hidden) {
  const float *post = weights + streams, *comb = post + streams;
  for (int64_t i = 0; i < streams; ++i) {
    scale_stream(z + i * hidden, y, post[i], hidden);
    add_streams(z + i * hidden, x, comb + i, streams, streams, hidden);
  }
}

// dx, dy and dweights may be null.
void expand_gradients(float* dx, float* dy, float* dweights, const float* x, const float* y, const float* weights,
                      const float* dz, int64_t streams, int64_t hidden) {
  const float *post = weights + streams, *comb = post + streams;
  if (dy != nullptr) {
    scale_stream(dy, dz, post[0], hidden);
    add_streams(dy, dz + hidden, post + 1, streams - 1, 1, hidden);
  }
  for (int64_t j = 0; j < streams && dx != nullptr; ++j) {
    scale_stream(dx + j * hidden, dz, comb[j * streams], hidden);
    add_streams(dx + j * hidden, dz + hidden, comb + j * streams + 1, streams - 1, 1, hidden);
  }
  if (dweights == nullptr) return;
  std::fill_n(dweights, streams, 0.0f);
  for (int64_t i = 0; i < streams; ++i) {
    const float* own = dz + i * hidden;
    dweights[streams + i] = dot(y, own, hidden);
    for (int64_t j = 0; j < streams; ++j) dweights[(2 + j) * streams + i] = dot(x + j * hidden, own, hidden);
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(collapse_token);
EADEM_CPU_EXPORT(collapse_gradients);
EADEM_CPU_EXPORT(expand_token);
EADEM_CPU_EXPORT(expand_gradients);

namespace {

Verdict can_mix_f32(const KernelRequest& r) {
  Requirements requirements(r);
  for (const TensorType& type : r.inputs) requirements.f32("an input", type);
  for (const TensorType& type : r.outputs) requirements.f32("an output", type);
  return requirements.verdict();
}

// ---- stream_weights

constexpr int64_t kWeightsGrain = 16;  // tokens: some microseconds of work

float logistic_of(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The rows and the columns of comb in turn: element (i, j) of the one that is divided lies at i * across + j * along.
struct Division {
  int64_t along, across;
};
Division division_at(int64_t k, int64_t streams) { return k % 2 == 0 ? Division{streams, 1} : Division{1, streams}; }

// The values of a token on the way to its weights.
struct MixingScratch {
  float* logits;  // [width]: scaled, with the base
  // Backward only: comb before and after each division, and their divisors.
  float *states, *divisors;

  static int64_t floats(const StreamWeightsAttrs& a, bool backward) {
    const int64_t n = a.streams, steps = backward && !a.merges ? a.divisions() + 1 : 0;
    return round_up(a.width() + steps * (n * n + n), 16);
  }
  MixingScratch(const StreamWeightsAttrs& a, float* p)
      : logits(p), states(p + a.width()), divisors(states + (a.divisions() + 1) * a.streams * a.streams) {}
};

struct StreamParameters {
  StreamWeightsAttrs attrs;
  const float *base, *scale;

  int64_t part_of(int64_t i) const { return std::min<int64_t>(i / attrs.streams, 2); }
  void scale_logits(float* z, const float* logits) const {
    for (int64_t i = 0; i < attrs.width(); ++i) z[i] = scale[part_of(i)] * logits[i] + base[i];
  }
};

// comb = softmax of each row of z, plus eps.
void first_mixing(float* comb, const float* z, const StreamWeightsAttrs& a) {
  const int64_t n = a.streams;
  for (int64_t i = 0; i < n; ++i, z += n, comb += n) {
    const float most = *std::max_element(z, z + n);
    float sum = 0.0f;
    for (int64_t j = 0; j < n; ++j) sum += comb[j] = std::exp(z[j] - most);
    for (int64_t j = 0; j < n; ++j) comb[j] = comb[j] / sum + a.eps;
  }
}

// Divides in place; `divisors` [streams] is written.
void divide(float* comb, float* divisors, const Division& d, const StreamWeightsAttrs& a) {
  for (int64_t i = 0; i < a.streams; ++i) {
    float* first = comb + i * d.across;
    float sum = first[0];
    for (int64_t j = 1; j < a.streams; ++j) sum += first[j * d.along];
    divisors[i] = sum + a.eps;
    for (int64_t j = 0; j < a.streams; ++j) first[j * d.along] /= divisors[i];
  }
}

// `z` has room for a token's logits, and then serves the divisions.
void token_weights(float* weights, const float* logits, const StreamParameters& p, float* z) {
  const StreamWeightsAttrs& a = p.attrs;
  const int64_t n = a.streams;
  p.scale_logits(z, logits);
  for (int64_t i = 0; i < n; ++i) weights[i] = logistic_of(z[i]) + a.eps;
  if (a.merges) return;
  for (int64_t i = n; i < 2 * n; ++i) weights[i] = 2.0f * logistic_of(z[i]);
  first_mixing(weights + 2 * n, z + 2 * n, a);
  for (int64_t k = 0; k < a.divisions(); ++k) divide(weights + 2 * n, z, division_at(k, n), a);
}

// The gradient of comb, through the divisions, the last first, and the softmax. The formulas stand in
// ops/streams/stream_weights.cc.
void mixing_gradient(float* dz, const float* dcomb, const MixingScratch& s, const StreamWeightsAttrs& a) {
  const int64_t n = a.streams, size = n * n;
  first_mixing(s.states, s.logits + 2 * n, a);
  for (int64_t k = 0; k < a.divisions(); ++k) {
    float* next = s.states + (k + 1) * size;
    std::copy_n(s.states + k * size, size, next);
    divide(next, s.divisors + k * n, division_at(k, n), a);
  }
  std::copy_n(dcomb, size, dz);
  for (int64_t k = a.divisions(); k-- > 0;) {
    const Division d = division_at(k, n);
    const float* after = s.states + (k + 1) * size;
    for (int64_t i = 0; i < n; ++i) {
      float along = 0.0f;
      for (int64_t j = 0; j < n; ++j) along += dz[i * d.across + j * d.along] * after[i * d.across + j * d.along];
      for (int64_t j = 0; j < n; ++j) {
        float& own = dz[i * d.across + j * d.along];
        own = (own - along) / s.divisors[k * n + i];
      }
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const float* p = s.states + i * n;  // with eps
    float along = 0.0f;
    for (int64_t j = 0; j < n; ++j) along += dz[i * n + j] * (p[j] - a.eps);
    for (int64_t j = 0; j < n; ++j) dz[i * n + j] = (p[j] - a.eps) * (dz[i * n + j] - along);
  }
}

// The gradient of the scaled logits.
void token_gradients(float* dz, const float* logits, const float* dweights, const StreamParameters& p, float* scratch) {
  const StreamWeightsAttrs& a = p.attrs;
  const int64_t n = a.streams;
  const MixingScratch s(a, scratch);
  p.scale_logits(s.logits, logits);
  for (int64_t i = 0; i < std::min(a.width(), 2 * n); ++i)
    dz[i] = (i < n ? 1.0f : 2.0f) * dweights[i] * (logistic_of(s.logits[i]) * logistic_of(-s.logits[i]));
  if (!a.merges) mixing_gradient(dz + 2 * n, dweights + 2 * n, s, a);
}

StreamParameters stream_parameters(const StreamWeightsAttrs& attrs, const KernelCall& call) {
  return {attrs, elements<const float>(call.inputs[1]), elements<const float>(call.inputs[2])};
}

PlanPtr prepare_stream_weights(const KernelRequest& r, Context&) {
  const auto attrs = r.attrs.get<StreamWeightsAttrs>();
  const int64_t floats = MixingScratch::floats(attrs, false), width = attrs.width();
  return make_plan(
      [=](const KernelCall& call) {
        const StreamParameters p = stream_parameters(attrs, call);
        const auto* logits = elements<const float>(call.inputs[0]);
        auto* weights = elements<float>(call.outputs[0]);
        cpu_device(call).pool().parallel_ranges(call.inputs[0].shape[0], kWeightsGrain,
                                                [&](int64_t begin, int64_t end, int worker) {
                                                  float* z = static_cast<float*>(call.scratch.data) + worker * floats;
                                                  for (int64_t t = begin; t < end; ++t)
                                                    token_weights(weights + t * width, logits + t * width, p, z);
                                                });
      },
      cpu_device(r).pool().num_threads() * floats * static_cast<int64_t>(sizeof(float)));
}

// Adds the gradients of base and scale, token by token.
void add_parameter_gradients(float* dbase, float* dscale, const float* dz, const float* logits, int64_t tokens,
                             const StreamParameters& p) {
  const int64_t width = p.attrs.width();
  double scales[3] = {};
  for (int64_t i = 0; i < width; ++i) {
    double sum = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      sum += static_cast<double>(dz[t * width + i]);
      scales[p.part_of(i)] += static_cast<double>(dz[t * width + i]) * static_cast<double>(logits[t * width + i]);
    }
    if (dbase != nullptr) dbase[i] += static_cast<float>(sum);
  }
  for (int64_t part = 0; part < p.attrs.scales() && dscale != nullptr; ++part)
    dscale[part] += static_cast<float>(scales[part]);
}

PlanPtr prepare_stream_weights_backward(const KernelRequest& r, Context&) {
  const auto attrs = r.attrs.get<StreamWeightsAttrs>();
  const int64_t floats = MixingScratch::floats(attrs, true), width = attrs.width();
  const int64_t threads = cpu_device(r).pool().num_threads(), most_tokens = r.inputs[0].bind(r.bounds)[0];
  return make_plan(
      [=](const KernelCall& call) {
        const StreamParameters p = stream_parameters(attrs, call);
        const auto *logits = elements<const float>(call.inputs[0]), *dweights = elements<const float>(call.inputs[3]);
        auto* scratch = static_cast<float*>(call.scratch.data);
        float *dz = scratch + threads * floats, *dlogits = elements<float>(call.outputs[0]);
        const int64_t tokens = call.inputs[0].shape[0];
        cpu_device(call).pool().parallel_ranges(tokens, kWeightsGrain, [&](int64_t begin, int64_t end, int worker) {
          for (int64_t t = begin; t < end; ++t) {
            token_gradients(dz + t * width, logits + t * width, dweights + t * width, p, scratch + worker * floats);
            for (int64_t i = 0; i < width && dlogits != nullptr; ++i)
              dlogits[t * width + i] = dz[t * width + i] * p.scale[p.part_of(i)];
          }
        });
        add_parameter_gradients(elements<float>(call.outputs[1]), elements<float>(call.outputs[2]), dz, logits, tokens,
                                p);
      },
      (threads * floats + most_tokens * width) * static_cast<int64_t>(sizeof(float)));
}

// ---- collapse_streams, expand_streams

struct StreamSizes {
  int64_t tokens, streams, hidden;

  explicit StreamSizes(const TensorView& x) : tokens(x.shape[0]), streams(x.shape[1]), hidden(x.shape[2]) {}
  // Tokens of a task.
  int64_t grain() const { return std::max<int64_t>(1, 16384 / (streams * hidden)); }
};

template <typename Task>
void for_tokens(const KernelCall& call, const StreamSizes& sizes, Task&& task) {
  cpu_device(call).pool().parallel_ranges(sizes.tokens, sizes.grain(), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) task(t);
  });
}

// Row t of a port that may be absent.
template <typename T>
T* row_of(T* data, int64_t t, int64_t width) {
  return data == nullptr ? nullptr : data + t * width;
}

PlanPtr prepare_collapse(const KernelRequest& r, Context&) {
  return make_plan([task = EADEM_CPU_DISPATCH(collapse_token, cpu_device(r).isa())](const KernelCall& call) {
    const StreamSizes s(call.inputs[0]);
    const auto *x = elements<const float>(call.inputs[0]), *weights = elements<const float>(call.inputs[1]);
    auto* y = elements<float>(call.outputs[0]);
    const int64_t width = call.inputs[1].shape[1];
    for_tokens(call, s, [&](int64_t t) {
      task(y + t * s.hidden, x + t * s.streams * s.hidden, weights + t * width, s.streams, s.hidden);
    });
  });
}

PlanPtr prepare_collapse_backward(const KernelRequest& r, Context&) {
  return make_plan([task = EADEM_CPU_DISPATCH(collapse_gradients, cpu_device(r).isa())](const KernelCall& call) {
    const StreamSizes s(call.inputs[0]);
    const auto *x = elements<const float>(call.inputs[0]), *weights = elements<const float>(call.inputs[1]),
               *dy = elements<const float>(call.inputs[2]);
    auto *dx = elements<float>(call.outputs[0]), *dweights = elements<float>(call.outputs[1]);
    const int64_t width = call.inputs[1].shape[1], row = s.streams * s.hidden;
    for_tokens(call, s, [&](int64_t t) {
      task(row_of(dx, t, row), row_of(dweights, t, width), x + t * row, weights + t * width, dy + t * s.hidden,
           s.streams, width, s.hidden);
    });
  });
}

PlanPtr prepare_expand(const KernelRequest& r, Context&) {
  return make_plan([task = EADEM_CPU_DISPATCH(expand_token, cpu_device(r).isa())](const KernelCall& call) {
    const StreamSizes s(call.inputs[0]);
    const auto *x = elements<const float>(call.inputs[0]), *y = elements<const float>(call.inputs[1]),
               *weights = elements<const float>(call.inputs[2]);
    auto* z = elements<float>(call.outputs[0]);
    const int64_t width = call.inputs[2].shape[1], row = s.streams * s.hidden;
    for_tokens(call, s, [&](int64_t t) {
      task(z + t * row, x + t * row, y + t * s.hidden, weights + t * width, s.streams, s.hidden);
    });
  });
}

PlanPtr prepare_expand_backward(const KernelRequest& r, Context&) {
  return make_plan([task = EADEM_CPU_DISPATCH(expand_gradients, cpu_device(r).isa())](const KernelCall& call) {
    const StreamSizes s(call.inputs[0]);
    const auto *x = elements<const float>(call.inputs[0]), *y = elements<const float>(call.inputs[1]),
               *weights = elements<const float>(call.inputs[2]), *dz = elements<const float>(call.inputs[3]);
    auto *dx = elements<float>(call.outputs[0]), *dy = elements<float>(call.outputs[1]),
         *dweights = elements<float>(call.outputs[2]);
    const int64_t width = call.inputs[2].shape[1], row = s.streams * s.hidden;
    for_tokens(call, s, [&](int64_t t) {
      task(row_of(dx, t, row), row_of(dy, t, s.hidden), row_of(dweights, t, width), x + t * row, y + t * s.hidden,
           weights + t * width, dz + t * row, s.streams, s.hidden);
    });
  });
}

constexpr Kernel kWeightsForward{"cpu_tokens", Pass::forward, can_mix_f32, prepare_stream_weights};
constexpr Kernel kWeightsInference{"cpu_tokens", Pass::inference, can_mix_f32, prepare_stream_weights};
constexpr Kernel kWeightsBackward{"cpu_tokens", Pass::backward, can_mix_f32, prepare_stream_weights_backward};
constexpr Kernel kCollapseForward{"cpu_vectors", Pass::forward, can_mix_f32, prepare_collapse};
constexpr Kernel kCollapseInference{"cpu_vectors", Pass::inference, can_mix_f32, prepare_collapse};
constexpr Kernel kCollapseBackward{"cpu_vectors", Pass::backward, can_mix_f32, prepare_collapse_backward};
constexpr Kernel kExpandForward{"cpu_vectors", Pass::forward, can_mix_f32, prepare_expand};
constexpr Kernel kExpandInference{"cpu_vectors", Pass::inference, can_mix_f32, prepare_expand};
constexpr Kernel kExpandBackward{"cpu_vectors", Pass::backward, can_mix_f32, prepare_expand_backward};

}  // namespace

KernelList stream_weights_kernels() { return {&kWeightsForward, &kWeightsInference, &kWeightsBackward}; }
KernelList collapse_streams_kernels() { return {&kCollapseForward, &kCollapseInference, &kCollapseBackward}; }
KernelList expand_streams_kernels() { return {&kExpandForward, &kExpandInference, &kExpandBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
