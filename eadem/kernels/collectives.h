// SPDX-License-Identifier: Apache-2.0
//
// Collectives over the ranks of one axis of the mesh. x and y are f32 or bf16 (all_gather and broadcast: any plain
// dtype) and contiguous; a rank's part of a dimension is part_of(whole, ranks, rank), so parts may differ by one.
//
//   all_reduce      y := sum of x over the ranks, in rank order and rounded once; y like x (may alias x)
//   all_gather      y := the parts x of all ranks, joined along dimension `dim`; y[dim] = whole.
//                   backward inputs: dy, the same on every rank.  outputs: dx, this rank's part of it; nothing is sent
//   reduce_scatter  y := this rank's part along `dim` of the sum of x over the ranks; x[dim] = whole
//   all_to_all      x has a part along `dim` and all of `other_dim`; y has all of `dim` and a part along `other_dim`.
//                   Parts must be of one size
//   broadcast       y := x of rank `peer` (may alias x)
//   send            x goes to rank `peer`; no outputs
//   recv            y comes from rank `peer`; no inputs
//
// On one rank all but send and recv are the identity. The state form of all_reduce changes its input in place.
#pragma once

#include <cstdint>

#include "eadem/core/mesh/mesh_axis.h"

namespace eadem::kernels {

struct CollectiveAttrs {
  MeshAxis over = MeshAxis::tp;
  int ranks = 1;
  int rank = 0;
  int dim = 0;
  int other_dim = 0;
  int64_t whole = 0;  // extent of `dim` over all ranks
  int peer = 0;
};

}  // namespace eadem::kernels
