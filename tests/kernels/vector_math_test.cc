// SPDX-License-Identifier: Apache-2.0
//
// The vocabulary of the CPU kernels (kernels/cpu/simd-inl.h) and its dispatch, on every instruction set of this
// machine: conversions bit for bit, remainders that touch nothing else, functions against double precision.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "eadem/core/dtype.h"
#include "eadem/core/machine/isa.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/kernels/vector_math_test.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

int64_t compiled_for() { return HWY_TARGET; }
int64_t lanes() { return kLanes; }

void exp_array(float* y, const float* x, int64_t n) {
  map(
      y, n, [](Vec v) { return exp(v); }, x);
}
void exp_of_negative_array(float* y, const float* x, int64_t n) {
  map(
      y, n, [](Vec v) { return exp_of_negative(v); }, x);
}
void sigmoid_array(float* y, const float* x, int64_t n) {
  map(
      y, n, [](Vec v) { return sigmoid(v); }, x);
}
void tanh_array(float* y, const float* x, int64_t n) {
  map(
      y, n, [](Vec v) { return tanh(v); }, x);
}
void gauss_array(float* y, const float* x, int64_t n) {
  map(
      y, n, [](Vec v) { return gauss(v); }, x);
}
void normal_cdf_array(float* y, const float* x, int64_t n) {
  map(
      y, n, [](Vec v) { return normal_cdf(v, gauss(v)); }, x);
}

template <typename To, typename From>
void convert_array(To* y, const From* x, int64_t n) {
  map(
      y, n, [](Vec v) { return v; }, x);
}
void widen_bf16(float* y, const bf16_t* x, int64_t n) { convert_array(y, x, n); }
void widen_f16(float* y, const f16_t* x, int64_t n) { convert_array(y, x, n); }
void round_bf16(bf16_t* y, const float* x, int64_t n) { convert_array(y, x, n); }
void round_f16(f16_t* y, const float* x, int64_t n) { convert_array(y, x, n); }

