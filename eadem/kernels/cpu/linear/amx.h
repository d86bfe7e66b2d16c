// SPDX-License-Identifier: Apache-2.0
//
// Matrix products on the tiles of AMX: registers of 16 rows of 64 bytes (Intel SDM, volume 1, chapter "Programming with
// Intel AMX"). Compiled for Isa::amx, and to be called only there; round_to_tiles also for Isa::avx512_bf16.
//
//   c[r, n] = sum over tiles t: a[r, t] b[t, n]
//
// A tile of k is 64 bytes of a row of a: 32 bf16 values or 64 signed bytes. b is stored in panels of 16 outputs, each
// tile after tile. A tile of b has 16 lines of 64 bytes: line i holds, for each output, the two bf16 values or the four
// unsigned bytes that are multiplied by bytes 4 i … 4 i + 3 of a row of a.
//
// Sums of bytes are exact in 32 bits. For bf16, each tile adds (even + odd) to c. `even` and `odd` are chains of fma(a,
// b, chain) from zero, over the first and over the second values of the tile's 16 pairs. Every operation rounds, and
// subnormal numbers count as zero.
#pragma once

#include <cstdint>

namespace eadem::kernels::cpu {

inline constexpr int64_t kTileRows = 16;     // rows of a and c in a tile
inline constexpr int64_t kTileLine = 64;     // bytes of a row in a tile
inline constexpr int64_t kTileBytes = 1024;  // bytes of a tile of b, and of 16 rows of a
inline constexpr int64_t kTileBlock = 8;     // tiles of k that all rows are multiplied by before the next ones

// Rows of a. Row 32 j + 16 h + i begins its tile t, which is tile u of block b, at
//   data + b * k_stride + j * pair_stride + u * tile_stride + h * half_stride + i * line_stride.
struct TileRows {
  const void* data;
  int64_t k_stride, pair_stride, tile_stride, half_stride, line_stride;

  // `rows` rows stored in the order in which tiles read them.
  static TileRows in_order(const void* data, int64_t rows) {
    const int64_t pair_bytes = 2 * kTileBlock * kTileBytes;
    return {data, (rows + 31) / 32 * pair_bytes, pair_bytes, 2 * kTileBytes, kTileBytes, kTileLine};
  }
  // The bytes that `rows` rows of `tiles` tiles take when stored in order.
  static int64_t bytes_in_order(int64_t rows, int64_t tiles) {
    return (tiles + kTileBlock - 1) / kTileBlock * in_order(nullptr, rows).k_stride;
  }
  // Rows of `tiles` tiles, stored 32 rows after 32 rows. 32 rows take exactly `tiles` times 2 KB, where those in order
  // take whole blocks of kTileBlock tiles.
  static TileRows in_pairs(const void* data, int64_t tiles) {
    const int64_t block_bytes = 2 * kTileBlock * kTileBytes;
    return {data, block_bytes, 2 * tiles * kTileBytes, 2 * kTileBytes, kTileBytes, kTileLine};
  }
  static int64_t bytes_in_pairs(int64_t rows, int64_t tiles) { return (rows + 31) / 32 * 2 * tiles * kTileBytes; }

  // Where tile `tile` of row `row` begins, for whoever writes the rows.
  char* line(int64_t row, int64_t tile) const {
    return static_cast<char*>(const_cast<void*>(data)) + tile / kTileBlock * k_stride + row / 32 * pair_stride +
           tile % kTileBlock * tile_stride + row / kTileRows % 2 * half_stride + row % kTileRows * line_stride;
  }
};
// Panels of b, which begin `panel_stride` bytes apart.
struct TilePanels {
  const void* data;
  int64_t panel_stride;
};

// Computes c [rows, panels * 16] with row stride c_stride, for any number of rows and panels; one row by bf16_row.
void bf16_tiles(float* c, int64_t c_stride, const TileRows& a, const TilePanels& b, int64_t rows, int64_t panels,
                int64_t tiles);

// Computes only the first row of a, with vector instructions: c [panels * 16] has the bits of bf16_tiles, at the cost
// of reading b once.
void bf16_row(float* c, const TileRows& a, const TilePanels& b, int64_t panels, int64_t tiles);

// The start values and factors of integer sums: row r's are at index r * stride.
struct TileScales {
  const int32_t* starts;
  const float* scales;
  int64_t stride;
};

// c [rows, panels * 16] += scale * float(start + sum over `tiles` tiles, at most kTileBlock), one fma for each element.
// Meanwhile the panels that begin at `next` (null: none), as far apart as those of b, are prefetched.
void int8_tiles(float* c, int64_t c_stride, const TileRows& a, const TilePanels& b, const TileScales& scales,
                int64_t rows, int64_t panels, int64_t tiles, const void* next);

// Rounds the n values of a row to bf16, to nearest even (subnormal ones to zero), and stores them as row `row` of
// `rows`, which are in order. The last tile is padded with zeros.
void round_to_tiles(const TileRows& rows, int64_t row, const float* x, int64_t n);

}  // namespace eadem::kernels::cpu
