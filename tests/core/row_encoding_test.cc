// SPDX-License-Identifier: Apache-2.0
//
// e4m3 against its definition, and rows of 8-bit codes against their bounds.
#include "eadem/core/encodings/row_encoding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "eadem/core/error.h"
#include "eadem/core/tensor.h"

namespace eadem {
namespace {

// From the definition, in double.
double e4m3_value(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

TEST(E4m3, EveryCodeHasItsValue) {
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_t{static_cast<uint8_t>(code)}.to_float();
    if ((code & 0x7f) == 0x7f)
      EXPECT_TRUE(std::isnan(value)) << code;
    else
      EXPECT_EQ(static_cast<double>(value), e4m3_value(code)) << code;
  }
  EXPECT_EQ(e4m3_t{0x7e}.to_float(), e4m3_t::kLargest);
}

// The nearest of the codes that are written, the even one of two.
int nearest_code(double value) {
  int best = 0;
  const double size = std::fabs(value);
  for (int code = 8; code < 0x7f; ++code) {
    const double distance = std::fabs(e4m3_value(code) - size), least = std::fabs(e4m3_value(best) - size);
    if (distance < least || (distance == least && code % 2 == 0 && best != 0)) best = code;
  }
  return best | (std::signbit(value) ? 0x80 : 0);
}

TEST(E4m3, RoundsToTheNearestCodeThatIsWritten) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> exponent(-12, 9), fraction(-1, 1);
  std::vector<float> values = {0.0f, -0.0f, 0x1p-7f, 0x1.000002p-7f, 0x1p-6f, 448.0f, 460.0f, 1e9f, 0x1.fp-7f, 1e-30f};
  for (int code = 0; code < 0x7e; ++code) {  // codes, the middles between them, and beside those
    const float middle = static_cast<float>((e4m3_value(code) + e4m3_value(code + 1)) / 2);
    for (float value :
         {static_cast<float>(e4m3_value(code)), middle, std::nextafter(middle, 1000.0f), std::nextafter(middle, 0.0f)})
      values.push_back(value);
  }
  for (int i = 0; i < 10000; ++i) values.push_back(std::ldexp(fraction(random), static_cast<int>(exponent(random))));
  for (float value : values)
    for (float signed_value : {value, -value})
      EXPECT_EQ(e4m3_t::from_float(signed_value).bits, nearest_code(static_cast<double>(signed_value))) << signed_value;
}

Tensor rows_of(const std::vector<float>& values, int64_t columns) {
  Tensor result = Tensor::on_host(DType::f32, Shape{static_cast<int64_t>(values.size()) / columns, columns});
  std::copy(values.begin(), values.end(), result.view.as<float>());
  return result;
}

std::vector<float> round_trip(const RowEncoding& encoding, const Tensor& values) {
  const Tensor encoded = Tensor::on_host(DType::f32, values.shape(), encoding);
  encoding.encode(encoded.view, values.view);
  const Tensor decoded = Tensor::on_host(DType::f32, values.shape());
  encoding.decode(decoded.view, encoded.view);
  return {decoded.view.as<float>(), decoded.view.as<float>() + decoded.view.num_elements()};
}

TEST(RowEncoding, ZerosStayAndWhatIsNoNumberSpoilsItsRowAlone) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const Tensor values = rows_of({0, 0, 0, 1, -2, 3, inf, 1, 0, nan, 0, 0, 4, 5, -6}, 3);
  for (const RowEncoding* encoding : {&RowEncoding::int8(), &RowEncoding::fp8_e4m3()}) {
    const std::vector<float> got = round_trip(*encoding, values);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(got[i], 0.0f);
    for (size_t i = 6; i < 12; ++i) EXPECT_TRUE(std::isnan(got[i])) << i;
    EXPECT_NEAR(got[5], 3.0f, 1e-6f);  // the largest of its row is exact but for the scale's rounding
    EXPECT_NEAR(got[14], -6.0f, 2e-6f);
  }
}

// Kept apart from tests/ops, where the kernel is compared: 2000 rows of normal numbers, int8 within half a unit of the
// row's scale, e4m3 within a sixteenth of each value or 2^-7 units.
TEST(RowEncoding, NormalRowsStayWithinTheirBounds) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<float> data(64 * 2000);
  for (float& value : data) value = normal(random);
  const Tensor values = rows_of(data, 64);
  for (const RowEncoding* encoding : {&RowEncoding::int8(), &RowEncoding::fp8_e4m3()}) {
    const std::vector<float> got = round_trip(*encoding, values);
    for (size_t row = 0; row < data.size(); row += 64) {
      double most = 0;
      for (size_t i = row; i < row + 64; ++i) most = std::max(most, std::fabs(static_cast<double>(data[i])));
      const double scale = most / static_cast<double>(encoding->largest());
      for (size_t i = row; i < row + 64; ++i) {
        const double size = std::fabs(static_cast<double>(data[i]));
        const double bound = encoding == &RowEncoding::int8() ? scale / 2 : std::max(0x1p-4 * size, 0x1p-7 * scale);
        ASSERT_LE(std::fabs(static_cast<double>(got[i]) - static_cast<double>(data[i])), bound + 4 * 0x1p-24 * most);
      }
    }
  }
}

TEST(RowEncoding, IsCutAlongEveryAxisButTheLast) {
  const RowEncoding& encoding = RowEncoding::int8();
  std::vector<float> data(3 * 4 * 5);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i) - 30.0f;
  Tensor values = rows_of(data, 5);
  values.view = values.view.reshaped(Shape{3, 4, 5});
  const Tensor whole = Tensor::on_host(DType::f32, values.shape(), encoding);
  encoding.encode(whole.view, values.view);
  const Tensor part = Tensor::on_host(DType::f32, Shape{3, 2, 5}, encoding);
  encoding.slice(part.view, whole.view, 1, 1);
  float a[5], b[5];
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t j = 0; j < 2; ++j) {
      encoding.decode_row(a, part.view, i * 2 + j);
      encoding.decode_row(b, whole.view, i * 4 + j + 1);
      for (int d = 0; d < 5; ++d) EXPECT_EQ(a[d], b[d]);
    }
  EXPECT_THROW(encoding.slice(part.view, whole.view, 2, 0), InvalidArgument);
  EXPECT_THROW(encoding.planes(Shape{}), InvalidArgument);
}

TEST(RowEncoding, CacheTypesHaveNames) {
  for (const char* name : {"f32", "bf16", "f16", "int8", "fp8_e4m3"}) EXPECT_EQ(kv_cache_type(name)->name(), name);
  for (const char* name : {"", "i32", "q8_0", "fp8"}) EXPECT_FALSE(kv_cache_type(name).has_value()) << name;
}

}  // namespace
}  // namespace eadem
