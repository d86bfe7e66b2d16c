// SPDX-License-Identifier: Apache-2.0
//
// What kernels for products of many rows of 8-bit codes share (integer_tiles.cu, integer_group_tiles.cu).
// integer_turns.cu stores results as they do. A block computes tiles of 64 or 128 tokens and 128 rows of the weight, 64
// for each of two warpgroups (or 64 rows and 64 tokens for each). The tokens' codes arrive in stages of panels that
// wgmma reads, the encoded blocks of a chunk of 256 columns and what else belongs to it in slots.
//
// Blocks are paired (a cluster of two), with the same tokens and rows one after another: each copies half of the tokens
// for both.
#pragma once

#include <algorithm>

#include "eadem/kernels/cuda/instructions/cluster.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/instructions/ring.cuh"
#include "eadem/kernels/cuda/instructions/tensor_map.cuh"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/integer_products.cuh"

namespace eadem::kernels::cuda::tiles {

constexpr int kWarpgroups = 2;  // that multiply
constexpr int kGroupRows = 64;  // of the weight, of a warpgroup
constexpr int kMultiplyingWarps = kWarpgroups * kWarpgroup / kWarp;
constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;  // of the last, two copy
constexpr int kPair = 2;                                  // blocks of a cluster
// Registers of a thread that multiplies, and of one that copies: what all have at first is all there is.
constexpr int kGrown = 232, kShrunk = 40;
static_assert(kWarpgroups * kGrown + kShrunk <= (kWarpgroups + 1) * (65536 / kThreads / 8 * 8));
constexpr int kSlots = 3;            // chunks whose slots are in memory
constexpr uint32_t kStepBytes = 32;  // of k in one wgmma

constexpr FragmentLayout kLargestGroups = with_offsets({.code = FragmentLayout::Code::bits4,
                                                        .scale_type = FragmentLayout::Scale::f32,
                                                        .has_zeros = true,
                                                        .scale_shift = 7});

// kWide: the warpgroups have different rows of the weight, else different tokens. A kernel derives its shape from this
// one and adds how a warp multiplies its rows of the tiles of its block:
//
//   template <typename Y>
//   static void multiply(params, layout, memory, num_chunks, rank, warp, lane)
template <IntegerCodes kCodes_, bool kWide_, int kTokens_>
struct Shape {
  static constexpr IntegerCodes kCodes = kCodes_;
  static constexpr bool kWide = kWide_, kHasMin = kCodes == IntegerCodes::four;
  static constexpr int kTokens = kTokens_;  // of a tile
  // Panels of a chunk of the tokens, which are f16 for K-quants and bytes for groups, and of a stage.
  static constexpr bool kHalves = kCodes != IntegerCodes::groups;
  static constexpr int kPanels = kIntegerChunk * (kHalves ? 2 : 1) / static_cast<int>(kPanelRowBytes);
  static constexpr int kStagePanels = kHalves ? 2 : 1, kStages = kHalves ? 4 : 8;
  static constexpr uint32_t kPanelBytes = kTokens * kPanelRowBytes, kStageBytes = kStagePanels * kPanelBytes;
  // The slot of a chunk: sums of its tokens (narrow_operand) if there are minimums, their scales, then the encoded
  // blocks of its rows.
  static constexpr uint32_t kSumBytes = kHasMin ? kTokens * 32 : 0, kScaleBytes = kTokens * 4;
  static constexpr int kRows = kGroupRows * (kWide ? kWarpgroups : 1);
  static constexpr int kGroupTokens = kTokens / (kWide ? 1 : kWarpgroups);
  static constexpr int kTokenTiles = kGroupTokens / 8;
  // An encoded block; blocks of groups differ in size, and this is the largest.
  static constexpr uint32_t kBlockBytes = kCodes == IntegerCodes::four  ? kFourBits.block_bytes
                                          : kCodes == IntegerCodes::six ? kSixBits.block_bytes
                                                                        : kLargestGroups.block_bytes;
  static constexpr int kBlockRows = kRows / kFragmentBlockRows;  // rows of blocks
  static constexpr uint32_t kSlotBytes = (kSumBytes + kScaleBytes + kBlockRows * kBlockBytes + 127) / 128 * 128;
  static constexpr uint32_t kSharedBytes = kStages * kStageBytes + kSlots * kSlotBytes;
  static_assert(kSharedBytes <= 226 * 1024);

  // What a warp of a warpgroup multiplies of a tile: a row of blocks, and the tokens from this one on.
  __device__ static int row_block(int warp) { return kWide ? warp : warp % (kWarpgroup / kWarp); }
  __device__ static int first_token(int group) { return kWide ? 0 : group * kGroupTokens; }
};

// Shared memory, and the barriers in it.
struct Memory {
  uint32_t stages;
  uint8_t* slots;
  Ring ring, slot_ring;
};

// The tiles of a launch, tokens first: pairs of blocks take pairs of tiles in turns.
template <typename S>
struct Tiles {
  int tokens, outputs;

