// SPDX-License-Identifier: Apache-2.0
//
// y[t, i, :] = x[t, head(i), :] with head(i) = (first_query + i * run) / group: the key-value heads that a rank's query
// heads read, where key-value heads do not divide between the ranks. Each serves `run` consecutive query heads of the
// rank, and `group` query heads of the whole model.
//
//   inputs   x [tokens, heads, head_dim] f32 or bf16
//   outputs  y [tokens, own_heads, head_dim] like x
//   backward inputs: dy.  outputs: dx, the sum of the dy of each head's copies on this rank, in order; 0 without one
#pragma once

#include <cstdint>

namespace eadem::kernels {

struct SelectHeadsAttrs {
  int64_t heads = 0;        // of x
  int64_t own_heads = 0;    // of y
  int64_t first_query = 0;  // first query head of this rank
  int64_t run = 1;
  int64_t group = 1;
  int64_t head(int64_t i) const { return (first_query + i * run) / group; }
};

}  // namespace eadem::kernels
