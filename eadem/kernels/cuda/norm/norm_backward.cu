// SPDX-License-Identifier: Apache-2.0
//
// The gradients of rms_norm, y = x * s * weight with s = 1 / rms(x):
//   dx = s * weight * dy - s^3 * x * sum(dy * weight * x) / hidden      one block per row; + dsum, of add_rms_norm
//   dweight += sum over the rows of dy * x * s                          parts of kNormRowsOfPart rows, added in order
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

// kWidth elements are read at once. The second reading of a row comes from the cache.
template <typename T, typename W, int kWidth>
__global__ void __launch_bounds__(kThreads) rms_norm_dx(RmsNormBackwardParams p) {
  const int64_t offset = blockIdx.x * p.hidden;
  const T* x = static_cast<const T*>(p.x) + offset;    // [hidden]
  const T* dy = static_cast<const T*>(p.dy) + offset;  // [hidden]
  const T* dsum = p.dsum == nullptr ? nullptr : static_cast<const T*>(p.dsum) + offset;
  T* dx = static_cast<T*>(p.dx) + offset;             // [hidden]
  const W* weight = static_cast<const W*>(p.weight);  // [hidden]
  const int64_t first = threadIdx.x * kWidth;
  allow_next_kernel();
  wait_for_earlier_kernels();

  // 1. The sum of dy * weight * x.
  float sum = 0.0f;
  float values[kWidth], gradients[kWidth], weights[kWidth];
  const auto load_all = [&](int64_t i) {
    load_vector(values, x + i);
    load_vector(gradients, dy + i);
    load_vector(weights, weight + i);
  };
  for (int64_t i = first; i < p.hidden; i += kThreads * kWidth) {
    load_all(i);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) sum += gradients[n] * weights[n] * values[n];
  }
  const float s = p.inv_rms[blockIdx.x];
  const float factor = s * s * s * (block_sum(sum) / static_cast<float>(p.hidden));

  // 2. The gradient.
  for (int64_t i = first; i < p.hidden; i += kThreads * kWidth) {
    load_all(i);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) values[n] = s * weights[n] * gradients[n] - factor * values[n];
    if (dsum != nullptr) {
      load_vector(gradients, dsum + i);
#pragma unroll
      for (int n = 0; n < kWidth; ++n) values[n] = rounded<T>(values[n]) + gradients[n];
    }
    store_vector(dx + i, values);
  }
}

// One thread per column and part.
template <typename T>
__global__ void __launch_bounds__(kThreads) rms_norm_dweight_parts(RmsNormBackwardParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= p.hidden) return;
  const int64_t begin = blockIdx.y * kNormRowsOfPart, end = min(begin + kNormRowsOfPart, p.rows);
  const T* x = static_cast<const T*>(p.x) + column;
  const T* dy = static_cast<const T*>(p.dy) + column;
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t row = begin; row < end; ++row)
    sum += load(dy + row * p.hidden) * load(x + row * p.hidden) * p.inv_rms[row];
  p.parts[blockIdx.y * p.hidden + column] = sum;
}

unsigned column_blocks(int64_t columns) { return static_cast<unsigned>(ceil_div(columns, kThreads)); }

}  // namespace

cudaError_t launch_rms_norm_backward(const RmsNormBackwardParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.hidden == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    using T = decltype(x);
    if (p.dx != nullptr) {
      const cudaError_t error = with_f32_or_bf16(p.weight_dtype, [&](auto weight) {
        using W = decltype(weight);
        const dim3 grid(static_cast<unsigned>(p.rows));
        return p.hidden % 16 == 0 ? launch_overlapped(rms_norm_dx<T, W, 8>, grid, kThreads, 0, stream, p)
                                  : launch_overlapped(rms_norm_dx<T, W, 1>, grid, kThreads, 0, stream, p);
      });
      if (error != cudaSuccess) return error;
    }
    if (p.dweight == nullptr) return cudaSuccess;
    const int64_t parts = ceil_div(p.rows, kNormRowsOfPart);
    const dim3 grid(column_blocks(p.hidden), static_cast<unsigned>(parts));
    const cudaError_t error = launch_overlapped(rms_norm_dweight_parts<T>, grid, kThreads, 0, stream, p);
    if (error != cudaSuccess) return error;
    return launch_add_parts(p.dweight, p.parts, p.hidden, parts, stream);
  });
}

}  // namespace eadem::kernels::cuda