  __host__ __device__ explicit Tiles(const LinearStreamParams& p)
      : tokens(static_cast<int>(ceil_div(p.tokens, int64_t{S::kTokens}))),
        outputs(static_cast<int>(ceil_div(p.parts[0].out, int64_t{kPair} * S::kRows))) {}
  __host__ __device__ int count() const { return tokens * outputs; }
  __device__ int token_of(int tile) const { return tile % tokens * S::kTokens; }
  __device__ int output_of(int tile, int rank) const { return (tile / tokens * kPair + rank) * S::kRows; }
  __device__ static int first() { return static_cast<int>(blockIdx.x) / kPair; }
  __device__ static int step() { return static_cast<int>(gridDim.x) / kPair; }
};

// By one thread: copies the tokens of this block's tiles, half of them for both blocks. A stage is filled again when
// the warps of both blocks have left it.
template <typename S>
__device__ inline void copy_tokens(const LinearStreamParams& p, const CUtensorMap& map, const Memory& memory,
                                   int num_chunks, int rank) {
  const Tiles<S> tiles(p);
  const uint64_t policy = l2_policy<L2Policy::evict_last>();
  RingPlace<S::kStages> place{0, 1};  // parity of the phase before the first: the first round waits for nothing
  wait_for_earlier_kernels();
  for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step())
    for (int panel = 0; panel < num_chunks * S::kPanels; panel += S::kStagePanels) {
      barrier_wait(memory.ring.empty_at(place.stage), place.parity);
      const uint32_t full = memory.ring.full_at(place.stage);
      const uint32_t to = memory.stages + static_cast<uint32_t>(place.stage) * S::kStageBytes +
                          static_cast<uint32_t>(rank) * (S::kPanelBytes / kPair);
      barrier_arrive_expecting(full, S::kStageBytes);
#pragma unroll
      for (int i = 0; i < S::kStagePanels; ++i)
        copy_box_to_blocks_async(to + static_cast<uint32_t>(i) * S::kPanelBytes, map,
                                 tiles.token_of(tile) + rank * (S::kTokens / kPair), panel + i, full, (1 << kPair) - 1,
                                 policy);
      place.advance();
    }
}

// By one thread: fills the slots of this block's tiles.
template <typename S>
__device__ inline void copy_slots(const LinearStreamParams& p, const FragmentLayout& layout, const Memory& memory,
                                  int num_chunks, int rank) {
  const Tiles<S> tiles(p);
  const uint32_t block_bytes =
      S::kCodes == IntegerCodes::groups ? static_cast<uint32_t>(layout.block_bytes) : S::kBlockBytes;
  constexpr uint32_t kTokenBytes = (S::kHasMin ? 256 : 0) + 32;  // of eight tokens
  const LinearStreamPart& part = p.parts[0];
  const auto groups = static_cast<int>(ceil_div(p.tokens, int64_t{8}));
  const auto block_rows = static_cast<int>(ceil_div(part.out, int64_t{kFragmentBlockRows}));
  const uint64_t policy = l2_policy<L2Policy::evict_last>();
  const auto token_groups = [&](int tile) {
    return static_cast<uint32_t>(min(S::kTokens / 8, groups - tiles.token_of(tile) / 8));
  };
  const auto copy_blocks = [&](int slot, int tile, int chunk) {
    const uint32_t full = memory.slot_ring.full_at(slot);
    const uint32_t to = shared_address(memory.slots + slot * S::kSlotBytes) + S::kSumBytes + S::kScaleBytes;
    barrier_arrive_expecting(full, token_groups(tile) * kTokenBytes + S::kBlockRows * block_bytes);
    for (int n = 0; n < S::kBlockRows; ++n) {
      // Beyond the last row of blocks it is the last one.
      const int row = min(tiles.output_of(tile, rank) / kFragmentBlockRows + n, block_rows - 1);
      copy_bulk_async(to + static_cast<uint32_t>(n) * S::kBlockBytes,
                      static_cast<const uint8_t*>(part.weight) + (int64_t{row} * num_chunks + chunk) * block_bytes,
                      block_bytes, full, policy);
    }
  };
  // Weights do not depend on earlier kernels: the first ones are there before tokens are.
  const int early = min(kSlots, num_chunks);
  for (int chunk = 0; chunk < early; ++chunk) copy_blocks(chunk, tiles.first(), chunk);
  wait_for_earlier_kernels();
  RingPlace<kSlots> slot{0, 1};
  for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step())
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      if (tile != tiles.first() || chunk >= early) {
        barrier_wait(memory.slot_ring.empty_at(slot.stage), slot.parity);
        copy_blocks(slot.stage, tile, chunk);
      }
      const uint32_t full = memory.slot_ring.full_at(slot.stage);
      const uint32_t to = shared_address(memory.slots + slot.stage * S::kSlotBytes);
      const int64_t first_group = int64_t{chunk} * groups + tiles.token_of(tile) / 8;
      if constexpr (S::kHasMin)
        copy_bulk_async(to, p.x_chunks.sums + first_group * 128, token_groups(tile) * 256, full, policy);
      copy_bulk_async(to + S::kSumBytes, p.x_scales + first_group * 8, token_groups(tile) * 32, full, policy);
      slot.advance();
    }
}

