// SPDX-License-Identifier: Apache-2.0
//
// Kernel choice: one kernel per node, asked once when the pipeline compiles.
#pragma once

#include "eadem/core/device/device.h"
#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

struct KernelChoice {
  const kernels::Kernel* kernel = nullptr;  // null: nobody accepts
  Decision decision;
  std::vector<TensorType> inputs;   // the ports of the pass, in order
  std::vector<TensorType> outputs;  // likewise
  ops::Cost cost;                   // at the bounds

  // Returns the request that the kernels answered. It refers to `node`, `device` and this.
  kernels::KernelRequest request(const Node& node, Pass pass, const Device& device, const SymbolValues& bounds) const;
};

// The kernels of `node`'s op for `pass`, in the order in which a decision about them lists its answers.
kernels::KernelList kernels_of(const Node& node, Pass pass, const Device& device);

// Asks the kernels of `node`'s op about `pass`. The types of a backward pass are derived from those of the forward
// ports.
KernelChoice decide(const Graph& graph, const Node& node, Pass pass, const Device& device, const SymbolValues& bounds);

// The choice for every node in its own pass; views get none. A node that no kernel serves has a null kernel.
std::vector<KernelChoice> cover(const Graph& graph, const Device& device, const SymbolValues& bounds);

// Throws Unsupported when a node that is no view has no kernel, listing the nodes by name with their refusals.
void require_complete(const Graph& graph, std::span<const KernelChoice> choices, const Device& device);

}  // namespace eadem::pipeline
