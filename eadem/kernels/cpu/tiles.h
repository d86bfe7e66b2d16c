// SPDX-License-Identifier: Apache-2.0
//
// Matrix products on the tiles of AMX: registers of 16 rows of 64 bytes (Intel SDM, volume 1, chapter "Programming with
// Intel AMX"). Compiled for Isa::amx, and to be called only there.
//
//   c[r, n] = sum over tiles t: a[r, t] b[t, n]
//
// A tile of k is 64 bytes of a row of a: 32 bf16, or 64 signed bytes. b lies in panels of 16 outputs, in each one tile
// after the other: 16 lines of 64 bytes, line i holding for each output the two bf16, or the four bytes (unsigned), of
// k that meet bytes 4 i … 4 i + 3 of a row of a.
//
// Sums of bytes are exact in 32 bits. Of bf16, a tile adds to c, rounded each time and subnormal numbers being zeros,
// (even + odd): two chains over the tile's 16 pairs of fma(a, b, chain) that begin at zero, of first and of second
// ones.
#pragma once

#include <cstdint>

namespace eadem::kernels::cpu {

inline constexpr int64_t kTileRows = 16;     // rows of a and c in a tile
inline constexpr int64_t kTileLine = 64;     // bytes of a row in a tile
inline constexpr int64_t kTileBytes = 1024;  // bytes of a tile of b, and of 16 rows of a
inline constexpr int64_t kTileBlock = 8;     // tiles of k that are multiplied by all rows before the next

// Rows of a. Row 32 j + 16 h + i begins its tile t, which is tile u of block b, at
//   data + b * k_stride + j * pair_stride + u * tile_stride + h * half_stride + i * line_stride.
struct TileRows {
  const void* data;
  int64_t k_stride, pair_stride, tile_stride, half_stride, line_stride;

  // `rows` rows that are stored in the order in which tiles read them.
  static TileRows in_order(const void* data, int64_t rows) {
    const int64_t pair_bytes = 2 * kTileBlock * kTileBytes;
    return {data, (rows + 31) / 32 * pair_bytes, pair_bytes, 2 * kTileBytes, kTileBytes, kTileLine};
  }
  // Bytes of `rows` rows stored in order, each of `tiles` tiles.
  static int64_t bytes_in_order(int64_t rows, int64_t tiles) {
    return (tiles + kTileBlock - 1) / kTileBlock * in_order(nullptr, rows).k_stride;
  }
};
// Panels of b from the first one on, `panel_stride` bytes apart.
struct TilePanels {
  const void* data;
  int64_t panel_stride;
};

// c [rows, panels * 16] with row stride c_stride, any numbers of each.
void bf16_tiles(float* c, int64_t c_stride, const TileRows& a, const TilePanels& b, int64_t rows, int64_t panels,
                int64_t tiles);

// The first row of a alone, c [panels * 16], in vectors: the same bits, for the price of reading b.
void bf16_row(float* c, const TileRows& a, const TilePanels& b, int64_t panels, int64_t tiles);

// The start value and the factor of sums of bytes: those of row r stand at [r * stride].
struct TileScales {
  const int32_t* starts;
  const float* scales;
  int64_t stride;
};

// c [rows, panels * 16] += scale * float(start + sum over `tiles` tiles, at most kTileBlock), one fma each. Panels that
// begin at `next`, as far apart as those of b, or none, are fetched meanwhile.
void int8_tiles(float* c, int64_t c_stride, const TileRows& a, const TilePanels& b, const TileScales& scales,
                int64_t rows, int64_t panels, int64_t tiles, const void* next);

// Rounds the n values of a row to bf16, to nearest even (subnormal ones to zero), into its place among `rows`, in
// order; its last tile is filled up with zeros.
void round_to_tiles(const TileRows& rows, int64_t row, const float* x, int64_t n);

}  // namespace eadem::kernels::cpu
