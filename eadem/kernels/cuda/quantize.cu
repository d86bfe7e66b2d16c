// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/activation.cuh"
#include "eadem/kernels/cuda/fp8_rows.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 512, kWidth = 8, kStride = kThreads * kWidth;

// One block per row. A thread keeps its kVectors vectors in registers; with kVectors = 0 it reads them twice.
template <typename T, int kVectors, bool kGated>
__global__ void __launch_bounds__(kThreads) quantize_rows(QuantizeRowsParams p) {
  const int64_t offset = blockIdx.x * p.columns;
  const T* x = static_cast<const T*>(p.x) + offset;
  const T* factor = static_cast<const T*>(p.factor) + offset;  // with kGated
  uint8_t* codes = p.codes + offset;
  const int64_t first = threadIdx.x * kWidth;
  float values[kVectors > 0 ? kVectors : 1][kWidth];
  uint64_t largest = 0;
  const auto load_values = [&](float(&vector)[kWidth], int64_t i) {
    load_vector(vector, x + i);
    if constexpr (kGated) {
      float factors[kWidth];
      load_vector(factors, factor + i);
#pragma unroll
      for (int n = 0; n < kWidth; ++n) vector[n] = rounded<T>(activate(p.activation, vector[n]) * factors[n]);
    }
  };
  allow_next_kernel();
  wait_for_earlier_kernels();
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (first + v * kStride < p.columns) {
        load_values(values[v], first + v * kStride);
        largest = largest_magnitude(largest, values[v]);
      }
  } else {
    for (int64_t i = first; i < p.columns; i += kStride) {
      load_values(values[0], i);
      largest = largest_magnitude(largest, values[0]);
    }
  }
  const float scale = e4m3_scale(largest);
  if (threadIdx.x == 0) p.scales[blockIdx.x] = scale;
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (first + v * kStride < p.columns) store_codes(codes + first + v * kStride, values[v], scale);
  } else {
    for (int64_t i = first; i < p.columns; i += kStride) {
      load_values(values[0], i);
      store_codes(codes + i, values[0], scale);
    }
  }
}

}  // namespace

cudaError_t launch_quantize_rows(const QuantizeRowsParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  if (p.columns % kWidth != 0) return cudaErrorInvalidValue;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    using T = decltype(x);
    const dim3 grid(static_cast<unsigned>(p.rows));
    const auto launch = [&](auto plain, auto gated) {
      return launch_overlapped(p.factor == nullptr ? plain : gated, grid, kThreads, 0, stream, p);
    };
    if (p.columns <= kStride) return launch(quantize_rows<T, 1, false>, quantize_rows<T, 1, true>);
    if (p.columns <= 4 * kStride) return launch(quantize_rows<T, 4, false>, quantize_rows<T, 4, true>);
    return launch(quantize_rows<T, 0, false>, quantize_rows<T, 0, true>);
  });
}

}  // namespace eadem::kernels::cuda
