// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/activation.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/int8_chunks.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kWarps = 4;

// A warp for each chunk of a row.
template <typename T, bool kGated>
__global__ void __launch_bounds__(kWarps* kWarp) quantize_chunks(const __grid_constant__ QuantizeChunksParams p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t chunks = p.to.columns / kIntegerChunk;
  const int64_t at = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  allow_next_kernel();
  wait_for_earlier_kernels();
  if (at >= p.to.rows * chunks) return;
  const int64_t first = at * kIntegerChunk + lane * 8;
  float values[8];
  load_vector(values, static_cast<const T*>(p.x) + first);
  if constexpr (kGated) {
    float factors[8];
    load_vector(factors, static_cast<const T*>(p.factor) + first);
    activate(p.activation, values);
#pragma unroll
    for (int n = 0; n < 8; ++n) values[n] = rounded<T>(values[n] * factors[n]);
  }
  store_chunk(p.to, at / chunks, at % chunks, values, lane);
}

}  // namespace

cudaError_t launch_quantize_chunks(const QuantizeChunksParams& p, cudaStream_t stream) {
  if (p.to.rows == 0 || p.to.columns == 0) return cudaSuccess;
  if (p.to.columns % kIntegerChunk != 0) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.to.rows * (p.to.columns / kIntegerChunk), int64_t{kWarps})));
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    using T = decltype(x);
    return p.factor == nullptr ? launch_overlapped(quantize_chunks<T, false>, grid, kWarps * kWarp, 0, stream, p)
                               : launch_overlapped(quantize_chunks<T, true>, grid, kWarps * kWarp, 0, stream, p);
  });
}

}  // namespace eadem::kernels::cuda
