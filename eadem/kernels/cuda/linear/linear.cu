// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kTile = 64;      // rows and columns of y per block
constexpr int kStep = 16;      // terms per stage: one 64 x 16 tile of x and one of weight, 8 KB of shared memory
constexpr int kThreads = 256;  // 16 x 16, each a 4 x 4 piece of y
constexpr int kPiece = 4;

// Accepts any mix of element types and uses f32 FMA. The terms of an output are added in rising order of k for any
// `tokens`.
template <typename X, typename W>
__global__ void __launch_bounds__(kThreads) linear_tiles(LinearParams p) {
  // x is stored transposed; one column of padding keeps the 16 threads that store a row of the tile on different banks.
  __shared__ float x_tile[kStep][kTile + 1];
  __shared__ float w_tile[kStep][kTile + 1];
  const X* x = static_cast<const X*>(p.x);            // [tokens, in]
  const W* weight = static_cast<const W*>(p.weight);  // [out, in]
  const int64_t first_out = int64_t{blockIdx.x} * kTile;
  const int64_t first_token = int64_t{blockIdx.y} * kTile;
  const int column = threadIdx.x % 16, line = threadIdx.x / 16;

  // 1. Compute the sums.
  float y[kPiece][kPiece] = {};
  for (int64_t k = 0; k < p.in; k += kStep) {
    for (int i = threadIdx.x; i < kTile * kStep; i += kThreads) {
      const int row = i / kStep, term = i % kStep;
      const bool in_range = k + term < p.in;
      const int64_t t = first_token + row, n = first_out + row;
      x_tile[term][row] = in_range && t < p.tokens ? load(x + t * p.in + k + term) : 0.0f;
      w_tile[term][row] = in_range && n < p.out ? load(weight + n * p.in + k + term) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int term = 0; term < kStep; ++term) {
#pragma unroll
      for (int a = 0; a < kPiece; ++a)
#pragma unroll
        for (int b = 0; b < kPiece; ++b)
          y[a][b] = fmaf(x_tile[term][line + 16 * a], w_tile[term][column + 16 * b], y[a][b]);
    }
    __syncthreads();
  }

  // 2. Add the bias and round once.
#pragma unroll
  for (int a = 0; a < kPiece; ++a)
#pragma unroll
    for (int b = 0; b < kPiece; ++b) {
      const int64_t t = first_token + line + 16 * a, n = first_out + column + 16 * b;
      if (t >= p.tokens || n >= p.out) continue;
      float value = y[a][b];
      if (p.bias != nullptr) value += load_any(p.bias, p.bias_dtype, n);
      store_any(p.y, p.y_dtype, t * p.out + n, value);
    }
}

}  // namespace

cudaError_t launch_linear_tiles(const LinearParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.out == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.out, kTile)), static_cast<unsigned>(ceil_div(p.tokens, kTile)));
  return with_f32_or_bf16(p.x_dtype, [&](auto x) {
    return with_float_type(p.weight_dtype, [&](auto weight) {
      linear_tiles<decltype(x), decltype(weight)><<<grid, kThreads, 0, stream>>>(p);
      return cudaGetLastError();
    });
  });
}

}  // namespace eadem::kernels::cuda
