// SPDX-License-Identifier: Apache-2.0
//
// The loss of rows of logits, and what is made of their gradient.
#pragma once

#include <algorithm>

#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/log_softmax.cuh"

namespace eadem::kernels::cuda {

// The columns that a thread keeps of a row in shared memory, when `blocks` have it: at most 100 (409,600 of a cluster
// in all), or without clusters 40, since cards of compute capability 8.6 have less shared memory. Of a longer row it
// reads the others again from memory.
inline int kept_columns(int64_t vocab, unsigned blocks) {
  return static_cast<int>(
      std::min<int64_t>(ceil_div(vocab, int64_t{blocks} * kLogSoftmaxThreads), blocks > 1 ? 100 : 40));
}

// One row's logits as a thread of it sees them: every kRowThreads-th. They are read once from memory, and kept in
// shared memory, where each thread reads what it has written.
template <typename T>
class RowLogits {
 public:
  static constexpr bool kInRegisters = false;
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
  // Calls f(column, logits) for each four neighbouring columns of the block, where all threads have kept theirs and
  // rows are whole fours.
  template <typename F>
  __device__ void each_four(F&& f) const {
    constexpr int kFours = kLogSoftmaxThreads / 4;
    const int own = static_cast<int>(threadIdx.x), first = thread_ - own;
    const float* kept = kept_ - own;  // [num_kept, kLogSoftmaxThreads]
#pragma unroll 4
    for (int i = own; first + i / kFours * kRowThreads < vocab_; i += kLogSoftmaxThreads) {
      const int n = i / kFours, in_block = i % kFours * 4;
      const int32_t column = first + n * kRowThreads + in_block;
      if (column >= vocab_) continue;
      float four[4];
      if (n < num_kept_) {
        const float4 values = *reinterpret_cast<const float4*>(kept + n * kLogSoftmaxThreads + in_block);
        four[0] = values.x, four[1] = values.y, four[2] = values.z, four[3] = values.w;
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) four[k] = load(logits_ + column + k);
      }
      f(column, four);
    }
  }

 private:
  const T* logits_;
  float* kept_;
  int32_t vocab_;
  int thread_, num_kept_;
};

__device__ inline float gradient_of_logit(float logit, float lse, float dloss, bool is_label) {
  const float probability = expf(logit - lse);
  return dloss * (is_label ? probability - 1.0f : probability);
}

// What the gradient of a row of logits needs.
struct RowLoss {
  int64_t row, vocab;
  int32_t label;
  float lse, dloss;

  __device__ float gradient_of(float logit, bool is_label) const {
    return label < 0 ? 0.0f : gradient_of_logit(logit, lse, dloss, is_label);
  }
};

// One row's logits in the registers of a cluster's threads, each of which has every kRowThreads-th: up to 131,072
// columns.
template <typename T>
class RowLogitsInRegisters {
 public:
  static constexpr bool kInRegisters = true;
  static constexpr int kMost = 32;
  __device__ RowLogitsInRegisters(const T* logits, int32_t vocab, int thread, float*, int)
      : vocab_(vocab), thread_(thread) {
#pragma unroll
    for (int n = 0; n < kMost; ++n) logits_[n] = column_of(n) < vocab ? load(logits + column_of(n)) : -INFINITY;
  }
  // Calls f(column, logit) in ascending order, also for columns beyond the row: their logits are -inf. A thread of a
  // cluster has a whole partial sum, so all columns are asked for.
  template <typename F>
  __device__ void each(F&& f, int = 0, int = 1) const {
#pragma unroll
    for (int n = 0; n < kMost; ++n) f(column_of(n), logits_[n]);
  }
  // Stores what round(results, gradients) makes of each four gradients, 16 bytes at a time, for which threads exchange
  // them. Rows are a multiple of 16 columns.
  template <typename R, typename Round>
  __device__ void store_gradient(R* to, const RowLoss& loss, Round round) const {
    constexpr int kVector = 16 / sizeof(R), kVectors = kLogSoftmaxThreads / kVector;
    __shared__ alignas(16) R tile[kMost][kLogSoftmaxThreads];
    const int own = static_cast<int>(threadIdx.x), first = thread_ - own;
#pragma unroll
    for (int n = 0; n < kMost; n += 4) {
      float gradients[4];
      R results[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) gradients[k] = loss.gradient_of(logits_[n + k], false);
      round(results, gradients);
#pragma unroll
      for (int k = 0; k < 4; ++k) tile[n + k][own] = results[k];
    }
    // One thread has the label.
    if (const int from_first = loss.label - thread_; from_first >= 0 && from_first % kRowThreads == 0) {
      const int of_label = from_first / kRowThreads;
      float gradients[4] = {};
#pragma unroll
      for (int n = 0; n < kMost; ++n)
        if (n == of_label) gradients[0] = loss.gradient_of(logits_[n], true);
      R results[4];
      round(results, gradients);
      tile[of_label][own] = results[0];
    }
    __syncthreads();
#pragma unroll 4
    for (int i = own; i < kMost * kVectors; i += kLogSoftmaxThreads) {
      const int n = i / kVectors, in_block = i % kVectors * kVector, column = first + n * kRowThreads + in_block;
      if (column < vocab_) *reinterpret_cast<uint4*>(to + column) = *reinterpret_cast<const uint4*>(&tile[n][in_block]);
    }
  }

 private:
  __device__ int32_t column_of(int n) const { return thread_ + n * kRowThreads; }

  float logits_[kMost];
  int32_t vocab_;
  int thread_;
};

// One cluster per row, or one block without clusters. The largest logit and the sum of exponentials are those of
// log_softmax.cuh. gradient(logits, RowLoss) then writes what it makes of the row, which it may get in registers if it
// takes them.
template <typename T, typename Logits, typename Gradient>
__global__ void __launch_bounds__(kLogSoftmaxThreads, 2)
    cross_entropy_rows(CrossEntropyParams p, Gradient gradient, int num_kept) {
  extern __shared__ __align__(16) float kept[];
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
  const Logits logits(row, static_cast<int32_t>(p.vocab), thread, kept, num_kept);

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
    if (p.loss != nullptr) p.loss[r] = label < 0 ? 0.0f : -log_probability(scored, largest, sum);
    if (p.lse != nullptr) p.lse[r] = lse;
  }
  gradient(logits, RowLoss{r, p.vocab, label, lse, p.dloss == nullptr ? 0.0f : p.dloss[r]});
}

template <typename T, typename Gradient>
cudaError_t launch_rows(const CrossEntropyParams& p, const Gradient& gradient, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.vocab < 1 || p.vocab > kMaxSampleVocab) return cudaErrorInvalidValue;
  const unsigned blocks = blocks_of_row();
  const int num_kept = kept_columns(p.vocab, blocks);
  const auto launch = [&](auto kernel, int num_in_shared) {
    return launch_clusters(kernel, blocks, dim3(static_cast<unsigned>(p.rows) * blocks), kLogSoftmaxThreads,
                           num_in_shared * kLogSoftmaxThreads * sizeof(float), stream, p, gradient, num_in_shared);
  };
  // For few columns of a thread most of the registers would hold none.
  using InRegisters = RowLogitsInRegisters<T>;
  if constexpr (Gradient::kTakesRegisters)
    if (blocks > 1 && num_kept > InRegisters::kMost / 2 && num_kept <= InRegisters::kMost && p.vocab % 16 == 0)
      return launch(cross_entropy_rows<T, InRegisters, Gradient>, 0);
  return launch(cross_entropy_rows<T, RowLogits<T>, Gradient>, num_kept);
}

}  // namespace eadem::kernels::cuda
