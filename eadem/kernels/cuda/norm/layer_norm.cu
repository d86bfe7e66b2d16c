// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

// One block per row, which is read three times; y may be x, because a thread reads again only elements that it writes.
template <typename T, typename W>
__global__ void __launch_bounds__(kThreads) layer_norm_rows(LayerNormParams p) {
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.hidden;  // [hidden]
  const W* weight = static_cast<const W*>(p.weight);         // [hidden]
  const W* bias = static_cast<const W*>(p.bias);             // [hidden], or null
  T* y = static_cast<T*>(p.y) + row * p.hidden;              // [hidden]
  allow_next_kernel();
  wait_for_earlier_kernels();

  float sum = 0.0f, squares = 0.0f;
  for (int64_t i = threadIdx.x; i < p.hidden; i += kThreads) sum += load(x + i);
  const float mean = block_sum(sum) / static_cast<float>(p.hidden);
  for (int64_t i = threadIdx.x; i < p.hidden; i += kThreads) {
    const float difference = load(x + i) - mean;
    squares += difference * difference;
  }
  const float inv_std = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(p.hidden) + p.eps);
  for (int64_t i = threadIdx.x; i < p.hidden; i += kThreads) {
    const float scaled = (load(x + i) - mean) * inv_std * load(weight + i);
    store(y + i, bias != nullptr ? scaled + load(bias + i) : scaled);
  }
  if (threadIdx.x != 0) return;
  if (p.mean != nullptr) p.mean[row] = mean;
  if (p.inv_std != nullptr) p.inv_std[row] = inv_std;
}

// With g = weight dy and z = (x - mean) inv_std:  dx = inv_std (g - mean(g) - z mean(g z)). One block per row.
template <typename T, typename W>
__global__ void __launch_bounds__(kThreads) layer_norm_dx(LayerNormBackwardParams p) {
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.hidden;    // [hidden]
  const T* dy = static_cast<const T*>(p.dy) + row * p.hidden;  // [hidden]
  const W* weight = static_cast<const W*>(p.weight);           // [hidden]
  T* dx = static_cast<T*>(p.dx) + row * p.hidden;              // [hidden]
  allow_next_kernel();
  wait_for_earlier_kernels();
  const float mean = p.mean[row], inv_std = p.inv_std[row];
  float g_sum = 0.0f, gz_sum = 0.0f;
  for (int64_t i = threadIdx.x; i < p.hidden; i += kThreads) {
    const float g = load(weight + i) * load(dy + i);
    g_sum += g;
    gz_sum += g * ((load(x + i) - mean) * inv_std);
  }
  const auto hidden = static_cast<float>(p.hidden);
  const float g_mean = block_sum(g_sum) / hidden, gz_mean = block_sum(gz_sum) / hidden;
  for (int64_t i = threadIdx.x; i < p.hidden; i += kThreads) {
    const float g = load(weight + i) * load(dy + i), z = (load(x + i) - mean) * inv_std;
    store(dx + i, inv_std * (g - g_mean - z * gz_mean));
  }
}

// One thread per column and part of kNormRowsOfPart rows.
template <typename T>
__global__ void __launch_bounds__(kThreads) layer_norm_parts(LayerNormBackwardParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= p.hidden) return;
  const int64_t begin = blockIdx.y * kNormRowsOfPart, end = min(begin + kNormRowsOfPart, p.rows);
  const T* x = static_cast<const T*>(p.x) + column;
  const T* dy = static_cast<const T*>(p.dy) + column;
  float weight_sum = 0.0f, bias_sum = 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    const float gradient = load(dy + row * p.hidden);
    weight_sum += gradient * ((load(x + row * p.hidden) - p.mean[row]) * p.inv_std[row]);
    bias_sum += gradient;
  }
  p.parts[blockIdx.y * p.hidden + column] = weight_sum;
  p.parts[(gridDim.y + blockIdx.y) * p.hidden + column] = bias_sum;
}

}  // namespace

cudaError_t launch_layer_norm(const LayerNormParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.hidden == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    return with_float_type(p.weight_dtype, [&](auto weight) {
      return launch_overlapped(layer_norm_rows<decltype(x), decltype(weight)>, dim3(static_cast<unsigned>(p.rows)),
                               kThreads, 0, stream, p);
    });
  });
}

cudaError_t launch_layer_norm_backward(const LayerNormBackwardParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.hidden == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    using T = decltype(x);
    if (p.dx != nullptr) {
      const cudaError_t error = with_float_type(p.weight_dtype, [&](auto weight) {
        return launch_overlapped(layer_norm_dx<T, decltype(weight)>, dim3(static_cast<unsigned>(p.rows)), kThreads, 0,
                                 stream, p);
      });
      if (error != cudaSuccess) return error;
    }
    if (p.dweight == nullptr && p.dbias == nullptr) return cudaSuccess;
    const int64_t parts = ceil_div(p.rows, kNormRowsOfPart);
    const dim3 grid(static_cast<unsigned>(ceil_div(p.hidden, kThreads)), static_cast<unsigned>(parts));
    cudaError_t error = launch_overlapped(layer_norm_parts<T>, grid, kThreads, 0, stream, p);
    if (error == cudaSuccess && p.dweight != nullptr)
      error = launch_add_parts(p.dweight, p.parts, p.hidden, parts, stream);
    if (error == cudaSuccess && p.dbias != nullptr)
      error = launch_add_parts(p.dbias, p.parts + parts * p.hidden, p.hidden, parts, stream);
    return error;
  });
}

}  // namespace eadem::kernels::cuda
