// SPDX-License-Identifier: Apache-2.0
//
// selected_attention and compressed_attention, which differ in the keys that a token sees. A task is a token and a kv
// head; its rows are the queries of the heads of the group. The keys that it sees are gathered in chunks, and both
// products are the blocks of matmul-inl.h: every score is one chain over head_dim, every output one chain over these
// keys in their order.
//
// Gradients: with p = exp(s - lse) and ds = p (dy . v - dy . y) scale, tasks of tokens make p, ds and dq = ds k, and
// then tasks of columns add dk += ds^T q and dv += p^T dy, token by token in order. So a sum has the same order
// whatever the number of threads.
#include "eadem/kernels/attention/selected_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "eadem/kernels/cpu/attention/selected_call.h"
#include "eadem/kernels/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/attention/selected_attention.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/attention/gathered_rows-inl.h"
#include "eadem/kernels/cpu/dispatch.h"

#ifndef EADEM_KERNELS_CPU_SELECTED_ATTENTION_CALL_
#define EADEM_KERNELS_CPU_SELECTED_ATTENTION_CALL_
namespace eadem::kernels::cpu {
namespace {

// The tasks of one instruction set.
struct SelectedRoutines {
  void (*forward)(const SelectedCall& c, const SelectedToken& t, int64_t kv_head, float* scratch);
};
struct SelectedGradients {
  // Writes dq of a token, and its p and ds [group, most_keys] for the other routine.
  void (*of_query)(const SelectedCall& c, const SelectedToken& t, int64_t kv_head, float* p, float* ds, float* scratch);
  // Adds the columns [begin, end) of dk and dv of a token.
  void (*of_keys)(const SelectedCall& c, const SelectedToken& t, int64_t kv_head, const float* p, const float* ds,
                  int64_t begin, int64_t end, float* scratch);
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

template <typename T>
void selected_forward(const SelectedCall& c, const SelectedToken& t, int64_t kv_head, float* scratch) {
  const Attention& a = c.a;
  const SelectedScratch s(c, scratch);
  const int64_t count = list_positions(s.positions, c, t, kv_head), row = first_row(c, t, kv_head);
  load_group(s.q, c, a.q, a.head_dim, t, kv_head);
  multiply_gathered(s.weights, c, s, s.q, a.head_dim, count,
                    [&](int64_t first, int64_t own) { gather_keys<T>(s, c, t, kv_head, first, own); });
  if (count == 0) {
    std::fill_n(a.y + row * a.value_dim, a.group() * a.value_dim, 0.0f);
    if (a.lse != nullptr) std::fill_n(a.lse + row, a.group(), 0.0f);
    return;
  }
  float* sums = s.scores;
  for (int64_t r = 0; r < a.group(); ++r) {
    float* weights = s.weights + r * c.most_keys();
    map(
        weights, count, [scale = set(a.scale)](Vec v) { return hn::Mul(v, scale); },
        static_cast<const float*>(weights));
    const float most = max_of(weights, count);
    map(
        weights, count, [most](Vec v) { return exp_of_negative(hn::Sub(v, set(most))); },
        static_cast<const float*>(weights));
    sums[r] = reduce(
        count, [](Vec acc, Vec v) { return hn::Add(acc, v); }, static_cast<const float*>(weights));
    if (a.lse != nullptr) a.lse[row + r] = most + std::log(sums[r]);
  }
  sum_gathered(s.out, c, s, s.weights, a.value_dim, count,
               [&](int64_t first, int64_t own) { gather_values<T>(s, c, t, kv_head, first, own); });
  for (int64_t r = 0; r < a.group(); ++r)
    map(
        a.y + (row + r) * a.value_dim, a.value_dim,
        [sum = set(sums[r])](Vec v) { return hn::Add(hn::Div(v, sum), zero()); },
        static_cast<const float*>(s.out + r * a.value_width()));
}

void selected_query_gradient(const SelectedCall& c, const SelectedToken& t, int64_t kv_head, float* p, float* ds,
                             float* scratch) {
  const Attention& a = c.a;
  const SelectedScratch s(c, scratch);
  const int64_t count = list_positions(s.positions, c, t, kv_head), row = first_row(c, t, kv_head);
  const auto keys = [&](int64_t first, int64_t own) { gather_keys<float>(s, c, t, kv_head, first, own); };
  load_group(s.q, c, a.q, a.head_dim, t, kv_head);
  load_group(s.dy, c, a.dy, a.value_dim, t, kv_head);
  multiply_gathered(p, c, s, s.q, a.head_dim, count, keys);
  multiply_gathered(ds, c, s, s.dy, a.value_dim, count,
                    [&](int64_t first, int64_t own) { gather_values<float>(s, c, t, kv_head, first, own); });
  for (int64_t r = 0; r < a.group(); ++r) {
    float *own_p = p + r * c.most_keys(), *own_ds = ds + r * c.most_keys();
    const Vec scale = set(a.scale), lse = set(a.saved_lse[row + r]);
    const Vec along = set(dot(a.dy + (row + r) * a.value_dim, a.out + (row + r) * a.value_dim, a.value_dim));
    map(
        own_p, count, [&](Vec v) { return exp(hn::Sub(hn::Mul(v, scale), lse)); }, static_cast<const float*>(own_p));
    map(
        own_ds, count, [&](Vec w, Vec v) { return hn::Mul(hn::Mul(w, hn::Sub(v, along)), scale); },
        static_cast<const float*>(own_p), static_cast<const float*>(own_ds));
  }
  if (a.dq == nullptr) return;
  sum_gathered(s.out, c, s, ds, a.head_dim, count, keys);
  for (int64_t r = 0; r < a.group(); ++r)
    map(
        a.dq + (row + r) * a.head_dim, a.head_dim, [](Vec v) { return v; },
        static_cast<const float*>(s.out + r * a.width()));
}

// Adds factors^T x to the columns [begin, end) of the rows of `to` [tokens, kv_heads, row_dim] at the token's
// positions; x [group, width]. The columns of a range are whole panels.
void add_to_positions(float* to, int64_t dim, int64_t row_dim, const SelectedCall& c, const SelectedScratch& s,
                      const SelectedToken& t, int64_t kv_head, const float* factors, const float* x, int64_t count,
                      int64_t begin, int64_t end) {
  const int64_t width = Attention::padded(dim), panels = (std::min(end, width) - begin) / kPanelWidth;
  const int64_t columns = std::min(end, dim) - begin;
  if (to == nullptr || columns <= 0) return;
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t own = std::min(kChunk, count - first);
    matmul_block(s.rows, width, false, RowOperand{factors + first, 1, c.most_keys()},
                 PanelOperand<float>{x + begin, kPanelWidth, width}, own, panels, c.a.group());
    for (int64_t j = 0; j < own; ++j) {
      const int64_t row = (c.a.query_start[t.sequence] + s.positions[first + j]) * c.a.kv_heads + kv_head;
      float* target = to + row * row_dim + begin;
      map(
          target, columns, [](Vec v, Vec more) { return hn::Add(v, more); }, static_cast<const float*>(target),
          static_cast<const float*>(s.rows + j * width));
    }
  }
}

void selected_key_gradients(const SelectedCall& c, const SelectedToken& t, int64_t kv_head, const float* p,
                            const float* ds, int64_t begin, int64_t end, float* scratch) {
  const Attention& a = c.a;
  const SelectedScratch s(c, scratch);
  const int64_t count = list_positions(s.positions, c, t, kv_head);
  load_group(s.q, c, a.q, a.head_dim, t, kv_head);
  load_group(s.dy, c, a.dy, a.value_dim, t, kv_head);
  add_to_positions(a.dk, a.head_dim, a.head_dim, c, s, t, kv_head, ds, s.q, count, begin, end);
  add_to_positions(a.dv, a.value_dim, a.value_row, c, s, t, kv_head, p, s.dy, count, begin, end);
}

template <typename T>
constexpr SelectedRoutines kSelectedRoutines{selected_forward<T>};

// Returns the routines for keys and values that `encoding` stores; null: for plain ones of `dtype`.
SelectedRoutines selected_routines(DType dtype, const RowEncoding* encoding) {
  if (encoding != nullptr)
    return encoding->code() == RowEncoding::Code::int8 ? kSelectedRoutines<int8_t> : kSelectedRoutines<e4m3_t>;
  return with_dtype(dtype, [](auto* type) -> SelectedRoutines { return kSelectedRoutines<ElementOf<decltype(type)>>; });
}

SelectedGradients selected_gradients() { return {selected_query_gradient, selected_key_gradients}; }

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(selected_routines);
EADEM_CPU_EXPORT(selected_gradients);

namespace {

enum SelectedInput { kSelectedQ, kSelectedK, kSelectedV, kSelection };

// Where the other inputs stand: a selection stands before those that describe sequences.
struct SelectedPorts {
  bool selection;

