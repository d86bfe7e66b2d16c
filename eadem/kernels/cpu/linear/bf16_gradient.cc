// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/bf16_gradient.h"

#include <algorithm>

#include "eadem/kernels/cpu/linear/bf16_operands.h"
#include "eadem/kernels/cpu/support.h"

namespace eadem::kernels::cpu {

Bf16WeightGradient::Bf16WeightGradient(const CpuDevice& device)
    : product_(device, {.source = MatmulTypes::Source::vnni, .finish = MatmulTypes::Finish::accumulate}) {}

int64_t Bf16WeightGradient::scratch_bytes(const CpuDevice& device, int64_t tokens, int64_t outputs,
                                          int64_t inputs) const {
  const int64_t tiles = ceil_div(tokens, kVnniTile);
  return round_up(product_.scratch_bytes(device, outputs, tokens, /*is_rounded=*/true), 64) +
         ceil_div(inputs, kPanelWidth) * tiles * kTileBytes + TileRows::bytes_in_pairs(outputs, tiles);
}

void Bf16WeightGradient::add(CpuDevice& device, float* dweight, const Operands& o, void* scratch) const {
  // 1. Round both: x as panels of 16 inputs, dy as rows of tiles.
  const int64_t tiles = ceil_div(o.tokens, kVnniTile), panels = ceil_div(o.inputs, kPanelWidth),
                row_tiles = ceil_div(o.outputs, kTileRows);
  char* const x_panels =
      static_cast<char*>(scratch) + round_up(product_.scratch_bytes(device, o.outputs, o.tokens, true), 64);
  const TileRows rows = TileRows::in_pairs(x_panels + panels * tiles * kTileBytes, tiles);
  const auto round_x = [&](int64_t panel, int64_t tile, int64_t tokens) {
    const int64_t column = panel * kPanelWidth;
    pack_b_of_columns(x_panels + (panel * tiles + tile) * kTileBytes, o.x + tile * kVnniTile * o.inputs + column,
                      o.inputs, tokens, o.inputs - column);
  };
  const auto round_dy = [&](int64_t row_tile, int64_t tile, int64_t tokens) {
    const int64_t column = row_tile * kTileRows;
    pack_a_of_columns(rows.line(column, tile), o.dy + tile * kVnniTile * o.outputs + column, o.outputs, tokens,
                      o.outputs - column);
  };
  const int64_t strips = panels + row_tiles, least = rows_per_thread(kPanelWidth * o.tokens);
  device.pool().parallel_ranges(strips, least, [&](int64_t begin, int64_t end) {
    for (int64_t strip = begin; strip < end; ++strip)
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t tokens = std::min(kVnniTile, o.tokens - tile * kVnniTile);
        if (strip < panels)
          round_x(strip, tile, tokens);
        else
          round_dy(strip - panels, tile, tokens);
      }
  });

  // 2. Multiply.
  Matmul m;
  m.rows = o.outputs;
  m.k_size = o.tokens;
  m.outputs = o.inputs;
  m.a_tiles = rows;
  m.b.data = x_panels;
  m.y = dweight;
  product_.run(device, m, scratch);
}

}  // namespace eadem::kernels::cpu
