// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

// y[r, :] = scale * x[rows[r] - first, :], or zeros where x has no such row. One block per row.
template <typename X, typename Y>
__global__ void gather_rows(const X* x,           // [count, hidden]
                            const int32_t* rows,  // [gridDim.x]
                            Y* y,                 // [gridDim.x, hidden]
                            int64_t hidden, int64_t first, int64_t count, float scale) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t row = rows[blockIdx.x] - first;
  const bool present = row >= 0 && row < count;
  const X* from = x + (present ? row : 0) * hidden;
  Y* to = y + blockIdx.x * hidden;
  for (int64_t i = threadIdx.x; i < hidden; i += kThreads) store(to + i, present ? scale * load(from + i) : 0.0f);
}

// dtable[id, :] += scale * dy[t, :] for every token t of an id, in the order of the tokens. One block per token; that
// of an id's first token adds all of them.
template <typename T>
__global__ void __launch_bounds__(kThreads) add_rows_of_ids(EmbeddingBackwardParams p) {
  __shared__ uint32_t hits[kThreads / kWarp];  // a bit for each token of a chunk
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t token = blockIdx.x;
  const int32_t id = p.ids[token];
  const int64_t row = id - p.first;
  if (row < 0 || row >= p.vocab) return;
  for (int64_t chunk = 0; chunk < token; chunk += kThreads) {
    const int64_t t = chunk + threadIdx.x;
    if (__syncthreads_or(t < token && p.ids[t] == id)) return;
  }
  float* sums = p.dtable + row * p.hidden;  // [hidden]
  for (int64_t chunk = token; chunk < p.tokens; chunk += kThreads) {
    const int64_t t = chunk + threadIdx.x;
    const bool hit = t < p.tokens && p.ids[t] == id;
    const unsigned ballot = __ballot_sync(kAllLanes, hit);
    if (threadIdx.x % kWarp == 0) hits[threadIdx.x / kWarp] = ballot;
    if (!__syncthreads_or(hit)) continue;
    const T* rows = static_cast<const T*>(p.dy) + chunk * p.hidden;
#pragma unroll 1
    for (int64_t i = threadIdx.x; i < p.hidden; i += kThreads) {
      float sum = sums[i];
#pragma unroll 1
      for (int word = 0; word < kThreads / kWarp; ++word)
        for (uint32_t bits = hits[word]; bits != 0; bits &= bits - 1)
          sum += p.scale * load(rows + (word * kWarp + __ffs(static_cast<int>(bits)) - 1) * p.hidden + i);
      sums[i] = sum;
    }
    __syncthreads();  // the next chunk overwrites `hits`
  }
}

// One block: a step has few tokens where this matters.
__global__ void feed_tokens(FeedTokensParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  for (int64_t t = threadIdx.x; t < p.tokens; t += kThreads) {
    const int32_t id = p.ids[t];
    p.y[t] = id < 0 ? max(p.sampled[-1 - id], 0) : id;
  }
}

}  // namespace

cudaError_t launch_embedding(const EmbeddingParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.hidden == 0) return cudaSuccess;
  return with_float_type(p.table_dtype, [&](auto x) {
    return with_float_type(p.y_dtype, [&](auto y) {
      using X = decltype(x);
      using Y = decltype(y);
      return launch_overlapped(gather_rows<X, Y>, dim3(static_cast<unsigned>(p.tokens)), kThreads, 0, stream,
                               static_cast<const X*>(p.table), p.ids, static_cast<Y*>(p.y), p.hidden, p.first, p.vocab,
                               p.scale);
    });
  });
}

cudaError_t launch_embedding_backward(const EmbeddingBackwardParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.hidden == 0) return cudaSuccess;
  return with_float_type(p.dtype, [&](auto dy) {
    const dim3 grid(static_cast<unsigned>(p.tokens));
    return launch_overlapped(add_rows_of_ids<decltype(dy)>, grid, kThreads, 0, stream, p);
  });
}

cudaError_t launch_feed_tokens(const FeedTokensParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  return launch_overlapped(feed_tokens, dim3(1), kThreads, 0, stream, p);
}

cudaError_t launch_select_rows(const SelectRowsParams& p, cudaStream_t stream) {
  if (p.num_rows == 0 || p.hidden == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    using T = decltype(x);
    return launch_overlapped(gather_rows<T, T>, dim3(static_cast<unsigned>(p.num_rows)), kThreads, 0, stream,
                             static_cast<const T*>(p.x), p.rows, static_cast<T*>(p.y), p.hidden, int64_t{0}, p.tokens,
                             1.0f);
  });
}

}  // namespace eadem::kernels::cuda
