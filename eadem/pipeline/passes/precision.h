// SPDX-License-Identifier: Apache-2.0
//
// Step 3: where an edge carries another dtype than its consumer wants, a cast is inserted, once per value and dtype.
#pragma once

#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

// Parameters, states and constants are not cast: their dtype is a decision of the module that made them, and a consumer
// that cannot take it refuses when kernels are chosen. Requires and keeps inferred types.
void insert_casts(Graph& graph);

}  // namespace eadem::pipeline
