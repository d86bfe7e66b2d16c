// SPDX-License-Identifier: Apache-2.0
//
// Products of few rows with encoded weights, where there are rows of weights enough for many chains on each
// multiprocessor: each warp decodes 16 rows itself, in registers, and multiplies them with all tokens. The bits are
// those of packed_stream.cu.
#include <algorithm>
#include <optional>

#include "eadem/kernels/cuda/linear/packed_blocks.cuh"

namespace eadem::kernels::cuda {

namespace {

// A tile has kRowWarps * 16 weight rows, and all tokens. One more warp copies tokens, and one the blocks.
template <int kRowWarps, int kTokenTiles>
struct DirectShape : StreamShape<kRowWarps, 1, kTokenTiles, 1, 1, true> {
  static constexpr int kTokenBytes = kTokenTiles * kFragmentTokens * kChunk * 2;  // of a stage
};

// By one thread: as copy_tokens, into the stages of a ring of blocks.
template <typename S>
__device__ inline void copy_direct_tokens(const LinearStreamParams& p, const CUtensorMap& map, BlockRing blocks,
                                          int num_tiles) {
  const int num_chunks = static_cast<int>(ceil_div(p.in, kChunk));
  const uint64_t policy = l2_policy<L2Policy::evict_last>();
  const uint32_t stages = shared_address(blocks.tokens);
  wait_for_earlier_kernels();
  blocks.parity = 1;
  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x))
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      barrier_wait(blocks.empty + blocks.stage * kBarrierBytes, blocks.parity);
      const uint32_t full = blocks.full + blocks.stage * kBarrierBytes;
      barrier_arrive_expecting(full, S::kTokenBytes);
      copy_box_async(stages + static_cast<uint32_t>(blocks.stage * S::kTokenBytes), map, 0, chunk * kGroups, full,
                     policy);
      blocks.advance();
    }
}

// By S::kWarps warps, of which this is number `warp`: decodes and multiplies.
template <typename Y, typename S, bool kGated>
__device__ inline void multiply_blocks(const PackedStreamParams& p, BlockRing blocks, int num_tiles, int warp, int lane,
                                       GroupDecoding* groups, Y* up_products) {
  using Tiles = StreamTiles<S, kGated>;
  const int in = static_cast<int>(p.product.in);
  const int num_chunks = static_cast<int>(ceil_div(in, kChunk));
  const int last_panels = (in - (num_chunks - 1) * kChunk) / kPanelColumns;
  const uint32_t token_rows = shared_address(blocks.tokens) + static_cast<uint32_t>(lane % 8) * kPanelRowBytes;
  const uint32_t token_piece = static_cast<uint32_t>((lane / 8 ^ lane % 8) * 16);
  float sum[S::kTokenTiles][4];
  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
    int tile_of_part = tile;
    const int part = Tiles::part_of(p.product, tile_of_part);
    const int64_t first_output = int64_t{tile_of_part} * Tiles::kOutputs;
#pragma unroll
    for (int t = 0; t < S::kTokenTiles; ++t) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.0f;
    with_decoder(kGated && warp % 2 == 1 ? p.up_layout : p.layouts[part], [&](const auto& decoder) {
      for (int chunk = 0; chunk < num_chunks; ++chunk) {
        barrier_wait(blocks.full + blocks.stage * kBarrierBytes, blocks.parity);
        const uint8_t* block = blocks.stages + (blocks.stage * S::kRowWarps + warp) * blocks.pitch;
        const uint32_t tokens = token_rows + static_cast<uint32_t>(blocks.stage * S::kTokenBytes);
        const auto multiply_panel = [&](int panel, int nth) {
          const uint32_t rows = tokens + static_cast<uint32_t>(panel * S::kTokens) * kPanelRowBytes;
          uint32_t weight[2][4];  // of two steps
          decoder.decode(block, panel, nth, lane, groups, [&](int step, int r, int h, float low, float high) {
            weight[step % 2][r + 2 * h] = pack_bf16(low, high);
            if (step % 2 == 0 || r == 0 || h == 0) return;
#pragma unroll
            for (int t = 0; t < S::kTokenTiles; ++t) {
              uint32_t token[4];
              load_matrices(token, rows + t * kFragmentTokens * kPanelRowBytes +
                                       (token_piece ^ static_cast<uint32_t>((step - 1) * 32)));
              mma(sum[t], weight[0], token[0], token[1]);
              mma(sum[t], weight[1], token[2], token[3]);
            }
          });
        };
        if (chunk + 1 < num_chunks || last_panels == kGroups) {
#pragma unroll 1
          for (int half = 0; half < 2; ++half) {
            decoder.template prepare<kHalfPieces>(block, half * kHalfPieces, lane, groups);
#pragma unroll(S::kTokenTiles == 1 ? kHalfPieces : 1)
            for (int i = 0; i < kHalfPieces; ++i) multiply_panel(half * kHalfPieces + i, i);
          }
        } else {
#pragma unroll 1
          for (int panel = 0; panel < last_panels; ++panel) {
            decoder.template prepare<1>(block, panel, lane, groups);
            multiply_panel(panel, 0);
          }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(blocks.empty + blocks.stage * kBarrierBytes);
        blocks.advance();
      }
    });
    store_tile<Y, S, kGated>(p.product, p.product.parts[part], first_output, sum, warp, 0, lane, up_products);
  }
}