float sum_array(const float* x, int64_t n) {
  return reduce(
      n, [](Vec acc, Vec v) { return hn::Add(acc, v); }, x);
}
float max_array(const float* x, int64_t n) { return max_of(x, n); }

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {
namespace {

EADEM_CPU_EXPORT(compiled_for);
EADEM_CPU_EXPORT(lanes);
EADEM_CPU_EXPORT(exp_array);
EADEM_CPU_EXPORT(exp_of_negative_array);
EADEM_CPU_EXPORT(sigmoid_array);
EADEM_CPU_EXPORT(tanh_array);
EADEM_CPU_EXPORT(gauss_array);
EADEM_CPU_EXPORT(normal_cdf_array);
EADEM_CPU_EXPORT(widen_bf16);
EADEM_CPU_EXPORT(widen_f16);
EADEM_CPU_EXPORT(round_bf16);
EADEM_CPU_EXPORT(round_f16);
EADEM_CPU_EXPORT(sum_array);
EADEM_CPU_EXPORT(max_array);

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The distance of `actual` from the exact value in units of the last place of f32 there (subnormals: of the smallest).
double error_ulp(float actual, double exact) {
  if (std::fabs(exact) > static_cast<double>(std::numeric_limits<float>::max()))
    return std::isinf(actual) && std::signbit(actual) == std::signbit(exact) ? 0 : kInf;
  int exponent;
  std::frexp(exact, &exponent);
  const double ulp = std::ldexp(1.0, std::max(exponent - 24, -149));
  return std::fabs(static_cast<double>(actual) - exact) / ulp;
}

// Every `stride`-th f32 from `low` to `high`, both signs where the range has them.
std::vector<float> floats_between(float low, float high, uint32_t stride) {
  std::vector<float> result;
  for (uint64_t bits = 0; bits <= 0x7f7fffffu; bits += stride)
    for (float sign : {1.0f, -1.0f}) {
      const float x = sign * std::bit_cast<float>(static_cast<uint32_t>(bits));
      if (x >= low && x <= high) result.push_back(x);
    }
  return result;
}

class VectorMath : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(Isas, VectorMath, testing::ValuesIn(available_isas()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

TEST_P(VectorMath, DispatchReachesTheCodeOfTheInstructionSet) {
  const int64_t target = EADEM_CPU_DISPATCH(compiled_for, GetParam())();
  int64_t expected = 0, expected_lanes = 4;
  switch (GetParam()) {
    case Isa::amx:
    case Isa::avx512_bf16:
    case Isa::avx512_vnni:
    case Isa::avx512: expected = HWY_AVX3, expected_lanes = 16; break;
    case Isa::avx2: expected = HWY_AVX2, expected_lanes = 8; break;
    case Isa::sse4: expected = HWY_SSE4; break;
    case Isa::neon:
    case Isa::neon_dotprod: expected = HWY_NEON; break;
    // GCC miscompiles Highway's emulated vectors: with it the fallback is single values.
    case Isa::scalar: expected = HWY_BASELINE_SCALAR, expected_lanes = HWY_BROKEN_EMU128 ? 1 : 4; break;
  }
  EXPECT_EQ(target, expected);
  EXPECT_EQ(EADEM_CPU_DISPATCH(lanes, GetParam())(), expected_lanes);
}

TEST_P(VectorMath, ExpIsWithinTwoUlp) {
  const auto function = EADEM_CPU_DISPATCH(exp_array, GetParam());
  const std::vector<float> x = floats_between(-110.0f, 95.0f, 1021);  // 2 million, to the subnormals and beyond
  std::vector<float> y(x.size());
  function(y.data(), x.data(), static_cast<int64_t>(x.size()));
  double worst = 0;
  float where = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double error = error_ulp(y[i], std::exp(static_cast<double>(x[i])));
    if (error > worst) worst = error, where = x[i];
  }
  EXPECT_LE(worst, 2.0) << "at " << where;
  RecordProperty("worst_ulp", std::to_string(worst));
}

TEST_P(VectorMath, ExpAtTheEnds) {
  const auto function = EADEM_CPU_DISPATCH(exp_array, GetParam());
  const float x[] = {0.0f, -0.0f, kInf, -kInf, 1e30f, -1e30f, -3e38f, -105.0f, 89.0f, kNan};
  const float expected[] = {1, 1, kInf, 0, kInf, 0, 0, 0, kInf};
  float y[10];
  function(y, x, 10);
  for (int i = 0; i < 9; ++i) EXPECT_EQ(y[i], expected[i]) << x[i];
  EXPECT_TRUE(std::isnan(y[9]));
}

TEST_P(VectorMath, ExpOfNegativeIsWithinTwoUlp) {
  const auto function = EADEM_CPU_DISPATCH(exp_of_negative_array, GetParam());
  const std::vector<float> x = floats_between(-87.0f, 0.0f, 511);
  std::vector<float> y(x.size());
  function(y.data(), x.data(), static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_LE(error_ulp(y[i], std::exp(static_cast<double>(x[i]))), 2.0) << "at " << x[i];

  // NaN of any payload stays one: an unwritten slot of a cache may be any.
  const float ends[] = {
      0.0f, -0.0f, -kInf, -1e30f, -87.001f, kNan, std::bit_cast<float>(0xffffffffu), std::bit_cast<float>(0x7f800001u)};
  float got[8];
  function(got, ends, 8);
  EXPECT_EQ(got[0], 1.0f);
  EXPECT_EQ(got[1], 1.0f);
  for (int i : {2, 3, 4}) EXPECT_EQ(got[i], 0.0f) << ends[i];
  for (int i : {5, 6, 7}) EXPECT_TRUE(std::isnan(got[i])) << i;
}

// One exponential (2 ulp), a sum and a quotient; relative, so also where the result is tiny.
TEST_P(VectorMath, Sigmoid) {
  const auto function = EADEM_CPU_DISPATCH(sigmoid_array, GetParam());
  const std::vector<float> x = floats_between(-86.0f, 86.0f, 40961);
  std::vector<float> y(x.size());
  function(y.data(), x.data(), static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_LE(error_ulp(y[i], 1 / (1 + std::exp(-static_cast<double>(x[i])))), 4.0) << x[i];
}

// Two exponentials of 2 ulp each (1 ulp is at most 2^-23 of the value), their product, and the rounding of the
// second's argument, which is below 2^-11 x^2 < 0.1: 2^-27.
TEST_P(VectorMath, GaussKeepsItsRelativePrecision) {
  const auto function = EADEM_CPU_DISPATCH(gauss_array, GetParam());
  const std::vector<float> x = floats_between(-13.0f, 13.0f, 40961);
  std::vector<float> y(x.size());
  function(y.data(), x.data(), static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(-static_cast<double>(x[i]) * static_cast<double>(x[i]) / 2);
    ASSERT_LE(std::fabs(static_cast<double>(y[i]) - exact), 5 * 0x1p-23 * exact) << x[i];
  }
}

TEST_P(VectorMath, TanhKeepsItsRelativePrecisionNearZero) {
  const auto function = EADEM_CPU_DISPATCH(tanh_array, GetParam());
  std::vector<float> x = floats_between(-kInf, kInf, 40961);
  x.insert(x.end(), {kInf, -kInf, kNan, 0.625f, std::nextafter(0.625f, 0.0f)});
  std::vector<float> y(x.size());
  function(y.data(), x.data(), static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      ASSERT_TRUE(std::isnan(y[i]));
    } else {
      ASSERT_LE(error_ulp(y[i], std::tanh(static_cast<double>(x[i]))), 4.0) << x[i];
    }
  }
}

// gauss, w and ten steps of a polynomial whose partial sums lose at most a rounding each, two products.
TEST_P(VectorMath, NormalCdfKeepsItsRelativePrecisionInTheTail) {
  const auto function = EADEM_CPU_DISPATCH(normal_cdf_array, GetParam());
  const std::vector<float> x = floats_between(-12.8f, 12.8f, 40961);
  std::vector<float> y(x.size());
  function(y.data(), x.data(), static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = 0.5 * std::erfc(-static_cast<double>(x[i]) / std::sqrt(2.0));
    ASSERT_LE(std::fabs(static_cast<double>(y[i]) - exact), (5 * 0x1p-23 + 14 * 0x1p-24) * exact) << x[i];
  }
}

// Signalling NaN become quiet in hardware; otherwise every bit is that of the scalar conversion.
TEST_P(VectorMath, WideningIsExactForEveryPattern) {
  std::vector<bf16_t> b(65536);
  std::vector<f16_t> h(65536);
  for (uint32_t i = 0; i < 65536; ++i) b[i].bits = h[i].bits = static_cast<uint16_t>(i);
  std::vector<float> y(65536);
  const auto check = [&](const auto& from) {
    for (uint32_t i = 0; i < 65536; ++i) {
      const float expected = from[i].to_float();
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(y[i])) << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(y[i]), std::bit_cast<uint32_t>(expected)) << i;
      }
    }
  };
  EADEM_CPU_DISPATCH(widen_bf16, GetParam())(y.data(), b.data(), 65536);
  check(b);
  EADEM_CPU_DISPATCH(widen_f16, GetParam())(y.data(), h.data(), 65536);
  check(h);
}

TEST_P(VectorMath, RoundingIsThatOfTheScalarConversion) {
  std::vector<float> x = floats_between(-kInf, kInf, 65521);  // all exponents
  for (uint32_t i = 0; i < 65536; ++i) {                      // ties and their neighbours
    for (const float value : {f16_t{static_cast<uint16_t>(i)}.to_float(), bf16_t{static_cast<uint16_t>(i)}.to_float()})
      for (const uint32_t step : {0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u})
        x.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(value) + step));
  }
  x.insert(x.end(), {kInf, -kInf, kNan, -kNan, 65504.0f, 65519.996f, 65520.0f, 0x1p-24f, 0x1p-25f, 0x1.000002p-25f});
  const auto n = static_cast<int64_t>(x.size());
  std::vector<bf16_t> b(x.size());
  std::vector<f16_t> h(x.size());
  EADEM_CPU_DISPATCH(round_bf16, GetParam())(b.data(), x.data(), n);
  EADEM_CPU_DISPATCH(round_f16, GetParam())(h.data(), x.data(), n);
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      ASSERT_TRUE(std::isnan(b[i].to_float()) && std::isnan(h[i].to_float())) << i;
      continue;
    }
    ASSERT_EQ(b[i].bits, bf16_t::from_float(x[i]).bits) << x[i];
    ASSERT_EQ(h[i].bits, f16_t::from_float(x[i]).bits) << x[i];
  }
}

