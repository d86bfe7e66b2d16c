// SPDX-License-Identifier: Apache-2.0
//
// Products of few rows (up to 64 tokens) with encoded weights (FragmentBlocks), which are bound by reading them. One
// thread streams whole blocks by bulk copies into a ring in shared memory; warps decode them to bf16 fragments in the
// stages of a second ring, from which the chains of linear_stream.cuh multiply. So the bits are those of a product with
// the weight decoded and rounded to bf16, whoever computes that.
#include <algorithm>
#include <type_traits>

#include "eadem/kernels/cuda/linear/packed_blocks.cuh"

namespace eadem::kernels::cuda {

namespace {

// A shape, with `kDecoders` warps that decode, and `kBlocks` blocks on a multiprocessor. A multiprocessor has four
// schedulers, and that of a warp follows from its number. With `kApart` the first one has only the warps that multiply
// and those that copy: a chain is late by every clock that its scheduler gives to a warp that decodes.
template <int kRowWarps, int kTokenWarps, int kTokenTiles, int kStages, int kDecoders_, int kBlocks_, bool kApart_>
struct PackedShape : StreamShape<kRowWarps, kTokenWarps, kTokenTiles, kStages, 1 + kDecoders_, true> {
  static constexpr int kDecoders = kDecoders_, kBlocks = kBlocks_;
  static constexpr bool kApart = kApart_;
  static constexpr int kSchedulers = 4;
  static constexpr int kOthers = kRowWarps * kTokenWarps + 2;  // warps that do not decode
  // With kApart the others are every fourth warp, and no warp is without a role.
  static_assert(!kApart || kDecoders == (kSchedulers - 1) * (kOthers - 1));
  // A warp's role: the warps that multiply come first, then the one that copies tokens, the one that copies blocks, and
  // those that decode.
  __device__ static constexpr int role_of(int warp) {
    if (!kApart) return warp;
    return warp % kSchedulers == 0 ? warp / kSchedulers : kOthers + warp - warp / kSchedulers - 1;
  }
  static constexpr int kTurns = kDecoders / (2 * kRowWarps);  // stages of which a warp decodes one
  static_assert(kDecoders % (2 * kRowWarps) == 0);
  // A warp that were further ahead could take the phase before last of a barrier for the one it waits for.
  static_assert(kTurns <= kStages);
};

// By S::kDecoders warps, of which this is number `decoder`. Each has one half of the blocks of one row warp, in every
// S::kTurns-th stage.
template <typename S, bool kGated>
__device__ inline void decode_blocks(const PackedStreamParams& p, const StreamRing& ring, BlockRing blocks,
                                     int num_tiles, int decoder, int lane, GroupDecoding* groups) {
  const int half = decoder % 2, row_warp = decoder / 2 % S::kRowWarps;
  const int num_chunks = static_cast<int>(ceil_div(p.product.in, kChunk));
  const int first_row = StreamTiles<S, kGated>::output_of(row_warp * kFragmentRows);
  const uint8_t* from = blocks.stages + row_warp * blocks.pitch;
  const uint32_t to =
      ring.stages +
      static_cast<uint32_t>(((row_warp * kPieces + half * kHalfPieces) * kFragmentPieceSteps * kWarp + lane) * 16);
  int chunk = decoder / (2 * S::kRowWarps);  // this warp's next one
  RingPlace<S::kStages> place{chunk, 1};
  blocks.stage = chunk, blocks.parity = 0;
  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
    int tile_of_part = tile;
    const int part = StreamTiles<S, kGated>::part_of(p.product, tile_of_part);
    const bool has_rows =
        first_row < p.product.parts[part].out - int64_t{tile_of_part} * StreamTiles<S, kGated>::kOutputs;
    with_decoder(kGated && row_warp % 2 == 1 ? p.up_layout : p.layouts[part], [&](const auto& layout_decoder) {
      for (; chunk < num_chunks; chunk += S::kTurns) {
        barrier_wait(blocks.full + blocks.stage * kBarrierBytes, blocks.parity);
        barrier_wait(ring.empty + place.stage * kBarrierBytes, place.parity);
        if (has_rows) {
          const uint8_t* block = from + blocks.stage * S::kRowWarps * blocks.pitch;
          const uint32_t stage = to + static_cast<uint32_t>(place.stage * S::kStageBytes);
          layout_decoder.template prepare<kHalfPieces>(block, half * kHalfPieces, lane, groups);
#pragma unroll 1  // both at once would spill registers
          for (int i = 0; i < kHalfPieces; ++i) {
            uint32_t fragments[kFragmentPieceSteps][4];
            layout_decoder.decode(block, half * kHalfPieces + i, i, lane, groups,
                                  [&](int step, int r, int h, float low, float high) {
                                    fragments[step][r + 2 * h] = pack_bf16(low, high);
                                  });
#pragma unroll
            for (int step = 0; step < kFragmentPieceSteps; ++step)
              store_16(stage + static_cast<uint32_t>((i * kFragmentPieceSteps + step) * kWarp * 16), fragments[step]);
          }
        }
        __syncwarp();
        if (lane == 0) {
          barrier_arrive(ring.full + place.stage * kBarrierBytes);
          barrier_arrive(blocks.empty + blocks.stage * kBarrierBytes);
        }
        place.advance(S::kTurns);
        blocks.advance(S::kTurns);
      }
    });
    chunk -= num_chunks;
  }
}

// A block computes tiles blockIdx.x, blockIdx.x + gridDim.x, ..., and its copies continue from one tile into the next
// without waiting. Dynamic shared memory has the stages, then `block_stages` stages of blocks of `pitch` bytes.
template <typename Y, typename S, bool kGated>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    packed_stream(const __grid_constant__ PackedStreamParams p, const __grid_constant__ CUtensorMap tokens,
                  int block_stages, int pitch) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ uint64_t barriers[2 * S::kStages];  // full, empty
  __shared__ uint64_t block_barriers[2 * kMostBlockStages];
  __shared__ GroupDecoding groups[S::kDecoders][kHalfPieces * kPieceGroups];
  __shared__ Y up_products[kUpProducts<S, kGated>];
  constexpr int kStageDecoders = 2 * S::kRowWarps;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_tiles = StreamTiles<S, kGated>::count(p.product);
  const StreamRing ring = make_ring<S>(memory, barriers, kStageDecoders + 1);  // and the thread that copies tokens
  const uint32_t block_full = shared_address(block_barriers);
  const BlockRing blocks{.full = block_full,
                         .empty = block_full + kMostBlockStages * kBarrierBytes,
                         .stages = memory + S::kSharedBytes,
                         .count = block_stages,
                         .pitch = pitch,
                         .parity = 0};
  if (threadIdx.x < kMostBlockStages) {
    barrier_init(blocks.full + threadIdx.x * kBarrierBytes, 1);
    barrier_init(blocks.empty + threadIdx.x * kBarrierBytes, kStageDecoders);
  }
  fence_barriers();
  __syncthreads();
  allow_next_kernel();