// By a warp: stores its 16 outputs of the tokens from `first_token` on, plus bias, rounded once. Lane 4 g + q has
// outputs g and g + 8, tokens 2 q and 2 q + 1 of each tile.
template <typename Y, int kTokenTiles>
__device__ inline void store_outputs(const LinearStreamPart& part, int64_t tokens, const float (&sum)[kTokenTiles][4],
                                     int first_token, int first_output, int lane) {
  float bias[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (const int64_t n = first_output + lane / 4 + 8 * r; part.bias != nullptr && n < part.out)
      bias[r] = load(static_cast<const Y*>(part.bias) + n);
  if (sizeof(Y) == 2 && part.out % 2 == 0) {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float values[2] = {sum[t][2 * r], sum[t][2 * r + 1]};
        if (part.bias != nullptr) values[0] += bias[r], values[1] += bias[r];
        const uint32_t word = transposed(pack_bf16(values[0], values[1]));
        const int64_t token = first_token + t * 8 + lane / 4, n = first_output + 8 * r + lane % 4 * 2;
        if (token < tokens && n < part.out)
          *reinterpret_cast<uint32_t*>(static_cast<Y*>(part.y) + token * part.out + n) = word;
      }
    return;
  }
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t token = first_token + t * 8 + lane % 4 * 2 + i % 2, n = first_output + lane / 4 + i / 2 * 8;
      float value = sum[t][i];
      if (part.bias != nullptr) value += bias[i / 2];
      if (token < tokens && n < part.out) store(static_cast<Y*>(part.y) + token * part.out + n, value);
    }
}

template <typename Y, typename S>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_tiles(const __grid_constant__ LinearStreamParams p, const __grid_constant__ FragmentLayout layout,
                   const __grid_constant__ CUtensorMap token_map) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  __shared__ uint64_t barriers[2 * S::kStages + 2 * kSlots];
  const uint32_t first = shared_address(barriers);
  const Memory memory{
      .stages = shared_address(bytes),
      .slots = bytes + S::kStages * S::kStageBytes,
      .ring = {first, first + S::kStages * kBarrierBytes},
      .slot_ring = {first + 2 * S::kStages * kBarrierBytes, first + (2 * S::kStages + kSlots) * kBarrierBytes}};
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < S::kStages) {
    barrier_init(memory.ring.full_at(thread), 1);
    barrier_init(memory.ring.empty_at(thread), kPair * kMultiplyingWarps);
  }
  if (thread < kSlots) {
    barrier_init(memory.slot_ring.full_at(thread), 1);
    barrier_init(memory.slot_ring.empty_at(thread), kMultiplyingWarps);
  }
  fence_barriers();
  cluster_sync();
  allow_next_kernel();

  const int rank = cluster_rank(), num_chunks = static_cast<int>(p.in / kIntegerChunk);
  const int warp = thread / kWarp, lane = thread % kWarp;
  if (warp < kMultiplyingWarps) {
    grow_registers<kGrown>();
    S::template multiply<Y>(p, layout, memory, num_chunks, rank, warp, lane);
  } else {
    shrink_registers<kShrunk>();
    if (warp == kMultiplyingWarps && lane == 0) copy_tokens<S>(p, token_map, memory, num_chunks, rank);
    if (warp == kMultiplyingWarps + 1 && lane == 0) copy_slots<S>(p, layout, memory, num_chunks, rank);
  }
  __syncwarp();
  cluster_sync();  // the other block may still copy into this one's memory
}

template <typename Y, typename S>
cudaError_t launch_shape(const PackedStreamParams& packed, cudaStream_t stream) {
  const LinearStreamParams& p = packed.product;
  CUtensorMap map;
  const cudaError_t error = S::kHalves
                                ? make_panel_map(map, p.x_chunks.halves, p.tokens, p.in, S::kTokens / kPair, 1)
                                : make_panel_map(map, p.x_chunks.codes, p.tokens, p.in / 2, S::kTokens / kPair, 1);
  if (error != cudaSuccess) return error;
  const int pairs = std::min(Tiles<S>(p).count(), static_cast<int>(p.multiprocessors) / kPair);
  return launch_clusters(multiply_tiles<Y, S>, kPair, dim3(static_cast<unsigned>(kPair * pairs)), kThreads,
                         size_t{S::kSharedBytes}, stream, p, packed.layouts[0], map);
}

// kTiles<kWide, kTokens> are shapes.
template <typename Y, template <bool, int> typename kTiles>
cudaError_t launch_tiles(const PackedStreamParams& packed, cudaStream_t stream) {
  const LinearStreamParams& p = packed.product;
  if (p.tokens <= 64) return launch_shape<Y, kTiles<true, 64>>(packed, stream);
  // Narrow tiles where wide ones would leave multiprocessors without work.
  if (Tiles<kTiles<true, 128>>(p).count() * kPair < p.multiprocessors)
    return launch_shape<Y, kTiles<false, 128>>(packed, stream);
  return launch_shape<Y, kTiles<true, 128>>(packed, stream);
}

}  // namespace eadem::kernels::cuda::tiles
