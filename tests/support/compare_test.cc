// SPDX-License-Identifier: Apache-2.0
#include "tests/support/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/values.h"

namespace eadem::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kU = 0x1p-24;  // roundoff of f32

RefTensor vec(std::vector<double> values) {
  const auto n = static_cast<int64_t>(values.size());
  return {Shape{n}, std::move(values)};
}

TEST(Compare, EqualValuesMatchExactly) {
  EXPECT_CLOSE(vec({1, -2, 0}), vec({1, -2, 0}), Tolerance::exact());
  EXPECT_CLOSE(vec({-0.0}), vec({0.0}), Tolerance::exact());
}

TEST(Compare, NegativeDifferencesCountLikePositiveOnes) {
  const Tolerance tolerance = Tolerance::absolute(0.1);
  EXPECT_TRUE(is_close(vec({-1.05}), vec({-1}), tolerance));
  EXPECT_TRUE(is_close(vec({-0.95}), vec({-1}), tolerance));
  EXPECT_FALSE(is_close(vec({-1.2}), vec({-1}), tolerance));
  EXPECT_FALSE(is_close(vec({-0.8}), vec({-1}), tolerance));
  EXPECT_FALSE(is_close(vec({1}), vec({-1}), tolerance));
}

TEST(Compare, NanMatchesNanOnly) {
  const Tolerance wide = Tolerance::absolute(1e300);
  EXPECT_TRUE(is_close(vec({kNan}), vec({kNan}), Tolerance::exact()));
  EXPECT_FALSE(is_close(vec({kNan}), vec({1}), wide));
  EXPECT_FALSE(is_close(vec({1}), vec({kNan}), wide));
  EXPECT_FALSE(is_close(vec({kInf}), vec({kNan}), wide));
}

TEST(Compare, InfinitiesMatchBySign) {
  const Tolerance wide = Tolerance::absolute(1e300);
  EXPECT_TRUE(is_close(vec({kInf, -kInf}), vec({kInf, -kInf}), Tolerance::exact()));
  EXPECT_FALSE(is_close(vec({kInf}), vec({-kInf}), wide));
  EXPECT_FALSE(is_close(vec({kInf}), vec({1}), wide));
  EXPECT_FALSE(is_close(vec({1}), vec({kInf}), wide));
}

TEST(Compare, InfinityWillDoOnlyWhereRoundingOverflows) {
  const Tolerance f16 = Tolerance::exact().then_round(DType::f16);
  EXPECT_TRUE(is_close(vec({kInf}), vec({65520}), f16));
  EXPECT_FALSE(is_close(vec({kInf}), vec({65519}), f16));
  EXPECT_FALSE(is_close(vec({-kInf}), vec({70000}), f16));
  EXPECT_FALSE(is_close(vec({kInf}), vec({1e30}), Tolerance::exact().then_round(DType::f32)));
}

TEST(Compare, ShapeMustAgreeEvenWhenCountsDo) {
  RefTensor row = vec({1, 2, 3, 4, 5, 6}), matrix = row;
  matrix.shape = Shape{2, 3};
  EXPECT_FALSE(is_close(row, matrix, Tolerance::exact()));
  EXPECT_FALSE(is_close(vec({1, 2}), vec({1}), Tolerance::exact()));
  EXPECT_FALSE(is_close(vec({}), vec({1}), Tolerance::exact()));
  EXPECT_FALSE(is_close(RefTensor{Shape{2}, {1}}, RefTensor{Shape{2}, {1, 2}}, Tolerance::exact()));
}

TEST(Compare, EmptyMatchesEmpty) {
  EXPECT_CLOSE(vec({}), vec({}), Tolerance::exact());
  EXPECT_FALSE(is_close(RefTensor{Shape{0, 3}, {}}, RefTensor{Shape{3, 0}, {}}, Tolerance::exact()));
}

TEST(Compare, FailureNamesIndexValuesAndBound) {
  RefTensor expected = zeros(Shape{2, 3}), actual = expected;
  actual.data[4] = 0.5;
  actual.data[5] = -3;
  const testing::AssertionResult result = is_close(actual, expected, Tolerance::absolute(0.25));
  ASSERT_FALSE(result);
  const std::string message = result.message();
  EXPECT_NE(message.find("2 of 6"), std::string::npos) << message;
  EXPECT_NE(message.find("first at [1, 1]: 0.5, expected 0, difference 0.5, bound 0.25"), std::string::npos) << message;
  EXPECT_NE(message.find("worst at [1, 2]: -3"), std::string::npos) << message;
}

