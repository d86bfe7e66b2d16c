// SPDX-License-Identifier: Apache-2.0
//
// error_bounds (error_bounds.h) of latent_attention.
#pragma once

#include <span>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

// `rounded_queries`: the rows are in an int8 cache, for whose keys the absorbed form rounds queries. `rounds_to_bf16`:
// its products with the matrices of heads round what they multiply. `bf16_parts`: the absorbed form
// multiplies queries and exponentials of scores as sums of two bf16 numbers, on tiles.
std::vector<std::vector<double>> latent_bounds(const ops::Op& op, std::span<const ops::RefTensor> inputs,
                                               bool rounded_queries, bool rounds_to_bf16, bool bf16_parts);

}  // namespace eadem::test
