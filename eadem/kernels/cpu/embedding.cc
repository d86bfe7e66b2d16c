// SPDX-License-Identifier: Apache-2.0
//
// embedding and select_rows: rows of a matrix, gathered; and the scatter that is embedding's gradient.
#include "eadem/kernels/embedding.h"

#include <algorithm>
#include <cstring>

#include "eadem/kernels/backends.h"
#include "eadem/kernels/cpu/fp8_panels.h"
#include "eadem/kernels/cpu/group_panels.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/select_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/embedding.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_EMBEDDING_PARAMS_
#define EADEM_KERNELS_CPU_EMBEDDING_PARAMS_
namespace eadem::kernels::cpu {
namespace {

// The ids whose rows a table has.
struct TableRows {
  int64_t first;
  int64_t count;
  bool contains(int64_t id) const { return id >= first && id < first + count; }
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// y[t, :] = table[ids[t] - first, :] for t in [begin, end), or zeros where the table has no such row
void gather_rows(float* y, DType dtype, const void* table, const int32_t* ids, TableRows range, int64_t hidden,
                 int64_t begin, int64_t end) {
  const auto gather = [&](const auto* rows) {
    for (int64_t t = begin; t < end; ++t)
      if (range.contains(ids[t]))
        map(
            y + t * hidden, hidden, [](Vec v) { return v; }, rows + (ids[t] - range.first) * hidden);
      else
        std::fill_n(y + t * hidden, hidden, 0.0f);
  };
  switch (dtype) {
    case DType::bf16: return gather(static_cast<const bf16_t*>(table));
    case DType::f16: return gather(static_cast<const f16_t*>(table));
    default: return gather(static_cast<const float*>(table));
  }
}

// dtable[ids[t] - first, begin:end] += dy[t, begin:end] for all t in order whose row the table has
void scatter_add_columns(float* dtable, const float* dy, const int32_t* ids, TableRows range, int64_t tokens,
                         int64_t hidden, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < tokens; ++t) {
    if (!range.contains(ids[t])) continue;
    float* row = dtable + (ids[t] - range.first) * hidden + begin;
    map(
        row, end - begin, [](Vec sum, Vec g) { return hn::Add(sum, g); }, row, dy + t * hidden + begin);
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

HWY_EXPORT(gather_rows);
HWY_EXPORT(scatter_add_columns);

namespace {

void run_gather(const KernelCall& call, const TensorView& table, const TensorView& ids, int64_t first) {
  EADEM_CHECK(table.encoding == nullptr && table.is_contiguous(), "table {} is not plain", to_string(table));
  const auto task = EADEM_CPU_DISPATCH(gather_rows, cpu_device(call).isa());
  const int64_t hidden = table.shape[1];
  float* y = elements<float>(call.outputs[0]);
  const int32_t* index = elements<const int32_t>(ids);
  cpu_device(call).pool().parallel_ranges(
      ids.shape[0], std::max<int64_t>(1, 8192 / std::max<int64_t>(hidden, 1)), [&](int64_t begin, int64_t end) {
        task(y, table.dtype, table.data, index, {first, table.shape[0]}, hidden, begin, end);
      });
}

// The modelled cost counts only the rows that are looked up: they are read and written, so the traffic is twice that of
// y.
Verdict at_cost_of_rows(const KernelRequest& r, const Requirements& requirements) {
  const KernelRequest looked_up{r.op, r.pass, r.device, r.attrs, r.inputs.subspan(1), r.outputs, r.bounds};
  const Verdict verdict = requirements.at_cost(0);
  return verdict.accepted ? Requirements(looked_up).at_cost(elements_of(r, r.outputs[0])) : verdict;
}

Verdict can_embedding(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.one_of("table", r.inputs[0], {DType::f32, DType::bf16, DType::f16})
      .one_of("ids", r.inputs[1], {DType::i32})
      .f32("y", r.outputs[0]);
  return at_cost_of_rows(r, requirements);
}

// A quantized table uses the packing that the LM head reads, so that tied weights are stored once.
const Encoding* packing_of_table(const Encoding* encoding) {
  if (const Fp8Panels* floats = Fp8Panels::of(encoding)) return floats;
  return quantized_packing_of(encoding);
}

Verdict can_decode_rows(const KernelRequest& r) {
  Requirements requirements(r);
  requirements
      .require(
          packing_of_table(r.inputs[0].encoding) != nullptr,
          fmt::format("takes a quantized table; it is {}",
                      r.inputs[0].encoding == nullptr ? dtype_name(r.inputs[0].dtype) : r.inputs[0].encoding->name()))
      .one_of("ids", r.inputs[1], {DType::i32})
      .f32("y", r.outputs[0]);
  return at_cost_of_rows(r, requirements);
}

const Encoding* pack_table(const KernelRequest& r, int input) {
  return input == 0 ? packing_of_table(r.inputs[0].encoding) : nullptr;
}

void run_decode_rows(const KernelCall& call) {
  const TensorView& table = call.inputs[0];
  const int32_t* ids = elements<const int32_t>(call.inputs[1]);
  float* y = elements<float>(call.outputs[0]);
  const TableRows range{call.attrs.get<EmbeddingAttrs>().first, table.shape[0]};
  cpu_device(call).pool().parallel_for(call.inputs[1].shape[0], [&](int64_t t, int) {
    float* row = y + t * table.shape[1];
    if (range.contains(ids[t]))
      table.encoding->decode_row(row, table, ids[t] - range.first);
    else
      std::fill_n(row, table.shape[1], 0.0f);
  });
}

void run_embedding(const KernelCall& call) {
  run_gather(call, call.inputs[0], call.inputs[1], call.attrs.get<EmbeddingAttrs>().first);
}

Verdict can_embedding_backward(const KernelRequest& r) {
  return Requirements(r)
      .one_of("ids", r.inputs[0], {DType::i32})
      .f32("dy", r.inputs[1])
      .f32("dtable", r.outputs[0])
      .at_cost(elements_of(r, r.inputs[1]));
}

void run_embedding_backward(const KernelCall& call) {
  float* dtable = elements<float>(call.outputs[0]);
  if (dtable == nullptr) return;
  const auto task = EADEM_CPU_DISPATCH(scatter_add_columns, cpu_device(call).isa());
  const int32_t* ids = elements<const int32_t>(call.inputs[0]);
  const float* dy = elements<const float>(call.inputs[1]);
  const int64_t tokens = call.inputs[1].shape[0], hidden = call.inputs[1].shape[1];
  const TableRows range{call.attrs.get<EmbeddingAttrs>().first, call.outputs[0].shape[0]};
  // Each task owns some columns, so rows are added in token order on any thread.
  cpu_device(call).pool().parallel_for(ceil_div(hidden, 64), [&](int64_t block, int) {
    task(dtable, dy, ids, range, tokens, hidden, block * 64, std::min(hidden, block * 64 + 64));
  });
}

Verdict can_select_rows(const KernelRequest& r) {
  return Requirements(r)
      .f32("x", r.inputs[0])
      .one_of("rows", r.inputs[1], {DType::i32})
      .f32("y", r.outputs[0])
      .at_cost(0);
}

void run_select_rows(const KernelCall& call) { run_gather(call, call.inputs[0], call.inputs[1], 0); }

constexpr Kernel kForward{"cpu_gather_rows", Pass::forward, can_embedding, run_embedding};
constexpr Kernel kInference{"cpu_gather_rows", Pass::inference, can_embedding, run_embedding};
constexpr Kernel kBackward{"cpu_scatter_add", Pass::backward, can_embedding_backward, run_embedding_backward};
constexpr Kernel kDecodeForward{"cpu_decode_rows", Pass::forward, can_decode_rows,
                                run_decode_rows,   nullptr,       pack_table};
constexpr Kernel kDecodeInference{"cpu_decode_rows", Pass::inference, can_decode_rows,
                                  run_decode_rows,   nullptr,         pack_table};
constexpr Kernel kSelectRows{"cpu_gather_rows", Pass::inference, can_select_rows, run_select_rows};

}  // namespace

KernelList embedding_kernels() { return {&kForward, &kInference, &kBackward, &kDecodeForward, &kDecodeInference}; }
KernelList select_rows_kernels() { return {&kSelectRows}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
