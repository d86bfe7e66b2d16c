// SPDX-License-Identifier: Apache-2.0
//
// The gradients of attention: scores s are computed again, chunk by chunk. With p = exp(s - lse),
//   dv_j = sum_i p_ij dy_i,   ds_ij = p_ij (dy_i . v_j - dy_i . y_i) scale,   dq_i = sum_j ds_ij k_j,
//   dk_j = sum_i ds_ij q_i.
// A soft cap c has the slope 1 - (s / c)^2, which multiplies ds. A sink is the score of a key whose value is 0:
//   dsink_h = - sum_i exp(sink_h - lse_i) dy_i . y_i.
#include <algorithm>
#include <utility>

#include "eadem/kernels/cpu/attention/attention_call.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/attention/attention_backward.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/attention/attention-inl.h"
#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/linear/matmul-inl.h"

#ifndef EADEM_KERNELS_CPU_ATTENTION_BACKWARD_SCRATCH_
#define EADEM_KERNELS_CPU_ATTENTION_BACKWARD_SCRATCH_
namespace eadem::kernels::cpu {
namespace {

struct BackwardScratch {
  float *q, *dq;             // [rows, width]
  float* dy;                 // [rows, value_width]
  float *weights, *dscores;  // [rows, kChunk]
  float *keys, *values;      // [kChunk, width or value_width]
  float *keys_t, *values_t;  // [head_dim or value_dim, kChunk]
  float *dkeys, *dvalues;    // [kChunk, width or value_width]
  float* along;              // [rows]: dy . y

