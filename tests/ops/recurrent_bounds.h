// SPDX-License-Identifier: Apache-2.0
//
// error_bounds (error_bounds.h) of the ops that carry a state along a sequence.
#pragma once

#include <span>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

std::vector<std::vector<double>> recurrent_bounds(const ops::Op& op, kernels::Pass pass,
                                                  std::span<const ops::RefTensor> inputs,
                                                  std::span<const ops::RefTensor> expected,
                                                  std::span<const ops::RefTensor> initial);

}  // namespace eadem::test
