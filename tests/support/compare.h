// SPDX-License-Identifier: Apache-2.0
//
// The one comparator. Shapes must agree; NaN matches NaN and nothing else; infinities match by sign; numbers lie
// within the tolerance of the expected ones. The failure names the worst offender and the first, with both values and
// the bound.
#pragma once

#include <gtest/gtest.h>

#include <span>
#include <string>

#include "eadem/ops/op.h"
#include "tests/support/tolerance.h"

namespace eadem::test {

using ops::RefTensor;

// `magnitudes`: one per element, as large as the terms that were summed; empty: those of the expected values.
testing::AssertionResult is_close(const RefTensor& actual, const RefTensor& expected, const Tolerance& tolerance,
                                  std::span<const double> magnitudes = {});

// Compares with a bound for each element, for results whose error is no multiple of one magnitude.
testing::AssertionResult is_within(const RefTensor& actual, const RefTensor& expected, std::span<const double> bounds,
                                   const Tolerance& rounding);

#define EXPECT_CLOSE(...) EXPECT_TRUE(::eadem::test::is_close(__VA_ARGS__))

}  // namespace eadem::test
