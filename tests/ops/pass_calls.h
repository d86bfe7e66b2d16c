// SPDX-License-Identifier: Apache-2.0
//
// The calls that a workload row stands for: its passes with inputs from the generators, gradients, saved tensors of
// the reference's forward pass, and what the reference says comes out.
#pragma once

#include <optional>
#include <vector>

#include "tests/ops/kernel_runner.h"
#include "tests/support/values.h"

namespace eadem::test {

// Forward or inference, for tests that compare kernels with each other and need no reference: the op's inputs in, its
// outputs (and in forward the extra tensors) out.
PassCall straight_call(const ops::Workload& row, kernels::Pass pass, std::vector<Tensor> inputs);
PassCall straight_call(const ops::Workload& row, kernels::Pass pass, uint64_t seed);

struct ExpectedCall {
  PassCall call;
  std::vector<ops::RefTensor> inputs;    // call.inputs, widened
  std::vector<ops::RefTensor> initial;   // call.outputs, widened
  std::vector<ops::RefTensor> expected;  // from the reference
};

// Nothing when the op has no such pass, or no kernel of its own for it (a gradient that passes through).
std::optional<ExpectedCall> expected_call(const ops::Workload& row, kernels::Pass pass, uint64_t seed);

// Makes the calls with inputs of the op that the caller made.
std::optional<ExpectedCall> expected_call(const ops::Workload& row, kernels::Pass pass, std::vector<Tensor> op_inputs,
                                          uint64_t seed);

// The call as the pipeline makes it: a backward pass whose gradients of activations and of parameters are apart as two,
// any other as it is.
std::vector<ExpectedCall> divided(const ExpectedCall& call, const ops::Workload& row);

}  // namespace eadem::test
