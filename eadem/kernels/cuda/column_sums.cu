// SPDX-License-Identifier: Apache-2.0
//
// Sums over the rows of a matrix, in parts that are added in order: the bits depend on the number of rows alone.
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

// result[i] += the sum of parts[:, i], in order.
__global__ void __launch_bounds__(kThreads) add_parts(float* result,       // [size]
                                                      const float* parts,  // [count, size]
                                                      int64_t size, int64_t count) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= size) return;
  float sum = 0.0f;
  for (int64_t part = 0; part < count; ++part) sum += parts[part * size + i];
  result[i] += sum;
}

// One thread per column and part of kColumnSumRows rows.
template <typename T>
__global__ void __launch_bounds__(kThreads) column_sum_parts(ColumnSumsParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= p.out) return;
  const int64_t begin = blockIdx.y * kColumnSumRows, end = min(begin + kColumnSumRows, p.tokens);
  const T* dy = static_cast<const T*>(p.dy) + column;
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t row = begin; row < end; ++row) sum += load(dy + row * p.out);
  p.parts[blockIdx.y * p.out + column] = sum;
}

unsigned column_blocks(int64_t columns) { return static_cast<unsigned>(ceil_div(columns, kThreads)); }

}  // namespace

cudaError_t launch_add_parts(float* result, const float* parts, int64_t size, int64_t count, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  return launch_overlapped(add_parts, dim3(column_blocks(size)), kThreads, 0, stream, result, parts, size, count);
}

cudaError_t launch_column_sums(const ColumnSumsParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.out == 0) return cudaSuccess;
  const int64_t parts = ceil_div(p.tokens, kColumnSumRows);
  const cudaError_t error = with_f32_or_bf16(p.dtype, [&](auto dy) {
    const dim3 grid(column_blocks(p.out), static_cast<unsigned>(parts));
    return launch_overlapped(column_sum_parts<decltype(dy)>, grid, kThreads, 0, stream, p);
  });
  if (error != cudaSuccess) return error;
  return launch_add_parts(p.dbias, p.parts, p.out, parts, stream);
}

}  // namespace eadem::kernels::cuda