// Dynamic shared memory has the tokens of `block_stages` stages, then their blocks.
template <typename Y, typename S, bool kGated>
__global__ void __launch_bounds__(S::kThreads, 1)
    packed_direct(const __grid_constant__ PackedStreamParams p, const __grid_constant__ CUtensorMap tokens,
                  int block_stages, int pitch) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ uint64_t barriers[2 * kMostBlockStages];
  __shared__ GroupDecoding groups[S::kWarps][kHalfPieces * kPieceGroups];
  __shared__ Y up_products[kUpProducts<S, kGated>];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_tiles = StreamTiles<S, kGated>::count(p.product);
  const uint32_t full = shared_address(barriers);
  const BlockRing blocks{.full = full,
                         .empty = full + kMostBlockStages * kBarrierBytes,
                         .stages = memory + block_stages * S::kTokenBytes,
                         .tokens = memory,
                         .count = block_stages,
                         .pitch = pitch,
                         .parity = 0};
  if (threadIdx.x < kMostBlockStages) {
    barrier_init(blocks.full + threadIdx.x * kBarrierBytes, 2);
    barrier_init(blocks.empty + threadIdx.x * kBarrierBytes, S::kWarps);
  }
  fence_barriers();
  __syncthreads();
  allow_next_kernel();
  if (warp < S::kWarps)
    multiply_blocks<Y, S, kGated>(p, blocks, num_tiles, warp, lane, groups[warp], up_products);
  else if (warp == S::kWarps && lane == 0)
    copy_blocks<S, kGated>(p, blocks, num_tiles);
  else if (warp > S::kWarps && lane == 0)
    copy_direct_tokens<S>(p.product, tokens, blocks, num_tiles);
}

// The stages that fit a shape's shared memory.
template <typename Y, typename S, bool kGated>
int direct_stages(int pitch) {
  constexpr int kStatic = S::kWarps * kHalfPieces * kPieceGroups * static_cast<int>(sizeof(GroupDecoding)) +
                          kUpProducts<S, kGated> * static_cast<int>(sizeof(Y));
  return std::min(kMostBlockStages, (kSharedLimit - kStatic - 3072) / (S::kRowWarps * pitch + S::kTokenBytes));
}

template <typename Y, typename S, bool kGated>
std::optional<cudaError_t> launch_shape(const PackedStreamParams& p, cudaStream_t stream) {
  const int pitch = block_pitch<kGated>(p), stages = direct_stages<Y, S, kGated>(pitch);
  if (stages < 2) return std::nullopt;
  const int blocks = std::min(StreamTiles<S, kGated>::count(p.product), static_cast<int>(p.product.multiprocessors));
  CUtensorMap tokens;
  const cudaError_t error = make_panel_map(tokens, p.product.x, p.product.tokens, p.product.in, S::kTokens, kGroups);
  if (error != cudaSuccess) return error;
  return launch_overlapped(packed_direct<Y, S, kGated>, dim3(static_cast<unsigned>(blocks)), S::kThreads,
                           static_cast<size_t>(stages * (S::kRowWarps * pitch + S::kTokenBytes)), stream, p, tokens,
                           stages, pitch);
}

// A multiprocessor has one block of fourteen chains: as many as 28,672 rows give each of 132.
template <typename Y, bool kGated>
std::optional<cudaError_t> launch_rows(const PackedStreamParams& p, cudaStream_t stream) {
  if (p.product.tokens <= 8) return launch_shape<Y, DirectShape<14, 1>, kGated>(p, stream);
  if (p.product.tokens <= 16) return launch_shape<Y, DirectShape<14, 2>, kGated>(p, stream);
  if (p.product.tokens <= 32) return launch_shape<Y, DirectShape<14, 4>, kGated>(p, stream);
  return launch_shape<Y, DirectShape<14, 8>, kGated>(p, stream);
}

}  // namespace

std::optional<cudaError_t> launch_packed_direct(const PackedStreamParams& p, cudaStream_t stream) {
  if (p.product.up != nullptr) return launch_rows<bf16_t, true>(p, stream);
  if (p.product.y_dtype == DType::f32) return launch_rows<float, false>(p, stream);
  return launch_rows<bf16_t, false>(p, stream);
}

}  // namespace eadem::kernels::cuda
