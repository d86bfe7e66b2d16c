// SPDX-License-Identifier: Apache-2.0
//
// Step 5, training only: the backward pass, from each op's gradient rule.
#pragma once

#include "eadem/core/mesh/mesh.h"
#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

struct Differentiated {
  size_t forward_end = 0;               // nodes [0, forward_end) are the forward pass, the rest the backward pass
  size_t num_deferred = 0;              // of the backward pass, the last nodes: they make gradients of `deferred`
  std::vector<std::string> parameters;  // parameters that receive a gradient
};

// Appends the backward pass. For each graph output `out` there is a new input "d.<out>" of its type: the gradient that
// the caller seeds. Gradients of a parameter `p` accumulate (+=) into the state "grad.<p>", f32. For each name in
// `input_gradients`, an input of the graph, the output "d.<name>" is its gradient. Nodes on the way change from the
// inference to the forward pass. Parameters named in `frozen` have no gradient, and what only
// they influence has no backward pass. What adds to the gradients of the parameters named in `deferred` comes last.
// Requires and keeps inferred types. Throws Unsupported naming an op that has no backward pass, and one that makes such
// a gradient together with others.
//
// On several ranks the gradient of a whole value that an op divided (its output is sharded) is a partial sum; an
// all_reduce is inserted where the backward pass reads it, after parts of one value have been added. The gradients of
// parameters stay as they fall: those of divided parameters are divided, others may be partial sums over tp, and all
// are over dp. Their states' types say so, and who reads them gets the sum (sharding.h). What was received from another
// pipeline stage has its gradient sent back.
Differentiated differentiate(Graph& graph, std::span<const std::string> input_gradients = {}, const Mesh& mesh = {},
                             std::span<const std::string> frozen = {}, std::span<const std::string> deferred = {});

}  // namespace eadem::pipeline
