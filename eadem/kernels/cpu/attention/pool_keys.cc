// SPDX-License-Identifier: Apache-2.0
//
// pool_keys. A row is made by the task of its last token. A column's softmax goes three times over the positions of the
// row, in order: the largest score, the sums of the exponentials and of their products, and the quotient.
//
// Gradients: a position's part is in one row alone, so the task of a row writes dx and dgate; dposition is then the sum
// of dgate over the windows, in order.
#include <algorithm>

#include "eadem/kernels/attention/pooled_attention.h"
#include "eadem/kernels/cpu/attention/selected_call.h"
#include "eadem/kernels/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/attention/pool_keys.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/attention/attention-inl.h"
#include "eadem/kernels/cpu/dispatch.h"

#ifndef EADEM_KERNELS_CPU_POOL_KEYS_CALL_
#define EADEM_KERNELS_CPU_POOL_KEYS_CALL_
namespace eadem::kernels::cpu {
namespace {

struct PoolCall {
  Attention a;  // x is its k and gate its v, of `columns` columns
  PoolKeysAttrs attrs;
  const float* position;  // [stride, columns]

  // The first position that the row of the token at `last` is made of.
  int64_t first_position(int64_t last) const { return std::max<int64_t>(0, last + 1 - attrs.length()); }
  // The part's first column, for a position of that row.
  int64_t column(int64_t last, int64_t at) const {
    return (at - (last + 1 - attrs.length())) / attrs.stride * attrs.width;
  }
  int64_t place(int64_t at, int64_t column) const { return at % attrs.stride * attrs.columns() + column; }
};

// Makes z [width] of the row that `row` ends. `scratch` has two rows of floats.
using PoolRow = void (*)(float* z, const PoolCall& c, const SelectedToken& row, float* scratch);

struct PoolGradients {
  // Writes dx and dgate [tokens, columns] of the positions of a row; dx may be null.
  void (*of_row)(float* dx, float* dgate, const PoolCall& c, const SelectedToken& row, const float* z, const float* dz,
                 float* scratch);
  // to += x
  void (*add)(float* to, const float* x, int64_t n);
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// The scores of a column less the largest one, and the sum of their exponentials: most [width] and sum [width].
template <typename T>
void pool_statistics(float* most, float* sum, const PoolCall& c, const SelectedToken& row) {
  const int64_t width = c.attrs.width, first = c.first_position(row.position);
  const KvRows<T> gates{c.a, static_cast<const T*>(c.a.v), row.sequence, 0, c.attrs.columns()};
  for (int64_t at = first; at <= row.position; ++at) {
    const int64_t column = c.column(row.position, at);
    const T* gate = gates.at(at) + column;
    const float* e = c.position + c.place(at, column);
    if (at == first)
      map(
          most, width, [](Vec g, Vec b) { return hn::Add(g, b); }, gate, e);
    else
      map(
          most, width, [](Vec m, Vec g, Vec b) { return hn::Max(m, hn::Add(g, b)); }, static_cast<const float*>(most),
          gate, e);
  }
  std::fill_n(sum, width, 0.0f);
  for (int64_t at = first; at <= row.position; ++at) {
    const int64_t column = c.column(row.position, at);
    map(
        sum, width, [](Vec s, Vec g, Vec b, Vec m) { return hn::Add(s, exp_of_negative(hn::Sub(hn::Add(g, b), m))); },
        static_cast<const float*>(sum), gates.at(at) + column, c.position + c.place(at, column),
        static_cast<const float*>(most));
  }
}

template <typename T>
void pool_row(float* z, const PoolCall& c, const SelectedToken& row, float* scratch) {
  const int64_t width = c.attrs.width;
  float *most = scratch, *sum = scratch + width;
  pool_statistics<T>(most, sum, c, row);
  const KvRows<T> xs{c.a, static_cast<const T*>(c.a.k), row.sequence, 0, c.attrs.columns()},
      gates{c.a, static_cast<const T*>(c.a.v), row.sequence, 0, c.attrs.columns()};
  std::fill_n(z, width, 0.0f);
  for (int64_t at = c.first_position(row.position); at <= row.position; ++at) {
    const int64_t column = c.column(row.position, at);
    map(
        z, width,
        [](Vec acc, Vec x, Vec g, Vec b, Vec m) {
          return hn::MulAdd(exp_of_negative(hn::Sub(hn::Add(g, b), m)), x, acc);
        },
        static_cast<const float*>(z), xs.at(at) + column, gates.at(at) + column, c.position + c.place(at, column),
        static_cast<const float*>(most));
  }
  map(
      z, width, [](Vec v, Vec s) { return hn::Div(v, s); }, static_cast<const float*>(z),
      static_cast<const float*>(sum));
}

PoolRow pool_routine(DType dtype) {
  return with_dtype(dtype, [](auto* type) -> PoolRow { return pool_row<ElementOf<decltype(type)>>; });
}

void pool_row_gradient(float* dx, float* dgate, const PoolCall& c, const SelectedToken& row, const float* z,
                       const float* dz, float* scratch) {
  const int64_t width = c.attrs.width, columns = c.attrs.columns();
  float *most = scratch, *sum = scratch + width;
  pool_statistics<float>(most, sum, c, row);
  for (int64_t at = c.first_position(row.position); at <= row.position; ++at) {
    const int64_t column = c.column(row.position, at);
    const int64_t own = (c.a.query_start[row.sequence] + at) * columns + column;
    const auto *x = static_cast<const float*>(c.a.k) + own, *gate = static_cast<const float*>(c.a.v) + own;
    // p dz
    map(
        dgate + own, width,
        [](Vec g, Vec b, Vec m, Vec s, Vec d) {
          return hn::Mul(hn::Div(exp_of_negative(hn::Sub(hn::Add(g, b), m)), s), d);
        },
        gate, c.position + c.place(at, column), static_cast<const float*>(most), static_cast<const float*>(sum), dz);
    if (dx != nullptr) std::copy_n(dgate + own, width, dx + own);
    map(
        dgate + own, width, [](Vec pd, Vec v, Vec mean) { return hn::Mul(pd, hn::Sub(v, mean)); },
        static_cast<const float*>(dgate + own), x, z);
  }
}

void add_row(float* to, const float* x, int64_t n) {
  map(
      to, n, [](Vec v, Vec more) { return hn::Add(v, more); }, static_cast<const float*>(to), x);
}

PoolGradients pool_gradients() { return {pool_row_gradient, add_row}; }

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(pool_routine);
EADEM_CPU_EXPORT(pool_gradients);

namespace {

enum PoolInput { kPoolX, kPoolGate, kPoolPosition, kPoolQueryStart, kPoolKvLength, kPoolBlockTable, kPoolSlots };
enum PoolBackwardInput { kPooledZ = 5, kPooledDz };

PoolCall pool_shape(const KernelRequest& r) {
  const PoolKeysAttrs& attrs = r.attrs.get<PoolKeysAttrs>();
  Attention a{};
  a.heads = a.kv_heads = 1;
  a.head_dim = attrs.columns();
  return {.a = a, .attrs = attrs, .position = nullptr};
}

void set_pool_inputs(PoolCall& c, const KernelCall& call) {
  const TensorView &x = call.inputs[kPoolX], &gate = call.inputs[kPoolGate];
  EADEM_CHECK(x.is_contiguous() && gate.is_contiguous(), "keys {} and gates {}", to_string(x), to_string(gate));
  c.a.k = x.data;
  c.a.v = gate.data;
  c.position = elements<const float>(call.inputs[kPoolPosition]);
  c.a.query_start = elements<const int32_t>(call.inputs[kPoolQueryStart]);
  c.a.kv_length = elements<const int32_t>(call.inputs[kPoolKvLength]);
  c.a.sequences = call.inputs[kPoolKvLength].shape[0];
}

bool pools_cache(const KernelRequest& r) { return r.attrs.get<PoolKeysAttrs>().source == KvSource::cached; }

Verdict can_pool(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("position", r.inputs[kPoolPosition]).f32("z", r.outputs[0]);
  if (!pools_cache(r)) return requirements.f32("x", r.inputs[kPoolX]).f32("gate", r.inputs[kPoolGate]).verdict();
  return requirements.one_of("x", r.inputs[kPoolX], kStorageDTypes)
      .one_of("gate", r.inputs[kPoolGate], {r.inputs[kPoolX].dtype})
      .verdict();
}

Verdict can_pool_forward(const KernelRequest& r) {
  if (pools_cache(r)) return Verdict::no("the forward pass reads keys directly, not a cache");
  return can_pool(r);
}

PlanPtr prepare_pool(const KernelRequest& r, Context&) {
  const PoolCall shape = pool_shape(r);
  const bool cached = pools_cache(r);
  const PoolRow pool = EADEM_CPU_DISPATCH(pool_routine, cpu_device(r).isa())(r.inputs[kPoolX].dtype);
  const int64_t floats = round_up(2 * shape.attrs.width, kPanelWidth);
  return make_plan(
      [=](const KernelCall& call) {
        PoolCall c = shape;
        set_pool_inputs(c, call);
        const int64_t* slots = nullptr;
        if (cached) {
          c.a.block_table = elements<const int32_t>(call.inputs[kPoolBlockTable]);
          c.a.max_blocks = call.inputs[kPoolBlockTable].shape[1];
          c.a.block_size = call.inputs[kPoolX].shape[2];
          slots = elements<const int64_t>(call.inputs[kPoolSlots]);
        }
        auto* z = elements<float>(call.outputs[0]);
        const int64_t width = c.attrs.width;
        cpu_device(call).pool().parallel_ranges(
            c.a.query_start[c.a.sequences], c.attrs.stride, [&](int64_t begin, int64_t end, int worker) {
              float* scratch = static_cast<float*>(call.scratch.data) + worker * floats;
              for (int64_t t = begin; t < end; ++t) {
                const SelectedToken row = token_at(c.a, t);
                if (c.attrs.ends_row(row.position) && (slots == nullptr || slots[t] >= 0))
                  pool(z + t * width, c, row, scratch);
                else
                  std::fill_n(z + t * width, width, 0.0f);
              }
            });
      },
      cpu_device(r).pool().num_threads() * floats * static_cast<int64_t>(sizeof(float)));
}

Verdict can_pool_backward(const KernelRequest& r) {
  Requirements requirements(r);
  for (const size_t port :
       {size_t{kPoolX}, size_t{kPoolGate}, size_t{kPoolPosition}, size_t{kPooledZ}, size_t{kPooledDz}})
    requirements.f32("an input", r.inputs[port]);
  for (const TensorType& type : r.outputs) requirements.f32("a gradient", type);
  return requirements.verdict();
}

// Adds dgate to the places in a window, token by token.
void add_places(float* dposition, const float* dgate, const PoolCall& c, const PoolGradients& routines) {
  const int64_t columns = c.attrs.columns();
  for (int64_t s = 0; s < c.a.sequences; ++s)
    for (int64_t t = c.a.query_start[s]; t < c.a.query_start[s + 1]; ++t)
      routines.add(dposition + (t - c.a.query_start[s]) % c.attrs.stride * columns, dgate + t * columns, columns);
}

PlanPtr prepare_pool_backward(const KernelRequest& r, Context&) {
  const PoolCall shape = pool_shape(r);
  const PoolGradients routines = EADEM_CPU_DISPATCH(pool_gradients, cpu_device(r).isa())();
  const int64_t floats = round_up(2 * shape.attrs.width, kPanelWidth), threads = cpu_device(r).pool().num_threads();
  const int64_t elements_of_gate = r.inputs[kPoolGate].bind(r.bounds).num_elements();
  return make_plan(
      [=](const KernelCall& call) {
        PoolCall c = shape;
        set_pool_inputs(c, call);
        auto* scratch = static_cast<float*>(call.scratch.data);
        auto *dx = elements<float>(call.outputs[0]), *dgate = elements<float>(call.outputs[1]),
             *dposition = elements<float>(call.outputs[2]);
        if (dgate == nullptr) dgate = scratch + threads * floats;
        const auto *z = elements<const float>(call.inputs[kPooledZ]),
                   *dz = elements<const float>(call.inputs[kPooledDz]);
        const int64_t tokens = c.a.query_start[c.a.sequences], width = c.attrs.width;
        // Positions of an incomplete window are in no row, and have a part in none.
        std::fill_n(dgate, tokens * c.attrs.columns(), 0.0f);
        if (dx != nullptr) std::fill_n(dx, tokens * c.attrs.columns(), 0.0f);
        cpu_device(call).pool().parallel_ranges(tokens, c.attrs.stride, [&](int64_t begin, int64_t end, int worker) {
          for (int64_t t = begin; t < end; ++t)
            if (const SelectedToken row = token_at(c.a, t); c.attrs.ends_row(row.position))
              routines.of_row(dx, dgate, c, row, z + t * width, dz + t * width, scratch + worker * floats);
        });
        if (dposition != nullptr) add_places(dposition, dgate, c, routines);
      },
      (threads * floats + elements_of_gate) * static_cast<int64_t>(sizeof(float)));
}

constexpr Kernel kPoolForward{"cpu_rows", Pass::forward, can_pool_forward, prepare_pool};
constexpr Kernel kPoolInference{"cpu_rows", Pass::inference, can_pool, prepare_pool};
constexpr Kernel kPoolBackward{"cpu_rows", Pass::backward, can_pool_backward, prepare_pool_backward};

}  // namespace

KernelList pool_keys_kernels() { return {&kPoolForward, &kPoolInference, &kPoolBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