TEST(Compare, MagnitudesScaleTheBoundOfEachElement) {
  const double magnitudes[] = {1, 1e6};
  const Tolerance tolerance = Tolerance::sum(10);
  EXPECT_TRUE(is_close(vec({0, 10 * kU * 1e6}), vec({0, 0}), tolerance, magnitudes));
  EXPECT_FALSE(is_close(vec({10.1 * kU, 0}), vec({0, 0}), tolerance, magnitudes));
  EXPECT_FALSE(is_close(vec({0}), vec({0}), tolerance, magnitudes)) << "as many magnitudes as values";
}

TEST(Compare, BoundsPerElement) {
  const double bounds[] = {0.5, 0};
  EXPECT_TRUE(is_within(vec({1.4, 1}), vec({1, 1}), bounds, Tolerance::exact()));
  EXPECT_FALSE(is_within(vec({1.4, 1.1}), vec({1, 1}), bounds, Tolerance::exact()));
  EXPECT_FALSE(is_within(vec({1}), vec({1}), bounds, Tolerance::exact()));
  EXPECT_TRUE(is_within(vec({1, 1 + 0x1p-8}), vec({1, 1}), bounds, Tolerance::exact().then_round(DType::bf16)));
}

TEST(ToleranceRule, ExactIsZero) {
  EXPECT_EQ(Tolerance::exact().bound(5), 0);
  EXPECT_EQ(Tolerance::exact().bound(5, 1e9), 0);
}

TEST(ToleranceRule, SumIsGamma) {
  EXPECT_DOUBLE_EQ(Tolerance::sum(1000).bound(0, 3), 3 * (1000 * kU) / (1 - 1000 * kU));
  EXPECT_DOUBLE_EQ(Tolerance::sum(8).bound(-2), 2 * gamma_f32(8));
}

TEST(ToleranceRule, RoundingAddsOnceAndToTheErrorToo) {
  const double e = gamma_f32(100) * 4;
  EXPECT_DOUBLE_EQ(Tolerance::sum(100).then_round(DType::bf16).bound(2, 4), e + 0x1p-8 * (2 + e) + 0x1p-126);
  EXPECT_EQ(Tolerance::sum(3).then_round(DType::i32).bound(1), Tolerance::sum(3).bound(1));
}

TEST(ToleranceRule, RoundingCoversEveryRoundingOfItsDtype) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (double value : {1.0, 1.0 / 3, 0.1, 1e-3, 1e-6, 1e-8, 3e4, 65503.9, -7.7e-5}) {
      const RefTensor exact = vec({value});
      EXPECT_CLOSE(widen(narrow(exact, dtype).view), exact, Tolerance::exact().then_round(dtype))
          << dtype_name(dtype) << " " << value;
    }
  // And no more: two roundings do not fit.
  const double ulp = 0x1p-7;
  EXPECT_FALSE(is_close(vec({1 + ulp}), vec({1 + ulp / 4}), Tolerance::exact().then_round(DType::bf16)));
}

TEST(ToleranceRule, IndependentErrorsAdd) {
  const Tolerance both = Tolerance::sum(3) + Tolerance::absolute(0.5) + Tolerance::sum(4);
  EXPECT_GE(both.bound(1), 0.5 + 7 * kU);
  EXPECT_LE(both.bound(1), 0.5 + gamma_f32(7)) << "gamma(3) + gamma(4) + gamma(3) gamma(4) <= gamma(7)";
}

TEST(SameBits, TellsZerosAndNansApart) {
  const Tensor plus = narrow(vec({0.0, 1}), DType::f32), minus = narrow(vec({-0.0, 1}), DType::f32);
  EXPECT_FALSE(same_bits(plus.view, minus.view));
  EXPECT_TRUE(same_bits(plus.view, plus.view));
  EXPECT_TRUE(same_bits(narrow(vec({kNan}), DType::f32).view, narrow(vec({kNan}), DType::f32).view));
  EXPECT_FALSE(same_bits(plus.view, narrow(vec({0.0, 1}), DType::bf16).view));
}

}  // namespace
}  // namespace eadem::test