  const int role = S::role_of(warp), decoder = role - S::kOthers;
  if (role < S::kWarps)
    multiply_tiles<Y, S, kGated>(p.product, ring, num_tiles, role, lane, up_products);
  else if (decoder >= 0)
    decode_blocks<S, kGated>(p, ring, blocks, num_tiles, decoder, lane, groups[decoder]);
  else if (role == S::kWarps && lane == 0)
    copy_tokens<S>(p.product, tokens, ring, num_tiles);
  else if (role == S::kWarps + 1 && lane == 0)
    copy_blocks<S, kGated>(p, blocks, num_tiles);
}

template <typename Y, typename S, bool kGated>
cudaError_t launch_shape(const PackedStreamParams& p, cudaStream_t stream) {
  // kLeft is the shared memory for encoded blocks: a block's share without its static arrays, its stages and 2 KB that
  // the system reserves.
  constexpr int kStatic = S::kDecoders * kHalfPieces * kPieceGroups * static_cast<int>(sizeof(GroupDecoding)) +
                          kUpProducts<S, kGated> * static_cast<int>(sizeof(Y));
  constexpr int kLeft = kSharedLimit / S::kBlocks - kStatic - S::kSharedBytes - 3072;
  static_assert(kLeft >= 2 * S::kRowWarps * 8192);
  const int pitch = block_pitch<kGated>(p);
  const int block_stages = std::min(kMostBlockStages, kLeft / (S::kRowWarps * pitch));
  if (block_stages < std::max(S::kTurns, 2)) return cudaErrorInvalidValue;
  const int blocks =
      std::min(StreamTiles<S, kGated>::count(p.product), static_cast<int>(p.product.multiprocessors) * S::kBlocks);
  CUtensorMap tokens;
  const cudaError_t error = make_panel_map(tokens, p.product.x, p.product.tokens, p.product.in, S::kTokens, kGroups);
  if (error != cudaSuccess) return error;
  return launch_overlapped(packed_stream<Y, S, kGated>, dim3(static_cast<unsigned>(blocks)), S::kThreads,
                           static_cast<size_t>(S::kSharedBytes + block_stages * S::kRowWarps * pitch), stream, p,
                           tokens, block_stages, pitch);
}

// Up to 8 tokens, two blocks share a multiprocessor, and tiles of 16 rows let narrow weights reach all of them. More
// tokens are read again for every tile, so that larger ones are faster.
template <typename Y, bool kGated>
cudaError_t launch_rows(const PackedStreamParams& p, cudaStream_t stream) {
  if (p.product.tokens <= 8) {
    using Shape = std::conditional_t<kGated, PackedShape<2, 1, 1, 3, 4, 2, false>, PackedShape<1, 1, 1, 4, 6, 2, true>>;
    return launch_shape<Y, Shape, kGated>(p, stream);
  }
  if (p.product.tokens <= 16) return launch_shape<Y, PackedShape<2, 1, 2, 4, 8, 1, false>, kGated>(p, stream);
  if (p.product.tokens <= 32) return launch_shape<Y, PackedShape<2, 2, 2, 4, 8, 1, false>, kGated>(p, stream);
  return launch_shape<Y, PackedShape<2, 4, 2, 3, 8, 1, false>, kGated>(p, stream);
}

}  // namespace

cudaError_t launch_packed_stream(const PackedStreamParams& p, cudaStream_t stream) {
  if (p.product.tokens == 0 || p.product.parts[0].out == 0) return cudaSuccess;
  if (p.product.tokens > kLinearStreamMaxTokens || p.product.in % kLinearStreamMultiple != 0)
    return cudaErrorInvalidValue;
  int64_t tiles = 0;  // of 16 rows
  for (const LinearStreamPart& part : p.product.parts) tiles += ceil_div(part.out, kFragmentRows);
  if (p.product.up != nullptr) tiles *= 2;
  if (tiles >= 4 * p.product.multiprocessors)
    if (const auto launched = launch_packed_direct(p, stream)) return *launched;
  if (p.product.up != nullptr) return launch_rows<bf16_t, true>(p, stream);
  return with_f32_or_bf16(p.product.y_dtype, [&](auto y) { return launch_rows<decltype(y), false>(p, stream); });
}

}  // namespace eadem::kernels::cuda
