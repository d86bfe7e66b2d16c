// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

// y = x / rms(x) * weight; with `add`, sum = x + add is normalized instead of x. One block per row. The row is read
// twice rather than kept in registers, so any `hidden` works; each thread reads again only elements that it wrote
// itself. The sum is rounded before it is normalized, so the bits equal those of the separate ops. kWidth elements are
// read at once.
template <typename T, typename W, int kWidth>
__global__ void __launch_bounds__(kThreads) rms_norm_rows(RmsNormParams p) {
  const int64_t offset = blockIdx.x * p.hidden;
  const T* x = static_cast<const T*>(p.x) + offset;      // [hidden]
  const T* add = static_cast<const T*>(p.add) + offset;  // [hidden], if p.add
  T* sum = static_cast<T*>(p.sum) + offset;              // [hidden], if p.add
  const W* weight = static_cast<const W*>(p.weight);     // [hidden]
  T* y = static_cast<T*>(p.y) + offset;                  // [hidden]
  allow_next_kernel();
  wait_for_earlier_kernels();

  // 1. Compute the mean square, in f32.
  float squares = 0.0f;
  for (int64_t i = threadIdx.x * kWidth; i < p.hidden; i += kThreads * kWidth) {
    float values[kWidth];
    load_vector(values, x + i);
    if (p.add != nullptr) {
      float added[kWidth];
      load_vector(added, add + i);
#pragma unroll
      for (int n = 0; n < kWidth; ++n) values[n] = rounded<T>(values[n] + added[n]);
      store_vector(sum + i, values);
    }
#pragma unroll
    for (int n = 0; n < kWidth; ++n) squares += values[n] * values[n];
  }
  const float mean = block_sum(squares) / static_cast<float>(p.hidden);
  const float scale = 1.0f / sqrtf(mean + p.eps);

  // 2. Scale and store.
  const T* normalized = p.add != nullptr ? sum : x;
  for (int64_t i = threadIdx.x * kWidth; i < p.hidden; i += kThreads * kWidth) {
    float values[kWidth], weights[kWidth];
    load_vector(values, normalized + i);
    load_vector(weights, weight + i);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) values[n] = values[n] * scale * weights[n];
    store_vector(y + i, values);
  }
}

}  // namespace

cudaError_t launch_rms_norm(const RmsNormParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.hidden == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    return with_f32_or_bf16(p.weight_dtype, [&](auto weight) {
      using T = decltype(x);
      using W = decltype(weight);
      const dim3 grid(static_cast<unsigned>(p.rows));
      return p.hidden % 8 == 0 ? launch_overlapped(rms_norm_rows<T, W, 8>, grid, kThreads, 0, stream, p)
                               : launch_overlapped(rms_norm_rows<T, W, 1>, grid, kThreads, 0, stream, p);
    });
  });
}

}  // namespace eadem::kernels::cuda
