// SPDX-License-Identifier: Apache-2.0
//
// Valid inputs for any op: given its types, the step's extents and a seed, host tensors for every input port. Values
// are decided by the names of op and port, so that ids are in range, sequences ascend, slots and blocks are distinct
// and shuffled, probabilities are probabilities. The same seed gives the same bytes on every machine.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "eadem/core/tensor.h"
#include "eadem/ops/op.h"

namespace eadem::workloads {

enum class StepKind : uint8_t {
  // Anything that a step may be, for tests: sequences of any length, tokens that are written nowhere, sequences without
  // a state, selections with room left, tokens of prompts beside generated ones, experts of which one is popular.
  varied,
  // Steps for timing, which do all of the work that a row's name says: sequences fill their blocks, every token and
  // state has a slot, every row a label,
  // selections are full,
  // the experts of a token are distinct. A step with one token of each sequence generates them all; the tokens of any
  // other step are all of prompts.
  plain
};

// Undefined tensors for absent ports.
std::vector<Tensor> make_inputs(const ops::Op& op, std::span<const TensorType> types, const SymbolValues& symbols,
                                uint64_t seed, StepKind kind = StepKind::varied);

// Uniform in [-1, 1), rounded to `dtype` (a floating one). What gradients and plain activations are made of.
Tensor random_tensor(DType dtype, const Shape& shape, uint64_t seed);

}  // namespace eadem::workloads
