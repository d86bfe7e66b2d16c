// SPDX-License-Identifier: Apache-2.0
//
// What the tensor-core kernels for attention share. attention_prompt.cu, for steps with prompts, and
// attention_decode.cu, for pure decode steps, give a query the same bits, because both compute, for every query,
//   chunks of 64 key positions, begun at multiples of 64:   s = q . k, one k16 chain of mma over head_dim
//     in a cache of 8-bit codes, q . k and p v take the levels of the codes, s is multiplied by its key's scale, and p
//     by its value's, after its sum is taken and before it is rounded
//     with a soft cap, s becomes tanh(s * scale / cap)
//     m' = max s * c if max s * c - m > kSlack, and m otherwise,  c = scale * log2 e, or with a soft cap cap * log2 e
//                                                           p = exp2(s * c - m')
//     l' = l * exp2(m - m') + sum p                         acc' = acc * exp2(m - m') + p v, one chain over 64 keys,
//                                                           for which p is rounded to bf16
//   splits of kAttentionSplitKeys positions, begun at their multiples: a state {m, l, acc} of their own, merged in
//   order
//     M' = m if m - M > kSlack, and M otherwise
//     L' = L * exp2(M - M') + l * exp2(m - M')              A' = A * exp2(M - M') + acc * exp2(m - M')
//   a head's sink, once all splits are merged: M' = max(M, sink * log2 e)   L' = L * exp2(M - M') + exp2(sink * log2 e
//   - M')   A' = A * exp2(M - M')
//   y = A / L
// A chunk or split in which the query sees no key changes none of its numbers, so a query's bits do not depend on the
// other queries of its tile. For sums of p, each lane adds the sixteen columns of a chunk that its fragments hold, from
// left to right, and groups of four lanes add their sums at the end of a split.
//
// p is at most 2^kSlack, and sums are rescaled only where a much larger score comes.
//
// The query heads that share a key head are rows of one tile, so that keys are read once.
//
// Heads have p.head_dim elements. The kernels compute with kD, 64, 128 or 256, the next that is not smaller: zeros
// follow each row of queries, keys and values in registers and shared memory. They add zeros to the chains, which
// change none.
#pragma once

#include <type_traits>

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

constexpr int kChunk = static_cast<int>(kAttentionChunk);
constexpr int kSplit = static_cast<int>(kAttentionSplitKeys);
constexpr int kKeyTiles = kChunk / 8;  // accumulators of 8 keys
constexpr int kFragmentRows = 16;

constexpr float kSlack = 8.0f;
// What a state that is relative to m goes on with, when the largest score to come is `largest`.
__device__ inline float next_maximum(float m, float largest, float c) {
  return fmaf(largest, c, -m) > kSlack ? __fmul_rn(largest, c) : m;
}
// The factor that rescales sums from the maximum `from` to the maximum `to`; 0 if there was no key yet.
__device__ inline float rescale(float from, float to) { return fast_exp2(from - (to == -INFINITY ? 0.0f : to)); }
// exp2(s c - m); 0 for a masked score.
__device__ inline float probability(float s, float c, float m) {
  return fast_exp2(fmaf(s, c, m == -INFINITY ? 0.0f : -m));
}

constexpr float kLog2E = 1.4426950408889634f;

// Within 8 units of 2^-24 of the larger of |tanh x| and |x|, without branches.
__device__ inline float hyperbolic_tangent(float x) {
  const float size = fabsf(x), square = __fmul_rn(size, size);
  // From 0.55 on, 1 - 2 / (exp(2 x) + 1); up to there x + x^3 P(x^2), P of least largest error.
  float polynomial = fmaf(0x1.0d4f62p-6f, square, -0x1.af7c96p-5f);
  polynomial = fmaf(polynomial, square, 0x1.10cef4p-3f);
  polynomial = fmaf(polynomial, square, -0x1.555452p-2f);
  const float small = fmaf(__fmul_rn(polynomial, square), size, size);
  const float large = fmaf(-2.0f, fast_reciprocal(__fadd_rn(fast_exp2(__fmul_rn(size, 2 * kLog2E)), 1.0f)), 1.0f);
  return copysignf(size < 0.55f ? small : large, x);
}

// How products of queries and keys become exponents of 2: a score's is c times what `cap` makes of it.
template <bool kCapped>
struct ScoreScale {
  const AttentionParams& p;
  float c;

  __device__ explicit ScoreScale(const AttentionParams& params)
      : p(params), c((kCapped ? params.softcap : params.scale) * kLog2E) {}
  // Of scores that have no mask yet.
  template <int kTiles>
  __device__ void cap(float (&s)[kTiles][4]) const {
    if constexpr (kCapped) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[t][i] = hyperbolic_tangent(__fmul_rn(s[t][i], p.scale_by_cap));
    }
  }
};