  static int64_t floats(const Attention& a) {
    const int64_t width = a.width(), value_width = a.value_width();
    return round_up(a.block_rows() * (2 * width + value_width + 2 * kChunk + 1) + 3 * kChunk * (width + value_width),
                    kPanelWidth);
  }
  BackwardScratch(const Attention& a, float* p) {
    const int64_t rows = a.block_rows(), width = a.width(), value_width = a.value_width();
    const auto take = [&](int64_t n) { return std::exchange(p, p + n); };
    q = take(rows * width), dy = take(rows * value_width), dq = take(rows * width);
    weights = take(rows * kChunk), dscores = take(rows * kChunk);
    keys = take(kChunk * width), values = take(kChunk * value_width);
    keys_t = take(kChunk * width), values_t = take(kChunk * value_width);
    dkeys = take(kChunk * width), dvalues = take(kChunk * value_width);
    along = take(rows);
  }
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// Turns the products q . k of a row of a chunk into weights under a soft cap, and dy . v into (dy . v - dy . y) times
// the cap's slope.
void cap_scores(float* weights, float* dscores, float softcap, Vec scale, Vec lse, Vec along) {
  const Vec cap = set(softcap), inverse = set(1.0f / softcap);
  for (int64_t j = 0; j < kChunk; j += kLanes) {
    const Vec t = tanh(hn::Mul(hn::Mul(load(weights + j), scale), inverse));
    store(exp(hn::Sub(hn::Mul(cap, t), lse)), weights + j);
    const Vec slope = hn::Mul(hn::Sub(set(1.0f), t), hn::Add(set(1.0f), t));
    store(hn::Mul(hn::Sub(load(dscores + j), along), slope), dscores + j);
  }
}

// Adds the gradients of the sinks of the heads [begin, end).
void sinks_backward(const Attention& a, int64_t begin, int64_t end) {
  const int64_t tokens = a.query_start[a.sequences];
  for (int64_t h = begin; h < end; ++h) {
    float sum = 0.0f;
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t row = t * a.heads + h;
      const Vec weight = exp(set(a.sinks[h] - a.saved_lse[row]));
      sum += hn::GetLane(weight) * dot(a.dy + row * a.value_dim, a.out + row * a.value_dim, a.value_dim);
    }
    a.dsinks[h] -= sum;
  }
}

// Computes the gradients of one sequence and one kv head: for each chunk of keys, all later blocks of queries in order.
void attention_backward_sequence(const Attention& a, int64_t sequence, int64_t kv_head, void* scratch) {
  const BackwardScratch s(a, static_cast<float*>(scratch));
  const int64_t width = a.width(), value_width = a.value_width(), group = a.group();
  const int64_t first_token = a.query_start[sequence];
  const int64_t tokens = a.query_start[sequence + 1] - first_token;

  for (int64_t start = 0; start < tokens; start += kChunk) {
    const int64_t count = std::min(kChunk, tokens - start);
    load_chunk(s.keys, a, static_cast<const float*>(a.k), a.head_dim, a.head_dim, sequence, kv_head, start, count);
    load_chunk(s.values, a, static_cast<const float*>(a.v), a.value_dim, a.value_row, sequence, kv_head, start, count);
    transpose_chunk(s.keys_t, s.keys, width);
    transpose_chunk(s.values_t, s.values, value_width);
    std::fill(s.dkeys, s.dkeys + kChunk * width, 0.0f);
    std::fill(s.dvalues, s.dvalues + kChunk * value_width, 0.0f);

    for (int64_t begin = start / a.block_tokens() * a.block_tokens(); begin < tokens; begin += a.block_tokens()) {
      const int64_t first = std::max(begin, start);  // earlier tokens see none of these keys
      const TokenBlock b{sequence, first, std::min(tokens, begin + a.block_tokens()), first};
      if (a.first_key(b.begin) >= start + kChunk) break;  // later blocks see none of these keys
      const int64_t rows = (b.end - b.begin) * group;
      const int64_t first_row = (first_token + b.begin) * a.heads + kv_head * group;
      const auto row_of = [&](int64_t r) { return first_row + r / group * a.heads + r % group; };
      load_rows(s.q, a, a.q, a.head_dim, b, kv_head);
      load_rows(s.dy, a, a.dy, a.value_dim, b, kv_head);
      for (int64_t r = 0; r < rows; ++r)
        s.along[r] = dot(a.dy + row_of(r) * a.value_dim, a.out + row_of(r) * a.value_dim, a.value_dim);

      // 1. Scores and dy . v.
      matmul_block(s.weights, kChunk, false, RowOperand{s.q, width, 1},
                   PanelOperand<float>{s.keys_t, kPanelWidth, kChunk}, rows, kChunk / kPanelWidth, a.head_dim);
      matmul_block(s.dscores, kChunk, false, RowOperand{s.dy, value_width, 1},
                   PanelOperand<float>{s.values_t, kPanelWidth, kChunk}, rows, kChunk / kPanelWidth, a.value_dim);

      // 2. Weights, and the gradient of the scores.
      for (int64_t r = 0; r < rows; ++r) {
        float* weights = s.weights + r * kChunk;
        float* dscores = s.dscores + r * kChunk;
        const Vec lse = set(a.saved_lse[row_of(r)]), along = set(s.along[r]), scale = set(a.scale);
        const Vec taken = a.softcap > 0 ? zero() : along;  // from dy . v
        if (a.softcap > 0)
          cap_scores(weights, dscores, a.softcap, scale, lse, along);
        else
          map(
              weights, kChunk, [&](Vec v) { return exp(hn::Sub(hn::Mul(v, scale), lse)); },
              static_cast<const float*>(weights));
        const Seen keys = seen(a, b.position + r / group, start);
        std::fill(weights, weights + keys.first, 0.0f);
        std::fill(weights + std::max(keys.first, keys.last), weights + kChunk, 0.0f);
        map(
            dscores, kChunk, [&](Vec w, Vec dw) { return hn::Mul(hn::Mul(w, hn::Sub(dw, taken)), scale); },
            static_cast<const float*>(weights), static_cast<const float*>(dscores));
      }

      // 3. dv += p^T dy, dk += ds^T q.
      matmul_block(s.dvalues, value_width, true, RowOperand{s.weights, 1, kChunk},
                   PanelOperand<float>{s.dy, kPanelWidth, value_width}, kChunk, value_width / kPanelWidth, rows);
      matmul_block(s.dkeys, width, true, RowOperand{s.dscores, 1, kChunk}, PanelOperand<float>{s.q, kPanelWidth, width},
                   kChunk, width / kPanelWidth, rows);

      // 4. dq += ds k; the first chunk that a block sees overwrites dq.
      if (a.dq == nullptr) continue;
      const bool resume = first_chunk(a, b.position) * kChunk < start;
      if (resume) load_rows(s.dq, a, a.dq, a.head_dim, b, kv_head);
      matmul_block(s.dq, width, resume, RowOperand{s.dscores, kChunk, 1},
                   PanelOperand<float>{s.keys, kPanelWidth, width}, rows, width / kPanelWidth, count);
      for (int64_t r = 0; r < rows; ++r)
        map(
            a.dq + row_of(r) * a.head_dim, a.head_dim, [](Vec v) { return v; },
            static_cast<const float*>(s.dq + r * width));
    }

    for (int64_t j = 0; j < count; ++j) {
      const int64_t row = (first_token + start + j) * a.kv_heads + kv_head;
      const auto same = [](Vec v) { return v; };
      if (a.dk != nullptr)
        map(a.dk + row * a.head_dim, a.head_dim, same, static_cast<const float*>(s.dkeys + j * width));
      if (a.dv == nullptr) continue;
      float* dv = a.dv + row * a.value_row;
      map(dv, a.value_dim, same, static_cast<const float*>(s.dvalues + j * value_width));
      std::fill(dv + a.value_dim, dv + a.value_row, 0.0f);
    }
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(attention_backward_sequence);
EADEM_CPU_EXPORT(sinks_backward);

Requirements backward_requirements(const KernelRequest& r) {
  const AttentionAttrs& attrs = r.attrs.get<AttentionAttrs>();
  Requirements requirements(r);
  for (const int port : {static_cast<int>(kQ), static_cast<int>(kK), static_cast<int>(kV)})
    requirements.f32("q, k or v", r.inputs[static_cast<size_t>(port)]);
  requirements.f32("y", r.inputs[kSavedY]).f32("lse", r.inputs[kSavedLse]).f32("dy", r.inputs.back());
  if (attrs.sinks) requirements.f32("sinks", r.inputs[kSavedSinks]);
  for (const TensorType& type : r.outputs) requirements.f32("a gradient", type);
  return requirements.require(attrs.source == KvSource::direct, "gradients need keys given directly, not a cache")
      .require(attrs.kv_heads > 0 && attrs.heads % attrs.kv_heads == 0, "heads is not a multiple of kv_heads");
}

PlanPtr plan_backward(const KernelRequest& r, int64_t worker_bytes, BackwardTask task) {
  const Attention shape = shape_of(r.attrs.get<AttentionAttrs>());
  const auto sinks_task = EADEM_CPU_DISPATCH(sinks_backward, cpu_device(r).isa());
  worker_bytes = round_up(worker_bytes, 64);
  return make_plan(
      [=](const KernelCall& call) {
        Attention a = shape;
        set_inputs(a, call);
        a.out = elements<const float>(call.inputs[kSavedY]);
        a.saved_lse = elements<const float>(call.inputs[kSavedLse]);
        a.dy = elements<const float>(call.inputs.back());
        a.dq = elements<float>(call.outputs[0]);
        a.dk = elements<float>(call.outputs[1]);
        a.dv = elements<float>(call.outputs[2]);
        cpu_device(call).pool().parallel_for(a.sequences * a.kv_heads, [&](int64_t index, int worker) {
          task(a, index / a.kv_heads, index % a.kv_heads,
               static_cast<char*>(call.scratch.data) + worker * worker_bytes);
        });
        if (call.outputs.size() <= 3 || !call.outputs[3].defined()) return;
        a.sinks = elements<const float>(call.inputs[kSavedSinks]);
        a.dsinks = elements<float>(call.outputs[3]);
        cpu_device(call).pool().parallel_ranges(a.heads, 1,
                                                [&](int64_t begin, int64_t end) { sinks_task(a, begin, end); });
      },
      cpu_device(r).pool().num_threads() * worker_bytes);
}

namespace {

Verdict can_backward(const KernelRequest& r) { return backward_requirements(r).verdict(); }

PlanPtr prepare_backward(const KernelRequest& r, Context&) {
  const int64_t floats = BackwardScratch::floats(shape_of(r.attrs.get<AttentionAttrs>()));
  return plan_backward(r, floats * static_cast<int64_t>(sizeof(float)),
                       EADEM_CPU_DISPATCH(attention_backward_sequence, cpu_device(r).isa()));
}

}  // namespace

const Kernel kAttentionBackward{"cpu_recompute", Pass::backward, can_backward, prepare_backward};

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
