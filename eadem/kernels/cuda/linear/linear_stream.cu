// SPDX-License-Identifier: Apache-2.0
//
// Products of few rows (up to 64 tokens), which are bound by reading the weights. Tensor maps stream the weights once
// into a ring of stages in shared memory, and each output is one chain of mma.sync over ascending k. The chain has the
// bits of cuBLASLt without split-K (see mma.cuh), so a row's bits depend neither on the number of rows nor on whether
// this kernel or cuBLASLt computes them.
#include <algorithm>

#include "eadem/kernels/cuda/linear/linear_stream.cuh"

namespace eadem::kernels::cuda {

namespace {

template <int kRowWarps, int kTokenWarps, int kTokenTiles, int kStages>
using Shape = StreamShape<kRowWarps, kTokenWarps, kTokenTiles, kStages, 1, false>;

// A block computes tiles blockIdx.x, blockIdx.x + gridDim.x, ..., and its copies continue from one tile into the next
// without waiting.
template <typename Y, typename S, bool kGated>
__global__ void __launch_bounds__(S::kThreads, 1)
    linear_stream(const __grid_constant__ LinearStreamParams p, const __grid_constant__ StreamMaps maps) {
  extern __shared__ __align__(1024) uint8_t memory[];  // stages
  __shared__ uint64_t barriers[2 * S::kStages];        // full, empty
  __shared__ Y up_products[kUpProducts<S, kGated>];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_tiles = StreamTiles<S, kGated>::count(p);
  const StreamRing ring = make_ring<S>(memory, barriers, 2);  // both copying threads
  fence_barriers();
  __syncthreads();
  allow_next_kernel();

  if (warp < S::kWarps)
    multiply_tiles<Y, S, kGated>(p, ring, num_tiles, warp, lane, up_products);
  else if (warp == S::kWarps && lane == 0)
    copy_weights<S, kGated>(p, maps, ring, num_tiles);
  else if (warp > S::kWarps && lane == 0)
    copy_tokens<S>(p, maps.tokens, ring, num_tiles);
}

template <typename Y, typename S, bool kGated>
cudaError_t launch_shape(const LinearStreamParams& p, cudaStream_t stream) {
  using Tiles = StreamTiles<S, kGated>;
  StreamMaps maps{};
  const cudaError_t error = make_stream_maps<S, kGated>(maps, p);
  if (error != cudaSuccess) return error;
  const int blocks = std::min(Tiles::count(p), static_cast<int>(p.multiprocessors));
  return launch_overlapped(linear_stream<Y, S, kGated>, dim3(static_cast<unsigned>(blocks)), S::kThreads,
                           S::kSharedBytes, stream, p, maps);
}

// One block on a multiprocessor has all its memory for stages. Tiles of 32 rows give every multiprocessor work where
// weights are narrow, and where they are not, larger ones are no faster. A warp has at most two tiles of tokens,
// because their chains share a tensor core. Tiles of 16 rows spread narrow weights over more multiprocessors; for up to
// 32 tokens that is no faster, because those that have no tile copy for the next kernel.
template <typename Y, bool kGated>
cudaError_t launch_rows(const LinearStreamParams& p, cudaStream_t stream) {
  if (p.tokens <= 8) return launch_shape<Y, Shape<2, 1, 1, 10>, kGated>(p, stream);
  if (p.tokens <= 16) return launch_shape<Y, Shape<2, 1, 2, 8>, kGated>(p, stream);
  if (p.tokens <= 32) return launch_shape<Y, Shape<2, 2, 2, 6>, kGated>(p, stream);
  using Narrow = Shape<1, 4, 2, 5>;
  using Wide = Shape<2, 4, 2, 4>;
  if constexpr (!kGated)
    if (most_rows<Narrow>(p) < most_rows<Wide>(p)) return launch_shape<Y, Narrow, false>(p, stream);
  return launch_shape<Y, Wide, kGated>(p, stream);
}

}  // namespace

bool has_hopper_kernels() { return true; }  // as this source is one of them

cudaError_t launch_linear_stream(const LinearStreamParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.parts[0].out == 0) return cudaSuccess;
  if (p.tokens > kLinearStreamMaxTokens || p.in % kLinearStreamMultiple != 0) return cudaErrorInvalidValue;
  if (p.up != nullptr) return launch_rows<bf16_t, true>(p, stream);
  return with_f32_or_bf16(p.y_dtype, [&](auto y) { return launch_rows<decltype(y), false>(p, stream); });
}

}  // namespace eadem::kernels::cuda
