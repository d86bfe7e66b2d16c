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

constexpr int kThreads = 256, kPartThreads = 64;

// kWidth elements are read at once. A thread keeps its kVectors vectors of each operand; with kVectors = 0 it reads
// them twice, the second time from the cache.
template <typename T, typename W, int kWidth, int kVectors>
__global__ void __launch_bounds__(kThreads) rms_norm_dx(RmsNormBackwardParams p) {
  const int64_t offset = blockIdx.x * p.hidden;
  const T* x = static_cast<const T*>(p.x) + offset;    // [hidden]
  const T* dy = static_cast<const T*>(p.dy) + offset;  // [hidden]
  const T* dsum = p.dsum == nullptr ? nullptr : static_cast<const T*>(p.dsum) + offset;
  T* dx = static_cast<T*>(p.dx) + offset;             // [hidden]
  const W* weight = static_cast<const W*>(p.weight);  // [hidden]
  struct {
    Vector<T, kWidth> x, dy, dsum;
    Vector<W, kWidth> weight;
  } kept[kVectors > 0 ? kVectors : 1];
  float values[kWidth], gradients[kWidth], weights[kWidth];
  const auto load_operands = [&](int64_t i, int v) {
    kept[v].x = vector_at<T, kWidth>(x + i);
    kept[v].dy = vector_at<T, kWidth>(dy + i);
    kept[v].weight = vector_at<W, kWidth>(weight + i);
    if (dsum != nullptr) kept[v].dsum = vector_at<T, kWidth>(dsum + i);
  };
  // Calls f(i, v) for each vector of the thread, which begins at i and is in kept[v].
  const auto each = [&](auto&& f) {
    const int64_t first = threadIdx.x * kWidth;
    if constexpr (kVectors > 0) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        if (const int64_t i = first + v * kThreads * kWidth; i < p.hidden) f(i, v);
    } else {
      for (int64_t i = first; i < p.hidden; i += kThreads * kWidth) {
        load_operands(i, 0);
        f(i, 0);
      }
    }
  };
  allow_next_kernel();
  wait_for_earlier_kernels();
  if constexpr (kVectors > 0) each(load_operands);

  // 1. The sum of dy * weight * x.
  const auto widen_operands = [&](int v) {
    widen(values, kept[v].x);
    widen(gradients, kept[v].dy);
    widen(weights, kept[v].weight);
  };
  float sum = 0.0f;
  each([&](int64_t, int v) {
    widen_operands(v);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) sum += gradients[n] * weights[n] * values[n];
  });
  const float s = p.inv_rms[blockIdx.x];
  const float factor = s * s * s * (block_sum(sum) / static_cast<float>(p.hidden));

  // 2. The gradient.
  each([&](int64_t i, int v) {
    widen_operands(v);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) values[n] = s * weights[n] * gradients[n] - factor * values[n];
    if (dsum != nullptr) {
      widen(gradients, kept[v].dsum);
#pragma unroll
      for (int n = 0; n < kWidth; ++n) values[n] = rounded<T>(values[n]) + gradients[n];
    }
    store_vector(dx + i, values);
  });
}

// One thread per kWidth columns and part.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kPartThreads) rms_norm_dweight_parts(RmsNormBackwardParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t column = (int64_t{blockIdx.x} * kPartThreads + threadIdx.x) * kWidth;
  if (column >= p.hidden) return;
  const int64_t begin = blockIdx.y * kNormRowsOfPart, end = min(begin + kNormRowsOfPart, p.rows);
  const T* x = static_cast<const T*>(p.x) + column;
  const T* dy = static_cast<const T*>(p.dy) + column;
  constexpr int kAtOnce = 4;  // rows, whose loads come first
  float sums[kWidth] = {};
  for (int64_t row = begin; row < end; row += kAtOnce) {
    Vector<T, kWidth> xs[kAtOnce], dys[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r)
      if (row + r < end) {
        xs[r] = vector_at<T, kWidth>(x + (row + r) * p.hidden);
        dys[r] = vector_at<T, kWidth>(dy + (row + r) * p.hidden);
      }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      if (row + r >= end) continue;
      float values[kWidth], gradients[kWidth];
      widen(values, xs[r]);
      widen(gradients, dys[r]);
      const float s = p.inv_rms[row + r];
#pragma unroll
      for (int n = 0; n < kWidth; ++n) sums[n] += gradients[n] * values[n] * s;
    }
  }
  store_vector(p.parts + blockIdx.y * p.hidden + column, sums);
}

}  // namespace

cudaError_t launch_rms_norm_backward(const RmsNormBackwardParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.hidden == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    using T = decltype(x);
    if (p.dx != nullptr) {
      const cudaError_t error = with_f32_or_bf16(p.weight_dtype, [&](auto weight) {
        using W = decltype(weight);
        const dim3 grid(static_cast<unsigned>(p.rows));
        const auto launch = [&](auto kernel) { return launch_overlapped(kernel, grid, kThreads, 0, stream, p); };
        constexpr int kStride = kThreads * 8;
        if (p.hidden % 16 != 0) return launch(rms_norm_dx<T, W, 1, 0>);
        if (p.hidden <= kStride) return launch(rms_norm_dx<T, W, 8, 1>);
        if (p.hidden <= 2 * kStride) return launch(rms_norm_dx<T, W, 8, 2>);
        return launch(rms_norm_dx<T, W, 8, 0>);
      });
      if (error != cudaSuccess) return error;
    }
    if (p.dweight == nullptr) return cudaSuccess;
    const int64_t parts = ceil_div(p.rows, kNormRowsOfPart);
    const auto launch_parts = [&](auto kernel, int width) {
      const dim3 grid(static_cast<unsigned>(ceil_div(p.hidden, int64_t{kPartThreads} * width)),
                      static_cast<unsigned>(parts));
      return launch_overlapped(kernel, grid, kPartThreads, 0, stream, p);
    };
    const cudaError_t error = p.hidden % 16 == 0 ? launch_parts(rms_norm_dweight_parts<T, 8>, 8)
                                                 : launch_parts(rms_norm_dweight_parts<T, 1>, 1);
    if (error != cudaSuccess) return error;
    return launch_add_parts(p.dweight, p.parts, p.hidden, parts, stream);
  });
}

}  // namespace eadem::kernels::cuda
