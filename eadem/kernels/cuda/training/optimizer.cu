// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/training/optimizer.h"

#include <algorithm>
#include <iterator>

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256, kNormThreads = 1024;

// One block per kGradNormBlock elements. The square of an f32 is exact in f64.
__global__ void __launch_bounds__(kThreads) sum_squares(const float* x,  // [size]
                                                        int64_t size,
                                                        double* sums) {  // [gridDim.x]
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t begin = blockIdx.x * kGradNormBlock, end = min(begin + kGradNormBlock, size);
  double sum = 0.0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) sum += static_cast<double>(x[i]) * x[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// One block.
__global__ void __launch_bounds__(kNormThreads) root_of_sum(const double* sums,  // [count]
                                                            int64_t count, float* norm) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += kNormThreads) sum += sums[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *norm = static_cast<float>(sqrt(sum));
}

// One thread per kWidth elements, which are loaded and stored together.
template <typename Weight, int kWidth>
__global__ void __launch_bounds__(kThreads) adamw_elements(AdamWParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (i >= p.size) return;
  float grad[kWidth], m[kWidth], v[kWidth], master[kWidth];
  load_vector(grad, p.grad + i);
  load_vector(m, p.m + i);
  load_vector(v, p.v + i);
  load_vector(master, p.master + i);
  const float max_norm = p.hyper[kHyperMaxNorm];
  const float grad_scale = max_norm > 0.0f ? fminf(1.0f, max_norm / (*p.norm + 1e-6f)) : 1.0f;
  const float beta1 = p.hyper[kHyperBeta1], beta2 = p.hyper[kHyperBeta2];
  const float correction1 = p.hyper[kHyperBiasCorrection1], correction2 = p.hyper[kHyperBiasCorrection2];
  const float eps = p.hyper[kHyperEps], learning_rate = p.hyper[kHyperLearningRate];
  const float decay = p.decay ? p.hyper[kHyperWeightDecay] : 0.0f;
#pragma unroll
  for (int n = 0; n < kWidth; ++n) {
    // 1. Moments.
    const float g = grad[n] * grad_scale;
    m[n] = fmaf(beta1, m[n], (1.0f - beta1) * g);
    v[n] = fmaf(beta2, v[n], (1.0f - beta2) * (g * g));
    // 2. The step.
    const float step = m[n] / correction1 / (sqrtf(v[n] / correction2) + eps);
    master[n] = fmaf(-learning_rate, fmaf(decay, master[n], step), master[n]);
  }
  store_vector(p.m + i, m);
  store_vector(p.v + i, v);
  store_vector(p.master + i, master);
  // 3. The rounded copy that the passes read.
  if (p.weight != nullptr) store_vector(static_cast<Weight*>(p.weight) + i, master);
}

constexpr int kVectorWidth = 4;

bool takes_vectors(const AdamWParams& p) {
  const void* const arrays[] = {p.grad, p.m, p.v, p.master, p.weight};
  return p.size % kVectorWidth == 0 && std::all_of(std::begin(arrays), std::end(arrays), [](const void* array) {
           return reinterpret_cast<uintptr_t>(array) % (kVectorWidth * sizeof(float)) == 0;
         });
}

}  // namespace

cudaError_t launch_sum_squares(const float* x, int64_t size, double* sums, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(size, kGradNormBlock)));
  return launch_overlapped(sum_squares, grid, kThreads, 0, stream, x, size, sums);
}

cudaError_t launch_norm(const double* sums, int64_t count, float* norm, cudaStream_t stream) {
  return launch_overlapped(root_of_sum, dim3(1), kNormThreads, 0, stream, sums, count, norm);
}

cudaError_t launch_adamw(const AdamWParams& p, cudaStream_t stream) {
  if (p.size == 0) return cudaSuccess;
  const auto launch = [&](auto kernel, int width) {
    const dim3 grid(static_cast<unsigned>(ceil_div(p.size, kThreads * width)));
    return launch_overlapped(kernel, grid, kThreads, 0, stream, p);
  };
  const bool f16 = p.weight_dtype == DType::f16;
  if (takes_vectors(p))
    return f16 ? launch(adamw_elements<f16_t, kVectorWidth>, kVectorWidth)
               : launch(adamw_elements<bf16_t, kVectorWidth>, kVectorWidth);
  return f16 ? launch(adamw_elements<f16_t, 1>, 1) : launch(adamw_elements<bf16_t, 1>, 1);
}

}  // namespace eadem::kernels::cuda
