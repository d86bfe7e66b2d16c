// SPDX-License-Identifier: Apache-2.0
//
// error_bounds (error_bounds.h) of linear.
#pragma once

#include <span>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

// `encoded`: the weight where it is encoded, else undefined. `rounds_to_bf16`: the kernel rounds x to bf16.
std::vector<std::vector<double>> linear_bounds(const ops::Op& op, kernels::Pass pass,
                                               std::span<const ops::RefTensor> inputs,
                                               std::span<const ops::RefTensor> initial, const TensorView& encoded,
                                               bool rounds_to_bf16);

}  // namespace eadem::test
