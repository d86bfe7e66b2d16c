// SPDX-License-Identifier: Apache-2.0
//
// One call of gated_delta_rule (kernels/recurrent/gated_delta_rule.h), as its routines see it.
#pragma once

#include <cstdint>

#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/recurrent/gated_delta_rule.h"

namespace eadem::kernels::cpu {

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
  float* state = nullptr;          // [num_slots, value_heads, state_floats] or null
  float* y = nullptr;              // [tokens, value_heads, value_dim]

  // The offset of a value head's rows of v, and of those of its key head.
  int64_t value_row(int64_t token, int64_t head) const { return (token * attrs.value_heads + head) * attrs.value_dim; }
  int64_t key_row(int64_t token, int64_t head) const {
    return (token * attrs.key_heads + attrs.key_head_of(head)) * attrs.key_dim;
  }
};

struct DeltaRuleGradient {
  DeltaRule forward;
  const float* dy;                                    // [tokens, value_heads, value_dim]
  float *dq, *dk, *dv, *da, *db, *da_log, *ddt_bias;  // of the shapes of their inputs, or null
  int64_t chunk;                                      // tokens between the states that are kept
};

}  // namespace eadem::kernels::cpu
