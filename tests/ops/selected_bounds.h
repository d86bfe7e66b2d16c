// SPDX-License-Identifier: Apache-2.0
//
// error_bounds (error_bounds.h) of attention over selected and over compressed keys.
#pragma once

#include <span>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

std::vector<std::vector<double>> selected_bounds(const ops::Op& op, kernels::Pass pass,
                                                 std::span<const ops::RefTensor> inputs,
                                                 std::span<const ops::RefTensor> expected);
// Those of compressed_attention and of compress_keys.
std::vector<std::vector<double>> compressed_bounds(const ops::Op& op, kernels::Pass pass,
                                                   std::span<const ops::RefTensor> inputs,
                                                   std::span<const ops::RefTensor> expected);
std::vector<std::vector<double>> compress_bounds(const ops::Op& op, kernels::Pass pass,
                                                 std::span<const ops::RefTensor> inputs,
                                                 std::span<const ops::RefTensor> expected,
                                                 std::span<const ops::RefTensor> initial);

}  // namespace eadem::test
