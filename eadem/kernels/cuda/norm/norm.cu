// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "eadem/kernels/cuda/fp8_rows.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/int8_chunks.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

enum class Result : uint8_t { plain, e4m3, chunks };  // how y is stored

// y = x / rms(x) * weight; with `add`, sum = x + add is normalized instead of x. One block of kThreads threads per row.
// The sum is rounded before it is normalized, so the bits equal those of the separate ops. kWidth elements are read at
// once. A thread keeps its kVectors vectors in registers, and the weights, which no earlier kernel makes, are there
// before the row is; with kVectors = 0 the row is read twice instead, so any `hidden` works, and each thread reads
// again only elements that it wrote itself.
template <typename T, typename W, int kThreads, int kWidth, int kVectors, Result kResult>
__global__ void __launch_bounds__(kThreads) rms_norm_rows(RmsNormParams p) {
  constexpr int kKept = kVectors > 0 ? kVectors : 1, kStride = kThreads * kWidth;
  static_assert(kResult == Result::plain || (kVectors > 0 && kWidth == 8));
  const int64_t offset = blockIdx.x * p.hidden;
  const T* x = static_cast<const T*>(p.x) + offset;      // [hidden]
  const T* add = static_cast<const T*>(p.add) + offset;  // [hidden], if p.add
  T* sum = static_cast<T*>(p.sum) + offset;              // [hidden], if p.add
  const W* weight = static_cast<const W*>(p.weight);     // [hidden]
  T* y = static_cast<T*>(p.y) + offset;                  // [hidden]
  const int64_t first = threadIdx.x * kWidth;
  float values[kKept][kWidth], weights[kKept][kWidth];
  allow_next_kernel();
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (first + v * kStride < p.hidden) load_vector(weights[v], weight + first + v * kStride);
  }
  wait_for_earlier_kernels();

  // 1. Compute the mean square, in f32.
  float squares = 0.0f;
  const auto add_squares = [&](float(&vector)[kWidth], int64_t i) {
    load_vector(vector, x + i);
    if (p.add != nullptr) {
      float added[kWidth];
      load_vector(added, add + i);
#pragma unroll
      for (int n = 0; n < kWidth; ++n) vector[n] = rounded<T>(vector[n] + added[n]);
      store_vector(sum + i, vector);
    }
#pragma unroll
    for (int n = 0; n < kWidth; ++n) squares += vector[n] * vector[n];
  };
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (first + v * kStride < p.hidden) add_squares(values[v], first + v * kStride);
  } else {
    for (int64_t i = first; i < p.hidden; i += kStride) add_squares(values[0], i);
  }
  const float mean = block_sum(squares) / static_cast<float>(p.hidden);
  const float scale = 1.0f / sqrtf(mean + p.eps);
  if (p.inv_rms != nullptr && threadIdx.x == 0) p.inv_rms[blockIdx.x] = scale;

  // 2. Scale and store.
  if constexpr (kResult == Result::chunks) {
    // A warp's vectors are a chunk.
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first + v * kStride >= p.hidden) continue;
#pragma unroll
      for (int n = 0; n < kWidth; ++n) values[v][n] = rounded<T>(values[v][n] * scale * weights[v][n]);
      store_chunk(p.chunks, blockIdx.x, (first + v * kStride) / kIntegerChunk, values[v],
                  static_cast<int>(threadIdx.x) % kWarp);
    }
    return;
  }
  if constexpr (kResult == Result::e4m3) {
    uint32_t largest = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first + v * kStride >= p.hidden) continue;
#pragma unroll
      for (int n = 0; n < kWidth; ++n) values[v][n] = rounded<T>(values[v][n] * scale * weights[v][n]);
      largest = largest_magnitude(largest, values[v]);
    }
    const float row_scale = e4m3_scale(largest);
    if (threadIdx.x == 0) p.scales[blockIdx.x] = row_scale;
    const Divisor divided(row_scale);
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (first + v * kStride < p.hidden) store_codes(p.codes + offset + first + v * kStride, values[v], divided);
    return;
  }
  const auto store_scaled = [&](float(&vector)[kWidth], const float(&factors)[kWidth], int64_t i) {
#pragma unroll
    for (int n = 0; n < kWidth; ++n) vector[n] = vector[n] * scale * factors[n];
    store_vector(y + i, vector);
  };
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (first + v * kStride < p.hidden) store_scaled(values[v], weights[v], first + v * kStride);
  } else {
    const T* normalized = p.add != nullptr ? sum : x;
    for (int64_t i = first; i < p.hidden; i += kStride) {
      load_vector(values[0], normalized + i);
      load_vector(weights[0], weight + i);
      store_scaled(values[0], weights[0], i);
    }
  }
}

}  // namespace

cudaError_t launch_rms_norm(const RmsNormParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.hidden == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    return with_f32_or_bf16(p.weight_dtype, [&](auto weight) {
      using T = decltype(x);
      using W = decltype(weight);
      const auto with_result = [&](auto result) {
        constexpr Result kResult = decltype(result)::value;
        const auto launch = [&](auto kernel, int threads) {
          return launch_overlapped(kernel, dim3(static_cast<unsigned>(p.rows)), static_cast<unsigned>(threads), 0,
                                   stream, p);
        };
        if (p.hidden % 8 == 0) {
          static_assert(kMostQuantizedNormColumns == 512 * 16);
          if (p.hidden <= 256 * 8) return launch(rms_norm_rows<T, W, 256, 8, 1, kResult>, 256);
          if (p.hidden <= 512 * 8) return launch(rms_norm_rows<T, W, 512, 8, 1, kResult>, 512);
          if (p.hidden <= 512 * 16) return launch(rms_norm_rows<T, W, 512, 8, 2, kResult>, 512);
        }
        if constexpr (kResult != Result::plain) {
          return cudaErrorInvalidValue;
        } else {
          if (p.hidden % 8 != 0) return launch(rms_norm_rows<T, W, 256, 1, 0, kResult>, 256);
          return launch(rms_norm_rows<T, W, 512, 8, 0, kResult>, 512);
        }
      };
      if (p.codes != nullptr) return with_result(std::integral_constant<Result, Result::e4m3>());
      if (p.chunks.codes == nullptr) return with_result(std::integral_constant<Result, Result::plain>());
      if (p.hidden % kIntegerChunk != 0) return cudaErrorInvalidValue;
      return with_result(std::integral_constant<Result, Result::chunks>());
    });
  });
}

}  // namespace eadem::kernels::cuda
