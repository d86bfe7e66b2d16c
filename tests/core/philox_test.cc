// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/philox.h"

#include <gtest/gtest.h>

#include <cmath>

namespace eadem {
namespace {

void expect_words(const PhiloxBlock& block, std::array<uint32_t, 4> expected) {
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(block.words[i], expected[i]) << "word " << i;
}

// The published known answers of philox4x32 with 10 rounds (Random123, kat_vectors).
TEST(Philox, KnownAnswers) {
  expect_words(philox4x32(0, 0, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  expect_words(philox4x32(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  // Digits of pi: counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0, low words first.
  expect_words(philox4x32(0x299f31d0a4093822u, 0x85a308d3243f6a88u, 0x0370734413198a2eu),
               {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(Philox, IsAConstantExpression) {
  static_assert(philox4x32(0, 0).words[0] == 0x6627e8d5);
  static_assert(uniform_float(0) == 0.0f);
}

TEST(Philox, UniformIsExactAndBelowOne) {
  EXPECT_LT(uniform_float(0xffffffffu), 1.0f);
  EXPECT_EQ(uniform_float(0xffffffffu), 1.0f - 0x1p-24f);
  EXPECT_EQ(uniform_float(0x80000000u), 0.5f);
  EXPECT_EQ(uniform_float(0xffu), 0.0f) << "24 bits count";
}

TEST(Philox, KeysCountersAndStreamsAreApart) {
  EXPECT_NE(philox4x32(1, 0).words[0], philox4x32(0, 0).words[0]);
  EXPECT_NE(philox4x32(0, 1).words[0], philox4x32(0, 0).words[0]);
  EXPECT_NE(philox4x32(0, 0, 1).words[0], philox4x32(0, 0).words[0]);
  EXPECT_NE(philox4x32(uint64_t{1} << 32, 0).words[0], philox4x32(1, 0).words[0]);
}

// The mean of n uniforms has standard deviation 1 / sqrt(12 n).
TEST(Philox, ConsecutiveCountersLookUniform) {
  constexpr int kDraws = 100000;
  double sum = 0;
  for (int i = 0; i < kDraws; ++i)
    sum += static_cast<double>(uniform_float(philox4x32(42, static_cast<uint64_t>(i)).words[0]));
  EXPECT_NEAR(sum / kDraws, 0.5, 5 / std::sqrt(12.0 * kDraws));
}

}  // namespace
}  // namespace eadem
