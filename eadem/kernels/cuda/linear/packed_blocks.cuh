// SPDX-License-Identifier: Apache-2.0
//
// What the products of encoded weights share (packed_stream.cu, packed_direct.cu): a ring of encoded blocks in shared
// memory, and the thread that copies into it.
#pragma once

#include <algorithm>
#include <optional>

#include "eadem/kernels/cuda/linear/fragment_decode.cuh"
#include "eadem/kernels/cuda/linear/linear_stream.cuh"

namespace eadem::kernels::cuda {

inline constexpr int kMostBlockStages = 16;
inline constexpr int kPieces = kFragmentPieces;
inline constexpr int kHalfPieces = kPieces / 2;
static_assert(kChunk == kFragmentBlockColumns && kFragmentRows == kFragmentBlockRows && kPieces == kGroups);

// The ring of encoded blocks: a stage has those of a chunk of a tile, one for each row warp.
struct BlockRing {
  uint32_t full, empty;  // barriers
  uint8_t* stages;
  uint8_t* tokens = nullptr;  // packed_direct: their stages
  int count;                  // stages
  int pitch;                  // bytes from a row warp's block to the next one's
  int stage = 0;              // the place, as RingPlace
  uint32_t parity;

  // `by`: at most `count`.
  __device__ void advance(int by = 1) {
    stage += by;
    if (stage >= count) stage -= count, parity ^= 1;
  }
};

// The weight of a row warp of a tile.
template <typename S, bool kGated>
struct RowBlocks {
  const uint8_t* first = nullptr;  // the block of the first chunk; null beyond the last output
  const FragmentLayout* layout = nullptr;

  __device__ RowBlocks(const PackedStreamParams& p, int part, int tile_of_part, int row_warp, int num_chunks) {
    const LinearStreamPart& product = p.product.parts[part];
    const bool up = kGated && row_warp % 2 == 1;
    layout = up ? &p.up_layout : &p.layouts[part];
    const int64_t row = int64_t{tile_of_part} * StreamTiles<S, kGated>::kOutputs +
                        StreamTiles<S, kGated>::output_of(row_warp * kFragmentRows);
    if (row >= product.out) return;
    const void* weight = up ? p.product.up : product.weight;
    first = static_cast<const uint8_t*>(weight) + row / kFragmentRows * num_chunks * layout->block_bytes;
  }
};

// By one thread: copies the blocks of every chunk of every tile. Weights do not depend on earlier kernels.
template <typename S, bool kGated>
__device__ inline void copy_blocks(const PackedStreamParams& p, BlockRing blocks, int num_tiles) {
  const int num_chunks = static_cast<int>(ceil_div(p.product.in, kChunk));
  const uint64_t policy = l2_policy<L2Policy::evict_first>();
  blocks.parity = 1;  // of the phase before the first: the first round waits for nothing
  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
    int tile_of_part = tile;
    const int part = StreamTiles<S, kGated>::part_of(p.product, tile_of_part);
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      barrier_wait(blocks.empty + blocks.stage * kBarrierBytes, blocks.parity);
      const uint32_t full = blocks.full + blocks.stage * kBarrierBytes;
      const auto for_each_block = [&](auto&& f) {
#pragma unroll
        for (int row_warp = 0; row_warp < S::kRowWarps; ++row_warp) {
          const RowBlocks<S, kGated> row(p, part, tile_of_part, row_warp, num_chunks);
          if (row.first != nullptr) f(row_warp, row, static_cast<uint32_t>(row.layout->block_bytes));
        }
      };
      uint32_t bytes = 0;
      for_each_block([&](int, const auto&, uint32_t block_bytes) { bytes += block_bytes; });
      barrier_arrive_expecting(full, bytes);
      for_each_block([&](int row_warp, const auto& row, uint32_t block_bytes) {
        copy_bulk_async(shared_address(blocks.stages + (blocks.stage * S::kRowWarps + row_warp) * blocks.pitch),
                        row.first + int64_t{chunk} * block_bytes, block_bytes, full, policy);
      });
      blocks.advance();
    }
  }
}

// The greatest block of the weights of a launch.
template <bool kGated>
inline int block_pitch(const PackedStreamParams& p) {
  int pitch = kGated ? p.up_layout.block_bytes : 0;
  for (int i = 0; i < kMostLinearStreamParts; ++i)
    if (p.product.parts[i].out > 0) pitch = std::max(pitch, p.layouts[i].block_bytes);
  return pitch;
}

// packed_direct.cu: the products of launch_packed_stream whose weights have rows enough for many chains on each
// multiprocessor. Nothing is launched, and nothing returned, where a block's shared memory has no room for two stages
// of the encoded blocks.
[[nodiscard]] std::optional<cudaError_t> launch_packed_direct(const PackedStreamParams& params, cudaStream_t stream);

}  // namespace eadem::kernels::cuda
