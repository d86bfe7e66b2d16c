// SPDX-License-Identifier: Apache-2.0
//
// Two ops around the products of virtual shards (core/mesh/virtual_shards.h), which give a sum over columns the same
// bits for each number of ranks that divides them.
//
// cut_columns: y0, y1, … = neighbouring ranges of the columns of x
//   inputs   x [tokens, columns] f32 or bf16.
//   outputs  y0 [tokens, widths[0]], y1 [tokens, widths[1]], …, dtype of x; the widths add up to columns.
//
// shard_sum: y = the sum over the shards of all ranks, in the order of `tree`, in f32 and rounded once
//   inputs   partial0, partial1, … [tokens, hidden] f32: the products of this rank's shards, in order.
//   outputs  y [tokens, hidden] in out_dtype.
//   A rank adds up what the tree adds up by itself among its shards, sends that to the others, and adds up what all of
//   them have, which every rank does alike. With one rank nothing is sent.
//
// Neither has a backward pass.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "eadem/core/dtype.h"
#include "eadem/core/mesh/virtual_shards.h"

namespace eadem::kernels {

struct CutColumnsAttrs {
  std::vector<int64_t> widths;
};

struct ShardSumAttrs {
  MeshAxis over = MeshAxis::tp;
  int rank = 0;                    // this one
  std::vector<ShardRange> owners;  // the shards of each rank
  SumTree tree;
  DType out_dtype = DType::f32;

  int ranks() const { return static_cast<int>(owners.size()); }
  ShardRange own() const { return owners[static_cast<size_t>(rank)]; }
  // The sums that a rank sends.
  std::vector<ShardRange> sums_of(int of_rank) const { return tree.sums_within(owners[static_cast<size_t>(of_rank)]); }
  // The most of any rank: as many travel from each, because the parts of a gathering are equal.
  int64_t most_sums() const {
    size_t most = 0;
    for (int r = 0; r < ranks(); ++r) most = std::max(most, sums_of(r).size());
    return static_cast<int64_t>(most);
  }
};

}  // namespace eadem::kernels
