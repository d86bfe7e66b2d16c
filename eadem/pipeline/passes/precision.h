// SPDX-License-Identifier: Apache-2.0
//
// The types of edges. Step 3: where an edge carries another dtype than its consumer wants, a cast is inserted, once per
// value and dtype. Step 6: where the kernel of a consumer wants its activation rounded to an encoding, a quantize is
// inserted, once per value and encoding. It comes after fusion and autograd, so that every pass rounds from the value
// as it was computed: forward products may multiply rounded rows while the gradient of the weight reads the row itself.
#pragma once

#include "eadem/core/device/device.h"
#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

// Parameters, states and constants are not cast: their dtype is a decision of the module that made them, and a consumer
// that cannot take it refuses when kernels are chosen. Requires and keeps inferred types.
void insert_casts(Graph& graph);

// Asks the kernels that serve `graph` on `device`. `forward_end`, the number of nodes in the forward pass, grows with
// it. Requires and keeps inferred types. The state of a rounding, if it has one, is named after its first reader:
// "scaling." + scope + ".x" or ".dy".
void insert_quantize(Graph& graph, const Device& device, const SymbolValues& bounds, bool training,
                     size_t& forward_end);

// The rounding of activations in one step of a program at `symbols`, for `explain` and tests.
struct RoundingCount {
  int64_t values = 0, readers = 0;  // rounded values, and the ports that read them
  double bytes = 0;                 // of the values
  double bytes_if_alone = 0;        // as if each reader rounded for itself
};
RoundingCount count_rounding(const Graph& graph, const SymbolValues& symbols);

}  // namespace eadem::pipeline
