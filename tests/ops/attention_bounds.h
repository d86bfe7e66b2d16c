// SPDX-License-Identifier: Apache-2.0
//
// error_bounds (error_bounds.h) of attention.
#pragma once

#include <span>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

// `rounded_queries`: the kernel rounds queries to 8 bits, as the keys of an int8 cache are, and perhaps the weights of
// its values to 16. `rounded_weights`: it
// rounds the exponentials of scores to bf16, and in the backward pass everything that it multiplies. `bf16_parts`: it
// multiplies queries and exponentials as sums of two bf16 numbers, on tiles.
std::vector<std::vector<double>> attention_bounds(const ops::Op& op, kernels::Pass pass,
                                                  std::span<const ops::RefTensor> inputs,
                                                  std::span<const ops::RefTensor> expected, bool rounded_queries,
                                                  bool rounded_weights, bool bf16_parts);

}  // namespace eadem::test
