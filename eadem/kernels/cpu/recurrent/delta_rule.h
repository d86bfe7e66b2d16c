// SPDX-License-Identifier: Apache-2.0
//
// One call of gated_delta_rule (kernels/recurrent/gated_delta_rule.h), as its routines see it.
#pragma once

#include <cstdint>

#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/recurrent/gated_delta_rule.h"

namespace eadem::kernels::cpu {

// Tokens whose rows are normalized at a time, before the columns of S go through all of them.
inline constexpr int64_t kDeltaChunk = 32;

// From so many tokens of a sequence on, copying S there and back costs less than it saves.
inline constexpr int64_t kDeltaTokensInBlocks = 8;
static_assert(kDeltaTokensInBlocks <= kDeltaChunk);

struct DeltaRule {
  GatedDeltaRuleAttrs attrs;
  const float* q;              // [tokens, key_heads, key_dim]
  const float* k;              // likewise
  const float* v;              // [tokens, value_heads, value_dim]
  const float* a;              // [tokens, decays]
  const float* b;              // [tokens, value_heads]
  const float* a_log;          // [value_heads]
  const float* dt_bias;        // [decays]
  const int32_t* query_start;  // [sequences + 1]
  int64_t sequences;
  const int32_t* slots = nullptr;  // [sequences] or null
  float* state = nullptr;          // [num_slots, value_heads, key_dim, value_dim] or null
  float* y = nullptr;              // [tokens, value_heads, value_dim]
  int64_t first_cache = 0;         // bytes of the first-level cache, as far as known

  int64_t state_size() const { return attrs.key_dim * attrs.value_dim; }
  // The offset of a value head's rows of v, and of those of its key head.
  int64_t value_row(int64_t token, int64_t head) const { return (token * attrs.value_heads + head) * attrs.value_dim; }
  int64_t key_row(int64_t token, int64_t head) const {
    return (token * attrs.key_heads + attrs.key_head_of(head)) * attrs.key_dim;
  }
};

// The rows of one token for one value head, in scratch; a row has key_dim elements.
struct DeltaTokenRows {
  float* q;      // normalized
  float* k;      // normalized
  float* faded;  // decay * k
  float* decay;  // exp(g): a row with channel_decay, else one number
  float* beta;   // one number
  int64_t decay_step;

  float decay_of_row(int64_t i) const { return decay[i * decay_step]; }
};

// Rows for tokens 0, 1, … of a chunk, one after another in scratch, on whole lines where `begin` is.
struct DeltaChunkRows {
  static int64_t floats_per_token(const GatedDeltaRuleAttrs& attrs) {
    return round_up(attrs.key_dim * (attrs.channel_decay ? 4 : 3) + 2, 16);
  }
  DeltaTokenRows at(int64_t i) const {
    const int64_t n = attrs.key_dim, decays = attrs.channel_decay ? n : 1;
    float* row = begin + i * floats_per_token(attrs);
    return {row, row + n, row + 2 * n, row + 3 * n, row + 3 * n + decays, attrs.channel_decay ? 1 : 0};
  }
  float* begin;
  GatedDeltaRuleAttrs attrs;
};

struct DeltaRuleGradient {
  DeltaRule forward;
  const float* dy;                                    // [tokens, value_heads, value_dim]
  float *dq, *dk, *dv, *da, *db, *da_log, *ddt_bias;  // of the shapes of their inputs, or null
  int64_t chunk;                                      // tokens between the states that are kept
};

}  // namespace eadem::kernels::cpu
