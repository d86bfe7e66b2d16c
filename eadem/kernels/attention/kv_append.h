// SPDX-License-Identifier: Apache-2.0
//
// Writes the keys and values of new tokens into the cache: position slots[t] % block_size of block slots[t] /
// block_size. A token whose slot is negative is written nowhere: rows that fill up a step of fixed size have such
// slots.
//
//   inputs   k, v [tokens, kv_heads, width] f32 or bf16, each with a width of its own; slots [tokens] i64, distinct or
//            negative;
//            cache_k, cache_v [num_blocks, kv_heads, block_size, width] f32, bf16 or f16, or in a RowEncoding (state)
//   outputs  the same caches (inference only: the state ports are aliases), rounded once to the cache dtype, or as the
//            encoding rounds rows of a head.
//
// latent_append: rows in which keys and values lie together (latent attention), into one cache.
//   inputs   rows [tokens, kv_heads, width] f32 or bf16; slots [tokens] i64; cache [num_blocks, kv_heads, block_size,
//            width], as above.   outputs: the cache.
//   With a stride, blocks of block_size positions have one row for so many tokens: a token at slot s whose position in
//   its block, s % block_size, is the last of `stride` ones is written to row s % block_size / stride of it, and the
//   others nowhere. The cache is [num_blocks, kv_heads, ceil(block_size / stride), width].
//
// rope_kv_append, the fusion: k is rotated on the way in (see rope.h).
//   inputs   k, table [tokens, rotary_dim] f32, v, slots, cache_k, cache_v.   outputs: the caches.
//
// rope_qk_append, the fusion: the queries of the same tokens are rotated by the same table, too.
//   inputs   q [tokens, heads, width of k] of the dtype of k, then those of rope_kv_append with `table` before k.
//   outputs  y like q; the caches.
#pragma once

#include "eadem/kernels/attention/rope.h"

namespace eadem::kernels {

struct LatentAppendAttrs {
  int64_t stride = 1;
  int64_t block_size = 0;  // with a stride
};

// The attributes of both fusions, rope_kv_append and rope_qk_append.
struct RopeKvAppendAttrs {
  RopeAttrs rope;
};

}  // namespace eadem::kernels
