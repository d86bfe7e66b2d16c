// SPDX-License-Identifier: Apache-2.0
//
// Step 2: the ranks of a mesh. Parameters are divided over tp along the axis their module named, types are inferred
// from the parts (modules build with this rank's heads, so the whole would not fit), and where an edge's sharding is
// not what its consumer wants (Op::wanted_sharding) a collective is inserted:
//
//   partial    -> replicated   all_reduce          sharded(a) -> replicated   all_gather
//   partial    -> sharded(a)   reduce_scatter      sharded(a) -> sharded(b)   all_to_all
//
// On one rank this is type inference alone. Source: Shoeybi et al. 2019 (column- and row-parallel products).
//
// Over dp every rank has rows of its own, and symbols count this rank's: activations need no division of types, and
// the gradients of parameters are partial sums. Over ep parameters of experts are divided along their first axis, and
// rows between the ops that the module of experts puts around them (ops/parallel/expert_exchange.h); all else is as
// over dp, or the same on every rank. Over pp a graph is cut into stages (stages.h).
#pragma once

#include "eadem/core/mesh/mesh.h"
#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

// Leaves types inferred. `whole_outputs`: outputs of the graph that every rank gets whole; the others stay as they are,
// partial sums apart, which are summed. Throws InvalidArgument when a dimension is smaller than the number of ranks.
void shard(Graph& graph, const Mesh& mesh, std::span<const std::string> whole_outputs = {});

}  // namespace eadem::pipeline
