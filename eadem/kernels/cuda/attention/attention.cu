// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kChunk = static_cast<int>(kAttentionChunk);
static_assert(kChunk == 2 * kWarp, "a lane holds two weights of a chunk");

// One block per (token, head) makes one pass over the keys in chunks. A warp computes one score at a time; a thread
// owns the elements threadIdx.x + i * kThreads, i < kDims, of the output. The borders of chunks and the order of every
// sum depend on positions alone.
template <typename T, typename K, int kDims>
__global__ void __launch_bounds__(kThreads) attention_online_softmax(AttentionParams p) {
  __shared__ float q[kDims * kThreads];
  __shared__ float scores[kChunk];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int32_t token = static_cast<int32_t>(blockIdx.x / p.heads);
  const int32_t head = static_cast<int32_t>(blockIdx.x % p.heads);
  const int32_t kv_head = head / (p.heads / p.kv_heads);

  // 1. The token's sequence: the last one that begins at or before it.
  int32_t sequence = 0;
  for (int32_t last = static_cast<int32_t>(p.sequences) - 1; sequence < last;) {
    const int32_t middle = sequence + (last - sequence + 1) / 2;
    if (p.query_start[middle] <= token) {
      sequence = middle;
    } else {
      last = middle - 1;
    }
  }
  const int32_t first_token = p.query_start[sequence];
  const int32_t first_position = p.kv_length[sequence] - (p.query_start[sequence + 1] - first_token);
  const int32_t position = first_position + token - first_token;
  const bool direct = p.block_table == nullptr;
  // The token sees the keys at positions [key_begin, position].
  int32_t key_begin = p.window > 0 && position >= p.window ? position - p.window + 1 : 0;
  if (direct) key_begin = max(key_begin, first_position);

  const K* keys = static_cast<const K*>(p.k);
  const K* values = static_cast<const K*>(p.v);
  const int32_t* blocks = direct ? nullptr : p.block_table + sequence * p.max_blocks;  // [max_blocks]
  const auto offset_of = [&](int32_t key) -> int64_t {  // offset of a key's head_dim elements, in keys and values
    if (direct) return (int64_t{first_token + key - first_position} * p.kv_heads + kv_head) * p.head_dim;
    const int32_t block_size = static_cast<int32_t>(p.block_size);
    const int64_t block = blocks[key / block_size];
    return ((block * p.kv_heads + kv_head) * block_size + key % block_size) * p.head_dim;
  };

  const int64_t row = (int64_t{token} * p.heads + head) * p.head_dim;
  for (int i = threadIdx.x; i < p.head_dim; i += kThreads) q[i] = load(static_cast<const T*>(p.q) + row + i);
  __syncthreads();

  // A sink is a score whose value is 0.
  float largest = p.sinks != nullptr ? p.sinks[head] : -INFINITY;  // largest score so far
  float sum = p.sinks != nullptr ? 1.0f : 0.0f;                    // sum of exp(score - largest)
  float y[kDims] = {};                                             // sum of exp(score - largest) * value
  for (int32_t chunk = key_begin / kChunk * kChunk; chunk <= position; chunk += kChunk) {
    // 2. Compute scores; they are -inf outside [key_begin, position].
    for (int i = warp; i < kChunk; i += kWarps) {
      const int32_t key = chunk + i;
      float score = -INFINITY;
      if (key >= key_begin && key <= position) {
        const K* k = keys + offset_of(key);  // [head_dim]
        float dot = 0.0f;
        for (int d = lane; d < p.head_dim; d += kWarp) dot += q[d] * load(k + d);
        score = p.scale * warp_reduce(dot, Sum{});
        if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);
      }
      if (lane == 0) scores[i] = score;
    }
    __syncthreads();

    // 3. Compute the weights of the chunk, equal in every warp: lane l holds those of keys l and l + 32.
    const float score_low = scores[lane], score_high = scores[lane + kWarp];
    const float new_largest = fmaxf(largest, warp_reduce(fmaxf(score_low, score_high), Max{}));
    const float correction = expf(largest - new_largest);
    const float weight_low = expf(score_low - new_largest), weight_high = expf(score_high - new_largest);
    sum = sum * correction + warp_reduce(weight_low + weight_high, Sum{});
    largest = new_largest;

    // 4. Add the values. Values outside the range are not read, because a cache may hold anything there.
#pragma unroll
    for (int n = 0; n < kDims; ++n) y[n] *= correction;
    const int begin = max(key_begin - chunk, 0), end = min(position - chunk + 1, kChunk);
    for (int i = begin; i < end; ++i) {
      const float weight = __shfl_sync(kAllLanes, i < kWarp ? weight_low : weight_high, i % kWarp);
      const K* v = values + offset_of(chunk + i);  // [head_dim]
#pragma unroll
      for (int n = 0; n < kDims; ++n) {
        const int d = threadIdx.x + n * kThreads;
        if (d < p.head_dim) y[n] += weight * load(v + d);
      }
    }
    __syncthreads();  // the next chunk overwrites `scores`
  }

  if (p.lse != nullptr && threadIdx.x == 0) p.lse[int64_t{token} * p.heads + head] = largest + logf(sum);
#pragma unroll
  for (int n = 0; n < kDims; ++n) {
    const int d = threadIdx.x + n * kThreads;
    if (d < p.head_dim) store(static_cast<T*>(p.y) + row + d, y[n] / sum);
  }
}

}  // namespace

cudaError_t launch_attention(const AttentionParams& p, cudaStream_t stream) {
  if (p.tokens * p.heads == 0 || p.head_dim == 0 || p.sequences == 0) return cudaSuccess;
  static_assert(kMaxHeadDim == 4 * kThreads);
  const unsigned blocks = static_cast<unsigned>(p.tokens * p.heads);
  return with_f32_or_bf16(p.dtype, [&](auto q) {
    return with_float_type(p.kv_dtype, [&](auto k) {
      using T = decltype(q);
      using K = decltype(k);
      if (p.head_dim <= kThreads) {
        attention_online_softmax<T, K, 1><<<blocks, kThreads, 0, stream>>>(p);
      } else if (p.head_dim <= 2 * kThreads) {
        attention_online_softmax<T, K, 2><<<blocks, kThreads, 0, stream>>>(p);
      } else if (p.head_dim <= kMaxHeadDim) {
        attention_online_softmax<T, K, 4><<<blocks, kThreads, 0, stream>>>(p);
      } else {
        return cudaErrorInvalidValue;
      }
      return cudaGetLastError();
    });
  });
}

}  // namespace eadem::kernels::cuda
