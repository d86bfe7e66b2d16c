// SPDX-License-Identifier: Apache-2.0
//
// Step 7b, training that saves memory: the backward pass of a layer begins with the layer's forward pass, run again, so
// that its values need not be kept meanwhile (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
#pragma once

#include "eadem/pipeline/passes/autograd.h"

namespace eadem::pipeline {

// Appends to each layer's backward pass copies of the forward nodes that make what it reads, and lets it read theirs.
// What another layer, or none, reads as well is kept, as are results of collectives and of nodes that change a state:
// those run once. The same kernels make the same bits again. Requires inferred types.
void recompute_layers(Graph& graph, const Differentiated& differentiated);

}  // namespace eadem::pipeline
