// SPDX-License-Identifier: Apache-2.0
//
// Rows of a cache in shared memory, as tensor maps bring them, for the kernels for decode steps: panels of 64 columns,
// as wgmma.cuh describes them, or of 64 or 128 codes, whose pieces of 16 are permuted likewise.
#pragma once

#include <algorithm>
#include <bit>
#include <utility>

#include "eadem/kernels/cuda/attention/attention_tiles.cuh"
#include "eadem/kernels/cuda/attention/kv_codes.cuh"
#include "eadem/kernels/cuda/instructions/tensor_map.cuh"

namespace eadem::kernels::cuda {

template <int kD, typename Code, int kRowCount>
struct RowPanels {
  static constexpr int kRows = kRowCount;
  static constexpr uint32_t kRowBytes = kD * Code::kBytes;
  static constexpr uint32_t kPanelRow = std::min(kRowBytes, kPanelRowBytes);
  static constexpr int kPanels = static_cast<int>(kRowBytes / kPanelRow);
  static constexpr uint32_t kPanelBytes = kRows * kPanelRow;
  static constexpr uint32_t kBytes = kRows * kRowBytes;

  // The offset of a piece of 16 bytes of a row.
  __device__ static uint32_t offset(int row, int piece) {
    constexpr int kPieces = static_cast<int>(kPanelRow) / 16;
    return static_cast<uint32_t>(piece / kPieces) * kPanelBytes + static_cast<uint32_t>(row) * kPanelRow +
           static_cast<uint32_t>((piece % kPieces) ^ (kPieces == 8 ? row % 8 : row / 2 % 4)) * 16;
  }
  // How much further the same pieces of eight rows stand than those of the first eight.
  __device__ static constexpr uint32_t tile_offset(int tile) { return static_cast<uint32_t>(tile) * 8 * kPanelRow; }
};

// The keys and values of the cache, as [rows, head_dim].
struct CacheMaps {
  CUtensorMap k, v;
  int box_shift = -1;    // log2 of the rows of a box, or negative if there are no maps
  int block_shift = -1;  // of those of a block of the cache, or negative if that is no power of two
};
// Copies panel `panel` of the rows from `row` on.
__device__ inline void copy_panel_async(uint32_t to, const CUtensorMap& map, int32_t row, int panel, uint32_t full,
                                        uint64_t policy) {
  copy_columns_async(to, map, panel * kPanelColumns, row, 0, full, policy);
}
// Describes boxes of as many rows as surely lie in one block of the cache, at most `most_rows`, a power of two.
template <int kD, typename Code>
cudaError_t make_cache_maps(CacheMaps& maps, const AttentionParams& p, int most_rows) {
  const auto size = static_cast<uint64_t>(p.block_size);
  const int shift = std::countr_zero(size);  // blocks begin at multiples of this power of two
  maps.box_shift = std::min(shift, std::countr_zero(static_cast<unsigned>(most_rows)));
  maps.block_shift = std::has_single_bit(size) ? shift : -1;
  for (const auto& [map, rows] : {std::pair(&maps.k, p.k), std::pair(&maps.v, p.v)})
    if (const cudaError_t error = Code::kEncoded
                                      ? make_code_map(*map, rows, p.cache_rows, p.head_dim, 1 << maps.box_shift, kD)
                                      : make_head_map(*map, rows, p.cache_rows, 1, p.head_dim, 1 << maps.box_shift);
        error != cudaSuccess)
      return error;
  return cudaSuccess;
}

// Four registers of a lane, which are its part of a left operand.
struct Fragment {
  uint32_t r[4];
};

// Computes s[tile] = q . k for the keys in `Panels` at `keys`, 8 keys a tile. `query(step)` is the Fragment of columns
// 16 step to 16 step + 15 of the queries (load_queries, kInFours with codes).
template <int kD, typename Panels, typename Code, typename Query>
__device__ void multiply_keys(float (*s)[4], const Query& query, uint32_t keys, int lane) {
  constexpr int kTiles = Panels::kRows / 8, kSteps = 4 / Code::kBytes;  // of four matrices of 16 bytes a row
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) s[tile][0] = s[tile][1] = s[tile][2] = s[tile][3] = 0.0f;
    // Lane l addresses row l % 8 of the matrix of piece l / 8. Independent chains run side by side.
#pragma unroll
  for (int step = 0; step < kD / 16; step += kSteps) {
    const uint32_t address = keys + Panels::offset(lane % 8, step * Code::kBytes + lane / 8);
    uint32_t k[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) load_matrices(k[tile], address + Panels::tile_offset(tile));
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const Fragment q = query(step + i);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) multiply_step<Code>(s[tile], q.r, k[tile], i);
    }
  }
}

}  // namespace eadem::kernels::cuda
