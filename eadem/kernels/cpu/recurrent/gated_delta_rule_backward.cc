// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of gated_delta_rule. States are computed again, one token after the other: one is kept every
// `chunk` tokens, and all of a chunk's while its tokens are gone through backwards.
#include <algorithm>
#include <cmath>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/recurrent/delta_rule.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/recurrent/gated_delta_rule.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/recurrent/gated_delta_rule_backward.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/recurrent/delta_rule-inl.h"

#ifndef EADEM_KERNELS_CPU_GATED_DELTA_RULE_SCRATCH_
#define EADEM_KERNELS_CPU_GATED_DELTA_RULE_SCRATCH_
namespace eadem::kernels::cpu {
namespace {

// The rows of one token for one value head, in scratch; a row has key_dim elements.
struct DeltaTokenRows {
  float* q;      // normalized
  float* k;      // normalized
  float* faded;  // decay * k
  float* decay;  // exp(g): a row with channel_decay, else one number
  float* beta;   // one number
  int64_t decay_step;

  float decay_of_row(int64_t i) const { return decay[i * decay_step]; }
};

// Rows for tokens 0, 1, … of a chunk, one after another in scratch.
struct DeltaChunkRows {
  static int64_t floats_per_token(const GatedDeltaRuleAttrs& attrs) {
    return round_up(3 * attrs.key_dim + attrs.decays_of_head() + 1, 16);
  }
  DeltaTokenRows at(int64_t i) const {
    const int64_t n = attrs.key_dim, decays = attrs.decays_of_head();
    float* row = begin + i * floats_per_token(attrs);
    return {row, row + n, row + 2 * n, row + 3 * n, row + 3 * n + decays, attrs.channel_decay ? 1 : 0};
  }
  float* begin;
  GatedDeltaRuleAttrs attrs;
};

// A worker's memory, in floats.
struct DeltaScratch {
  static int64_t floats(const GatedDeltaRuleAttrs& attrs, int64_t tokens, int64_t chunk) {
    const int64_t state = attrs.key_dim * attrs.value_dim;
    return round_up((chunks(tokens, chunk) + chunk + 2) * state + chunk * DeltaChunkRows::floats_per_token(attrs) +
                        2 * chunk * attrs.value_dim + attrs.value_dim + attrs.key_dim,
                    16);
  }
  static int64_t chunks(int64_t tokens, int64_t chunk) { return std::max<int64_t>(1, ceil_div(tokens, chunk)); }

  DeltaScratch(const GatedDeltaRuleAttrs& attrs, int64_t chunk, float* memory)
      : state(attrs.key_dim * attrs.value_dim), columns(attrs.value_dim) {
    const auto take = [&](int64_t floats) {
      float* begin = memory;
      memory += floats;
      return begin;
    };
    gradient = take(state);
    states = take((chunk + 1) * state);
    rows = take(chunk * DeltaChunkRows::floats_per_token(attrs));
    reads = take(chunk * columns);
    corrections = take(chunk * columns);
    dread = take(columns);
    decays = take(attrs.key_dim);
    kept = memory;
  }

  float* state_before(int64_t i) const { return states + i * state; }  // token i of a chunk
  float* kept_state(int64_t chunk) const { return kept + chunk * state; }

