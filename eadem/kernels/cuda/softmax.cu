// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

// One block per row, which is read three times. A NaN in the row makes the sum NaN, and with it every output.
__global__ void softmax_rows(SoftmaxParams p) {
  const float* x = p.x + blockIdx.x * p.n;  // [n]
  float* y = p.y + blockIdx.x * p.n;        // [n], may be x

  // 1. Find the largest element, then the sum of exponentials.
  float largest = -INFINITY;
  for (int64_t i = threadIdx.x; i < p.n; i += kThreads) largest = fmaxf(largest, x[i]);
  largest = block_max(largest);
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < p.n; i += kThreads) sum += expf(x[i] - largest);
  sum = block_sum(sum);

  // 2. Scale and store.
  for (int64_t i = threadIdx.x; i < p.n; i += kThreads) y[i] = expf(x[i] - largest) / sum;
}

}  // namespace

cudaError_t launch_softmax(const SoftmaxParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.n == 0) return cudaSuccess;
  softmax_rows<<<static_cast<unsigned>(p.rows), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace eadem::kernels::cuda
