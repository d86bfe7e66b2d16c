// SPDX-License-Identifier: Apache-2.0
//
// Linear attention with the gated delta rule. A sequence keeps a matrix S [key_dim, value_dim] for each value head,
// which every token fades, corrects and reads:
//   S = diag(exp(g)) S;   d = beta (v - S^T k);   S = S + k d^T;   y = S^T q
// with, for value head h of token t,
//   q, k  rows of key head h / (value_heads / key_heads) or, tiled, h mod key_heads, normalized:
//         x / sqrt(sum x^2 + eps); q also times key_dim^-1/2
//   beta  sigmoid(b[t, h])
//   g     -exp(a_log[h]) softplus(a[t, h] + dt_bias[h]), the same for every row of S; or, with channel_decay, for row i
//         -exp(a_log[h]) softplus(a[t, h key_dim + i] + dt_bias[h key_dim + i])
// S is zeros before a sequence's first token, or what the state has kept.
//
// Tokens are computed in groups of kGroup, counted from the first token of their sequence. Within a group S stays as
// it was before its first token, S0, and is made anew after its last one. With F_t the product of a group's decays up
// to its token t, and D_ti the product of those after token i up to t,
//   d_t = beta_t (v_t - S0^T (F_t k_t) - sum over i < t of (k_t . D_ti k_i) d_i)
//   y_t = S0^T (F_t q_t) + sum over i <= t of (q_t . D_ti k_i) d_i
//   S   = F S0 + sum over the group of (D_i k_i) d_i^T
// which takes 3.25 operations for each element of S and token where one token after the other takes four. A state keeps
// S0 and the tokens of its sequence's last group, where that is not whole:
//   how many tokens there are; F, a row [key_dim] with channel_decay, else one number; D_i k_i [kGroup - 1, key_dim];
//   d_i [kGroup - 1, value_dim]; S0 [key_dim, value_dim]
// each from where it begins in the attributes. What lies between them, and what belongs to no token, is not read. Zeros
// are the state before the first token.
//
//   inputs   q, k [tokens, key_heads, key_dim] f32 or bf16; v [tokens, value_heads, value_dim], dtype of q
//            a [tokens, value_heads], with channel_decay [tokens, value_heads key_dim]; b [tokens, value_heads]; dtype
//            of q
//            a_log [value_heads] f32 (parameter); dt_bias, a row of a, f32 (parameter)
//            query_start [sequences + 1] i32: tokens of sequence s are [query_start[s], query_start[s + 1])
//            cached only: state_slots [sequences] i32, distinct or negative; state [num_slots, value_heads,
//            state_floats()] f32. A sequence with a negative slot begins with zeros and leaves nothing.
//   outputs  y [tokens, value_heads, value_dim] dtype of q; cached also the state (inference only: the port is an
//            alias)
//   backward (not cached) inputs: all but the states, then dy.
//            outputs: dq =, dk =, dv =, da =, db =, da_log f32 +=, ddt_bias f32 +=.
//
// A token's bits do not depend on the steps that its sequence was cut into, nor on its neighbours: sums have one order,
// and a group one beginning. On the CPU a sum over rows of S is one chain, from the first row on.
// Source: Yang et al. 2024 (gated delta networks); Kimi Team 2025 (Kimi Linear), for the decay of channels; Bischof and
// Van Loan 1987 (the WY form of a product of such steps), for groups.
#pragma once

#include <cstdint>

namespace eadem::kernels {

struct GatedDeltaRuleAttrs {
  static constexpr int64_t kGroup = 4;  // tokens

  int64_t key_heads = 0;
  int64_t value_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  bool channel_decay = false;
  bool tiled = false;  // value heads of one key head stand key_heads apart, not side by side
  float eps = 1e-6f;
  bool cached = false;

  int64_t key_head_of(int64_t value_head) const {
    return tiled ? value_head % key_heads : value_head / (value_heads / key_heads);
  }
  int64_t decays() const { return value_heads * decays_of_head(); }
  int64_t decays_of_head() const { return channel_decay ? key_dim : 1; }

  // Where the parts of a value head's state begin, in floats, and how many it has. The parts that a step reads first
  // come first, since what follows is fetched meanwhile.
  static constexpr int64_t count_at() { return 0; }
  static constexpr int64_t fade_at() { return 1; }
  int64_t keys_at() const { return whole_lines(fade_at() + decays_of_head()); }
  int64_t corrections_at() const { return keys_at() + (kGroup - 1) * key_dim; }
  int64_t matrix_at() const { return whole_lines(corrections_at() + (kGroup - 1) * value_dim); }
  int64_t state_floats() const { return matrix_at() + whole_lines(key_dim * value_dim); }
  static constexpr int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }
};

}  // namespace eadem::kernels
