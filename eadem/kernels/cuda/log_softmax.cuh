// SPDX-License-Identifier: Apache-2.0
//
// The log softmax of a row, computed by a cluster of blocks, or by one block where there are no clusters. The loss
// (training/cross_entropy.cu) adds the exponentials of the same columns in the same order, so that a token has one
// log-probability in sampling and in the loss, with clusters and without.
#pragma once

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/cluster.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"

namespace eadem::kernels::cuda {

inline constexpr int kLogSoftmaxThreads = 512;  // of a block
inline constexpr int kLogSoftmaxBlocks = 8;     // of a cluster
// Sums in f64 are sums of so many partial ones, whoever has them: thread t of a cluster has columns t, t + kPartialSums
// and so on.
inline constexpr int kPartialSums = kLogSoftmaxBlocks * kLogSoftmaxThreads;

// The blocks and threads that have a row. Only device code may ask; the host asks blocks_of_row.
inline constexpr int kRowBlocks = kHasClusters ? kLogSoftmaxBlocks : 1;
inline constexpr int kRowThreads = kRowBlocks * kLogSoftmaxThreads;
using RowReduction = ClusterReduction<kRowBlocks>;
inline unsigned blocks_of_row() { return has_clusters() ? kLogSoftmaxBlocks : 1; }

// The sum of partial_sum(t) over t in [0, kPartialSums), in the order of a cluster. `thread` is in [0, kRowThreads).
template <typename PartialSum>
__device__ double sum_in_order(PartialSum partial_sum, RowReduction& reduction, int thread) {
  double sum = reduction.sum(partial_sum(thread));
  for (int first = kRowThreads; first < kPartialSums; first += kRowThreads)
    sum += reduction.sum(partial_sum(first + thread));
  return sum;
}

// Maps floats to unsigned integers in ascending order; -0 and +0 have one key. Not for NaN.
__device__ inline uint32_t key_of(float value) {
  const uint32_t bits = value == 0.0f ? 0u : __float_as_uint(value);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ inline float value_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

struct Largest {
  int32_t index;  // the smallest index of the largest logits
  float value;
  bool finite;  // the largest logit is finite and no logit is NaN
};

// Pairs of a logit and its index, in ascending order of logits, of equal ones in falling order of indices.
__device__ inline uint64_t pair_of(float logit, int32_t index) {
  return (uint64_t{key_of(logit)} << 32) | static_cast<uint32_t>(~index);
}
__device__ inline int32_t index_of(uint64_t pair) { return static_cast<int32_t>(~static_cast<uint32_t>(pair)); }

// The largest of logit(0) … logit(vocab - 1). `thread` is in [0, kRowThreads).
template <typename Logit>
__device__ Largest largest_among(Logit logit, int32_t vocab, RowReduction& reduction, int thread) {
  constexpr uint64_t kNaN = ~uint64_t{0};
  uint64_t best = 0;
  for (int32_t i = thread; i < vocab; i += kRowThreads) {
    const float value = logit(i);
    best = Max{}(best, isnan(value) ? kNaN : pair_of(value, i));
  }
  best = reduction.max(best);
  if (best == kNaN) return {0, nanf(""), false};
  const float value = value_of(static_cast<uint32_t>(best >> 32));
  return {index_of(best), value, static_cast<bool>(isfinite(value))};
}

template <typename T>
__device__ Largest largest_of(const T* logits,  // [vocab]
                              int32_t vocab, RowReduction& reduction, int thread) {
  return largest_among([&](int32_t i) { return load(logits + i); }, vocab, reduction, thread);
}

// The sum of exp(logit - largest), in f64.
template <typename T>
__device__ double sum_of_exponentials(const T* logits,  // [vocab]
                                      int32_t vocab, float largest, RowReduction& reduction, int thread) {
  const auto partial_sum = [&](int first) {
    double sum = 0.0;
    for (int32_t i = first; i < vocab; i += kPartialSums) sum += expf(load(logits + i) - largest);
    return sum;
  };
  return sum_in_order(partial_sum, reduction, thread);
}

__device__ inline float log_probability(float logit, float largest, double sum) {
  return static_cast<float>(static_cast<double>(logit) - largest - log(sum));
}

}  // namespace eadem::kernels::cuda
