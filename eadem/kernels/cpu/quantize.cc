// SPDX-License-Identifier: Apache-2.0
//
// quantize, to the encodings that the products of linear read.
#include "eadem/kernels/quantize.h"

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/linear/bf16_tile_rows.h"
#include "eadem/kernels/cpu/linear/quantized_rows.h"
#include "eadem/kernels/cpu/support.h"

namespace eadem::kernels::cpu {

namespace {

const Int8Rows* int8_rows(const Encoding* encoding) {
  for (const Int8Rows* rows : {&Int8Rows::with_scale_per_step(), &Int8Rows::with_scale_per_chunk()})
    if (encoding == rows) return rows;
  return nullptr;
}

Verdict can_quantize(const KernelRequest& r) {
  const Encoding* to = r.attrs.get<QuantizeAttrs>().to;
  const bool is_tiles = to == &Bf16TileRows::instance();
  return Requirements(r)
      .f32("x", r.inputs[0])
      .require(int8_rows(to) != nullptr || is_tiles, "rounds to rows of its own products only")
      .require(!is_tiles || cpu_device(r).isa() == Isa::amx, "writes tiles with AMX only")
      .verdict();
}

PlanPtr prepare_quantize(const KernelRequest& r, Context&) {
  const Int8Rows* rows = int8_rows(r.attrs.get<QuantizeAttrs>().to);
  const RowRoutines routines = row_routines(cpu_device(r).isa());
  const auto round = rows != nullptr && rows->scale_per_chunk() ? routines.round_chunks : routines.round_steps;
  return make_plan([is_int8 = rows != nullptr, round](const KernelCall& call) {
    const TensorView &x = call.inputs[0], &y = call.outputs[0];
    const RoundedSource source{elements<const float>(x), x.shape[1], x.shape[1]};
    cpu_device(call).pool().parallel_ranges(
        x.shape[0], rows_per_thread(x.shape[1]), [&](int64_t begin, int64_t end) {
          if (is_int8) return round(int8_row_planes(y), source, begin, end);
          const TileRows tiles = TileRows::in_order(y.data, y.shape[0]);
          for (int64_t i = begin; i < end; ++i) round_to_tiles(tiles, i, source.x + i * source.stride, source.columns);
        });
  });
}

constexpr Kernel kForward{"cpu_rows", Pass::forward, can_quantize, prepare_quantize};
constexpr Kernel kInference{"cpu_rows", Pass::inference, can_quantize, prepare_quantize};

}  // namespace

KernelList quantize_kernels() { return {&kForward, &kInference}; }

}  // namespace eadem::kernels::cpu
