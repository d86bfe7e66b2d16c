// SPDX-License-Identifier: Apache-2.0
//
// Step 2, pipeline parallelism: of a graph only one stage stays, and values that cross stages are sent and received.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "eadem/core/mesh/mesh.h"
#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

// A parameter that two stages read (tied weights), each of which has it.
struct SharedParameter {
  std::string name;
  int first, last;  // stages
};

// Keeps the part of one of mesh.size(pp) stages of a graph with inferred types; with one stage the graph is unchanged.
// Stage s has the layers (Node::layer) of part_of(layers, stages, s); a node outside the layers goes where the last of
// its inputs is made, so that the first stage has what comes before the layers and the last one what comes after. What
// depends on inputs and constants alone, such as a rope table, is computed on every stage that reads it. A value that a
// later stage reads goes by way of the stages between; a stage receives before it computes and sends when it has.
//
// All inputs of the graph stay; of its outputs, parameters and states those of the stage. Returns the parameters that
// several stages read, of all stages, in the order of the graph; the gradients of both uses are the caller's to add.
// Throws InvalidArgument when there are more stages than layers, and Unsupported when `training` and more than two
// stages read a parameter that is not `frozen`, and when a stage reads a state that another one writes.
std::vector<SharedParameter> keep_stage(Graph& graph, const Mesh& mesh, bool training,
                                        std::span<const std::string> frozen = {});

}  // namespace eadem::pipeline
