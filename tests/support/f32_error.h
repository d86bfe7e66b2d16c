// SPDX-License-Identifier: Apache-2.0
//
// How far f32 results of a whole model may lie from the exact ones, measured by another program's: the bound that all
// tests against PyTorch's goldens use.
//
// Both programs round every product sum of one graph to f32, and differ in how many partial sums they add it up in. In
// a sum of n terms of one size, kept in L partial sums, each partial sum grows like a random walk, so that its k-th
// rounding error has a variance proportional to k; the n / L errors of each of the L sums add up to L (n / L)^2 / 2 =
// n^2 / (2 L). The standard deviation is thus proportional to 1 / sqrt(L). (Higham & Mary 2019, "A New Approach to
// Probabilistic Rounding Error Analysis", for why errors may be taken as independent.) Eadem's kernels add each output
// in one chain, L = 1; PyTorch's in at most four accumulators of 16 lanes, L = 64. So ours may be sqrt(64) times as
// wide, and its largest value, being the largest of as many draws, as well.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace eadem::test {

inline constexpr double kMostPartialSums = 64;
inline const double kF32ErrorRatio = std::sqrt(kMostPartialSums);

struct Deviation {
  double rms = 0, largest = 0;
};

// Measures the deviation of value(i) from exact(i), for i below `count`.
template <typename Value, typename Exact>
Deviation deviation(size_t count, Value value, Exact exact) {
  Deviation result;
  for (size_t i = 0; i < count; ++i) {
    const double error = std::abs(static_cast<double>(value(i)) - static_cast<double>(exact(i)));
    if (!(error <= result.largest)) result.largest = error;  // NaN stays
    result.rms += error * error;
  }
  result.rms = std::sqrt(result.rms / static_cast<double>(std::max<size_t>(1, count)));
  return result;
}

// Ours and the other program's deviations from the same exact values.
inline void expect_f32_error(const Deviation& ours, const Deviation& other, const std::string& what) {
  EXPECT_GT(other.rms, 0) << what;
  EXPECT_LE(ours.rms, kF32ErrorRatio * other.rms) << what;
  EXPECT_LE(ours.largest, kF32ErrorRatio * other.largest) << what;
}

}  // namespace eadem::test
