// SPDX-License-Identifier: Apache-2.0
//
// embedding and select_rows: rows of a matrix, gathered; and the scatter that is embedding's gradient.
#include "eadem/kernels/embedding.h"

#include <algorithm>
#include <cstring>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/linear/fp8_panels.h"
#include "eadem/kernels/cpu/linear/group_panels.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/select_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/embedding.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_EMBEDDING_ROUTINES_
#define EADEM_KERNELS_CPU_EMBEDDING_ROUTINES_
namespace eadem::kernels::cpu {
namespace {

// The ids whose rows a table has.
struct TableRows {
  int64_t first;
  int64_t count;
  float scale = 1;  // factor on their values
  bool contains(int64_t id) const { return id >= first && id < first + count; }
};

using GatherRows = void (*)(float* y, const void* table, const int32_t* ids, TableRows range, int64_t hidden,
                            int64_t begin, int64_t end);

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// y[t, :] = scale * table[ids[t] - first, :] for t in [begin, end), or zeros where the table has no such row
template <typename T>
void gather_rows(float* y, const void* table, const int32_t* ids, TableRows range, int64_t hidden, int64_t begin,
                 int64_t end) {
  const T* rows = static_cast<const T*>(table);
  for (int64_t t = begin; t < end; ++t)
    if (!range.contains(ids[t]))
      std::fill_n(y + t * hidden, hidden, 0.0f);
    else if (range.scale == 1)
      map(
          y + t * hidden, hidden, [](Vec v) { return v; }, rows + (ids[t] - range.first) * hidden);
    else
      map(
          y + t * hidden, hidden, [scale = range.scale](Vec v) { return hn::Mul(v, set(scale)); },
          rows + (ids[t] - range.first) * hidden);
}

GatherRows gather_rows_of(DType table) {
  return with_dtype(table, [](auto* type) -> GatherRows { return gather_rows<ElementOf<decltype(type)>>; });
}

// dtable[ids[t] - first, begin:end] += scale * dy[t, begin:end] for all t in order whose row the table has
void scatter_add_columns(float* dtable, const float* dy, const int32_t* ids, TableRows range, int64_t tokens,
                         int64_t hidden, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < tokens; ++t) {
    if (!range.contains(ids[t])) continue;
    float* row = dtable + (ids[t] - range.first) * hidden + begin;
    map(
        row, end - begin, [scale = range.scale](Vec sum, Vec g) { return hn::Add(sum, hn::Mul(g, set(scale))); }, row,
        dy + t * hidden + begin);
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(gather_rows_of);
EADEM_CPU_EXPORT(scatter_add_columns);

namespace {

Verdict can_embedding(const KernelRequest& r) {
  return Requirements(r)
      .one_of("table", r.inputs[0], kStorageDTypes)
      .one_of("ids", r.inputs[1], {DType::i32})
      .f32("y", r.outputs[0])
      .verdict();
}

// Gathers rows of a table that has those of the ids from `first` on.
PlanPtr plan_of_gather(const KernelRequest& r, int64_t first, float scale) {
  const GatherRows gather = EADEM_CPU_DISPATCH(gather_rows_of, cpu_device(r).isa())(r.inputs[0].dtype);
  return make_plan([gather, first, scale](const KernelCall& call) {
    const TensorView &table = call.inputs[0], &ids = call.inputs[1];
    EADEM_CHECK(table.encoding == nullptr && table.is_contiguous(), "table {} is not plain", to_string(table));
    const int64_t hidden = table.shape[1];
    float* y = elements<float>(call.outputs[0]);
    const int32_t* index = elements<const int32_t>(ids);
    cpu_device(call).pool().parallel_ranges(
        ids.shape[0], std::max<int64_t>(1, 8192 / std::max<int64_t>(hidden, 1)), [&](int64_t begin, int64_t end) {
          gather(y, table.data, index, {first, table.shape[0], scale}, hidden, begin, end);
        });
  });
}

PlanPtr prepare_embedding(const KernelRequest& r, Context&) {
  const auto& attrs = r.attrs.get<EmbeddingAttrs>();
  return plan_of_gather(r, attrs.first, attrs.scale);
}

// Tables in the packing that the LM head reads, so that tied weights are kept once. It depends on how far the head's
// product may round its activations, `x`; a table is offered in either packing.
template <MatmulInput x>
const Encoding* packing_of_table(const KernelRequest& r) {
  const TensorType& table = r.inputs[0];
  if (table.encoding == nullptr) return PackedPanels::of_forward(table.dtype, cpu_device(r).isa(), x);
  if (const Fp8Panels* floats = Fp8Panels::of(table.encoding)) return floats;
  return quantized_packing_of(table.encoding);
}

template <MatmulInput x>
Verdict can_decode_rows(const KernelRequest& r) {
  const TensorType& table = r.inputs[0];
  Requirements requirements(r);
  requirements.require(packing_of_table<x>(r) != nullptr, fmt::format("has no packing of {}", to_string(table)))
      .one_of("ids", r.inputs[1], {DType::i32})
      .f32("y", r.outputs[0]);
  return requirements.verdict({.bandwidth_share = 0.1, .reason = "the values of a row lie apart"});
}

template <MatmulInput x>
const Encoding* pack_table(const KernelRequest& r, int input) {
  return input == 0 ? packing_of_table<x>(r) : nullptr;
}

template <MatmulInput x>
PlanPtr prepare_decode_rows(const KernelRequest& r, Context&) {
  return make_plan([attrs = r.attrs.get<EmbeddingAttrs>()](const KernelCall& call) {
    const TensorView& table = call.inputs[0];
    const int32_t* ids = elements<const int32_t>(call.inputs[1]);
    float* y = elements<float>(call.outputs[0]);
    const TableRows range{attrs.first, table.shape[0]};
    cpu_device(call).pool().parallel_for(call.inputs[1].shape[0], [&](int64_t t, int) {
      float* row = y + t * table.shape[1];
      const int64_t index = ids[t] - range.first;
      if (!range.contains(ids[t]))
        std::fill_n(row, table.shape[1], 0.0f);
      else if (table.encoding != nullptr)  // `packing`, or as the table is stored
        table.encoding->decode_row(row, table, index);
      else
        convert_on_host(TensorView(row, DType::f32, Shape{1, table.shape[1]}), table.rows(index, 1));
      if (attrs.scale != 1)
        for (int64_t i = 0; i < table.shape[1]; ++i) row[i] *= attrs.scale;
    });
  });
}

Verdict can_embedding_backward(const KernelRequest& r) {
  return Requirements(r)
      .one_of("ids", r.inputs[0], {DType::i32})
      .f32("dy", r.inputs[1])
      .f32("dtable", r.outputs[0])
      .verdict();
}

PlanPtr prepare_embedding_backward(const KernelRequest& r, Context&) {
  const auto add = EADEM_CPU_DISPATCH(scatter_add_columns, cpu_device(r).isa());
  return make_plan([add, attrs = r.attrs.get<EmbeddingAttrs>()](const KernelCall& call) {
    float* dtable = elements<float>(call.outputs[0]);
    if (dtable == nullptr) return;
    const int32_t* ids = elements<const int32_t>(call.inputs[0]);
    const float* dy = elements<const float>(call.inputs[1]);
    const int64_t tokens = call.inputs[1].shape[0], hidden = call.inputs[1].shape[1];
    const TableRows range{attrs.first, call.outputs[0].shape[0], attrs.scale};
    // Each task owns some columns, so rows are added in token order on any thread.
    cpu_device(call).pool().parallel_for(ceil_div(hidden, 64), [&](int64_t block, int) {
      add(dtable, dy, ids, range, tokens, hidden, block * 64, std::min(hidden, block * 64 + 64));
    });
  });
}

Verdict can_select_rows(const KernelRequest& r) {
  return Requirements(r)
      .f32("x", r.inputs[0])
      .one_of("rows", r.inputs[1], {DType::i32})
      .f32("y", r.outputs[0])
      .verdict();
}

PlanPtr prepare_select_rows(const KernelRequest& r, Context&) { return plan_of_gather(r, 0, 1); }

constexpr Kernel kForward{"cpu_gather_rows", Pass::forward, can_embedding, prepare_embedding};
constexpr Kernel kInference{"cpu_gather_rows", Pass::inference, can_embedding, prepare_embedding};
constexpr Kernel kBackward{"cpu_scatter_add", Pass::backward, can_embedding_backward, prepare_embedding_backward};
template <MatmulInput x>
constexpr Kernel decode_rows_kernel(std::string_view name, Pass pass) {
  return {.name = name,
          .pass = pass,
          .can_handle = can_decode_rows<x>,
          .prepare = prepare_decode_rows<x>,
          .packing = pack_table<x>,
          .reads_stored = true};
}
constexpr Kernel kDecodeForward = decode_rows_kernel<MatmulInput::int8>("cpu_decode_rows", Pass::forward);
constexpr Kernel kDecodeInference = decode_rows_kernel<MatmulInput::int8>("cpu_decode_rows", Pass::inference);
constexpr Kernel kDecodeF32Forward = decode_rows_kernel<MatmulInput::f32>("cpu_decode_rows_f32", Pass::forward);
constexpr Kernel kDecodeF32Inference = decode_rows_kernel<MatmulInput::f32>("cpu_decode_rows_f32", Pass::inference);
constexpr Kernel kSelectRows{"cpu_gather_rows", Pass::inference, can_select_rows, prepare_select_rows};

}  // namespace

KernelList embedding_kernels() {
  return {&kForward,         &kInference,        &kBackward,          &kDecodeForward,
          &kDecodeInference, &kDecodeF32Forward, &kDecodeF32Inference};
}
KernelList select_rows_kernels() { return {&kSelectRows}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
