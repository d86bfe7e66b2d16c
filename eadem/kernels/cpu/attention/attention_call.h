// SPDX-License-Identifier: Apache-2.0
//
// Declarations that the forward and the backward kernels of attention share: a call's pointers and sizes, and its
// division into blocks of tokens.
#pragma once

#include <algorithm>
#include <cstdint>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/attention/attention.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/support.h"

namespace eadem::kernels::cpu {

inline constexpr int64_t kChunk = kAttentionChunk, kSplit = kAttentionSplit;
static_assert(kChunk % kPanelWidth == 0 && kSplit % kChunk == 0);
// Rows of a task, a multiple of every tile's rows. A chunk is widened once for all of them. Prefill of 512 tokens after
// 7680 on Llama-3.2-1B takes 1.09 times as long with 96 rows, and 288 rows gain less than 2 %.
inline constexpr int64_t kBlockRows = 192;
// The number of products of two int8 codes whose sum stays below 2^24, and is therefore exact in f32.
inline constexpr int64_t kMostCodes = (1 << 24) / (127 * 127);

// Ports; see kernels/attention/attention.h.
enum AttentionInput { kQ, kK, kV, kQueryStart, kKvLength, kBlockTable, kSinks };
// With sinks, these stand before dy, which is the last input.
enum AttentionBackwardInput { kSavedY = 5, kSavedLse, kSavedSinks };

// The tokens [begin, end) of a sequence, counted within its tokens of this step, and the position of the first one.
struct TokenBlock {
  int64_t sequence, begin, end, position;
};

struct Attention {
  const float* q;  // [tokens, heads, head_dim]
  // direct [tokens, kv_heads, head_dim or value_row], cached [num_blocks, kv_heads, block_size, head_dim or value_row]
  const void *k, *v;
  int64_t value_row;                 // columns of v, of which the first value_dim are values
  const RowEncoding* kv_encoding;    // encoding of a cache; null: plain
  const float *k_scales, *v_scales;  // encoded: [num_blocks, kv_heads, block_size]
  bool byte_dots;                    // queries are rounded, and the processor has 8-bit dot products
  const int32_t* query_start;        // [sequences + 1]
  const int32_t* kv_length;          // [sequences]
  const int32_t* block_table;        // [sequences, max_blocks]; null: direct
  int64_t max_blocks, block_size;
  int64_t sequences, heads, kv_heads, head_dim, value_dim, window, chunk;
  float scale, softcap;
  const float* sinks;  // [heads] or null
  float* y;            // [tokens, heads, value_dim]
  float* lse;          // [tokens, heads] or null

  // Backward only.
  const float *out, *saved_lse, *dy;
  float *dq, *dk, *dv, *dsinks;

  bool rounds_queries() const { return kv_encoding != nullptr && kv_encoding->code() == RowEncoding::Code::int8; }
  int64_t group() const { return heads / kv_heads; }
  // Rows in scratch are whole panels: those of queries and keys, and those of values and results.
  static int64_t padded(int64_t dim) { return (dim + kPanelWidth - 1) / kPanelWidth * kPanelWidth; }
  int64_t width() const { return padded(head_dim); }
  int64_t value_width() const { return padded(value_dim); }
  int64_t block_tokens() const { return std::max<int64_t>(1, kBlockRows / group()); }
  int64_t block_rows() const { return block_tokens() * group(); }
  // The first key that the token at `position` sees.
  int64_t first_key(int64_t position) const { return first_seen_key(window, chunk, position); }
  // The splits of keys that a block sees any of: [first_split, end_split).
  int64_t first_split(const TokenBlock& b) const { return first_key(b.position) / kSplit; }
  int64_t end_split(const TokenBlock& b) const { return ceil_div(b.position + b.end - b.begin, kSplit); }
};

Attention shape_of(const AttentionAttrs& attrs);
// Sets the inputs that both passes have, except for a cache's block table, which is left to the caller.
void set_inputs(Attention& a, const KernelCall& call);

extern const Kernel kAttentionBackward;  // attention_backward.cc

}  // namespace eadem::kernels::cpu