// What the sum of a row's values is multiplied with, once all splits are merged into the state {m, l}: 1 / l, and with
// sinks what rescales it to the maximum that its head's sink is part of, too. The state becomes that with the sink.
__device__ inline float final_factor(float& m, float& l, const float* sinks, int head) {
  if (sinks == nullptr) return 1.0f / l;
  const float sink = __fmul_rn(__ldg(sinks + head), kLog2E), next = fmaxf(m, sink), factor = rescale(m, next);
  l = fmaf(l, factor, rescale(sink, next));
  m = next;
  return __fmul_rn(factor, 1.0f / l);
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

// Calls f with the kD of heads of `head_dim` elements.
template <typename Function>
cudaError_t with_padded_head_dim(int32_t head_dim, Function&& f) {
  switch (padded_head_dim(head_dim)) {
    case 64: return f(std::integral_constant<int, 64>{});
    case 128: return f(std::integral_constant<int, 128>{});
    default: return head_dim <= 256 ? f(std::integral_constant<int, 256>{}) : cudaErrorInvalidValue;
  }
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

// Loads 16 query rows of `width` elements as fragments; zeros follow. `row` gives the address of each in bf16, or null
// for a row of zeros. kInFours: of 16 elements, a lane has four neighbours 4 t ... 4 t + 3, t = lane % 4, in the place
// of 2 t, 2 t + 1, 2 t + 8, 2 t + 9: the first and the third, then the second and the fourth. That is how keys come of
// 8-bit codes.
template <int kD, bool kInFours, typename Row>
__device__ void load_fragments(uint32_t (&q)[kD / 16][4], const Row& row, int width, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const __nv_bfloat16* elements = row(lane / 4 + half * 8);
    const bool real = elements != nullptr;
    const auto* from = reinterpret_cast<const uint32_t*>(elements) + lane % 4 * (kInFours ? 2 : 1);
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      if constexpr (kInFours) {
        const uint2 four =
            real && step * 16 < width ? *reinterpret_cast<const uint2*>(from + step * 8) : make_uint2(0, 0);
        q[step][half] = __byte_perm(four.x, four.y, 0x5410);
        q[step][half + 2] = __byte_perm(four.x, four.y, 0x7632);
      } else {
        q[step][half] = real && step * 16 < width ? from[step * 8] : 0;
        q[step][half + 2] = real && step * 16 + 8 < width ? from[step * 8 + 4] : 0;
      }
    }
  }
}

// Loads the queries of 16 rows as fragments. Row r of a tile is head r % group of token r / group; rows past the last
// are 0. kInFours: as in load_fragments.
template <int kD, bool kInFours>
__device__ void load_queries(uint32_t (&q)[kD / 16][4], const AttentionParams& p, int32_t kv_head, int32_t first_token,
                             int32_t tokens, int first_row, int lane) {
  const int group = p.heads / p.kv_heads;
  const auto row = [&](int r) {
    const int at = first_row + r, token = at / group;
    return token < tokens ? static_cast<const __nv_bfloat16*>(p.q) +
                                (int64_t{first_token + token} * p.heads + kv_head * group + at % group) * p.head_dim
                          : nullptr;
  };
  load_fragments<kD, kInFours>(q, row, p.head_dim, lane);
}

// The key, of the chunk, of a lane's score i in a tile of 8 keys. The score is in row lane / 4 + i / 2 * 8.
__device__ inline int key_of(int tile, int i, int lane) { return tile * 8 + lane % 4 * 2 + i % 2; }

// The scales of a tile's keys, or of their values, that belong to a lane's scores, of f32 [kChunk] in shared memory.
__device__ inline float2 load_tile_scales(uint32_t scales, int tile, int lane) {
  return load_f32x2(scales + static_cast<uint32_t>(key_of(tile, 0, lane)) * 4);
}
// Multiplies a tile's scores, or their exponentials.
__device__ inline void multiply_tile(float (&s)[4], float2 scales) {
  s[0] = __fmul_rn(s[0], scales.x), s[1] = __fmul_rn(s[1], scales.y);
  s[2] = __fmul_rn(s[2], scales.x), s[3] = __fmul_rn(s[3], scales.y);
}
// Those of a chunk.
struct ChunkScales {
  float2 of[kKeyTiles];

  __device__ void load(uint32_t scales, int lane) {
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) of[t] = load_tile_scales(scales, t, lane);
  }
  __device__ void multiply(float (&s)[kKeyTiles][4]) const {
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) multiply_tile(s[t], of[t]);
  }
};

// Sums over values, of which a lane has pairs of neighbours. Values of 8-bit codes give a tile the even elements of 16,
// and the next one the odd ones.
template <bool kEncoded, int kTiles>
__device__ inline float2 pair_of(const float (&acc)[kTiles][4], int pair, int half) {
  if constexpr (kEncoded)
    return {acc[pair / 2 * 2][2 * half + pair % 2], acc[pair / 2 * 2 + 1][2 * half + pair % 2]};
  else
    return {acc[pair][2 * half], acc[pair][2 * half + 1]};
}
// The first element of a pair.
template <bool kEncoded>
__device__ inline int element_of(int pair, int lane) {
  return kEncoded ? pair / 2 * 16 + lane % 4 * 4 + pair % 2 * 2 : pair * 8 + lane % 4 * 2;
}

}  // namespace eadem::kernels::cuda
