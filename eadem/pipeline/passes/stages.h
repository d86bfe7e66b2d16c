// SPDX-License-Identifier: Apache-2.0
//
// Step 2, pipeline parallelism: of a graph only one stage stays, and values that cross stages are sent and received.
#pragma once

#include "eadem/core/mesh/mesh.h"
#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

// Keeps the part of one of mesh.size(pp) stages of a graph with inferred types; with one stage the graph is unchanged.
// Stage s has the layers (Node::layer) of part_of(layers, stages, s); a node outside the layers goes where the last of
// its inputs is made, so that the first stage has what comes before the layers and the last one what comes after. What
// depends on inputs and constants alone, such as a rope table, is computed on every stage that reads it. A value that a
// later stage reads goes by way of the stages between; a stage receives before it computes and sends when it has.
//
// All inputs of the graph stay; of its outputs, parameters and states those of the stage. Throws InvalidArgument when
// there are more stages than layers, and Unsupported when `training` and two stages read one parameter (tied weights),
// whose gradients nobody would add, and when a stage reads a state that another one writes.
void keep_stage(Graph& graph, const Mesh& mesh, bool training);

}  // namespace eadem::pipeline
