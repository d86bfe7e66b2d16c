// SPDX-License-Identifier: Apache-2.0
//
// Attention over keys that are selected for each token, and a selection by an indexer.
//
// select_keys: the positions whose index scores are largest,
//   score[t, j] = sum_h weights[t, h] * max(0, scale * q[t, h, :] . k[j, :])
// over the key positions j of the same sequence with j <= p, where p is the position of token t. Of equal scores the
// first position is taken. With a stride, keys are compressed rows of so many tokens, which lie as those of
// kernels/attention/compressed_attention.h do, and j are the numbers of rows with (j + 1) * stride <= p + 1.
//   inputs   q [tokens, heads, head_dim] f32 or bf16
//            k: direct  [tokens, 1, head_dim], the index keys of these same tokens
//               cached  [num_blocks, 1, block_size, head_dim] f32, bf16 or f16 (state, written by latent_append), or
//                       rows in the place of block_size
//            weights [tokens, heads] f32
//            query_start, kv_length, block_table: as in kernels/attention/attention.h
//   outputs  selection [tokens, 1, top_k] i32: positions in ascending order, then -1 where fewer are visible
// There is no gradient: what makes q, k and weights is not trained through a choice.
//
// selected_attention: attention of kernels/attention/attention.h over the positions of a selection alone,
//   y[t, h, :] = sum_j softmax_j(scale * q[t, h, :] . k[j, g, :]) * v[j, g, :],   g = h / (heads / kv_heads),
//   j over the positions [span * e, span * (e + 1)) of the entries e >= 0 of selection[t, g, :], as far as j <= p.
//   inputs   q, k, v: as in kernels/attention/attention.h; cached k and v may be in a RowEncoding, v may be k itself
//            selection [tokens, kv_heads, entries] i32: ascending without repetition, the first one visible, then -1.
//            Where it is empty, y and lse are 0
//            query_start, kv_length, block_table: as in kernels/attention/attention.h
//   outputs  y [tokens, heads, value_dim] dtype of q; forward (direct only) also lse [tokens, heads] f32
//   backward inputs: q, k, v, selection, query_start, kv_length, y, lse, dy.
//            outputs: dq =, dk =, dv =.
//
// A token's bits depend on its query, its selection and the keys and values there: not on the other tokens of its
// step, on where keys are kept, or on the thread count.
// Source: DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.1; transformers, models/deepseek_v32.
#pragma once

#include <cstdint>

#include "eadem/kernels/attention/attention.h"

namespace eadem::kernels {

struct SelectKeysAttrs {
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t top_k = 0;
  float scale = 1.0f;
  KvSource source = KvSource::direct;
  int64_t stride = 1;  // tokens of a key
};

struct SelectedAttentionAttrs {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;  // of queries and keys
  int64_t value_dim = 0;
  float scale = 1.0f;
  int64_t span = 1;  // positions of an entry of the selection
  KvSource source = KvSource::direct;
};

}  // namespace eadem::kernels