template <typename To, typename From, typename Function>
void expect_remainders_stay_inside(Function function, To guard, From value) {
  for (int64_t n = 0; n <= 70; ++n) {
    std::vector<From> x(static_cast<size_t>(n), value);  // its end is the end of an allocation: ASan sees an overrun
    std::vector<To> y(static_cast<size_t>(n) + 2, guard);
    function(y.data() + 1, x.data(), n);
    EXPECT_EQ(std::memcmp(&y.front(), &guard, sizeof(To)), 0) << n;
    EXPECT_EQ(std::memcmp(&y.back(), &guard, sizeof(To)), 0) << n;
    for (int64_t i = 0; i < n; ++i) EXPECT_NE(std::memcmp(&y[static_cast<size_t>(i) + 1], &guard, sizeof(To)), 0) << n;
  }
}

TEST_P(VectorMath, RemaindersStayInside) {
  expect_remainders_stay_inside(EADEM_CPU_DISPATCH(exp_array, GetParam()), 7.0f, 1.0f);
  expect_remainders_stay_inside(EADEM_CPU_DISPATCH(round_bf16, GetParam()), bf16_t{0x1234}, 1.0f);
  expect_remainders_stay_inside(EADEM_CPU_DISPATCH(round_f16, GetParam()), f16_t{0x1234}, 1.0f);
  expect_remainders_stay_inside(EADEM_CPU_DISPATCH(widen_bf16, GetParam()), 7.0f, bf16_t{0x3f80});
  expect_remainders_stay_inside(EADEM_CPU_DISPATCH(widen_f16, GetParam()), 7.0f, f16_t{0x3c00});
}

