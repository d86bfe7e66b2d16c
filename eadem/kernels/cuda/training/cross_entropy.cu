// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/log_softmax.cuh"

namespace eadem::kernels::cuda {

namespace {

// One cluster per row.
template <typename T>
__global__ void __launch_bounds__(kLogSoftmaxThreads) cross_entropy_rows(CrossEntropyParams p) {
  __shared__ uint64_t slots[2][kLogSoftmaxBlocks];
  RowReduction reduction(slots);
  const int thread = cluster_rank() * kLogSoftmaxThreads + static_cast<int>(threadIdx.x);
  const int64_t r = blockIdx.x / kLogSoftmaxBlocks;
  cluster_sync();  // no block may be written to before it has begun
  allow_next_kernel();
  wait_for_earlier_kernels();
  const T* logits = static_cast<const T*>(p.logits) + r * p.vocab;  // [vocab]
  const auto vocab = static_cast<int32_t>(p.vocab);
  const float largest = largest_of(logits, vocab, reduction, thread).value;
  const double sum = sum_of_exponentials(logits, vocab, largest, reduction, thread);
  if (thread == 0) {
    const int32_t label = p.labels[r];
    p.loss[r] = label < 0 ? 0.0f : -log_probability(load(logits + label), largest, sum);
    if (p.lse != nullptr) p.lse[r] = static_cast<float>(largest + log(sum));
  }
}

constexpr int kThreads = 256, kElementsOfThread = 8;
constexpr int64_t kElementsOfBlock = kThreads * kElementsOfThread;

// One block per row and kElementsOfBlock columns. `dlogits` may be `logits`.
template <typename T, typename R>
__global__ void __launch_bounds__(kThreads) cross_entropy_gradient(CrossEntropyBackwardParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t r = blockIdx.y;
  const T* logits = static_cast<const T*>(p.logits) + r * p.vocab;  // [vocab]
  R* dlogits = static_cast<R*>(p.dlogits) + r * p.vocab;            // [vocab]
  const int32_t label = p.labels[r];
  const float lse = p.lse[r], dloss = label < 0 ? 0.0f : p.dloss[r];
#pragma unroll
  for (int n = 0; n < kElementsOfThread; ++n) {
    const int64_t i = blockIdx.x * kElementsOfBlock + n * kThreads + threadIdx.x;
    if (i >= p.vocab) return;
    const float probability = label < 0 ? 0.0f : expf(load(logits + i) - lse);
    store(dlogits + i, dloss * (i == label ? probability - 1.0f : probability));
  }
}

}  // namespace

cudaError_t launch_cross_entropy(const CrossEntropyParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.vocab < 1 || p.vocab > kMaxSampleVocab) return cudaErrorInvalidValue;
  return with_f32_or_bf16(p.dtype, [&](auto logits) {
    return launch_clusters(cross_entropy_rows<decltype(logits)>, kLogSoftmaxBlocks,
                           dim3(static_cast<unsigned>(p.rows * kLogSoftmaxBlocks)), kLogSoftmaxThreads, 0, stream, p);
  });
}

cudaError_t launch_cross_entropy_backward(const CrossEntropyBackwardParams& p, cudaStream_t stream) {
  constexpr int64_t kMostRows = 65535;  // of a grid
  return with_f32_or_bf16(p.dtype, [&](auto logits) {
    return with_f32_or_bf16(p.result_dtype, [&](auto dlogits) {
      using T = decltype(logits);
      using R = decltype(dlogits);
      CrossEntropyBackwardParams part = p;
      for (int64_t row = 0; row < p.rows && p.vocab > 0; row += kMostRows) {
        part.logits = static_cast<const T*>(p.logits) + row * p.vocab;
        part.dlogits = static_cast<R*>(p.dlogits) + row * p.vocab;
        part.labels = p.labels + row, part.lse = p.lse + row, part.dloss = p.dloss + row;
        const dim3 grid(static_cast<unsigned>(ceil_div(p.vocab, kElementsOfBlock)),
                        static_cast<unsigned>(p.rows - row < kMostRows ? p.rows - row : kMostRows));
        const cudaError_t error = launch_overlapped(cross_entropy_gradient<T, R>, grid, kThreads, 0, stream, part);
        if (error != cudaSuccess) return error;
      }
      return cudaSuccess;
    });
  });
}

}  // namespace eadem::kernels::cuda
