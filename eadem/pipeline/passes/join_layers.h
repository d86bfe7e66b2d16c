// SPDX-License-Identifier: Apache-2.0
//
// Behind step 4, in inference: neighbouring decoder_layer nodes become one node of decoder_layers, as long as a kernel
// on this device accepts it (fusions/decoder_layers.h).
#pragma once

#include "eadem/core/device/device.h"
#include "eadem/pipeline/graph.h"
#include "eadem/pipeline/passes/fusion.h"

namespace eadem::pipeline {

// A run of layers grows layer by layer, and ends before a layer that does not follow the one before it, or with which
// no kernel accepts the run. A layer follows another that stands right before it, if it alone reads what that makes,
// which is no output of the graph, and both have the same attributes, tables and sequences. Returns a decision for each
// run and for each layer that could not be joined to one. Requires and keeps inferred types. `disabled`: as in
// FusionOptions; the joined layers are called "decoder_layers".
std::vector<FusionDecision> join_layers(Graph& graph, const Device& device, const SymbolValues& bounds,
                                        const std::vector<std::string>& disabled);

}  // namespace eadem::pipeline
