// SPDX-License-Identifier: Apache-2.0
//
// What the tensor-core kernels for attention share. attention_prompt.cu, for steps with prompts, and
// attention_decode.cu, for pure decode steps, give a query the same bits, because both compute, for every query,
//   chunks of 64 key positions, begun at multiples of 64:   s = q . k, one k16 chain of mma over head_dim
//     m' = max(m, max s * c),  c = scale * log2 e           p = exp2(s * c - m')
//     l' = l * exp2(m - m') + sum p                         acc' = acc * exp2(m - m') + p v, one chain over 64 keys,
//                                                           for which p is rounded to bf16
//   splits of kAttentionSplitKeys positions, begun at their multiples: a state {m, l, acc} of their own, merged in
//   order
//     M' = max(M, m)   L' = L * exp2(M - M') + l * exp2(m - M')   A' = A * exp2(M - M') + acc * exp2(m - M')
//   y = A / L
// A chunk or split in which the query sees no key changes none of its numbers, so a query's bits do not depend on the
// other queries of its tile. For sums of p, each lane adds the sixteen columns of a chunk that its fragments hold, from
// left to right, and groups of four lanes add their sums at the end of a split.
//
// The query heads that share a key head are rows of one tile, so that keys are read once.
#pragma once

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

constexpr int kChunk = static_cast<int>(kAttentionChunk);
constexpr int kSplit = static_cast<int>(kAttentionSplitKeys);
constexpr int kKeyTiles = kChunk / 8;  // accumulators of 8 keys
constexpr int kFragmentRows = 16;

// The factor that rescales sums from the maximum `from` to the maximum `to`; 0 if there was no key yet.
__device__ inline float rescale(float from, float to) { return fast_exp2(from - (to == -INFINITY ? 0.0f : to)); }
// exp2(s c - m); 0 for a masked score.
__device__ inline float probability(float s, float c, float m) {
  return fast_exp2(fmaf(s, c, m == -INFINITY ? 0.0f : -m));
}

// The natural logarithm of 2^m * l.
__device__ inline float log_of_sum(float m, float l) {
  constexpr double kLn2 = 0.6931471805599453;
  return static_cast<float>((m + log2(static_cast<double>(l))) * kLn2);
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// A sequence's part of a step, and the location of its keys.
struct Sequence {
  int32_t first_token, tokens;
  int32_t first_position;  // position of first_token
  int32_t length;          // number of keys
  const int32_t* blocks;   // null when direct
};

__device__ inline Sequence sequence_of(const AttentionParams& p, int s) {
  const int32_t first = p.query_start[s], tokens = p.query_start[s + 1] - first, length = p.kv_length[s];
  return {first, tokens, length - tokens, length,
          p.block_table == nullptr ? nullptr : p.block_table + s * p.max_blocks};
}

// The row of a key, counting rows of head_dim elements; at most 2^31 such rows fit a device's memory.
__device__ inline int32_t key_row(const AttentionParams& p, const Sequence& sequence, int32_t kv_head, int32_t key) {
  if (sequence.blocks == nullptr) return (sequence.first_token + key - sequence.first_position) * p.kv_heads + kv_head;
  const int32_t size = static_cast<int32_t>(p.block_size), block = key / size;
  return (sequence.blocks[block] * p.kv_heads + kv_head) * size + key - block * size;
}
constexpr int32_t kNoRow = -1;

// Returns the first key that a query at `position` attends to.
__device__ inline int32_t first_key(const AttentionParams& p, const Sequence& sequence, int32_t position) {
  const int32_t begin = p.window > 0 ? max(position - p.window + 1, 0) : 0;
  return sequence.blocks == nullptr ? max(begin, sequence.first_position) : begin;
}

// Loads the queries of 16 rows as fragments. Row r of a tile is head r % group of token r / group; rows past the last
// are 0.
template <int kD>
__device__ void load_queries(uint32_t (&q)[kD / 16][4], const AttentionParams& p, int32_t kv_head, int32_t first_token,
                             int32_t tokens, int first_row, int lane) {
  const int group = p.heads / p.kv_heads;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane / 4 + half * 8, token = row / group;
    const bool real = token < tokens;
    const int64_t offset =
        real ? (int64_t{first_token + token} * p.heads + kv_head * group + row % group) * kD + lane % 4 * 2 : 0;
    const auto* from = reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(p.q) + offset);
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      q[step][half] = real ? from[step * 8] : 0;
      q[step][half + 2] = real ? from[step * 8 + 4] : 0;
    }
  }
}

// The key, of the chunk, of a lane's score i in a tile of 8 keys. The score is in row lane / 4 + i / 2 * 8.
__device__ inline int key_of(int tile, int i, int lane) { return tile * 8 + lane % 4 * 2 + i % 2; }

}  // namespace eadem::kernels::cuda
