// SPDX-License-Identifier: Apache-2.0
//
// Step 1: the type of every value, from the types of inputs, parameters, constants and states.
#pragma once

#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

// Sets the types of all activations, sharding included. An edge whose dtype the consumer does not want is typed as if
// it were converted: the precision step puts the cast there. Throws InvalidArgument naming the node and both values.
void infer_types(Graph& graph);

// The types in which a node wants its inputs to arrive.
std::vector<TensorType> wanted_input_types(const Graph& graph, const Node& node);

// Types one forward or inference node's outputs, including the extra tensors of a forward node.
void infer_node_types(Graph& graph, const Node& node);

}  // namespace eadem::pipeline
