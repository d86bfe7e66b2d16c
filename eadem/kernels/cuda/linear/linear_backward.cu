// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int64_t kMostGridRows = 65535;

// dx[t, i] = the sum over n of dy[t, n] weight[n, i]. A thread computes elements of one column.
__global__ void __launch_bounds__(kThreads) linear_dx(LinearBackwardParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.in) return;
  for (int64_t t = blockIdx.y; t < p.tokens; t += gridDim.y) {
    float sum = 0.0f;
    for (int64_t n = 0; n < p.out; ++n)
      sum = fmaf(load_any(p.dy, p.dy_dtype, t * p.out + n), load_any(p.weight, p.weight_dtype, n * p.in + i), sum);
    store_any(p.dx, p.dx_dtype, t * p.in + i, sum);
  }
}

// dweight[n, i] += the sum over t of dy[t, n] x[t, i].
__global__ void __launch_bounds__(kThreads) linear_dweight(LinearBackwardParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.in) return;
  for (int64_t n = blockIdx.y; n < p.out; n += gridDim.y) {
    float sum = 0.0f;
    for (int64_t t = 0; t < p.tokens; ++t)
      sum = fmaf(load_any(p.dy, p.dy_dtype, t * p.out + n), load_any(p.x, p.x_dtype, t * p.in + i), sum);
    p.dweight[n * p.in + i] += sum;
  }
}

}  // namespace

cudaError_t launch_linear_backward(const LinearBackwardParams& p, cudaStream_t stream) {
  if (p.in == 0 || p.out == 0) return cudaSuccess;
  const auto grid = [&](int64_t rows) {
    return dim3(static_cast<unsigned>(ceil_div(p.in, kThreads)),
                static_cast<unsigned>(rows < kMostGridRows ? rows : kMostGridRows));
  };
  if (p.dx != nullptr && p.tokens > 0) {
    const cudaError_t error = launch_overlapped(linear_dx, grid(p.tokens), kThreads, 0, stream, p);
    if (error != cudaSuccess) return error;
  }
  if (p.dweight == nullptr) return cudaSuccess;
  return launch_overlapped(linear_dweight, grid(p.out), kThreads, 0, stream, p);
}

}  // namespace eadem::kernels::cuda
