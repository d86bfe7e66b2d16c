// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/bf16_gradient.h"

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/kernels/cpu/linear/transpose.h"
#include "eadem/kernels/cpu/support.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define EADEM_PAIRS __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace eadem::kernels::cpu {

namespace {

constexpr int64_t kPairs = kVnniTile / 2;  // of tokens, in a tile

// Neighbouring tokens of 16 columns: a word has the values of both in one column.
using PairWords = uint32_t __attribute__((vector_size(64)));
using HalfWords = uint16_t __attribute__((vector_size(32)));

EADEM_PAIRS inline PairWords rounded_words(const float* row, __mmask16 columns) {
  const auto halves = reinterpret_cast<HalfWords>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(columns, row)));
  return __builtin_convertvector(halves, PairWords);
}

// Rounds the tokens of a tile, at most 32, in 16 columns or fewer: words [16, 16], those of pair i in line i.
EADEM_PAIRS void round_pairs(uint32_t* words, const float* rows, int64_t stride, int64_t tokens, int64_t columns) {
  const auto mask = static_cast<__mmask16>((1u << columns) - 1);
  for (int64_t i = 0; i < kPairs; ++i, words += kPanelWidth) {
    PairWords pair{};
    if (2 * i < tokens) pair = rounded_words(rows + 2 * i * stride, mask);
    if (2 * i + 1 < tokens) pair |= rounded_words(rows + (2 * i + 1) * stride, mask) << 16;
    _mm512_storeu_si512(words, reinterpret_cast<__m512i>(pair));
  }
}

// Rounds likewise, and transposes: the tile has a line of 32 tokens for each of the 16 columns.
void round_turned(char* tile, const float* rows, int64_t stride, int64_t tokens, int64_t columns) {
  alignas(64) uint32_t words[kPairs][kPanelWidth];
  round_pairs(words[0], rows, stride, tokens, columns);
  const uint8_t* lines[kPairs];
  for (int64_t i = 0; i < kPairs; ++i) lines[i] = reinterpret_cast<const uint8_t*>(words[i]);
  constexpr int64_t kFour = 4;  // words in each direction that are turned at once
  for (int64_t n = 0; n < kPanelWidth; n += kFour)
    for (int64_t i = 0; i < kPairs; i += kFour)
      transpose_words(reinterpret_cast<uint8_t*>(tile) + n * kTileLine + i * 4, lines + i, n * 4);
}

}  // namespace

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
  char* const dy_rows = x_panels + panels * tiles * kTileBytes;
  const TileRows rows = TileRows::in_pairs(dy_rows, tiles);
  const auto round_x = [&](int64_t panel, int64_t tile, int64_t tokens) {
    const int64_t column = panel * kPanelWidth;
    round_pairs(reinterpret_cast<uint32_t*>(x_panels + (panel * tiles + tile) * kTileBytes),
                o.x + tile * kVnniTile * o.inputs + column, o.inputs, tokens, std::min(kPanelWidth, o.inputs - column));
  };
  const auto round_dy = [&](int64_t row_tile, int64_t tile, int64_t tokens) {
    const int64_t column = row_tile * kTileRows;
    round_turned(dy_rows + row_tile / 2 * rows.pair_stride + tile * rows.tile_stride + row_tile % 2 * rows.half_stride,
                 o.dy + tile * kVnniTile * o.outputs + column, o.outputs, tokens,
                 std::min(kTileRows, o.outputs - column));
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

#else

namespace eadem::kernels::cpu {

Bf16WeightGradient::Bf16WeightGradient(const CpuDevice& device) : product_(device, {}) {}
int64_t Bf16WeightGradient::scratch_bytes(const CpuDevice&, int64_t, int64_t, int64_t) const { return 0; }
void Bf16WeightGradient::add(CpuDevice&, float*, const Operands&, void*) const {
  EADEM_UNREACHABLE("products of bf16 are of x86 processors");
}

}  // namespace eadem::kernels::cpu

#endif
