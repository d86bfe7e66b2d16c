// SPDX-License-Identifier: Apache-2.0
//
// Step 5b, training where the gradient of each output is known before the forward pass: a loss is made together with
// its gradients, so that what both need (logits, of a head) is made once.
#pragma once

#include "eadem/core/device/device.h"
#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

// Moves forward nodes whose op can do it (Op::backward_makes_outputs) into their backward nodes. A node is moved if its
// backward pass needs no other gradient than the step's inputs "d.<out>", nothing but that pass reads what it makes,
// and a kernel of `device` serves the joint pass. Those outputs of the graph are then there after the backward pass.
// `forward_end`, the number of nodes in the forward pass, shrinks with it. Requires and keeps inferred types.
void join_losses(Graph& graph, const Device& device, const SymbolValues& bounds, size_t& forward_end);

}  // namespace eadem::pipeline
