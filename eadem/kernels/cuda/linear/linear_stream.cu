// SPDX-License-Identifier: Apache-2.0
//
// Products of few rows (up to 64 tokens), which are bound by reading the weights. Asynchronous copies stream the
// weights once into a ring of stages in shared memory, and each output is one chain of mma.sync over ascending k. The
// chain has the bits of cuBLASLt without split-K (see mma.cuh), so a row's bits depend neither on the number of rows
// nor on whether this kernel or cuBLASLt computes them.
#include <algorithm>

#include "eadem/kernels/cuda/linear/linear_stream.cuh"

namespace eadem::kernels::cuda {

namespace {

template <int kRowWarps, int kTokenWarps, int kTokenTiles, int kStages>
using Shape = StreamShape<kRowWarps, kTokenWarps, kTokenTiles, kStages, 1, false>;

// By one warp: copies the weights of every chunk of every tile of this block, one row at a time. They do not depend on
// earlier kernels.
template <typename S, bool kGated>
__device__ inline void copy_weights(const LinearStreamParams& p, const StreamRing& ring, int num_tiles, int lane) {
  using Tiles = StreamTiles<S, kGated>;
  const int in = static_cast<int>(p.in);
  const int num_chunks = static_cast<int>(ceil_div(in, kChunk));
  const uint64_t policy = l2_policy<L2Policy::evict_first>();
  RingPlace<S::kStages> place{0, 1};  // parity of the phase before the first: the first round waits for nothing
  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
    int tile_of_part = tile;
    const LinearStreamPart part = p.parts[Tiles::part_of(p, tile_of_part)];
    const int64_t first_output = int64_t{tile_of_part} * Tiles::kOutputs;
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      barrier_wait(ring.empty + place.stage * kBarrierBytes, place.parity);
      const uint32_t to = ring.stages + static_cast<uint32_t>(place.stage * S::kStageBytes + lane * 16);
      const int k = chunk * kChunk + lane * 8;
      if (k < in) {
#pragma unroll
        for (int row_warp = 0; row_warp < S::kRowWarps; ++row_warp) {
          const bool up = kGated && row_warp % 2 == 1;
          const int64_t output = first_output + Tiles::output_of(row_warp * kFragmentRows);
          const auto* weight = static_cast<const __nv_bfloat16*>(up ? p.up : part.weight) + output * in + k;
          const int rows = static_cast<int>(min(part.out - output, int64_t{kFragmentRows}));
#pragma unroll
          for (int row = 0; row < kFragmentRows; ++row, weight += in)
            if (row < rows)
              copy_16_async(to + static_cast<uint32_t>((row_warp * kFragmentRows + row) * kPitch * 2), weight, policy);
        }
      }
      barrier_arrive_after_copies(ring.full + place.stage * kBarrierBytes);
      place.advance();
    }
  }
}

// A block computes tiles blockIdx.x, blockIdx.x + gridDim.x, ..., and its copies continue from one tile into the next
// without waiting.
template <typename Y, typename S, bool kGated>
__global__ void __launch_bounds__(S::kThreads, 1) linear_stream(const __grid_constant__ LinearStreamParams p) {
  extern __shared__ __align__(128) uint8_t memory[];  // stages
  __shared__ uint64_t barriers[2 * S::kStages];       // full, empty
  __shared__ float up_products[kGated ? S::kRows / 2 * S::kTokens : 1];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_tiles = StreamTiles<S, kGated>::count(p);
  const StreamRing ring = make_ring<S>(memory, barriers, 2 * kWarp);  // the lanes of both copying warps
  __syncthreads();
  allow_next_kernel();

  if (warp < S::kWarps)
    multiply_tiles<Y, S, kGated>(p, ring, num_tiles, warp, lane, up_products);
  else if (warp == S::kWarps)
    copy_weights<S, kGated>(p, ring, num_tiles, lane);
  else
    copy_tokens<S>(p, ring, num_tiles, lane);
}

template <typename Y, typename S, bool kGated>
cudaError_t launch_shape(const LinearStreamParams& p, cudaStream_t stream) {
  constexpr int64_t kOutputs = kGated ? S::kRows / 2 : S::kRows;
  constexpr int64_t kBlocks = kSharedLimit / (S::kSharedBytes + 2048);  // blocks that fit one multiprocessor
  int64_t tiles = 0;
  for (const LinearStreamPart& part : p.parts) tiles += ceil_div(part.out, kOutputs);
  const int64_t blocks = std::min(tiles, p.multiprocessors * std::max<int64_t>(kBlocks, 1));
  return launch_overlapped(linear_stream<Y, S, kGated>, dim3(static_cast<unsigned>(blocks)), S::kThreads,
                           S::kSharedBytes, stream, p);
}

// Few tokens use tiles of 16 rows, so that narrow weights still reach every multiprocessor. Each of such a tile's warps
// has eight tokens, because one warp alone would wait for its tensor core. Where there are tiles for two blocks on each
// multiprocessor, two of 100 KB share one; else one block has all stages. More tokens are read again for every tile, so
// tiles have 64 rows if the weight has enough rows for all multiprocessors.
template <typename Y, bool kGated>
cudaError_t launch_rows(const LinearStreamParams& p, cudaStream_t stream) {
  constexpr int kR = kGated ? 2 : 1;
  int64_t tiles = 0;  // of 16 rows
  for (const LinearStreamPart& part : p.parts) tiles += ceil_div(part.out, kFragmentRows);
  const bool wide = tiles * kR >= 400, deep = tiles <= p.multiprocessors;
  if (p.tokens <= 8) return launch_shape<Y, Shape<kR, 1, 1, kGated ? 5 : 8>, kGated>(p, stream);
  if (p.tokens <= 16) {
    if (wide) return launch_shape<Y, Shape<4, 1, 2, 5>, kGated>(p, stream);
    if (deep) return launch_shape<Y, Shape<kR, 2, 1, kGated ? 8 : 12>, kGated>(p, stream);
    return launch_shape<Y, Shape<kR, 2, 1, kGated ? 4 : 6>, kGated>(p, stream);
  }
  if (p.tokens <= 32) {
    if (wide) return launch_shape<Y, Shape<4, 2, 2, 4>, kGated>(p, stream);
    if (deep) return launch_shape<Y, Shape<kR, 4, 1, kGated ? 6 : 8>, kGated>(p, stream);
    return launch_shape<Y, Shape<kR, 4, 1, kGated ? 3 : 4>, kGated>(p, stream);
  }
  if (wide) return launch_shape<Y, Shape<4, 2, 4, 3>, kGated>(p, stream);
  return launch_shape<Y, Shape<kR, 8, 1, kGated ? 4 : 5>, kGated>(p, stream);
}

}  // namespace

cudaError_t launch_linear_stream(const LinearStreamParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.parts[0].out == 0) return cudaSuccess;
  if (p.tokens > kLinearStreamMaxTokens || p.in % kLinearStreamMultiple != 0) return cudaErrorInvalidValue;
  return with_f32_or_bf16(p.y_dtype, [&](auto y) {
    using Y = decltype(y);
    return p.up != nullptr ? launch_rows<Y, true>(p, stream) : launch_rows<Y, false>(p, stream);
  });
}

}  // namespace eadem::kernels::cuda
