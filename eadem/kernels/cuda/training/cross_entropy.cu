// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/log_softmax.cuh"

namespace eadem::kernels::cuda {

namespace {

// The columns that a thread keeps of a row, when `blocks` have it: at most 100 (409,600 of a cluster in all), or
// without clusters 40, since cards of compute capability 8.6 have less shared memory. Of a longer row it reads the
// others again from memory.
int kept_columns(int64_t vocab, unsigned blocks) {
  return static_cast<int>(
      std::min<int64_t>(ceil_div(vocab, int64_t{blocks} * kLogSoftmaxThreads), blocks > 1 ? 100 : 40));
}

// One row's logits as a thread of it sees them: every kRowThreads-th. They are read once from memory, and kept in
// shared memory, where each thread reads what it has written.
template <typename T>
class RowLogits {
 public:
  // `kept`: shared memory, [num_kept, kLogSoftmaxThreads].
  __device__ RowLogits(const T* logits, int32_t vocab, int thread, float* kept, int num_kept)
      : logits_(logits), kept_(kept + threadIdx.x), vocab_(vocab), thread_(thread), num_kept_(num_kept) {
#pragma unroll 8
    for (int n = 0; n < num_kept; ++n) {
      const int32_t i = thread + n * kRowThreads;
      if (i < vocab) kept_[n * kLogSoftmaxThreads] = load(logits + i);
    }
  }
  // Calls f(column, logit) in ascending order, for every `step`-th column of the thread from number `first` on.
  template <typename F>
  __device__ void each(F&& f, int first = 0, int step = 1) const {
    int n = first;
#pragma unroll 4
    for (; n < num_kept_; n += step) {
      const int32_t i = thread_ + n * kRowThreads;
      if (i < vocab_) f(i, kept_[n * kLogSoftmaxThreads]);
    }
    for (int32_t i = thread_ + n * kRowThreads; i < vocab_; i += step * kRowThreads) f(i, load(logits_ + i));
  }

 private:
  const T* logits_;
  float* kept_;
  int32_t vocab_;
  int thread_, num_kept_;
};

__device__ inline float gradient_of(float logit, float lse, float dloss, bool is_label) {
  const float probability = expf(logit - lse);
  return dloss * (is_label ? probability - 1.0f : probability);
}

// One cluster per row, or one block without clusters. The largest logit and the sum of exponentials are those of
// log_softmax.cuh.
template <typename T, typename R, bool kGradient>
__global__ void __launch_bounds__(kLogSoftmaxThreads, 2) cross_entropy_rows(CrossEntropyParams p, int num_kept) {
  extern __shared__ float kept[];
  __shared__ uint64_t slots[2][kRowBlocks];
  RowReduction reduction(slots);
  const int thread = cluster_rank() * kLogSoftmaxThreads + static_cast<int>(threadIdx.x);
  const int64_t r = blockIdx.x / kRowBlocks;
  cluster_sync();  // no block may be written to before it has begun
  allow_next_kernel();
  wait_for_earlier_kernels();
  const T* row = static_cast<const T*>(p.logits) + r * p.vocab;  // [vocab]
  const int32_t label = p.labels[r];
  // Before the gradient may overwrite it.
  const float scored = thread == 0 && label >= 0 ? load(row + label) : 0.0f;
  const RowLogits<T> logits(row, static_cast<int32_t>(p.vocab), thread, kept, num_kept);

  float largest = -INFINITY;  // a NaN comes back in the sum
  logits.each([&](int32_t, float logit) { largest = fmaxf(largest, logit); });
  largest = value_of(static_cast<uint32_t>(reduction.max(uint64_t{key_of(largest)})));
  const auto partial_sum = [&](int first) {
    double sum = 0.0;
    logits.each([&](int32_t, float logit) { sum += expf(logit - largest); }, first / kRowThreads,
                kPartialSums / kRowThreads);
    return sum;
  };
  const double sum = sum_in_order(partial_sum, reduction, thread);
  const auto lse = static_cast<float>(largest + log(sum));
  if (thread == 0) {
    p.loss[r] = label < 0 ? 0.0f : -log_probability(scored, largest, sum);
    if (p.lse != nullptr) p.lse[r] = lse;
  }
  if constexpr (kGradient) {
    R* dlogits = static_cast<R*>(p.dlogits) + r * p.vocab;  // [vocab]
    const float dloss = p.dloss[r];
    logits.each([&](int32_t i, float logit) {
      store(dlogits + i, label < 0 ? 0.0f : gradient_of(logit, lse, dloss, i == label));
    });
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
  const float lse = p.lse[r], dloss = p.dloss[r];
#pragma unroll
  for (int n = 0; n < kElementsOfThread; ++n) {
    const int64_t i = blockIdx.x * kElementsOfBlock + n * kThreads + threadIdx.x;
    if (i >= p.vocab) return;
    store(dlogits + i, label < 0 ? 0.0f : gradient_of(load(logits + i), lse, dloss, i == label));
  }
}

}  // namespace

cudaError_t launch_cross_entropy(const CrossEntropyParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.vocab < 1 || p.vocab > kMaxSampleVocab) return cudaErrorInvalidValue;
  const auto launch = [&](auto kernel) {
    const unsigned blocks = blocks_of_row();
    const int num_kept = kept_columns(p.vocab, blocks);
    return launch_clusters(kernel, blocks, dim3(static_cast<unsigned>(p.rows) * blocks), kLogSoftmaxThreads,
                           num_kept * kLogSoftmaxThreads * sizeof(float), stream, p, num_kept);
  };
  return with_f32_or_bf16(p.dtype, [&](auto logits) {
    using T = decltype(logits);
    if (p.dlogits == nullptr) return launch(cross_entropy_rows<T, T, false>);
    return with_f32_or_bf16(p.result_dtype,
                            [&](auto dlogits) { return launch(cross_entropy_rows<T, decltype(dlogits), true>); });
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
