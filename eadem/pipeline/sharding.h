// SPDX-License-Identifier: Apache-2.0
//
// Step 3: tensor parallelism. Parameters are divided along the axis their module named, and an all_reduce is inserted
// where a partial sum meets an op that needs the whole value. On one rank nothing changes.
// Source: Shoeybi et al. 2019 (column- and row-parallel products).
#pragma once

#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

// Requires inferred types; leaves them inferred. Throws InvalidArgument when a dimension does not divide by
// `num_ranks`.
void shard(Graph& graph, int num_ranks);

}  // namespace eadem::pipeline
