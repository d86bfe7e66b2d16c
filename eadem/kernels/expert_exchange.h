// SPDX-License-Identifier: Apache-2.0
//
// Experts that the ranks of one axis of the mesh divide: rank r has part_of(experts, ranks, r) of them. Between
// permute and grouped_linear, rows go to the rank of their expert; between grouped_linear and unpermute they come back:
//
//   rows, offsets       = expert_order(experts)
//   y, own, counts      = expert_dispatch(permute(x, rows), offsets)
//   made                = grouped_linear(… y …, own)
//   back                = expert_combine(made, offsets, counts)
//   unpermute(back, rows, weights)
//
// So a token's own rank adds up what the experts made of it, in the order of the router's choice, as on one rank: no
// sum is divided, and every bit is that of one rank.
//
// With `same_tokens` every rank has the same rows. Dispatch takes those of this rank's experts, combine gathers the
// rows of all ranks. Otherwise each rank has tokens of its own, and both are an all_to_all of as many rows as the
// routers chose; dispatch first exchanges their counts. No token is ever dropped: there is room for every row that may
// come.
//
// expert_dispatch
//   inputs   x [top_k * tokens, hidden] of any plain dtype, in the order of experts; offsets [experts + 1] i32, as from
//            expert_order.
//   outputs  y [places, hidden], dtype of x; own [own experts + 1] i32: the rows of this rank's expert e stand at
//            [own[e], own[e + 1]), those of rank 0 first, and those of one rank in the order of its x. Rows from own's
//            last number on are not written. counts [ranks, most] i32: how many rows of this rank's expert e came from
//            each rank, 0 for e from the number of own experts on; `most` is that of the rank with the most.
//            places: same_tokens: min(top_k, own experts) * tokens; else ranks * min(top_k, own experts) * rank_tokens.
//   backward inputs: offsets, counts, dy.  outputs: dx, by expert_combine of dy. Not with same_tokens.
//
// expert_combine
//   inputs   x [places, hidden]; offsets; counts.
//   outputs  y [top_k * tokens, hidden]: the rows in the places that they were dispatched from. Rows of no expert,
//            behind offsets[experts], are 0, and so is their dx of dispatch.
//   backward inputs: offsets, counts, dy.  outputs: dx, by expert_dispatch of dy. Not with same_tokens.
#pragma once

#include <algorithm>
#include <cstdint>

#include "eadem/core/mesh/mesh_axis.h"
#include "eadem/core/symbol.h"

namespace eadem::kernels {

// The most tokens that a rank of the axis has in a step. A program in which ranks have tokens of their own binds it to
// the same number on all of them.
inline Symbol rank_tokens() { return Symbol::named("rank_tokens"); }

struct ExpertExchangeAttrs {
  MeshAxis over = MeshAxis::ep;
  int ranks = 1;
  int rank = 0;
  int64_t experts = 1;  // of all ranks
  int64_t top_k = 1;
  bool same_tokens = false;

  PartRange experts_of(int other) const { return part_of(experts, ranks, other); }
  PartRange own_experts() const { return experts_of(rank); }
  int64_t most_experts() const { return experts_of(0).size; }
  // Rows that a token may have on this rank.
  int64_t most_rows() const { return std::min(top_k, own_experts().size); }
};

}  // namespace eadem::kernels