  int64_t state, columns;
  float* gradient;     // dL/dS
  float* states;       // before each token of a chunk, and after the last
  float* rows;         // DeltaChunkRows
  float* reads;        // [chunk, value_dim]: S^T k
  float* corrections;  // [chunk, value_dim]: d
  float* dread;        // [value_dim]
  float* decays;       // [key_dim]: dL/dg of a token
  float* kept;         // the states before each chunk
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

HWY_INLINE void make_token_rows(const DeltaTokenRows& rows, const DeltaRule& p, int64_t token, int64_t head) {
  const int64_t n = p.attrs.key_dim;
  const float *q = p.q + p.key_row(token, head), *k = p.k + p.key_row(token, head);
  scale_row(rows.q, q, inverse_length(q, n, p.attrs.eps) / std::sqrt(static_cast<float>(n)), n);
  scale_row(rows.k, k, inverse_length(k, n, p.attrs.eps), n);
  make_gates(p, token, 1, head, rows.beta, rows.decay);
  if (!p.attrs.channel_decay) return scale_row(rows.faded, rows.k, *rows.decay, n);
  map(
      rows.decay, n, [rate = exp(set(p.a_log[head]))](Vec a, Vec bias) { return decay_of(a, bias, rate); },
      p.a + token * p.attrs.decays() + head * n, p.dt_bias + head * n);
  map(
      rows.faded, n, [](Vec e, Vec key) { return hn::Mul(e, key); }, static_cast<const float*>(rows.decay),
      static_cast<const float*>(rows.k));
}

// One token: S from `before` to `after` [key_dim, value_dim], with what it reads of the faded S and its correction.
struct DeltaStep {
  const float* before;
  float* after;
  const float* v;
  float *read, *d;  // [value_dim]
};

// Columns [c, c + kVecs * kLanes) of a step; with kVecs == 1 the first `lanes` of them.
template <int kVecs>
HWY_INLINE void delta_columns(const DeltaStep& s, const DeltaTokenRows& token, int64_t rows, int64_t stride, int64_t c,
                              int64_t lanes) {
  const DeltaColumns<kVecs> columns{lanes};
  Vec read[kVecs], d[kVecs];
  for (int u = 0; u < kVecs; ++u) read[u] = zero();
  for (int64_t i = 0; i < rows; ++i) {
    const Vec faded = set(token.faded[i]);
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) read[u] = hn::MulAdd(columns.at(s.before + i * stride + c, u), faded, read[u]);
  }
  const Vec beta = set(*token.beta);
  for (int u = 0; u < kVecs; ++u) {
    d[u] = hn::Mul(beta, hn::Sub(columns.at(s.v + c, u), read[u]));
    columns.put(read[u], s.read + c, u);
    columns.put(d[u], s.d + c, u);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const Vec decay = set(token.decay_of_row(i)), k = set(token.k[i]);
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u)
      columns.put(hn::MulAdd(columns.at(s.before + i * stride + c, u), decay, hn::Mul(k, d[u])),
                  s.after + i * stride + c, u);
  }
}

HWY_INLINE void delta_step(const DeltaStep& step, const DeltaTokenRows& token, int64_t rows, int64_t columns) {
  for_each_column_block<4>(
      columns, [&](int64_t c) { delta_columns<4>(step, token, rows, columns, c, kLanes); },
      [&](int64_t c, int64_t lanes) { delta_columns<1>(step, token, rows, columns, c, lanes); });
}

// y += factor * x
HWY_INLINE void add_scaled(float* y, float factor, const float* x, int64_t n) {
  map(
      y, n, [f = set(factor)](Vec sum, Vec v) { return hn::MulAdd(f, v, sum); }, static_cast<const float*>(y), x);
}

// x = factor * x
HWY_INLINE void scale_in_place(float* x, float factor, int64_t n) { scale_row(x, x, factor, n); }

class BackwardHead {
 public:
  BackwardHead(const DeltaRuleGradient& gradient, int64_t head, float* memory)
      : g_(gradient),
        p_(gradient.forward),
        head_(head),
        rows_(p_.attrs.key_dim),
        columns_(p_.attrs.value_dim),
        scratch_(p_.attrs, gradient.chunk, memory),
        chunk_rows_{scratch_.rows, p_.attrs} {}

  void run(int64_t first, int64_t end) {
    const int64_t chunks = DeltaScratch::chunks(end - first, g_.chunk);
    std::fill_n(scratch_.kept_state(0), scratch_.state, 0.0f);
    for (int64_t c = 0; c + 1 < chunks; ++c) {
      go_through(first + c * g_.chunk, g_.chunk, scratch_.kept_state(c));
      std::copy_n(scratch_.state_before(g_.chunk), scratch_.state, scratch_.kept_state(c + 1));
    }
    std::fill_n(scratch_.gradient, scratch_.state, 0.0f);
    for (int64_t c = chunks; c-- > 0;) {
      const int64_t begin = first + c * g_.chunk, tokens = std::min(g_.chunk, end - begin);
      go_through(begin, tokens, scratch_.kept_state(c));
      for (int64_t i = tokens; i-- > 0;) step_back(begin + i, i);
    }
  }

 private:
  // The states before and after each of the tokens, with what was read and corrected.
  void go_through(int64_t begin, int64_t tokens, const float* state) {
    std::copy_n(state, scratch_.state, scratch_.state_before(0));
    for (int64_t i = 0; i < tokens; ++i) {
      make_token_rows(chunk_rows_.at(i), p_, begin + i, head_);
      delta_step({.before = scratch_.state_before(i),
                  .after = scratch_.state_before(i + 1),
                  .v = p_.v + p_.value_row(begin + i, head_),
                  .read = scratch_.reads + i * columns_,
                  .d = scratch_.corrections + i * columns_},
                 chunk_rows_.at(i), rows_, columns_);
    }
  }

