// SPDX-License-Identifier: Apache-2.0
//
// The memory of a thread for groups of tokens of gated_delta_rule (kernels/recurrent/gated_delta_rule.h).
#pragma once

#include <cstdint>

#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/recurrent/gated_delta_rule.h"

namespace eadem::kernels::cpu {

inline constexpr int64_t kDeltaGroup = GatedDeltaRuleAttrs::kGroup;

// Groups whose rows are made at a time, before the columns of S go through all of them. On a processor with 48 KB of
// first cache 512 tokens of Qwen3-Next took 14.7 ms with 4 groups, 15.9 with 6 and 15.2 with 8 (medians of three runs).
inline constexpr int64_t kDeltaChunk = 4;

inline constexpr int64_t kMostLanes = 16;  // of a vector of f32

// Rows and products of a group's tokens for one value head. Names are those of kernels/recurrent/gated_delta_rule.h.
struct DeltaGroup {
  // Rows of key_dim elements: F_t k_t of every token; F_t q_t; D_ti k_i, t the last token that has come. So many
  // elements of each row as a vector has lanes lie side by side, then the next of each, so that whoever goes along all
  // rows has one address.
  float* rows;
  float* shares;  // [2, kDeltaGroup, kDeltaGroup]: at [0, t, i] -beta_t k_t . D_ti k_i, i < t; at [1, t, i] q_t . D_ti
                  // k_i, i <= t
  float* beta;    // [kDeltaGroup]
  float* fade;    // F_t, t the last token that has come: a row with channel_decay, else one number

  float* shares_of(int64_t which, int64_t token) const { return shares + (which * kDeltaGroup + token) * kDeltaGroup; }
};

inline constexpr int64_t kGroupRows = 3 * kDeltaGroup, kKeyRow = 0, kQueryRow = kDeltaGroup,
                         kOwnKeyRow = 2 * kDeltaGroup;

// A worker's memory: a copy of S, and the groups of a chunk.
struct DeltaGroupScratch {
  static int64_t floats_of_rows(const GatedDeltaRuleAttrs& attrs) {
    return kGroupRows * round_up(attrs.key_dim, kMostLanes);
  }
  static int64_t floats_per_group(const GatedDeltaRuleAttrs& attrs) {
    return floats_of_rows(attrs) + round_up((2 * kDeltaGroup + 1) * kDeltaGroup + attrs.decays_of_head(), 16);
  }
  static int64_t floats(const GatedDeltaRuleAttrs& attrs) {
    return round_up(attrs.key_dim * attrs.value_dim, 16) + kDeltaChunk * floats_per_group(attrs) +
           round_up(kDeltaGroup * attrs.value_dim, 16);
  }

  DeltaGroup group(int64_t i) const {
    float* rows = groups + i * floats_per_group(attrs);
    float *shares = rows + floats_of_rows(attrs), *beta = shares + 2 * kDeltaGroup * kDeltaGroup;
    return {rows, shares, beta, beta + kDeltaGroup};
  }

  DeltaGroupScratch(const GatedDeltaRuleAttrs& attrs, float* memory)
      : attrs(attrs),
        s(memory),
        groups(s + round_up(attrs.key_dim * attrs.value_dim, 16)),
        corrections(groups + kDeltaChunk * floats_per_group(attrs)) {}

  const GatedDeltaRuleAttrs& attrs;
  float* s;  // [key_dim, value_dim]
  float* groups;
  float* corrections;  // [kDeltaGroup, value_dim]: d_t of the group that is computed
};

}  // namespace eadem::kernels::cpu
