// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

// y = x / rms(x) * weight, or with `add` the same of sum = x + add. One block per row. The row is read twice rather
// than kept in registers, so any `hidden` works; each thread reads again only what it wrote itself. The sum is rounded
// before it is normalized: the bits are those of the two ops apart.
template <typename T, typename W>
__global__ void rms_norm_rows(RmsNormParams p) {
  const int64_t offset = blockIdx.x * p.hidden;
  const T* x = static_cast<const T*>(p.x) + offset;      // [hidden]
  const T* add = static_cast<const T*>(p.add) + offset;  // [hidden], if p.add
  T* sum = static_cast<T*>(p.sum) + offset;              // [hidden], if p.add
  const W* weight = static_cast<const W*>(p.weight);     // [hidden]
  T* y = static_cast<T*>(p.y) + offset;                  // [hidden]

  // 1. Mean square, in f32.
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < p.hidden; i += kThreads) {
    float value = load(x + i);
    if (p.add != nullptr) {
      value = rounded<T>(value + load(add + i));
      store(sum + i, value);
    }
    squares += value * value;
  }
  const float mean = block_sum(squares) / static_cast<float>(p.hidden);
  const float scale = 1.0f / sqrtf(mean + p.eps);

  // 2. Scale and store.
  const T* normalized = p.add != nullptr ? sum : x;
  for (int64_t i = threadIdx.x; i < p.hidden; i += kThreads)
    store(y + i, load(normalized + i) * scale * load(weight + i));
}

}  // namespace

cudaError_t launch_rms_norm(const RmsNormParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.hidden == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    return with_f32_or_bf16(p.weight_dtype, [&](auto weight) {
      rms_norm_rows<decltype(x), decltype(weight)><<<static_cast<unsigned>(p.rows), kThreads, 0, stream>>>(p);
      return cudaGetLastError();
    });
  });
}

}  // namespace eadem::kernels::cuda
