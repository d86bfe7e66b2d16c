// SPDX-License-Identifier: Apache-2.0
//
// Declarations that the kernels of attention share: a call's pointers and sizes, its division into blocks of tokens,
// and the tasks of the forward pass.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/attention/attention.h"
#include "eadem/kernels/cpu/attention/tiled_rows.h"
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
  bool on_tiles;                     // keys and values of bf16 are multiplied on tiles (tiled_rows.h)
  const int32_t* query_start;        // [sequences + 1]
  const int32_t* kv_length;          // [sequences]
  const int32_t* block_table;        // [sequences, max_blocks]; null: direct
  int64_t max_blocks, block_size;
  int64_t sequences, heads, kv_heads, head_dim, value_dim, window, chunk;
  int64_t sharing;  // query heads of all ranks that share a key head
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
  // Rows of results for tiles are an odd number of cache lines. Rows at multiples of 2 KB share a few sets of the first
  // cache: with them 512 prompt tokens of DeepSeek-V2-Lite's heads take 1.03 times as long.
  int64_t value_width() const { return padded(value_dim) + (on_tiles ? kPanelWidth : 0); }
  // Rows of results that scratch has for `rows` rows.
  int64_t stored_rows(int64_t rows) const { return on_tiles ? round_up(rows, kTiledGroup) : rows; }
  int64_t block_tokens() const { return std::max<int64_t>(1, kBlockRows / group()); }
  int64_t block_rows() const { return block_tokens() * group(); }
  // The first key that the token at `position` sees.
  int64_t first_key(int64_t position) const { return first_seen_key(window, chunk, position); }
  // The splits of keys that a block sees any of: [first_split, end_split).
  int64_t first_split(const TokenBlock& b) const { return first_key(b.position) / kSplit; }
  int64_t end_split(const TokenBlock& b) const { return ceil_div(b.position + b.end - b.begin, kSplit); }
};

// The softmax state of rows over some keys: the maximum score `most`, the sum of exp(score - most), and the sum of
// exp(score - most) * value.
struct Gathered {
  float *most, *sum;  // [rows]; a sum of 0 means that no key was seen yet
  float* out;         // [rows, width]: that of values

  static int64_t floats(int64_t rows, int64_t width) { return before_out(rows) + rows * width; }
  // The floats of the state of `rows` rows of attention `a`.
  static int64_t floats(const Attention& a, int64_t rows) { return floats(a.stored_rows(rows), a.value_width()); }
  Gathered() = default;
  Gathered(float* p, int64_t rows) : most(p), sum(p + rows), out(p + before_out(rows)) {}

 private:
  // Rows of results begin with a cache line.
  static int64_t before_out(int64_t rows) { return round_up(2 * rows, kPanelWidth); }
};

// The tasks of one instruction set and one type of keys and values. The scratch of a task has
// AttentionPlan::worker_floats.
struct AttentionRoutines {
  // Computes a block of tokens over all keys that it sees.
  void (*block)(const Attention& a, const TokenBlock& b, int64_t kv_head, float* scratch);
  // Computes a block of tokens over the splits [first, last) of keys. The states of the rows for each split are stored
  // in `gathered`, `floats` apart.
  void (*splits)(const Attention& a, const TokenBlock& b, int64_t kv_head, int64_t first, int64_t last, float* gathered,
                 int64_t floats, float* scratch);
  // Merges the states of a block's splits, which lie `floats` apart, and stores the result.
  void (*merge)(const Attention& a, const TokenBlock& b, int64_t kv_head, float* gathered, int64_t floats);
  // The same, split by split: merges the state of a later split into `all`, and stores the result.
  void (*add)(const Gathered& all, const Gathered& split, int64_t rows, int64_t width);
  void (*store)(const Attention& a, const TokenBlock& b, int64_t kv_head, const Gathered& all);
};

Attention shape_of(const AttentionAttrs& attrs);
// Sets the inputs that both passes have, except for a cache's block table, which is left to the caller.
void set_inputs(Attention& a, const KernelCall& call);

// What is settled for all steps: the sizes of `shape`, and the tasks.
struct AttentionPlan {
  Attention shape;
  AttentionRoutines routines;
  bool cached;
  int64_t worker_floats;  // of scratch; the states of splits lie behind those of all workers
  int64_t floats;         // of scratch for a step
};
// `keys`: the type of keys and values, whose rows have sizes.head_dim and sizes.value_row columns; `block_size`: of
// their cache; 0: they are given directly.
AttentionPlan attention_plan(const CpuDevice& device, const Attention& sizes, const TensorType& keys,
                             const SymbolValues& bounds, int64_t block_size);
// Computes the queries that `a` describes.
void run_attention(const AttentionPlan& plan, CpuDevice& device, const Attention& a, float* scratch);

// The kernels of the backward pass (attention_backward.cc, attention_backward_bf16.cc), and what both require.
extern const Kernel kAttentionBackward, kAttentionBackwardBf16;
Requirements backward_requirements(const KernelRequest& r);
// Computes the gradients of one sequence and one kv head. `scratch` has the bytes of a worker.
using BackwardTask = std::function<void(const Attention& a, int64_t sequence, int64_t kv_head, void* scratch)>;
// Runs `task` for all of them, then adds the gradients of sinks.
PlanPtr plan_backward(const KernelRequest& r, int64_t worker_bytes, BackwardTask task);

}  // namespace eadem::kernels::cpu
