// SPDX-License-Identifier: Apache-2.0
//
// Step 2: tensor parallelism. Parameters are divided along the axis their module named, types are inferred from the
// parts (modules build with this rank's heads, so the whole would not fit), and an all_reduce is inserted where a
// partial sum meets an op that needs the whole value. On one rank this is type inference alone. Source: Shoeybi et al.
// 2019 (column- and row-parallel products).
#pragma once

#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

// Leaves types inferred. Throws InvalidArgument when a dimension does not divide by
// `num_ranks`.
void shard(Graph& graph, int num_ranks);

}  // namespace eadem::pipeline
