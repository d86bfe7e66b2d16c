// SPDX-License-Identifier: Apache-2.0
//
// The selective state-space recurrence of Mamba-2. Each head h of a sequence has a state S [state, head_dim], zero
// before the first token, and each token t
//   delta = clamp(softplus(dt[t, h] + dt_bias[h]), dt_min, dt_max),   decay = exp(-exp(a_log[h]) delta)
//   S[n, :] = decay S[n, :] + delta b[t, g, n] x[t, h, :],            g = h / (heads / groups)
//   y[t, h, :] = sum_n c[t, g, n] S[n, :] + d[h] x[t, h, :]
//
//   inputs   x [tokens, heads, head_dim] f32 or bf16; dt [tokens, heads], b, c [tokens, groups, state], dtype of x;
//            dt_bias, a_log, d [heads] f32 (parameters)
//            query_start [sequences + 1] i32: tokens of sequence s are [query_start[s], query_start[s + 1])
//            cached only: state_slots [sequences] i32, distinct or negative; state [num_slots, heads, state, head_dim]
//            f32. A sequence goes on from its slot's state and leaves the new one there; one with a negative slot
//            begins with zeros and leaves nothing.
//   outputs  y [tokens, heads, head_dim], dtype of x; cached also the state (inference only: the port is an alias)
//   backward (not cached: every sequence is whole) inputs: x, dt, b, c, dt_bias, a_log, d, query_start, dy.
//            outputs: dx =, ddt =, db =, dc =, ddt_bias [heads] f32 +=, da_log [heads] f32 +=, dd [heads] f32 +=.
//
// In f32, one token after the other, so that a token's bits do not depend on how its sequence was cut into steps, on
// the other sequences or on the thread count. y starts with d x and adds the states in order. Source: Dao & Gu 2024,
// "Transformers are SSMs", section 5 and listing 1.
#pragma once

#include <limits>

namespace eadem::kernels {

struct StateSpaceScanAttrs {
  bool cached = false;
  float dt_min = 0.0f;
  float dt_max = std::numeric_limits<float>::infinity();
};

}  // namespace eadem::kernels
