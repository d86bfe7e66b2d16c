// SPDX-License-Identifier: Apache-2.0
//
// Step 7b, training that saves memory: the backward pass of a layer begins with the layer's forward pass, run again, so
// that its values need not be kept meanwhile (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
#pragma once

#include "eadem/pipeline/passes/autograd.h"

namespace eadem::pipeline {

// Appends to each layer's backward pass copies of the forward nodes that make what it reads, and lets it read theirs.
// Three kinds of values are kept instead: those that nodes of other layers read, or nodes of no layer; results of
// collectives; and results of nodes that read or change a state. Such nodes run once. The same kernels make the same
// bits again. Requires inferred types.
void recompute_layers(Graph& graph, const Differentiated& differentiated);

}  // namespace eadem::pipeline
