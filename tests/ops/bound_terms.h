// SPDX-License-Identifier: Apache-2.0
//
// Helpers for error bounds (error_bounds.h): roundoffs, sizes of terms, and bounds that many ops share.
#pragma once

#include <span>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

using Bounds = std::vector<std::vector<double>>;
using Inputs = std::span<const ops::RefTensor>;

inline constexpr double kU = 0x1p-24, kExp = 4 * kU, kTanh = 8 * kU;
// The sum of two bf16 numbers, a number rounded and what is left rounded, is within this of the number: what is left
// has at most 2^-8 of the power of two below it, and its own eight bits leave 2^-9 of that.
inline constexpr double kBf16Parts = 0x1p-17;
// A weight rounded to 16 bits moves by half of one of 65,535 levels of the largest of its chunk, and by the roundings
// of the scale, of the quotient and of the product with it.
inline constexpr double kWeightCode = 0.5 / 65535 + 4 * kU;
// Where an exponential leaves f32 the quotients it stands in are below this; kernels may flush them.
inline constexpr double kUnderflow = 0x1p-120;

ops::RefTensor absolute(const ops::RefTensor& x);
std::vector<ops::RefTensor> absolute(Inputs tensors);

// Sums of the absolute values of the terms of every output of an op that is linear in each input: the op itself on
// absolute values.
std::vector<ops::RefTensor> magnitudes(const ops::Op& op, kernels::Pass pass, Inputs in, Inputs initial);

// The absolute values, times a factor.
std::vector<double> scaled(double factor, const std::vector<double>& values);

// Every output is exact, or rounded from an exact value.
Bounds exact(Inputs expected);

// Every output has that relative error.
Bounds relative(double error, Inputs expected);

}  // namespace eadem::test
