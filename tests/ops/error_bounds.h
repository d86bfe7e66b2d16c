// SPDX-License-Identifier: Apache-2.0
//
// How far a kernel that computes in f32 may be from the double-precision reference, element by element, before its
// result is rounded to memory. Derived from the arithmetic that the contracts in kernels/ lay down, with
//   u = 2^-24, and gamma(n) = n u / (1 - n u) for n roundings one after the other, in any order;
//   exponentials within 2 ulp: relative error kExp = 4u.
#pragma once

#include <span>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

// One vector of bounds per output, for ports in contract order as in Op::reference. `expected` is what the reference
// gave, `initial` what the outputs held before (the part of accumulating ones that was there already). `encoded`: the
// second input where it is encoded, else undefined: linear's weight or attention's cache. A product with a quantized
// weight rounds x to 8 bits, row by row, in groups of 32 (kernels/cpu/linear/quantized/quantized_matmul.h), and one
// with the keys of an int8 cache the query; that is the larger part of the bound. `rounds_to_bf16`: the kernel rounds
// to bf16 what it multiplies with weights or values: linear its x and dy (kernels/cpu/linear/amx.h), attention the
// exponentials of its scores (kernels/cuda/attention/attention_tiles.cuh). `bf16_parts`: attention multiplies queries
// and these exponentials as sums of two bf16 numbers (kernels/cpu/attention/tiled_rows.h).
std::vector<std::vector<double>> error_bounds(const ops::Op& op, kernels::Pass pass,
                                              std::span<const ops::RefTensor> inputs,
                                              std::span<const ops::RefTensor> expected,
                                              std::span<const ops::RefTensor> initial, const TensorView& encoded = {},
                                              bool rounds_to_bf16 = false, bool bf16_parts = false);

// The bounds of linear by a kernel that rounds x in groups of 256, and weights of six bits to f16
// (kernels/cuda/linear/integer_products.cuh): to 2^-12 of themselves, which leaves as much for the sums of a tensor
// core.
std::vector<double> bounds_of_chunked_linear(std::span<const ops::RefTensor> inputs, const TensorView& encoded);

}  // namespace eadem::test