TEST_P(VectorMath, ReductionsTakeEveryElementOnce) {
  const auto sum = EADEM_CPU_DISPATCH(sum_array, GetParam());
  const auto most = EADEM_CPU_DISPATCH(max_array, GetParam());
  for (int64_t n = 1; n <= 200; ++n) {
    std::vector<float> x(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) x[static_cast<size_t>(i)] = static_cast<float>(i + 1);
    EXPECT_EQ(sum(x.data(), n), static_cast<float>(n * (n + 1) / 2));  // integers: exact in any order
    for (int64_t at : {int64_t{0}, n / 2, n - 1}) {
      std::vector<float> negative(static_cast<size_t>(n), -2.0f);
      negative[static_cast<size_t>(at)] = -1.0f;
      EXPECT_EQ(most(negative.data(), n), -1.0f) << n << " " << at;
    }
  }
}

TEST(Dispatch, EveryInstructionSetHasItsOwnSlot) {
  std::set<size_t> slots;
  size_t sharing = 0;  // avx512_vnni, avx512_bf16 and amx are compiled as avx512, neon_dotprod as neon
  for (Isa isa : available_isas()) {
    slots.insert(isa_slot(isa));
    sharing += has_byte_dots(isa);
  }
  EXPECT_EQ(slots.size() + sharing, available_isas().size());
}

}  // namespace
}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
