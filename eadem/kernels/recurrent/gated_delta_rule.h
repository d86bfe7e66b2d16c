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
//   inputs   q, k [tokens, key_heads, key_dim] f32 or bf16; v [tokens, value_heads, value_dim], dtype of q
//            a [tokens, value_heads], with channel_decay [tokens, value_heads key_dim]; b [tokens, value_heads]; dtype
//            of q
//            a_log [value_heads] f32 (parameter); dt_bias, a row of a, f32 (parameter)
//            query_start [sequences + 1] i32: tokens of sequence s are [query_start[s], query_start[s + 1])
//            cached only: state_slots [sequences] i32, distinct or negative; state [num_slots, value_heads, key_dim,
//            value_dim] f32. A sequence with a negative slot begins with zeros and leaves nothing.
//   outputs  y [tokens, value_heads, value_dim] dtype of q; cached also the state (inference only: the port is an
//   alias) backward (not cached) inputs: all but the states, then dy.
//            outputs: dq =, dk =, dv =, da =, db =, da_log f32 +=, ddt_bias f32 +=.
//
// One recurrence in f32 for any number of tokens: a token's bits do not depend on the steps that its sequence was cut
// into, nor on its neighbours. On the CPU the sums over rows of S are two chains, of even and of odd rows, for S^T k,
// and one for S^T q.
// Source: Yang et al. 2024 (gated delta networks); Kimi Team 2025 (Kimi Linear), for the decay of channels.
#pragma once

#include <cstdint>

namespace eadem::kernels {

struct GatedDeltaRuleAttrs {
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
  int64_t decays() const { return value_heads * (channel_decay ? key_dim : 1); }
};

}  // namespace eadem::kernels