  // The steps of ops/recurrent/gated_delta_rule_reference.cc. Gradients of normalized rows of q and k are added up over
  // the value heads of a key head.
  void step_back(int64_t token, int64_t i) {
    const DeltaTokenRows rows = chunk_rows_.at(i);
    const int64_t value = p_.value_row(token, head_), key = p_.key_row(token, head_);
    const float *dy = g_.dy + value, *d = scratch_.corrections + i * columns_;
    float* dread = scratch_.dread;
    std::fill_n(dread, columns_, 0.0f);
    for (int64_t r = 0; r < rows_; ++r) {
      float* gradient = scratch_.gradient + r * columns_;
      add_scaled(gradient, rows.q[r], dy, columns_);
      add_scaled(dread, rows.k[r], gradient, columns_);  // d of the correction, so far
    }
    if (g_.db != nullptr) {
      const float beta = *rows.beta;
      const float dbeta = reduce(
          columns_, [](Vec acc, Vec x, Vec v, Vec read) { return hn::MulAdd(x, hn::Sub(v, read), acc); }, dread,
          p_.v + value, scratch_.reads + i * columns_);
      g_.db[token * p_.attrs.value_heads + head_] = dbeta * beta * (1.0f - beta);
    }
    scale_in_place(dread, *rows.beta, columns_);
    if (g_.dv != nullptr) std::copy_n(dread, columns_, g_.dv + value);
    scale_in_place(dread, -1.0f, columns_);
    for (int64_t r = 0; r < rows_; ++r) {
      float* gradient = scratch_.gradient + r * columns_;
      const float *before = scratch_.state_before(i) + r * columns_, *after = before + scratch_.state;
      if (g_.dq != nullptr) g_.dq[key + r] += dot(after, dy, columns_);
      if (g_.dk != nullptr)
        g_.dk[key + r] += dot(gradient, d, columns_) + rows.decay_of_row(r) * dot(before, dread, columns_);
      add_scaled(gradient, rows.k[r], dread, columns_);
      scale_in_place(gradient, rows.decay_of_row(r), columns_);
      scratch_.decays[r] = dot(gradient, before, columns_);
    }
    step_back_decay(token);
  }

  // g = -exp(a_log) softplus(a + dt_bias)
  void step_back_decay(int64_t token) {
    const bool channels = p_.attrs.channel_decay;
    const int64_t first = channels ? head_ * rows_ : head_, count = channels ? rows_ : 1;
    if (!channels)
      scratch_.decays[0] = reduce(
          rows_, [](Vec acc, Vec x) { return hn::Add(acc, x); }, static_cast<const float*>(scratch_.decays));
    const Vec rate = exp(set(p_.a_log[head_]));
    const float *a = p_.a + token * p_.attrs.decays() + first, *bias = p_.dt_bias + first;
    if (g_.da_log != nullptr)
      g_.da_log[head_] -=
          hn::GetLane(rate) *
          reduce(
              count, [](Vec acc, Vec x, Vec own, Vec b) { return hn::MulAdd(x, softplus(hn::Add(own, b)), acc); },
              static_cast<const float*>(scratch_.decays), a, bias);
    map(
        scratch_.decays, count,
        [rate](Vec x, Vec own, Vec b) { return hn::Neg(hn::Mul(hn::Mul(x, rate), sigmoid(hn::Add(own, b)))); },
        static_cast<const float*>(scratch_.decays), a, bias);
    if (g_.da != nullptr) std::copy_n(scratch_.decays, count, g_.da + token * p_.attrs.decays() + first);
    if (g_.ddt_bias != nullptr) add_scaled(g_.ddt_bias + first, 1.0f, scratch_.decays, count);
  }

