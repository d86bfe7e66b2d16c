// SPDX-License-Identifier: Apache-2.0
//
// Attention over a window of keys and, in the same softmax, over pooled rows of all tokens. There is one head of keys,
// which are their own values.
//
// Pooled row r of a sequence is made of window r, the positions [r * stride, (r + 1) * stride), and with two parts of
// the window before it, too. It is known from its last token on: the token at position p sees the rows r with
// (r + 1) * stride <= p + 1. A row lies
//   direct  [tokens, 1, width]: at its last token. The other tokens' rows are 0, and nobody reads them.
//   cached  [num_blocks, 1, rows, width], rows = ceil(block_size / stride): at row (position % block_size) / stride of
//           the block of its last token (latent_append in kernels/attention/kv_append.h writes it there). A paged cache
//           has blocks of a multiple of stride positions; a contiguous one has one block per sequence.
//
// pool_keys: z[t, 0, d] = sum over i of softmax_i(gate[j, c + d] + e[j % stride, c + d]) * x[j, c + d], where t is the
//   last token of a row, and i goes over the parts, the earlier window first, and the positions j of their windows, c
//   being the part's first column. Row 0 has no window before it. For other tokens z is 0.
//   inputs   x, gate: direct [tokens, 1, parts * width] f32 or bf16
//                     cached [num_blocks, 1, block_size, parts * width] f32, bf16 or f16 (states)
//            position [stride, parts * width] f32 (parameter), e
//            query_start, kv_length, block_table: as in kernels/attention/attention.h
//            cached only: slots [tokens] i64, where the step's tokens lie, as in kernels/attention/kv_append.h; z of a
//            token with a negative one is 0
//   outputs  z [tokens, 1, width]: direct in the dtype of x, cached in f32
//   backward (direct only) inputs: x, gate, position, query_start, kv_length, z, dz.
//            outputs: dx =, dgate =, dposition +=; the sums over windows in order.
//
// pooled_attention: y[t, h, :] = sum over j of softmax_j(scale * q[t, h, :] . k_j) * k_j, where the keys k_j are, in
//   this order, those of the positions max(0, p - window + 1) to p and then the rows that the token sees, or those of
//   them that its selection names; and the number sinks[h] joins the scores of head h as that of a key of zeros.
//   inputs   q [tokens, heads, width] f32 or bf16
//            k: direct [tokens, 1, width]; cached [num_blocks, 1, block_size, width] f32, bf16 or f16, or in a
//               RowEncoding (state)
//            rows: as above; cached f32, bf16 or f16 (state)
//            sinks [heads] f32 (parameter)
//            query_start, kv_length, block_table (of k): as in kernels/attention/attention.h
//            cached only: rows_table [sequences, max_blocks] i32, the block table of rows
//            with `selected` > 0: selection [tokens, 1, selected] i32: numbers of rows, ascending, then -1
//   outputs  y [tokens, heads, width] dtype of q; forward (direct only) also lse [tokens, heads] f32, the logarithm of
//            the sum of exp(score), the sink among them
//   backward inputs: q, k, rows, sinks, query_start, kv_length, [selection,] y, lse, dy.
//            outputs: dq =, dk =, drows =, dsinks +=.
//
// A token's bits depend on its query and on the keys and rows that it sees: not on the other tokens of its step, on
// where keys are kept, as long as their dtype is the same, or on the thread count.
// Source: DeepSeek-AI 2026 (DeepSeek-V4), section 2.3; transformers, models/deepseek_v4.
#pragma once

#include <cstdint>

#include "eadem/kernels/attention/attention.h"

namespace eadem::kernels {

struct PoolKeysAttrs {
  int64_t width = 0;
  int64_t stride = 0;
  int64_t parts = 1;  // 1 or 2
  KvSource source = KvSource::direct;

  int64_t columns() const { return parts * width; }
  // The positions that make a row.
  int64_t length() const { return parts * stride; }
  bool ends_row(int64_t position) const { return (position + 1) % stride == 0; }
};

struct PooledAttentionAttrs {
  int64_t heads = 0;
  int64_t width = 0;
  float scale = 1.0f;
  int64_t window = 0;
  int64_t stride = 0;    // of the rows
  int64_t selected = 0;  // rows of a token's selection; 0: it sees all
  KvSource source = KvSource::direct;

  int64_t first_key(int64_t position) const { return first_seen_key(window, 0, position); }
  // The number of rows before the end of a token at `position`.
  int64_t rows_seen(int64_t position) const { return (position + 1) / stride; }
};

}  // namespace eadem::kernels