  size_t query_start() const { return selection ? 4 : 3; }
  size_t kv_length() const { return query_start() + 1; }
  size_t block_table() const { return query_start() + 2; }
  // Backward: y, and then lse and dy.
  size_t y() const { return query_start() + 2; }
};
SelectedPorts ports_of(const KernelRequest& r) { return {.selection = r.op == "selected_attention"}; }

struct SelectedShape {
  SelectedCall call;
  bool cached;
};

SelectedShape selected_shape(const KernelRequest& r) {
  const auto shape = [&](const auto& attrs) {
    Attention a{};
    a.heads = attrs.heads;
    a.kv_heads = attrs.kv_heads;
    a.head_dim = attrs.head_dim;
    a.value_dim = attrs.value_dim;
    a.scale = attrs.scale;
    a.value_row = r.inputs[kSelectedV].fixed(r.inputs[kSelectedV].rank() - 1);
    return SelectedShape{.call = {.a = a, .selection = nullptr, .entries = 0, .span = 1, .grid = {}},
                         .cached = attrs.source == KvSource::cached};
  };
  if (ports_of(r).selection) {
    const auto& attrs = r.attrs.get<SelectedAttentionAttrs>();
    SelectedShape result = shape(attrs);
    result.call.entries = r.inputs[kSelection].fixed(2);
    result.call.span = attrs.span;
    return result;
  }
  const auto& attrs = r.attrs.get<CompressedAttentionAttrs>();
  SelectedShape result = shape(attrs);
  result.call.grid = attrs.grid;
  result.call.entries = most_compressed_rows(r, attrs.grid, attrs.source);
  return result;
}

void set_selected_inputs(SelectedCall& c, const SelectedPorts& ports, const KernelCall& call) {
  const TensorView &k = call.inputs[kSelectedK], &v = call.inputs[kSelectedV];
  EADEM_CHECK(k.is_contiguous() && v.is_contiguous(), "keys {} and values {}", to_string(k), to_string(v));
  c.a.q = elements<const float>(call.inputs[kSelectedQ]);
  c.a.k = k.data;
  c.a.v = v.data;
  c.a.k_scales = static_cast<const float*>(k.plane(1));
  c.a.v_scales = static_cast<const float*>(v.plane(1));
  if (ports.selection) c.selection = elements<const int32_t>(call.inputs[kSelection]);
  c.a.query_start = elements<const int32_t>(call.inputs[ports.query_start()]);
  c.a.kv_length = elements<const int32_t>(call.inputs[ports.kv_length()]);
  c.a.sequences = call.inputs[ports.kv_length()].shape[0];
}

Requirements selected_requirements(const KernelRequest& r, bool cached) {
  const Encoding* encoding = cached ? RowEncoding::of(r.inputs[kSelectedK].encoding) : nullptr;
  Requirements requirements(r);
  requirements.f32("q", r.inputs[kSelectedQ])
      .packed("k", r.inputs[kSelectedK], kStorageDTypes, encoding)
      .packed("v", r.inputs[kSelectedV], {r.inputs[kSelectedK].dtype}, encoding)
      .f32("y", r.outputs[0])
      .require(r.inputs[kSelectedK].encoding == r.inputs[kSelectedV].encoding,
               "takes keys and values in the same encoding");
  if (ports_of(r).selection) requirements.one_of("selection", r.inputs[kSelection], {DType::i32});
  return requirements;
}

Verdict can_attend(const KernelRequest& r) { return selected_requirements(r, selected_shape(r).cached).verdict(); }

Verdict can_attend_forward(const KernelRequest& r) {
  if (selected_shape(r).cached) return Verdict::no("the forward pass reads keys directly, not a cache");
  return selected_requirements(r, false).f32("lse", r.outputs[1]).verdict();
}

PlanPtr prepare_selected(const KernelRequest& r, Context&) {
  const auto [shape, cached] = selected_shape(r);
  const SelectedRoutines routines = EADEM_CPU_DISPATCH(selected_routines, cpu_device(r).isa())(
      r.inputs[kSelectedK].dtype, RowEncoding::of(r.inputs[kSelectedK].encoding));
  const int64_t floats = SelectedScratch::floats(shape);
  return make_plan(
      [shape = shape, cached = cached, ports = ports_of(r), routines, floats](const KernelCall& call) {
        SelectedCall c = shape;
        set_selected_inputs(c, ports, call);
        if (cached) {
          c.a.block_table = elements<const int32_t>(call.inputs[ports.block_table()]);
          c.a.max_blocks = call.inputs[ports.block_table()].shape[1];
          c.a.block_size = call.inputs[kSelectedK].shape[2];
        }
        c.a.y = elements<float>(call.outputs[0]);
        c.a.lse = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr;
        cpu_device(call).pool().parallel_for(c.a.query_start[c.a.sequences] * c.a.kv_heads, [&](int64_t i, int worker) {
          routines.forward(c, token_at(c.a, i / c.a.kv_heads), i % c.a.kv_heads,
                           static_cast<float*>(call.scratch.data) + worker * floats);
        });
      },
      cpu_device(r).pool().num_threads() * floats * static_cast<int64_t>(sizeof(float)));
}

Verdict can_attend_backward(const KernelRequest& r) {
  Requirements requirements(r);
  for (const int port : {static_cast<int>(kSelectedQ), static_cast<int>(kSelectedK), static_cast<int>(kSelectedV)})
    requirements.f32("q, k or v", r.inputs[static_cast<size_t>(port)]);
  const size_t y = ports_of(r).y();
  requirements.f32("y", r.inputs[y]).f32("lse", r.inputs[y + 1]).f32("dy", r.inputs[y + 2]);
  for (const TensorType& type : r.outputs) requirements.f32("a gradient", type);
  return requirements.verdict();
}

// Tokens whose p and ds wait in scratch together, for each thread.
constexpr int64_t kTokensPerThread = 4;

PlanPtr prepare_selected_backward(const KernelRequest& r, Context&) {
  const SelectedCall shape = selected_shape(r).call;
  const SelectedPorts ports = ports_of(r);
  const SelectedGradients routines = EADEM_CPU_DISPATCH(selected_gradients, cpu_device(r).isa())();
  const int64_t threads = cpu_device(r).pool().num_threads(), floats = SelectedScratch::floats(shape);
  const int64_t kv_heads = shape.a.kv_heads, pair_floats = shape.a.group() * shape.most_keys();
  const int64_t tokens_at_once = threads * kTokensPerThread;
  const int64_t columns = std::max(shape.a.width(), shape.a.value_width());
  return make_plan(
      [=](const KernelCall& call) {
        SelectedCall c = shape;
        set_selected_inputs(c, ports, call);
        c.a.out = elements<const float>(call.inputs[ports.y()]);
        c.a.saved_lse = elements<const float>(call.inputs[ports.y() + 1]);
        c.a.dy = elements<const float>(call.inputs[ports.y() + 2]);
        c.a.dq = elements<float>(call.outputs[0]);
        c.a.dk = elements<float>(call.outputs[1]);
        c.a.dv = elements<float>(call.outputs[2]);
        const int64_t tokens = c.a.query_start[c.a.sequences];
        if (c.a.dk != nullptr) std::fill_n(c.a.dk, tokens * kv_heads * c.a.head_dim, 0.0f);
        if (c.a.dv != nullptr) std::fill_n(c.a.dv, tokens * kv_heads * c.a.value_row, 0.0f);
        auto* const scratch = static_cast<float*>(call.scratch.data);
        float* const pairs = scratch + threads * floats;
        const auto own = [&](int64_t i) { return pairs + 2 * i * pair_floats; };
        ThreadPool& pool = cpu_device(call).pool();
        for (int64_t first = 0; first < tokens; first += tokens_at_once) {
          const int64_t count = std::min(tokens_at_once, tokens - first) * kv_heads;
          pool.parallel_for(count, [&](int64_t i, int worker) {
            routines.of_query(c, token_at(c.a, first + i / kv_heads), i % kv_heads, own(i), own(i) + pair_floats,
                              scratch + worker * floats);
          });
          if (c.a.dk == nullptr && c.a.dv == nullptr) continue;
          pool.parallel_ranges(columns / kPanelWidth, 1, [&](int64_t begin, int64_t end, int worker) {
            for (int64_t i = 0; i < count; ++i)
              routines.of_keys(c, token_at(c.a, first + i / kv_heads), i % kv_heads, own(i), own(i) + pair_floats,
                               begin * kPanelWidth, end * kPanelWidth, scratch + worker * floats);
          });
        }
      },
      (threads * floats + 2 * tokens_at_once * kv_heads * pair_floats) * static_cast<int64_t>(sizeof(float)));
}

constexpr Kernel kSelectedForward{"cpu_gather", Pass::forward, can_attend_forward, prepare_selected};
constexpr Kernel kSelectedInference{"cpu_gather", Pass::inference, can_attend, prepare_selected};
constexpr Kernel kSelectedBackward{"cpu_gather", Pass::backward, can_attend_backward, prepare_selected_backward};

}  // namespace

KernelList selected_attention_kernels() { return {&kSelectedForward, &kSelectedInference, &kSelectedBackward}; }
KernelList compressed_attention_kernels() { return selected_attention_kernels(); }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
