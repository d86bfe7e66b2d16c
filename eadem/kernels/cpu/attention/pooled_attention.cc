// SPDX-License-Identifier: Apache-2.0
//
// pooled_attention. A task is a token; its rows are the queries of all heads. The keys that it sees, those of the
// window and then the pooled rows, are gathered in chunks, and both products are the blocks of matmul-inl.h: every
// score is one chain over the width, every output one chain over these keys in their order.
//
// Gradients: with p = exp(s - lse) and ds = p (dy . k - dy . y) scale, tasks of tokens make p, ds and dq = ds k, and
// then tasks of columns add ds^T q + p^T dy to dk and drows, token by token in order. So a sum has the same order
// whatever the number of threads. A head's sink adds its tokens in order.
#include "eadem/kernels/attention/pooled_attention.h"

#include <algorithm>
#include <cmath>

#include "eadem/kernels/cpu/attention/selected_call.h"
#include "eadem/kernels/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/attention/pooled_attention.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/attention/gathered_rows-inl.h"
#include "eadem/kernels/cpu/dispatch.h"

#ifndef EADEM_KERNELS_CPU_POOLED_ATTENTION_CALL_
#define EADEM_KERNELS_CPU_POOLED_ATTENTION_CALL_
namespace eadem::kernels::cpu {
namespace {

// Loads the rows of k of an Attention at `count` positions into rows of scratch.
using GatherPositions = void (*)(float* to, const Attention& a, const SelectedToken& t, const int32_t* positions,
                                 int64_t count);

struct PooledCall {
  SelectedCall c;  // its k is that of the window, its entries the most keys of a token
  Attention rows;  // k: the pooled rows
  PooledAttentionAttrs attrs;
  const int32_t* selection;  // [tokens, selected] or null
  GatherPositions gather_keys, gather_rows;
};

// The positions that a token sees: those of k, and behind them those of rows.
struct PooledKeys {
  int64_t window, count;
};

// The tasks of one instruction set.
struct PooledRoutines {
  void (*forward)(const PooledCall& p, const SelectedToken& t, float* scratch);
};
struct PooledGradients {
  // Writes dq of a token, and its p and ds [heads, most_keys] for the next routine.
  void (*of_query)(const PooledCall& p, const SelectedToken& t, float* probabilities, float* ds, float* scratch);
  // Adds the columns [begin, end) of dk and drows of a token.
  void (*of_keys)(const PooledCall& p, const SelectedToken& t, const float* probabilities, const float* ds, float* dk,
                  float* drows, int64_t begin, int64_t end, float* scratch);
  // Adds the gradient of a head's sink.
  void (*of_sink)(const PooledCall& p, float* dsink, int64_t head, int64_t tokens);
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

template <typename T>
void gather_positions(float* to, const Attention& a, const SelectedToken& t, const int32_t* positions, int64_t count) {
  const int64_t width = a.width();
  const KvRows<T> from{a, static_cast<const T*>(a.k), t.sequence, 0, a.head_dim};
  for (int64_t j = 0; j < count; ++j, to += width) {
    const T* row = from.at(positions[j]);
    widen_row(to, row, a.head_dim, width);
    if (a.k_scales == nullptr) continue;
    map(
        to, a.head_dim, [scale = set(a.k_scales[(row - from.base) / a.head_dim])](Vec v) { return hn::Mul(v, scale); },
        static_cast<const float*>(to));
  }
}

GatherPositions gather_routine(DType dtype, const RowEncoding* encoding) {
  if (encoding != nullptr)
    return encoding->code() == RowEncoding::Code::int8 ? gather_positions<int8_t> : gather_positions<e4m3_t>;
  return with_dtype(dtype, [](auto* type) -> GatherPositions { return gather_positions<ElementOf<decltype(type)>>; });
}

PooledKeys list_pooled(int32_t* positions, const PooledCall& p, const SelectedToken& t) {
  int64_t count = 0;
  for (int64_t j = p.attrs.first_key(t.position); j <= t.position; ++j) positions[count++] = static_cast<int32_t>(j);
  const int64_t window = count, seen = p.attrs.rows_seen(t.position);
  const int32_t* selection = p.selection == nullptr ? nullptr : p.selection + t.token * p.attrs.selected;
  const int64_t entries = selection == nullptr ? seen : p.attrs.selected;
  for (int64_t e = 0; e < entries; ++e) {
    const int64_t row = selection == nullptr ? e : selection[e];
    if (row < 0) break;
    // A row lies at its last token, and in a cache at its own number.
    positions[count++] = static_cast<int32_t>(p.rows.block_table == nullptr ? (row + 1) * p.attrs.stride - 1 : row);
  }
  return {window, count};
}

// Gathers the keys [first, first + own) of a token into a chunk of scratch, whose other rows are 0.
auto chunk_gatherer(const SelectedScratch& s, const PooledCall& p, const SelectedToken& t, const PooledKeys& keys) {
  return [&s, &p, &t, &keys](int64_t first, int64_t own) {
    const int64_t of_window = std::clamp<int64_t>(keys.window - first, 0, own), width = p.c.a.width();
    p.gather_keys(s.rows, p.c.a, t, s.positions + first, of_window);
    p.gather_rows(s.rows + of_window * width, p.rows, t, s.positions + first + of_window, own - of_window);
    std::fill(s.rows + own * width, s.rows + kChunk * width, 0.0f);
  };
}

void pooled_forward(const PooledCall& p, const SelectedToken& t, float* scratch) {
  const Attention& a = p.c.a;
  const SelectedScratch s(p.c, scratch);
  const PooledKeys keys = list_pooled(s.positions, p, t);
  const auto gather = chunk_gatherer(s, p, t, keys);
  const int64_t row = t.token * a.heads;
  load_group(s.q, p.c, a.q, a.head_dim, t, 0);
  multiply_gathered(s.weights, p.c, s, s.q, a.head_dim, keys.count, gather);
  float* sums = s.scores;
  for (int64_t h = 0; h < a.heads; ++h) {
    float* weights = s.weights + h * p.c.most_keys();
    map(
        weights, keys.count, [scale = set(a.scale)](Vec v) { return hn::Mul(v, scale); },
        static_cast<const float*>(weights));
    const float most = std::max(max_of(weights, keys.count), a.sinks[h]);
    map(
        weights, keys.count, [most](Vec v) { return exp_of_negative(hn::Sub(v, set(most))); },
        static_cast<const float*>(weights));
    sums[h] = reduce(
                  keys.count, [](Vec acc, Vec v) { return hn::Add(acc, v); }, static_cast<const float*>(weights)) +
              std::exp(a.sinks[h] - most);
    if (a.lse != nullptr) a.lse[row + h] = most + std::log(sums[h]);
  }
  sum_gathered(s.out, p.c, s, s.weights, a.head_dim, keys.count, gather);
  for (int64_t h = 0; h < a.heads; ++h)
    map(
        a.y + (row + h) * a.head_dim, a.head_dim,
        [sum = set(sums[h])](Vec v) { return hn::Add(hn::Div(v, sum), zero()); },
        static_cast<const float*>(s.out + h * a.width()));
}

void pooled_query_gradient(const PooledCall& p, const SelectedToken& t, float* probabilities, float* ds,
                           float* scratch) {
  const Attention& a = p.c.a;
  const SelectedScratch s(p.c, scratch);
  const PooledKeys keys = list_pooled(s.positions, p, t);
  const auto gather = chunk_gatherer(s, p, t, keys);
  const int64_t row = t.token * a.heads;
  load_group(s.q, p.c, a.q, a.head_dim, t, 0);
  load_group(s.dy, p.c, a.dy, a.head_dim, t, 0);
  multiply_gathered(probabilities, p.c, s, s.q, a.head_dim, keys.count, gather);
  multiply_gathered(ds, p.c, s, s.dy, a.head_dim, keys.count, gather);
  for (int64_t h = 0; h < a.heads; ++h) {
    float *own_p = probabilities + h * p.c.most_keys(), *own_ds = ds + h * p.c.most_keys();
    const Vec scale = set(a.scale), lse = set(a.saved_lse[row + h]);
    const Vec along = set(dot(a.dy + (row + h) * a.head_dim, a.out + (row + h) * a.head_dim, a.head_dim));
    map(
        own_p, keys.count, [&](Vec v) { return exp(hn::Sub(hn::Mul(v, scale), lse)); },
        static_cast<const float*>(own_p));
    map(
        own_ds, keys.count, [&](Vec w, Vec v) { return hn::Mul(hn::Mul(w, hn::Sub(v, along)), scale); },
        static_cast<const float*>(own_p), static_cast<const float*>(own_ds));
  }
  if (a.dq == nullptr) return;
  sum_gathered(s.out, p.c, s, ds, a.head_dim, keys.count, gather);
  for (int64_t h = 0; h < a.heads; ++h)
    map(
        a.dq + (row + h) * a.head_dim, a.head_dim, [](Vec v) { return v; },
        static_cast<const float*>(s.out + h * a.width()));
}

// Adds ds^T q + p^T dy of the keys [first, last) of a token to the columns [begin, end) of `to` [tokens, width]. The
// columns of a range are whole panels.
void add_key_gradients(float* to, const PooledCall& p, const SelectedScratch& s, const SelectedToken& t,
                       const float* probabilities, const float* ds, int64_t first, int64_t last, int64_t begin,
                       int64_t end) {
  const Attention& a = p.c.a;
  const int64_t width = a.width(), panels = (std::min(end, width) - begin) / kPanelWidth;
  const int64_t columns = std::min(end, a.head_dim) - begin;
  if (to == nullptr || columns <= 0) return;
  for (; first < last; first += kChunk) {
    const int64_t own = std::min(kChunk, last - first);
    matmul_block(s.rows, width, false, RowOperand{ds + first, 1, p.c.most_keys()},
                 PanelOperand<float>{s.q + begin, kPanelWidth, width}, own, panels, a.heads);
    matmul_block(s.rows, width, true, RowOperand{probabilities + first, 1, p.c.most_keys()},
                 PanelOperand<float>{s.dy + begin, kPanelWidth, width}, own, panels, a.heads);
    for (int64_t j = 0; j < own; ++j) {
      float* target = to + (a.query_start[t.sequence] + s.positions[first + j]) * a.head_dim + begin;
      map(
          target, columns, [](Vec v, Vec more) { return hn::Add(v, more); }, static_cast<const float*>(target),
          static_cast<const float*>(s.rows + j * width));
    }
  }
}

void pooled_key_gradients(const PooledCall& p, const SelectedToken& t, const float* probabilities, const float* ds,
                          float* dk, float* drows, int64_t begin, int64_t end, float* scratch) {
  const Attention& a = p.c.a;
  const SelectedScratch s(p.c, scratch);
  const PooledKeys keys = list_pooled(s.positions, p, t);
  load_group(s.q, p.c, a.q, a.head_dim, t, 0);
  load_group(s.dy, p.c, a.dy, a.head_dim, t, 0);
  add_key_gradients(dk, p, s, t, probabilities, ds, 0, keys.window, begin, end);
  add_key_gradients(drows, p, s, t, probabilities, ds, keys.window, keys.count, begin, end);
}

void pooled_sink_gradient(const PooledCall& p, float* dsink, int64_t head, int64_t tokens) {
  const Attention& a = p.c.a;
  float sum = 0.0f;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t row = t * a.heads + head;
    sum +=
        std::exp(a.sinks[head] - a.saved_lse[row]) * dot(a.dy + row * a.head_dim, a.out + row * a.head_dim, a.head_dim);
  }
  *dsink -= sum;
}

PooledRoutines pooled_routines() { return {pooled_forward}; }
PooledGradients pooled_gradients() { return {pooled_query_gradient, pooled_key_gradients, pooled_sink_gradient}; }

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(gather_routine);
EADEM_CPU_EXPORT(pooled_routines);
EADEM_CPU_EXPORT(pooled_gradients);

namespace {

enum PooledInput {
  kPooledQ,
  kPooledK,
  kPooledRows,
  kPooledSinks,
  kPooledQueryStart,
  kPooledKvLength,
  kPooledBlockTable,
  kPooledRowsTable
};

bool attends_cache(const KernelRequest& r) { return r.attrs.get<PooledAttentionAttrs>().source == KvSource::cached; }

// Where the selection stands. The backward pass has no tables.
size_t pooled_selection(bool cached, bool backward) {
  return backward ? kPooledBlockTable : cached ? kPooledRowsTable + 1 : kPooledRowsTable;
}

PooledCall pooled_shape(const KernelRequest& r) {
  const auto attrs = r.attrs.get<PooledAttentionAttrs>();
  Attention a{};
  a.heads = attrs.heads;
  a.kv_heads = 1;
  a.head_dim = a.value_dim = a.value_row = attrs.width;
  a.scale = attrs.scale;
  a.window = attrs.window;
  int64_t positions = 0;
  if (attends_cache(r))
    positions = r.bounds[Symbol::max_blocks] * r.inputs[kPooledRows].fixed(2) * attrs.stride;
  else
    positions = r.inputs[kPooledK].bind(r.bounds)[0];
  const int64_t all = positions / attrs.stride, rows = attrs.selected > 0 ? std::min(attrs.selected, all) : all;
  PooledCall p{.c = {.a = a, .selection = nullptr, .entries = 0, .span = 1, .grid = {}},
               .rows = a,
               .attrs = attrs,
               .selection = nullptr,
               .gather_keys = nullptr,
               .gather_rows = nullptr};
  p.c.entries = std::min(attrs.window, positions) + rows;
  const auto routine = EADEM_CPU_DISPATCH(gather_routine, cpu_device(r).isa());
  p.gather_keys = routine(r.inputs[kPooledK].dtype, RowEncoding::of(r.inputs[kPooledK].encoding));
  p.gather_rows = routine(r.inputs[kPooledRows].dtype, nullptr);
  return p;
}

void set_pooled_inputs(PooledCall& p, const KernelCall& call, bool cached, bool backward) {
  const TensorView &k = call.inputs[kPooledK], &rows = call.inputs[kPooledRows];
  EADEM_CHECK(k.is_contiguous() && rows.is_contiguous(), "keys {} and rows {}", to_string(k), to_string(rows));
  Attention& a = p.c.a;
  a.q = elements<const float>(call.inputs[kPooledQ]);
  a.k = k.data;
  a.k_scales = static_cast<const float*>(k.plane(1));
  a.sinks = elements<const float>(call.inputs[kPooledSinks]);
  a.query_start = elements<const int32_t>(call.inputs[kPooledQueryStart]);
  a.kv_length = elements<const int32_t>(call.inputs[kPooledKvLength]);
  a.sequences = call.inputs[kPooledKvLength].shape[0];
  p.rows.k = rows.data;
  p.rows.query_start = a.query_start;
  if (p.attrs.selected > 0) p.selection = elements<const int32_t>(call.inputs[pooled_selection(cached, backward)]);
  if (!cached) return;
  const TensorView &table = call.inputs[kPooledBlockTable], &rows_table = call.inputs[kPooledRowsTable];
  a.block_table = elements<const int32_t>(table);
  a.max_blocks = table.shape[1];
  a.block_size = k.shape[2];
  p.rows.block_table = elements<const int32_t>(rows_table);
  p.rows.max_blocks = rows_table.shape[1];
  p.rows.block_size = rows.shape[2];
}

Requirements pooled_requirements(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("q", r.inputs[kPooledQ])
      .packed("k", r.inputs[kPooledK], kStorageDTypes,
              attends_cache(r) ? RowEncoding::of(r.inputs[kPooledK].encoding) : nullptr)
      .one_of("rows", r.inputs[kPooledRows], kStorageDTypes)
      .f32("sinks", r.inputs[kPooledSinks])
      .f32("y", r.outputs[0]);
  if (r.attrs.get<PooledAttentionAttrs>().selected > 0)
    requirements.one_of("selection", r.inputs[pooled_selection(attends_cache(r), false)], {DType::i32});
  return requirements;
}

Verdict can_attend_pooled(const KernelRequest& r) { return pooled_requirements(r).verdict(); }

Verdict can_attend_pooled_forward(const KernelRequest& r) {
  if (attends_cache(r)) return Verdict::no("the forward pass reads keys directly, not a cache");
  return pooled_requirements(r).f32("lse", r.outputs[1]).verdict();
}

PlanPtr prepare_pooled(const KernelRequest& r, Context&) {
  const PooledCall shape = pooled_shape(r);
  const bool cached = attends_cache(r);
  const PooledRoutines routines = EADEM_CPU_DISPATCH(pooled_routines, cpu_device(r).isa())();
  const int64_t floats = SelectedScratch::floats(shape.c);
  return make_plan(
      [=](const KernelCall& call) {
        PooledCall p = shape;
        set_pooled_inputs(p, call, cached, false);
        p.c.a.y = elements<float>(call.outputs[0]);
        p.c.a.lse = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr;
        cpu_device(call).pool().parallel_for(p.c.a.query_start[p.c.a.sequences], [&](int64_t t, int worker) {
          routines.forward(p, token_at(p.c.a, t), static_cast<float*>(call.scratch.data) + worker * floats);
        });
      },
      cpu_device(r).pool().num_threads() * floats * static_cast<int64_t>(sizeof(float)));
}

// y, lse and dy are the last inputs.
Verdict can_attend_pooled_backward(const KernelRequest& r) {
  Requirements requirements(r);
  for (const size_t port : {size_t{kPooledQ}, size_t{kPooledK}, size_t{kPooledRows}, size_t{kPooledSinks},
                            r.inputs.size() - 3, r.inputs.size() - 2, r.inputs.size() - 1})
    requirements.f32("an input", r.inputs[port]);
  for (const TensorType& type : r.outputs) requirements.f32("a gradient", type);
  return requirements.verdict();
}

// Tokens whose p and ds wait in scratch together, for each thread.
constexpr int64_t kPooledTokensPerThread = 4;

PlanPtr prepare_pooled_backward(const KernelRequest& r, Context&) {
  const PooledCall shape = pooled_shape(r);
  const PooledGradients routines = EADEM_CPU_DISPATCH(pooled_gradients, cpu_device(r).isa())();
  const int64_t threads = cpu_device(r).pool().num_threads(), floats = SelectedScratch::floats(shape.c);
  const int64_t pair_floats = shape.attrs.heads * shape.c.most_keys(), at_once = threads * kPooledTokensPerThread;
  return make_plan(
      [=](const KernelCall& call) {
        PooledCall p = shape;
        set_pooled_inputs(p, call, false, true);
        Attention& a = p.c.a;
        const size_t last = call.inputs.size() - 1;
        a.out = elements<const float>(call.inputs[last - 2]);
        a.saved_lse = elements<const float>(call.inputs[last - 1]);
        a.dy = elements<const float>(call.inputs[last]);
        a.dq = elements<float>(call.outputs[0]);
        auto *dk = elements<float>(call.outputs[1]), *drows = elements<float>(call.outputs[2]),
             *dsinks = elements<float>(call.outputs[3]);
        const int64_t tokens = a.query_start[a.sequences];
        for (float* gradient : {dk, drows})
          if (gradient != nullptr) std::fill_n(gradient, tokens * a.head_dim, 0.0f);
        auto* const scratch = static_cast<float*>(call.scratch.data);
        const auto own = [&](int64_t i) { return scratch + threads * floats + 2 * i * pair_floats; };
        ThreadPool& pool = cpu_device(call).pool();
        for (int64_t first = 0; first < tokens; first += at_once) {
          const int64_t count = std::min(at_once, tokens - first);
          pool.parallel_for(count, [&](int64_t i, int worker) {
            routines.of_query(p, token_at(a, first + i), own(i), own(i) + pair_floats, scratch + worker * floats);
          });
          if (dk == nullptr && drows == nullptr) continue;
          pool.parallel_ranges(a.width() / kPanelWidth, 1, [&](int64_t begin, int64_t end, int worker) {
            for (int64_t i = 0; i < count; ++i)
              routines.of_keys(p, token_at(a, first + i), own(i), own(i) + pair_floats, dk, drows, begin * kPanelWidth,
                               end * kPanelWidth, scratch + worker * floats);
          });
        }
        if (dsinks != nullptr)
          pool.parallel_for(a.heads, [&](int64_t head, int) { routines.of_sink(p, dsinks + head, head, tokens); });
      },
      (threads * floats + 2 * at_once * pair_floats) * static_cast<int64_t>(sizeof(float)));
}

constexpr Kernel kPooledForward{"cpu_gather", Pass::forward, can_attend_pooled_forward, prepare_pooled};
constexpr Kernel kPooledInference{"cpu_gather", Pass::inference, can_attend_pooled, prepare_pooled};
constexpr Kernel kPooledBackward{"cpu_gather", Pass::backward, can_attend_pooled_backward, prepare_pooled_backward};

}  // namespace

KernelList pooled_attention_kernels() { return {&kPooledForward, &kPooledInference, &kPooledBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