  const DeltaRuleGradient& g_;
  const DeltaRule& p_;
  int64_t head_, rows_, columns_;
  DeltaScratch scratch_;
  DeltaChunkRows chunk_rows_;
};

// dx = factor (dn - n (n . dn)) / size, where dx holds dn and n = x / size.
void normalize_backward(float* dx, const float* x, float factor, float eps, int64_t n) {
  const float inverse = inverse_length(x, n, eps);
  const float along = dot(x, dx, n) * inverse * inverse;
  map(
      dx, n, [f = set(factor * inverse), a = set(along)](Vec dn, Vec v) { return hn::Mul(f, hn::NegMulAdd(a, v, dn)); },
      static_cast<const float*>(dx), x);
}

// The value heads of one key head, sequence by sequence, so that sums of parameters have one order.
void delta_rule_backward(const DeltaRuleGradient& g, int64_t key_head, float* memory) {
  const DeltaRule& p = g.forward;
  const int64_t group = p.attrs.value_heads / p.attrs.key_heads, n = p.attrs.key_dim;
  const auto key_rows = [&](int64_t s, auto&& each) {
    for (int64_t t = p.query_start[s]; t < p.query_start[s + 1]; ++t) each((t * p.attrs.key_heads + key_head) * n);
  };
  for (int64_t s = 0; s < p.sequences; ++s) {
    key_rows(s, [&](int64_t row) {
      if (g.dq != nullptr) std::fill_n(g.dq + row, n, 0.0f);
      if (g.dk != nullptr) std::fill_n(g.dk + row, n, 0.0f);
    });
    if (p.query_start[s] < p.query_start[s + 1])
      for (int64_t i = 0; i < group; ++i)
        BackwardHead(g, p.attrs.tiled ? key_head + i * p.attrs.key_heads : key_head * group + i, memory)
            .run(p.query_start[s], p.query_start[s + 1]);
    key_rows(s, [&](int64_t row) {
      if (g.dq != nullptr)
        normalize_backward(g.dq + row, p.q + row, 1.0f / std::sqrt(static_cast<float>(n)), p.attrs.eps, n);
      if (g.dk != nullptr) normalize_backward(g.dk + row, p.k + row, 1.0f, p.attrs.eps, n);
    });
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(delta_rule_backward);

extern const Kernel kGatedDeltaRuleBackward;

namespace {

Verdict can_delta_rule_backward(const KernelRequest& r) {
  Requirements requirements(r);
  for (const size_t port : {0, 1, 2, 3, 4, 8}) requirements.f32("q, k, v, a, b or dy", r.inputs[port]);
  for (const TensorType& type : r.outputs) requirements.f32("a gradient", type);
  return requirements.verdict({.flops_share = 0.2, .reason = "token by token, from states computed again"});
}

PlanPtr prepare_delta_rule_backward(const KernelRequest& r, Context&) {
  const auto task = EADEM_CPU_DISPATCH(delta_rule_backward, cpu_device(r).isa());
  const auto attrs = r.attrs.get<GatedDeltaRuleAttrs>();
  // As many states between chunks as within one: the least memory.
  const int64_t tokens = r.inputs[0].bind(r.bounds)[0];
  const int64_t chunk = std::max<int64_t>(1, static_cast<int64_t>(std::sqrt(static_cast<double>(tokens))));
  const int64_t floats = DeltaScratch::floats(attrs, tokens, chunk);
  return make_plan(
      [=](const KernelCall& call) {
        const auto in = [&](size_t port) { return elements<const float>(call.inputs[port]); };
        const auto out = [&](size_t port) { return elements<float>(call.outputs[port]); };
        const DeltaRuleGradient g{.forward = {.attrs = attrs,
                                              .q = in(0),
                                              .k = in(1),
                                              .v = in(2),
                                              .a = in(3),
                                              .b = in(4),
                                              .a_log = in(5),
                                              .dt_bias = in(6),
                                              .query_start = elements<const int32_t>(call.inputs[7]),
                                              .sequences = call.inputs[7].shape[0] - 1},
                                  .dy = in(8),
                                  .dq = out(0),
                                  .dk = out(1),
                                  .dv = out(2),
                                  .da = out(3),
                                  .db = out(4),
                                  .da_log = out(5),
                                  .ddt_bias = out(6),
                                  .chunk = chunk};
        cpu_device(call).pool().parallel_for(attrs.key_heads, [&](int64_t head, int worker) {
          task(g, head, static_cast<float*>(call.scratch.data) + worker * floats);
        });
      },
      cpu_device(r).pool().num_threads() * floats * static_cast<int64_t>(sizeof(float)));
}

}  // namespace

const Kernel kGatedDeltaRuleBackward{"cpu_recurrent", Pass::backward, can_delta_rule_backward,
                                     prepare_delta_rule_backward};

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
