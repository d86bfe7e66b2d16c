// SPDX-License-Identifier: Apache-2.0
//
// error_bounds (error_bounds.h) of the gated delta rule.
#pragma once

#include <span>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

std::vector<std::vector<double>> delta_rule_bounds(const ops::Op& op, kernels::Pass pass,
                                                   std::span<const ops::RefTensor> inputs,
                                                   std::span<const ops::RefTensor> expected,
                                                   std::span<const ops::RefTensor> initial);

}  // namespace eadem::test
