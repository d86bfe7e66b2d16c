// SPDX-License-Identifier: Apache-2.0
//
// Causal attention of packed sequences:
//   y[t, h, :] = sum_j softmax_j(scale * q[t, h, :] . k[j, g, :]) * v[j, g, :],   g = h / (heads / kv_heads)
// over the key positions j of the same sequence with j <= p and, with a window, j > p - window, or by chunks,
// floor(j / chunk) = floor(p / chunk), where p is the position of token t in its sequence. With a soft cap c, scores
// are c * tanh(scale * q . k / c) in the place of scale * q . k. With sinks, a head's number sinks[h] joins its scores
// as that of a key whose value is 0: it makes the softmax's sum larger and adds nothing to y.
//
//   inputs   q [tokens, heads, head_dim] f32 or bf16
//            k, v: direct  [tokens, kv_heads, head_dim or value_dim], the keys and values of these same tokens
//                  cached  [num_blocks, kv_heads, block_size, head_dim or value_dim] f32, bf16 or f16, or in a
//                  RowEncoding (state, written by kv_append)
//            query_start [sequences + 1] i32: tokens of sequence s are [query_start[s], query_start[s + 1])
//            kv_length   [sequences] i32: keys of sequence s, including those of its tokens in this step; a token
//                        with index i among the n of its sequence has position kv_length - n + i
//            block_table [sequences, max_blocks] i32: block that holds positions [i * block_size, …) of a sequence
//                        (cached only; absent when direct). A contiguous cache has one block per sequence.
//            v may be k itself, when the first value_dim columns of a key are its value: latent attention
//            sinks       [heads] f32, a parameter; the port is there only if the attribute says so
//   outputs  y [tokens, heads, value_dim] dtype of q; forward (direct only) also lse [tokens, heads] f32, the logarithm
//            of the sum of exp(score), that of the sink among them
//   backward inputs: q, k, v, query_start, kv_length, y, lse, sinks (if there), dy.
//            outputs: dq =, dk =, dv =, dsinks += (if there).
//
// Online softmax in f32 over chunks of kAttentionChunk keys whose borders are multiples of kAttentionChunk *positions*,
// so that a token's bits do not depend on which tokens share its step, on where its keys are kept (direct, contiguous,
// paged) as long as their dtype is the same, or on the thread count. On the CPU the chunks of every kAttentionSplit
// positions make a softmax of their own, so that splits can be computed side by side, and these are merged in order.
// On Hopper the tensor-core kernels do so too, with splits of 256 positions, and round exp(score) to bf16 before it
// meets the values; that moves y by at most 2^-8 * sum_j softmax_j |v_j|. With an int8 KV cache the CPU rounds each
// query to 8 bits as RowEncoding rounds a row, so that scores are sums of products of integers, which are exact; that
// moves a score by at most
//   scale * max |q| / 254 * sum |k|.
// With 8-bit dot products of AVX-512 it rounds each exp(score) times the scale of its value, too, to one of 65,536
// levels up to the largest of its chunk, so that the sum over a chunk's values is one of products of integers. That
// moves y, in each chunk, by at most
//   1 / 131,070 * max_j (softmax_j scale_j) * sum_j |code_j|.
// With tiles of bf16 (Isa::amx), keys and values in bf16 and head_dim and value_dim multiples of 32, the CPU multiplies
// each number of a query and each exp(score) as the sum of two bf16 numbers, if at least kTiledSharing query heads
// share a key head, or values are the first columns of rows as wide as keys. The sum is within 2^-17 of the number.
// That moves a score by at most
//   2^-17 * scale * sum |q k|
// and then y by at most 2^-17 * sum_j softmax_j |v_j| more.
// Where backward_input allows bf16 and the processor has products of bf16, the CPU's backward pass rounds q, k, v, dy,
// exp(score - lse) and the gradients of scores to bf16 before it multiplies them; sums are f32.
// Source: Milakov & Gimelshein 2018; Dao et al. 2022.
#pragma once

#include <algorithm>
#include <cstdint>

#include "eadem/core/machine/matmul_input.h"

namespace eadem::kernels {

inline constexpr int64_t kAttentionChunk = 64;
inline constexpr int64_t kAttentionSplit = 512;
// With fewer query heads for each key head one token is slower on the tiles of AMX than without them.
inline constexpr int64_t kTiledSharing = 8;

enum class KvSource : uint8_t { direct, cached };

// The first key that the query at `position` sees. It never moves back as positions grow.
constexpr int64_t first_seen_key(int64_t window, int64_t chunk, int64_t position) {
  if (window > 0) return std::max<int64_t>(0, position - window + 1);
  return chunk > 0 ? position / chunk * chunk : 0;
}

struct AttentionAttrs {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;  // of queries and keys
  float scale = 1.0f;
  int64_t window = 0;  // 0: unlimited
  KvSource source = KvSource::direct;
  int64_t value_dim = 0;  // of values and results; 0: head_dim
  float softcap = 0.0f;   // of scores; 0: none
  bool sinks = false;
  int64_t chunk = 0;                              // of positions that see each other; 0: no chunks. Not beside a window
  MatmulInput backward_input = MatmulInput::f32;  // how far the backward pass may round what it multiplies
  int64_t sharing = 0;  // query heads of all ranks together that share a key head; 0: heads / kv_heads

  bool operator==(const AttentionAttrs&) const = default;
  int64_t first_key(int64_t position) const { return first_seen_key(window, chunk, position); }
  int64_t values() const { return value_dim == 0 ? head_dim : value_dim; }
  int64_t sharing_heads() const { return sharing == 0 ? heads / kv_heads : sharing; }
};

}  // namespace eadem::kernels
