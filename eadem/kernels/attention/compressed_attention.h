// SPDX-License-Identifier: Apache-2.0
//
// Native sparse attention. A token attends three times, each time to keys of its own: to compressed keys, to the keys
// of selected blocks and to those of a window, and adds the results under gates. The ops are
//   compress_keys         keys, or values, to compressed ones
//   compressed_attention  attention over the compressed keys
//   select_blocks         the blocks that a token attends to, by its weights over the compressed keys
//   selected_attention    attention over these blocks (kernels/attention/selected_attention.h; its span is that of a
//   block) attention             attention over a window (kernels/attention/attention.h) gate_rows, add        the
//   gated sum (kernels/experts.h)
//
// Compressed row r of a sequence is made of the `length` positions that end with position (r + 1) * stride - 1; length
// is a multiple of stride. So it is known from its last token on, and the first row is length / stride - 1. It depends
// on no later token: blocks of a cache that sequences have in common hold the same rows for all of them. A row lies
//   direct  [tokens, kv_heads, width]: at its last token. The other tokens have rows of zeros, which nobody reads.
//   cached  [num_blocks, kv_heads, rows, width], rows = ceil(block_size / stride): at row
//           (position % block_size) / stride of the block of its last token. A paged cache has blocks of a multiple of
//           stride positions; a contiguous one has one block per sequence.
// The token at position p sees the rows whose last token is no later: r < (p + 1) / stride, rounded down.
//
// compress_keys: z[r, g, :] = sum over i < length of w[g, i] * (x[p + 1 - length + i, g, :] + e[g, i, :]), p the last
// position of row r.
//   inputs   x: direct [tokens, kv_heads, width] f32 or bf16
//               cached [num_blocks, kv_heads, block_size, width] f32, bf16 or f16, or in a RowEncoding (state)
//            weight [kv_heads, length] f32 (parameter, optional: each is 1 / length)
//            position [kv_heads, length, width] f32 (parameter, optional: 0), e: what tells the places in a block apart
//            query_start, kv_length, block_table (of x): as in kernels/attention/attention.h
//            cached only: slots [tokens] i64, where the step's tokens lie in the cache of z, as in
//            kernels/attention/kv_append.h; rows [num_blocks, kv_heads, rows, width] f32, bf16 or f16 (state)
//   outputs  direct: z [tokens, kv_heads, width] dtype of x. cached: the state `rows`, with the rows that end in this
//            step, but for those whose last token has a negative slot
//   backward (direct only) inputs: x, weight, position, query_start, kv_length, dz.
//            outputs: dx =, dweight +=, dposition += (of those that are there).
//
// compressed_attention: selected_attention over the rows that a token sees. Where it sees none, y and lse are 0.
//   inputs   q [tokens, heads, head_dim] f32 or bf16; k, v: compressed rows, direct or cached, of head_dim and of
//            value_dim columns, stored alike; query_start, kv_length, block_table (of the rows): as in
//            kernels/attention/attention.h
//   outputs  y [tokens, heads, value_dim] dtype of q; forward (direct only) also lse [tokens, heads] f32
//   backward inputs: q, k, v, query_start, kv_length, y, lse, dy.  outputs: dq =, dk =, dv =.
//
// select_blocks: the `top_n` most important blocks of `span` positions, a multiple of stride, for each token and head
// of keys. A block weighs
//   sum over r of (positions that row r and the block share) / stride * sum over heads h of g of softmax_r(scale * q_h
//   . k_r)
// over the rows that the token sees. The first `first_blocks` and the last `local_blocks` blocks that a token sees, its
// own among them, come before all others. Of equals the earlier block is taken.
//   inputs   q, k, query_start, kv_length, block_table: as in compressed_attention
//   outputs  selection [tokens, kv_heads, top_n] i32: blocks in ascending order, then -1 where the token sees fewer
// There is no gradient through a choice.
//
// A token's bits depend on its query and on the keys and values of its sequence up to itself: not on the other tokens
// of its step, on where keys are kept, or on the thread count. Source: Yuan et al. 2025 (arXiv 2502.11089),
// section 3.3. There a network of its own makes a compressed key of a block; here it is a weighted sum with a position
// embedding.
#pragma once

#include <cstdint>

#include "eadem/kernels/attention/attention.h"

namespace eadem::kernels {

// How positions make compressed rows.
struct RowGrid {
  int64_t length = 0;  // positions of a row, a multiple of stride
  int64_t stride = 0;  // from a row to the next

  int64_t first_row() const { return length / stride - 1; }
  // One behind the last row that the token at `position` sees.
  int64_t end_row(int64_t position) const { return (position + 1) / stride; }
  int64_t last_position(int64_t row) const { return (row + 1) * stride - 1; }
  bool ends_row(int64_t position) const { return (position + 1) % stride == 0 && position + 1 >= length; }
};

struct CompressKeysAttrs {
  int64_t heads = 0;  // of keys
  int64_t width = 0;
  RowGrid grid;
  KvSource source = KvSource::direct;
};

struct CompressedAttentionAttrs {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;  // of queries and keys
  int64_t value_dim = 0;
  float scale = 1.0f;
  RowGrid grid;
  KvSource source = KvSource::direct;
};

struct SelectBlocksAttrs {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  float scale = 1.0f;
  RowGrid grid;
  int64_t span = 0;   // positions of a block
  int64_t top_n = 0;  // blocks, those that come first among them
  int64_t first_blocks = 1;
  int64_t local_blocks = 2;
  KvSource source = KvSource::direct;
};

}  // namespace eadem::kernels
