// SPDX-License-Identifier: Apache-2.0
//
// error_bounds (error_bounds.h) of stream_weights.
#pragma once

#include <span>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

std::vector<std::vector<double>> stream_weights_bounds(const ops::Op& op, kernels::Pass pass,
                                                       std::span<const ops::RefTensor> inputs,
                                                       std::span<const ops::RefTensor> expected);

}  // namespace eadem::test
