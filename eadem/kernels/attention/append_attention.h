// SPDX-License-Identifier: Apache-2.0
//
// rope_append_attention, the fusion: queries and keys of a step's tokens are rotated by the same table, the keys and
// values are appended to the cache, and the queries attend to it (rope.h, kv_append.h, attention.h).
//
//   inputs   q [tokens, heads, head_dim], table [tokens, rotary_dim] f32, k, v [tokens, kv_heads, head_dim] of the
//   dtype
//            of q, slots, cache_k, cache_v (state), as of rope_qk_append; query_start, kv_length, block_table, as of
//            attention, which is cached and has no sinks. The slot of a token is that of its position in the blocks of
//            its sequence, or negative.
//   outputs  y like q; the caches.
//
// rope_append_attention_quantize: y is quantize(y [tokens, heads * head_dim]), encoded as round_to says (quantize.h).
#pragma once

#include "eadem/core/encoding.h"
#include "eadem/kernels/attention/attention.h"
#include "eadem/kernels/attention/rope.h"

namespace eadem::kernels {

struct RopeAppendAttentionAttrs {
  RopeAttrs rope;
  AttentionAttrs attention;
  const Encoding* round_to = nullptr;

  bool operator==(const RopeAppendAttentionAttrs&) const = default;
};

}  // namespace eadem::kernels
