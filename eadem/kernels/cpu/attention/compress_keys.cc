// SPDX-License-Identifier: Apache-2.0
//
// compress_keys. A row is made by the task of its last token; a value is one chain over the positions of its row, in
// order.
//
// Gradients: a task of dx adds the rows that its token is part of, in order, and a task of dweight and dposition is a
// place in a block and adds all rows of all sequences in order. So a sum has the same order whatever the number of
// threads.
#include <algorithm>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/attention/compressed_attention.h"
#include "eadem/kernels/cpu/attention/selected_call.h"
#include "eadem/kernels/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/attention/compress_keys.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/attention/attention-inl.h"
#include "eadem/kernels/cpu/dispatch.h"

#ifndef EADEM_KERNELS_CPU_COMPRESS_KEYS_CALL_
#define EADEM_KERNELS_CPU_COMPRESS_KEYS_CALL_
namespace eadem::kernels::cpu {
namespace {

struct CompressCall {
  Attention a;  // x is its k
  RowGrid grid;
  const float *weight, *position;  // [kv_heads, length] and [kv_heads, length, head_dim], or null

  float weight_of(int64_t place) const {
    return weight == nullptr ? 1.0f / static_cast<float>(grid.length) : weight[place];
  }
  const float* position_of(int64_t place) const {
    return position == nullptr ? nullptr : position + place * a.head_dim;
  }
};

// Makes a row of z [head_dim], whose last token is `row`.
using CompressRow = void (*)(float* z, const CompressCall& c, const SelectedToken& row, int64_t kv_head);
// Stores it, rounded, as row `row` of a cache.
using StoreCompressed = void (*)(void* rows, int64_t row, const float* z, int64_t width);

struct CompressGradients {
  // Writes dx of one position.
  void (*of_position)(float* dx, const CompressCall& c, const float* dz, int64_t sequence, int64_t at, int64_t kv_head);
  // Adds to a place of dweight and dposition, either of which may be null. `sum` [head_dim] is scratch.
  void (*of_place)(float* dweight, float* dposition, const CompressCall& c, const float* dz, int64_t kv_head, int64_t i,
                   float* sum);
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

template <typename T>
void compress_row(float* z, const CompressCall& c, const SelectedToken& row, int64_t kv_head) {
  const int64_t width = c.a.head_dim, first = row.position + 1 - c.grid.length;
  const KvRows<T> from{c.a, static_cast<const T*>(c.a.k), row.sequence, kv_head, width};
  std::fill_n(z, width, 0.0f);
  for (int64_t i = 0; i < c.grid.length; ++i) {
    const T* x = from.at(first + i);
    const int64_t place = kv_head * c.grid.length + i;
    const Vec weight = set(c.weight_of(place));
    const Vec scale = set(c.a.k_scales == nullptr ? 1.0f : c.a.k_scales[(x - from.base) / width]);
    if (const float* position = c.position_of(place); position != nullptr)
      map(
          z, width, [=](Vec acc, Vec v, Vec e) { return hn::MulAdd(weight, hn::Add(hn::Mul(v, scale), e), acc); },
          static_cast<const float*>(z), x, position);
    else
      map(
          z, width, [=](Vec acc, Vec v) { return hn::MulAdd(weight, hn::Mul(v, scale), acc); },
          static_cast<const float*>(z), x);
  }
}

CompressRow compress_routine(DType dtype, const RowEncoding* encoding) {
  if (encoding != nullptr)
    return encoding->code() == RowEncoding::Code::int8 ? compress_row<int8_t> : compress_row<e4m3_t>;
  return with_dtype(dtype, [](auto* type) -> CompressRow { return compress_row<ElementOf<decltype(type)>>; });
}

template <typename T>
void store_compressed(void* rows, int64_t row, const float* z, int64_t width) {
  map(
      static_cast<T*>(rows) + row * width, width, [](Vec v) { return v; }, z);
}

StoreCompressed store_routine(DType dtype) {
  return with_dtype(dtype, [](auto* type) -> StoreCompressed { return store_compressed<ElementOf<decltype(type)>>; });
}

void compress_position_gradient(float* dx, const CompressCall& c, const float* dz, int64_t sequence, int64_t at,
                                int64_t kv_head) {
  const int64_t width = c.a.head_dim, positions = c.a.query_start[sequence + 1] - c.a.query_start[sequence];
  const KvRows<float> from{c.a, dz, sequence, kv_head, width};
  std::fill_n(dx, width, 0.0f);
  const int64_t end = std::min((at + c.grid.length) / c.grid.stride, positions / c.grid.stride);
  for (int64_t r = std::max(c.grid.first_row(), at / c.grid.stride); r < end; ++r) {
    const int64_t last = c.grid.last_position(r), i = at - (last + 1 - c.grid.length);
    map(
        dx, width,
        [weight = set(c.weight_of(kv_head * c.grid.length + i))](Vec acc, Vec d) { return hn::MulAdd(weight, d, acc); },
        static_cast<const float*>(dx), from.at(last));
  }
}

void compress_place_gradient(float* dweight, float* dposition, const CompressCall& c, const float* dz, int64_t kv_head,
                             int64_t i, float* sum) {
  const int64_t width = c.a.head_dim, place = kv_head * c.grid.length + i;
  const float* position = c.position_of(place);
  float along = 0.0f;
  std::fill_n(sum, width, 0.0f);
  for (int64_t s = 0; s < c.a.sequences; ++s) {
    const KvRows<float> x{c.a, static_cast<const float*>(c.a.k), s, kv_head, width}, d{c.a, dz, s, kv_head, width};
    const int64_t rows = (c.a.query_start[s + 1] - c.a.query_start[s]) / c.grid.stride;
    for (int64_t r = c.grid.first_row(); r < rows; ++r) {
      const int64_t last = c.grid.last_position(r);
      const float *own = d.at(last), *value = x.at(last + 1 - c.grid.length + i);
      if (dweight != nullptr)
        along += position == nullptr
                     ? dot(own, value, width)
                     : reduce(
                           width, [](Vec acc, Vec a, Vec b, Vec e) { return hn::MulAdd(a, hn::Add(b, e), acc); }, own,
                           value, position);
      if (dposition != nullptr)
        map(
            sum, width, [](Vec acc, Vec v) { return hn::Add(acc, v); }, static_cast<const float*>(sum), own);
    }
  }
  if (dweight != nullptr) dweight[place] += along;
  if (dposition != nullptr)
    map(
        dposition + place * width, width,
        [weight = set(c.weight_of(place))](Vec before, Vec v) { return hn::MulAdd(weight, v, before); },
        static_cast<const float*>(dposition + place * width), static_cast<const float*>(sum));
}

CompressGradients compress_gradients() { return {compress_position_gradient, compress_place_gradient}; }

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(compress_routine);
EADEM_CPU_EXPORT(store_routine);
EADEM_CPU_EXPORT(compress_gradients);

namespace {

enum CompressInput {
  kCompressX,
  kCompressWeight,
  kCompressPosition,
  kCompressQueryStart,
  kCompressKvLength,
  kCompressBlockTable,
  kCompressSlots,
  kCompressRows
};
constexpr size_t kCompressDz = 5;

CompressCall compress_shape(const KernelRequest& r) {
  const CompressKeysAttrs& attrs = r.attrs.get<CompressKeysAttrs>();
  Attention a{};
  a.heads = a.kv_heads = attrs.heads;
  a.head_dim = attrs.width;
  return {.a = a, .grid = attrs.grid, .weight = nullptr, .position = nullptr};
}

void set_compress_inputs(CompressCall& c, const KernelCall& call) {
  const TensorView& x = call.inputs[kCompressX];
  EADEM_CHECK(x.is_contiguous(), "keys {}", to_string(x));
  c.a.k = x.data;
  c.a.k_scales = static_cast<const float*>(x.plane(1));
  c.weight = elements<const float>(call.inputs[kCompressWeight]);
  c.position = elements<const float>(call.inputs[kCompressPosition]);
  c.a.query_start = elements<const int32_t>(call.inputs[kCompressQueryStart]);
  c.a.kv_length = elements<const int32_t>(call.inputs[kCompressKvLength]);
  c.a.sequences = call.inputs[kCompressKvLength].shape[0];
}

Requirements compress_requirements(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("weight", r.inputs[kCompressWeight])
      .f32("position", r.inputs[kCompressPosition])
      .one_of("query_start", r.inputs[kCompressQueryStart], {DType::i32})
      .one_of("kv_length", r.inputs[kCompressKvLength], {DType::i32});
  return requirements;
}

Verdict can_compress(const KernelRequest& r) {
  Requirements requirements = compress_requirements(r);
  if (r.attrs.get<CompressKeysAttrs>().source == KvSource::direct)
    return requirements.f32("x", r.inputs[kCompressX]).f32("z", r.outputs[0]).verdict();
  return requirements.packed("x", r.inputs[kCompressX], kStorageDTypes, RowEncoding::of(r.inputs[kCompressX].encoding))
      .one_of("rows", r.inputs[kCompressRows], kStorageDTypes)
      .verdict();
}

Verdict can_compress_forward(const KernelRequest& r) {
  if (r.attrs.get<CompressKeysAttrs>().source == KvSource::cached)
    return Verdict::no("the forward pass reads keys directly, not a cache");
  return can_compress(r);
}

// Tokens of a task: few are the last of a row.
int64_t compress_grain(const RowGrid& grid) { return std::max<int64_t>(1, grid.stride); }

PlanPtr prepare_compress_direct(const KernelRequest& r) {
  const CompressCall shape = compress_shape(r);
  const CompressRow compress = EADEM_CPU_DISPATCH(compress_routine, cpu_device(r).isa())(DType::f32, nullptr);
  return make_plan([=](const KernelCall& call) {
    CompressCall c = shape;
    set_compress_inputs(c, call);
    auto* z = elements<float>(call.outputs[0]);
    const int64_t heads = c.a.kv_heads, width = c.a.head_dim;
    cpu_device(call).pool().parallel_ranges(c.a.query_start[c.a.sequences], compress_grain(c.grid),
                                            [&](int64_t begin, int64_t end) {
                                              for (int64_t t = begin; t < end; ++t) {
                                                const SelectedToken row = token_at(c.a, t);
                                                if (!c.grid.ends_row(row.position)) {
                                                  std::fill_n(z + t * heads * width, heads * width, 0.0f);
                                                  continue;
                                                }
                                                for (int64_t g = 0; g < heads; ++g)
                                                  compress(z + (t * heads + g) * width, c, row, g);
                                              }
                                            });
  });
}

PlanPtr prepare_compress(const KernelRequest& r, Context&) {
  if (r.attrs.get<CompressKeysAttrs>().source == KvSource::direct) return prepare_compress_direct(r);
  const CompressCall shape = compress_shape(r);
  const TensorType& x = r.inputs[kCompressX];
  const CompressRow compress =
      EADEM_CPU_DISPATCH(compress_routine, cpu_device(r).isa())(x.dtype, RowEncoding::of(x.encoding));
  const StoreCompressed store = EADEM_CPU_DISPATCH(store_routine, cpu_device(r).isa())(r.inputs[kCompressRows].dtype);
  const int64_t floats = round_up(shape.a.head_dim, kPanelWidth);
  return make_plan(
      [=](const KernelCall& call) {
        CompressCall c = shape;
        set_compress_inputs(c, call);
        c.a.block_table = elements<const int32_t>(call.inputs[kCompressBlockTable]);
        c.a.max_blocks = call.inputs[kCompressBlockTable].shape[1];
        c.a.block_size = call.inputs[kCompressX].shape[2];
        const auto* slots = elements<const int64_t>(call.inputs[kCompressSlots]);
        const TensorView& rows = call.outputs[0];
        const int64_t heads = c.a.kv_heads, block_rows = rows.shape[2];
        cpu_device(call).pool().parallel_ranges(
            c.a.query_start[c.a.sequences], compress_grain(c.grid), [&](int64_t begin, int64_t end, int worker) {
              float* z = static_cast<float*>(call.scratch.data) + worker * floats;
              for (int64_t t = begin; t < end; ++t) {
                const SelectedToken row = token_at(c.a, t);
                if (slots[t] < 0 || !c.grid.ends_row(row.position)) continue;
                const int64_t block = slots[t] / c.a.block_size;
                const int64_t place = slots[t] % c.a.block_size / c.grid.stride;
                for (int64_t g = 0; g < heads; ++g) {
                  compress(z, c, row, g);
                  store(rows.data, (block * heads + g) * block_rows + place, z, c.a.head_dim);
                }
              }
            });
      },
      cpu_device(r).pool().num_threads() * floats * static_cast<int64_t>(sizeof(float)));
}

Verdict can_compress_backward(const KernelRequest& r) {
  Requirements requirements = compress_requirements(r);
  requirements.f32("x", r.inputs[kCompressX]).f32("dz", r.inputs[kCompressDz]);
  for (const TensorType& type : r.outputs) requirements.f32("a gradient", type);
  return requirements.verdict();
}

PlanPtr prepare_compress_backward(const KernelRequest& r, Context&) {
  const CompressCall shape = compress_shape(r);
  const CompressGradients routines = EADEM_CPU_DISPATCH(compress_gradients, cpu_device(r).isa())();
  const int64_t floats = round_up(shape.a.head_dim, kPanelWidth);
  return make_plan(
      [=](const KernelCall& call) {
        CompressCall c = shape;
        set_compress_inputs(c, call);
        const auto* dz = elements<const float>(call.inputs[kCompressDz]);
        auto *dx = elements<float>(call.outputs[0]), *dweight = elements<float>(call.outputs[1]),
             *dposition = elements<float>(call.outputs[2]);
        const int64_t heads = c.a.kv_heads, width = c.a.head_dim;
        ThreadPool& pool = cpu_device(call).pool();
        if (dx != nullptr)
          pool.parallel_ranges(c.a.query_start[c.a.sequences], compress_grain(c.grid), [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
              const SelectedToken at = token_at(c.a, t);
              for (int64_t g = 0; g < heads; ++g)
                routines.of_position(dx + (t * heads + g) * width, c, dz, at.sequence, at.position, g);
            }
          });
        if (dweight == nullptr && dposition == nullptr) return;
        pool.parallel_for(heads * c.grid.length, [&](int64_t place, int worker) {
          routines.of_place(dweight, dposition, c, dz, place / c.grid.length, place % c.grid.length,
                            static_cast<float*>(call.scratch.data) + worker * floats);
        });
      },
      cpu_device(r).pool().num_threads() * floats * static_cast<int64_t>(sizeof(float)));
}

constexpr Kernel kCompressForward{"cpu_rows", Pass::forward, can_compress_forward, prepare_compress};
constexpr Kernel kCompressInference{"cpu_rows", Pass::inference, can_compress, prepare_compress};
constexpr Kernel kCompressBackward{"cpu_rows", Pass::backward, can_compress_backward, prepare_compress_backward};

}  // namespace

KernelList compress_keys_kernels() { return {&kCompressForward, &kCompressInference, &kCompressBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
