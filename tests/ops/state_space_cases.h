// SPDX-License-Identifier: Apache-2.0
//
// op_cases (op_cases.h) and error_bounds (error_bounds.h) of state_space_scan.
#pragma once

#include <span>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

std::vector<ops::Workload> state_space_cases();

std::vector<std::vector<double>> state_space_bounds(const ops::Op& op, kernels::Pass pass,
                                                    std::span<const ops::RefTensor> inputs,
                                                    std::span<const ops::RefTensor> expected,
                                                    std::span<const ops::RefTensor> initial);

}  // namespace eadem::test
