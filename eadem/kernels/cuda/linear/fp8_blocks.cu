// SPDX-License-Identifier: Apache-2.0
//
// Weights in e4m3 whose scales belong to blocks of 128 x 128, with the bits of Fp8Encoding: rounding a plain weight to
// them, and transposing them. A block of threads has a block of the weight.
#include "eadem/kernels/cuda/fp8_rows.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kSide = 128;  // of a block
// These kernels make weights, which products read without waiting for earlier kernels (linear_stream.cuh). So they do
// not allow the next kernel to begin before they have ended.
constexpr int kThreads = 256, kWidth = 8;
constexpr int kRowThreads = kSide / kWidth, kRowsAtOnce = kThreads / kRowThreads, kTurns = kSide / kRowsAtOnce;

template <typename T>
__global__ void __launch_bounds__(kThreads) quantize_blocks(QuantizeBlocksParams p) {
  const int64_t first_row = int64_t{blockIdx.y} * kSide + threadIdx.x / kRowThreads;
  const int64_t column = int64_t{blockIdx.x} * kSide + threadIdx.x % kRowThreads * kWidth;
  const T* x = static_cast<const T*>(p.x);
  wait_for_earlier_kernels();
  float values[kTurns][kWidth];
  uint32_t largest = 0;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t row = first_row + turn * kRowsAtOnce;
    if (row >= p.rows || column >= p.columns) continue;
    load_vector(values[turn], x + row * p.columns + column);
    largest = largest_magnitude(largest, values[turn]);
  }
  const float scale = e4m3_scale(largest);
  const Divisor divided(scale);
  if (threadIdx.x == 0) p.scales[blockIdx.y * gridDim.x + blockIdx.x] = scale;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t row = first_row + turn * kRowsAtOnce;
    if (row >= p.rows || column >= p.columns) continue;
    divided.divide(values[turn]);
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < kWidth; n += 2) words[n / 4] |= e4m3_codes(values[turn][n], values[turn][n + 1]) << (n % 4 * 8);
    *reinterpret_cast<uint2*>(p.codes + row * p.columns + column) = make_uint2(words[0], words[1]);
  }
}

__global__ void __launch_bounds__(kThreads) transpose_blocks(TransposeBlocksParams p) {
  // Words of four codes; the columns after a row's keep neighbouring rows in different banks.
  constexpr int kWords = kSide / 4;
  __shared__ uint32_t tile[kSide][kWords + 1];
  const int64_t row = int64_t{blockIdx.y} * kSide, column = int64_t{blockIdx.x} * kSide;
  wait_for_earlier_kernels();
  for (int i = threadIdx.x; i < kSide * kWords; i += kThreads)
    if (row + i / kWords < p.rows && column + i % kWords * 4 < p.columns)
      tile[i / kWords][i % kWords] =
          *reinterpret_cast<const uint32_t*>(p.codes + (row + i / kWords) * p.columns + column + i % kWords * 4);
  __syncthreads();
  // A word of the transposed tile: one code of four rows.
  for (int i = threadIdx.x; i < kSide * kWords; i += kThreads) {
    const int to_row = i / kWords, to_column = i % kWords * 4;
    if (column + to_row >= p.columns || row + to_column >= p.rows) continue;
    uint32_t word = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) word |= (tile[to_column + n][to_row / 4] >> (to_row % 4 * 8) & 0xffu) << (n * 8);
    *reinterpret_cast<uint32_t*>(p.transposed_codes + (column + to_row) * p.rows + row + to_column) = word;
  }
  if (threadIdx.x == 0)
    p.transposed_scales[blockIdx.x * gridDim.y + blockIdx.y] = p.scales[blockIdx.y * gridDim.x + blockIdx.x];
}

dim3 grid_of(int64_t rows, int64_t columns) {
  return dim3(static_cast<unsigned>(ceil_div(columns, int64_t{kSide})),
              static_cast<unsigned>(ceil_div(rows, int64_t{kSide})));
}

}  // namespace

cudaError_t launch_quantize_blocks(const QuantizeBlocksParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  if (p.columns % kWidth != 0) return cudaErrorInvalidValue;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    return launch_overlapped(quantize_blocks<decltype(x)>, grid_of(p.rows, p.columns), kThreads, 0, stream, p);
  });
}

cudaError_t launch_transpose_blocks(const TransposeBlocksParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  if (p.rows % 4 != 0 || p.columns % 4 != 0) return cudaErrorInvalidValue;
  return launch_overlapped(transpose_blocks, grid_of(p.rows, p.columns), kThreads, 0, stream, p);
}

}  // namespace eadem::kernels::cuda
