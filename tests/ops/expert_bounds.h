// SPDX-License-Identifier: Apache-2.0
//
// error_bounds (error_bounds.h) of the ops of mixtures of experts, and of head_linear, which has a matrix for each
// head.
#pragma once

#include <span>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

// `encoded`: the stacked weight of grouped_linear or head_linear where it is encoded.
std::vector<std::vector<double>> expert_bounds(const ops::Op& op, kernels::Pass pass,
                                               std::span<const ops::RefTensor> inputs,
                                               std::span<const ops::RefTensor> expected,
                                               std::span<const ops::RefTensor> initial, const TensorView& encoded,
                                               bool rounds_to_bf16);

}  // namespace eadem::test
