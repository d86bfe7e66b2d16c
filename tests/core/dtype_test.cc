// SPDX-License-Identifier: Apache-2.0
//
// The 16-bit conversions over every one of their 65536 values, against their definition in double.
#include "eadem/core/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace eadem {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Format {
  int exponent_bits, fraction_bits;
  int max_exponent() const { return (1 << exponent_bits) - 1; }
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};
constexpr Format kBf16{8, 7}, kF16{5, 10};

// The value of a bit pattern by the definition of IEEE 754 formats.
double value_of(uint16_t bits, const Format& format) {
  const int exponent = (bits >> format.fraction_bits) & format.max_exponent();
  const int fraction = bits & ((1 << format.fraction_bits) - 1);
  const double sign = (bits & 0x8000) ? -1 : 1;
  if (exponent == format.max_exponent()) return fraction ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - format.bias() - format.fraction_bits);
  return sign * std::ldexp((1 << format.fraction_bits) + fraction, exponent - format.bias() - format.fraction_bits);
}

template <typename T>
void check_every_value(const Format& format) {
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const T value{static_cast<uint16_t>(pattern)};
    const double expected = value_of(value.bits, format);
    const float wide = value.to_float();
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(wide)) << std::hex << pattern;
      const uint16_t back = T::from_float(wide).bits;
      ASSERT_TRUE(std::isnan(value_of(back, format))) << std::hex << pattern;
      ASSERT_TRUE(back & (1 << (format.fraction_bits - 1))) << "quiet, " << std::hex << pattern;
      continue;
    }
    ASSERT_EQ(static_cast<double>(wide), expected) << std::hex << pattern;
    ASSERT_EQ(std::signbit(wide), (pattern & 0x8000) != 0) << std::hex << pattern;
    ASSERT_EQ(T::from_float(wide).bits, pattern) << std::hex << pattern;
  }
}

// Between every two neighbours: below the midpoint rounds down, above it up, the midpoint itself to the even one.
template <typename T>
void check_every_rounding(const Format& format) {
  const uint16_t infinity = static_cast<uint16_t>(format.max_exponent() << format.fraction_bits);
  for (uint16_t low = 0; low < infinity; ++low) {
    const auto high = static_cast<uint16_t>(low + 1);
    const double below = value_of(low, format);
    // Beyond the largest finite value the grid goes on as if the exponent did.
    const double above =
        high == infinity ? std::ldexp(1, format.max_exponent() - format.bias()) : value_of(high, format);
    const double midpoint = (below + above) / 2;
    const auto middle = static_cast<float>(midpoint);
    ASSERT_EQ(static_cast<double>(middle), midpoint) << "midpoints are exact in f32";
    const uint16_t even = (low & 1) ? high : low;
    for (const uint16_t sign : {uint16_t{0}, uint16_t{0x8000}}) {
      const float s = sign ? -1.0f : 1.0f;
      ASSERT_EQ(T::from_float(s * middle).bits, even | sign) << std::hex << low;
      ASSERT_EQ(T::from_float(s * std::nextafter(middle, 0.0f)).bits, low | sign) << std::hex << low;
      ASSERT_EQ(T::from_float(s * std::nextafter(middle, kInf)).bits, high | sign) << std::hex << low;
    }
  }
}

TEST(DType, Bf16EveryValue) { check_every_value<bf16_t>(kBf16); }
TEST(DType, F16EveryValue) { check_every_value<f16_t>(kF16); }
TEST(DType, Bf16EveryRounding) { check_every_rounding<bf16_t>(kBf16); }
TEST(DType, F16EveryRounding) { check_every_rounding<f16_t>(kF16); }

TEST(DType, SpecialValues) {
  EXPECT_EQ(bf16_t::from_float(kInf).bits, 0x7f80);
  EXPECT_EQ(bf16_t::from_float(-kInf).bits, 0xff80);
  EXPECT_EQ(f16_t::from_float(kInf).bits, 0x7c00);
  EXPECT_EQ(f16_t::from_float(1e10f).bits, 0x7c00) << "overflow";
  EXPECT_EQ(f16_t::from_float(-1e-10f).bits, 0x8000) << "underflow keeps the sign";
  EXPECT_TRUE(std::isnan(bf16_t::from_float(kNan).to_float()));
  EXPECT_TRUE(std::isnan(f16_t::from_float(-kNan).to_float()));
  // A NaN whose payload lies in the dropped bits only must not become infinity.
  const float low_payload = std::bit_cast<float>(0x7f800001u);
  EXPECT_TRUE(std::isnan(bf16_t::from_float(low_payload).to_float()));
  EXPECT_TRUE(std::isnan(f16_t::from_float(low_payload).to_float()));
}

TEST(DType, NamesAndSizes) {
  constexpr DType kAll[] = {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i32, DType::i64, DType::u8};
  for (DType dtype : kAll) EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype);
  EXPECT_FALSE(dtype_from_name("float32"));
  EXPECT_FALSE(dtype_from_name(""));
  EXPECT_EQ(dtype_size(DType::bf16), 2u);
  EXPECT_EQ(dtype_size(DType::i64), 8u);
  EXPECT_TRUE(is_floating(DType::f16));
  EXPECT_FALSE(is_floating(DType::i32));
}

TEST(DType, UnitRoundoffIsHalfTheGapAboveOne) {
  EXPECT_EQ(dtype_unit_roundoff(DType::bf16), (static_cast<double>(bf16_t{0x3f81}.to_float()) - 1) / 2);
  EXPECT_EQ(dtype_unit_roundoff(DType::f16), (static_cast<double>(f16_t{0x3c01}.to_float()) - 1) / 2);
  EXPECT_EQ(dtype_unit_roundoff(DType::f32), static_cast<double>(std::numeric_limits<float>::epsilon()) / 2);
}

}  // namespace
}  // namespace eadem
