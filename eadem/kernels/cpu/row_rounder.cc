// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/row_rounder.h"

#include "eadem/kernels/cpu/linear/bf16_tile_rows.h"

namespace eadem::kernels::cpu {

namespace {

const Int8Rows* int8_rows(const Encoding* encoding) {
  for (const Int8Rows* rows : {&Int8Rows::with_scale_per_step(), &Int8Rows::with_scale_per_chunk()})
    if (encoding == rows) return rows;
  return nullptr;
}

}  // namespace

std::string RowRounder::refusal_of(const Encoding* to, const CpuDevice& device) {
  if (int8_rows(to) != nullptr) return "";
  if (to != &Bf16TileRows::instance()) return "rounds to the rows that products on the CPU read";
  return has_bf16_products(device.isa()) ? "" : "rounds to bf16 with instructions for bf16 only";
}

RowRounder::RowRounder(const Encoding* to, const CpuDevice& device) {
  const Int8Rows* rows = int8_rows(to);
  if (rows == nullptr) return;
  const RowRoutines routines = row_routines(device.isa());
  round_ = rows->scale_per_chunk() ? routines.round_chunks : routines.round_steps;
}

void RowRounder::round(const TensorView& y, const RoundedSource& source, int64_t begin, int64_t end) const {
  if (round_ != nullptr) return round_(int8_row_planes(y), source, begin, end);
  const TileRows tiles = TileRows::in_order(y.data, y.shape[0]);
  for (int64_t r = begin; r < end; ++r) round_to_tiles(tiles, r, source.x + r * source.stride, source.columns);
}

}  // namespace eadem::kernels::cpu
