// SPDX-License-Identifier: Apache-2.0
//
// error_bounds (error_bounds.h) of ops of sparse attention.
#pragma once

#include <span>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

// Of selected_attention.
std::vector<std::vector<double>> selected_bounds(const ops::Op& op, kernels::Pass pass,
                                                 std::span<const ops::RefTensor> inputs,
                                                 std::span<const ops::RefTensor> expected);
// Of compressed_attention.
std::vector<std::vector<double>> compressed_bounds(const ops::Op& op, kernels::Pass pass,
                                                   std::span<const ops::RefTensor> inputs,
                                                   std::span<const ops::RefTensor> expected);
// Of compress_keys.
std::vector<std::vector<double>> compress_bounds(const ops::Op& op, kernels::Pass pass,
                                                 std::span<const ops::RefTensor> inputs,
                                                 std::span<const ops::RefTensor> expected,
                                                 std::span<const ops::RefTensor> initial);

// Of pool_keys.
std::vector<std::vector<double>> pool_bounds(const ops::Op& op, kernels::Pass pass,
                                             std::span<const ops::RefTensor> inputs,
                                             std::span<const ops::RefTensor> expected,
                                             std::span<const ops::RefTensor> initial);
// Of pooled_attention.
std::vector<std::vector<double>> pooled_bounds(const ops::Op& op, kernels::Pass pass,
                                               std::span<const ops::RefTensor> inputs,
                                               std::span<const ops::RefTensor> expected,
                                               std::span<const ops::RefTensor> initial);

}  // namespace eadem::test
