// SPDX-License-Identifier: Apache-2.0
//
// Steps 4 and 7: patterns of ops that one kernel serves are replaced by the fusion's op, where a kernel on this device
// accepts it.
#pragma once

#include "eadem/core/device/device.h"
#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

// The outcome of one match of a fusion's pattern, or of joining layers (join_layers.h), for `explain`.
struct FusionDecision {
  std::string fusion;
  std::string scope;  // of the last matched node; of joined layers the first and the last: "layers.0 - layers.31"
  bool applied = false;
  std::string reason;                         // refusals only: switched off, attributes, or the kernels' refusals
  std::vector<std::string> kept_inside = {};  // applied ones: the values that the fused op does not write
};

struct FusionOptions {
  bool training = false;
  std::vector<std::string> disabled;  // names of fusions; "all" switches every fusion off
  bool after_rounding = false;        // tries those whose patterns have quantize ops, else the others
  bool joins_layers = true;           // tries decoder_layer
};

// Throws InvalidArgument for a disabled name that is no fusion, listing those there are. Requires and keeps inferred
// types. `forward_end`, the number of nodes in the forward pass, shrinks with it.
std::vector<FusionDecision> fuse(Graph& graph, const Device& device, const SymbolValues& bounds,
                                 const FusionOptions& options, size_t* forward_end = nullptr);

}  // namespace eadem::pipeline
