// SPDX-License-Identifier: Apache-2.0
//
// A call of attention over chosen rows of keys: those of a selection, or the compressed ones. What selected_attention,
// compressed_attention and select_blocks share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "eadem/kernels/attention/compressed_attention.h"
#include "eadem/kernels/cpu/attention/attention_call.h"

namespace eadem::kernels::cpu {

struct SelectedCall {
  Attention a;
  const int32_t* selection;  // [tokens, kv_heads, entries]; null: the compressed rows of `grid`
  int64_t entries, span;     // compressed rows: the most that a token sees, and 1
  RowGrid grid;

  // Room for the positions of a token, in whole chunks.
  int64_t most_keys() const { return round_up(entries * span, kChunk); }
};

// A token of a step.
struct SelectedToken {
  int64_t token, sequence, position;
};

struct SelectedScratch {
  int32_t* positions;       // [most_keys]
  float *q, *dy;            // [group, width or value_width]
  float *weights, *scores;  // [group, most_keys]
  float *rows, *rows_t;     // [kChunk, width or value_width], and transposed
  float* out;               // [group, width or value_width]

  static int64_t floats(const SelectedCall& c) {
    const int64_t widest = std::max(c.a.width(), c.a.value_width()), group = c.a.group();
    return round_up(c.most_keys() * (1 + 2 * group) + 3 * group * widest + 2 * kChunk * widest, kPanelWidth);
  }
  SelectedScratch(const SelectedCall& c, float* p) {
    const int64_t widest = std::max(c.a.width(), c.a.value_width()), group = c.a.group();
    const auto take = [&](int64_t n) { return std::exchange(p, p + n); };
    positions = reinterpret_cast<int32_t*>(take(c.most_keys()));
    q = take(group * widest), dy = take(group * widest), out = take(group * widest);
    weights = take(group * c.most_keys()), scores = take(group * c.most_keys());
    rows = take(kChunk * widest), rows_t = take(kChunk * widest);
  }
};

// Writes the positions that a token sees, and returns their number. Compressed rows lie at the positions of their last
// tokens, and in a cache at those of their own numbers.
inline int64_t list_positions(int32_t* positions, const SelectedCall& c, const SelectedToken& t, int64_t kv_head) {
  if (c.selection == nullptr) {
    const int64_t first = c.grid.first_row(), end = c.grid.end_row(t.position);
    for (int64_t r = first; r < end; ++r)
      positions[r - first] = static_cast<int32_t>(c.a.block_table == nullptr ? c.grid.last_position(r) : r);
    return std::max<int64_t>(0, end - first);
  }
  const int32_t* selection = c.selection + (t.token * c.a.kv_heads + kv_head) * c.entries;
  int64_t count = 0;
  for (int64_t e = 0; e < c.entries && selection[e] >= 0; ++e)
    for (int64_t j = selection[e] * c.span; j < (selection[e] + 1) * c.span && j <= t.position; ++j)
      positions[count++] = static_cast<int32_t>(j);
  return count;
}

// The most rows that a token sees of compressed keys `k`, the request's second input.
inline int64_t most_compressed_rows(const KernelRequest& r, const RowGrid& grid, KvSource source) {
  if (source == KvSource::cached) return r.bounds[Symbol::max_blocks] * r.inputs[1].fixed(2);
  return r.inputs[1].bind(r.bounds)[0] / grid.stride;
}

inline SelectedToken token_at(const Attention& a, int64_t token) {
  int64_t sequence = 0;
  while (token >= a.query_start[sequence + 1]) ++sequence;
  return {token, sequence, a.kv_length[sequence] - a.query_start[sequence + 1] + token};
}

}  // namespace eadem::kernels::cpu
