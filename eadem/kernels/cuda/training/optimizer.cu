// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/training/optimizer.h"

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

// One thread per element.
template <typename Weight>
__global__ void __launch_bounds__(kThreads) adamw_elements(AdamWParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.size) return;
  const float max_norm = p.hyper[kHyperMaxNorm];
  const float grad_scale = max_norm > 0.0f ? fminf(1.0f, max_norm / (*p.norm + 1e-6f)) : 1.0f;
  const float beta1 = p.hyper[kHyperBeta1], beta2 = p.hyper[kHyperBeta2];

  // 1. Moments.
  const float g = p.grad[i] * grad_scale;
  const float m = fmaf(beta1, p.m[i], (1.0f - beta1) * g);
  const float v = fmaf(beta2, p.v[i], (1.0f - beta2) * (g * g));
  p.m[i] = m;
  p.v[i] = v;

  // 2. The step.
  const float denominator = sqrtf(v / p.hyper[kHyperBiasCorrection2]) + p.hyper[kHyperEps];
  const float step = m / p.hyper[kHyperBiasCorrection1] / denominator;
  const float decay = p.decay ? p.hyper[kHyperWeightDecay] : 0.0f;
  float master = p.master[i];
  master = fmaf(-p.hyper[kHyperLearningRate], fmaf(decay, master, step), master);
  p.master[i] = master;

  // 3. The rounded copy that the passes read.
  if (p.weight != nullptr) store(static_cast<Weight*>(p.weight) + i, master);
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
  const dim3 grid(static_cast<unsigned>(ceil_div(p.size, kThreads)));
  return p.weight_dtype == DType::f16 ? launch_overlapped(adamw_elements<f16_t>, grid, kThreads, 0, stream, p)
                                      : launch_overlapped(adamw_elements<bf16_t>, grid, kThreads, 0, stream, p);
}

}  // namespace eadem::kernels::cuda
