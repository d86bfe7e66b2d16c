// SPDX-License-Identifier: Apache-2.0
//
// Integers in groups and 8-bit floats in blocks: against what PyTorch makes of the same codes, and their quantizers
// against their bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/core/tensor.h"

namespace eadem {
namespace {

Tensor empty_of(const Encoding& encoding, const Shape& shape) {
  const Tensor result = Tensor::in_one_piece(DType::f32, shape, encoding);
  std::memset(result.view.data, 0, static_cast<size_t>(encoded_bytes(encoding, shape)));
  return result;
}

Tensor quantized(const Encoding& encoding, std::vector<float>& values, const Shape& shape) {
  Tensor result = empty_of(encoding, shape);
  encoding.encode(result.view, TensorView(values.data(), DType::f32, shape));
  return result;
}

std::vector<float> decoded(const TensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.num_elements()));
  view.encoding->decode(TensorView(values.data(), DType::f32, view.shape), view);
  return values;
}

std::vector<float> random_values(int64_t count, uint32_t seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// Log-normal: a few columns matter much more than the others.
std::vector<float> random_importance(int64_t columns, uint32_t seed) {
  std::vector<float> importance = random_values(columns, seed, 1.5f);
  for (float& value : importance) value = std::exp(value);
  return importance;
}

// The sum of importance * error^2 of each block of `rows` x `columns`, in order.
std::vector<double> costs(const TensorView& encoded, const std::vector<float>& values,
                          const std::vector<float>& importance, int64_t rows, int64_t columns) {
  std::vector<float> restored(static_cast<size_t>(encoded.num_elements()));
  encoded.encoding->decode(TensorView(restored.data(), DType::f32, encoded.shape), encoded);
  const int64_t width = encoded.shape[1], across = (width + columns - 1) / columns;
  std::vector<double> result(static_cast<size_t>((encoded.shape[0] + rows - 1) / rows * across));
  for (int64_t i = 0; i < encoded.num_elements(); ++i) {
    const double error = static_cast<double>(values[static_cast<size_t>(i)]) - restored[static_cast<size_t>(i)];
    result[static_cast<size_t>(i / width / rows * across + i % width / columns)] +=
        importance[static_cast<size_t>(i % width)] * error * error;
  }
  return result;
}

// No block costs more than it did, and all of them together less. (Sums in the same order but for rows of blocks.)
void expect_cheaper(const std::vector<double>& weighted, const std::vector<double>& plain) {
  ASSERT_EQ(weighted.size(), plain.size());
  double before = 0, after = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_LE(weighted[i], plain[i] * (1 + 1e-12)) << i;
    before += plain[i], after += weighted[i];
  }
  EXPECT_LT(after, before);
}

std::vector<uint8_t> bytes_of(const Tensor& encoded) {
  const auto* data = static_cast<const uint8_t*>(encoded.view.data);
  return {data, data + encoded_bytes(*encoded.view.encoding, encoded.shape())};
}

// Values [begin, …) of `axis` of a matrix.
std::vector<float> slice(const std::vector<float>& all, const Shape& shape, int axis, int64_t begin, int64_t extent) {
  std::vector<float> result;
  for (int64_t r = 0; r < shape[0]; ++r)
    for (int64_t c = 0; c < shape[1]; ++c) {
      const int64_t at = axis == 0 ? r : c;
      if (at >= begin && at < begin + extent) result.push_back(all[static_cast<size_t>(r * shape[1] + c)]);
    }
  return result;
}

void expect_cut(const Tensor& whole, int axis, int64_t begin, int64_t extent) {
  SCOPED_TRACE(fmt::format("{} axis {} from {} by {}", to_string(whole.view), axis, begin, extent));
  Shape shape = whole.view.shape;
  shape[axis] = extent;
  const Encoding& encoding = *whole.view.encoding;
  Tensor part = empty_of(encoding, shape);
  encoding.slice(part.view, whole.view, axis, begin);
  EXPECT_EQ(decoded(part.view), slice(decoded(whole.view), whole.view.shape, axis, begin, extent));
}

template <typename Action>
void expect_refused(Action action, std::initializer_list<const char*> parts) {
  try {
    action();
    FAIL() << "not refused";
  } catch (const InvalidArgument& error) {
    for (const char* part : parts)
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << " lacks " << part;
  }
}

// ---- Groups --------------------------------------------------------------------------------------------------------

std::vector<const GroupEncoding*> every_group_encoding() {
  std::vector<const GroupEncoding*> result;
  for (const GroupEncoding& encoding : GroupEncoding::all()) result.push_back(&encoding);
  return result;
}

class Groups : public testing::TestWithParam<const GroupEncoding*> {
 protected:
  const GroupEncoding& encoding_ = *GetParam();
  const GroupFormat& format_ = encoding_.format();
};
INSTANTIATE_TEST_SUITE_P(All, Groups, testing::ValuesIn(every_group_encoding()),
                         [](const auto& info) { return std::string(info.param->name()); });

TEST_P(Groups, AreFoundByNameAndFormat) {
  EXPECT_EQ(GroupEncoding::find(encoding_.name()), &encoding_);
  EXPECT_EQ(GroupEncoding::find(format_), &encoding_);
  EXPECT_EQ(GroupEncoding::of(&encoding_), &encoding_);
  EXPECT_EQ(Fp8Encoding::of(&encoding_), nullptr);
}

// Random codes, scales, zeros and an order, written plane by plane as group_encoding.h draws them.
TEST_P(Groups, DecodeIsTheSentenceOfTheHeader) {
  const Shape shape{5, 384};
  const int64_t size = format_.group_size == 0 ? 384 : format_.group_size, groups = 384 / size;
  const Tensor encoded = empty_of(encoding_, shape);
  const std::vector<PlaneSpec> planes = encoding_.planes(shape);
  ASSERT_EQ(planes.size(), 2u + (format_.has_zeros ? 1 : 0) + (format_.has_order ? 1 : 0));
  EXPECT_EQ(planes[0].shape, (Shape{5, 384 * format_.bits / 8}));
  EXPECT_EQ(planes[1].shape, (Shape{5, groups}));
  EXPECT_EQ(planes[1].dtype, format_.scale);

  std::mt19937 random(3);
  std::vector<int> codes(5 * 384), zeros(static_cast<size_t>(5 * groups), 1 << (format_.bits - 1));
  std::vector<double> scales(static_cast<size_t>(5 * groups));
  std::vector<int32_t> order(384);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  if (format_.has_order) std::shuffle(order.begin(), order.end(), random);
  auto* code_bytes = static_cast<uint8_t*>(encoded.view.plane(0));
  for (size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<int>(random() % (1u << format_.bits));
    if (format_.bits == 8)
      code_bytes[i] = static_cast<uint8_t>(codes[i]);
    else
      code_bytes[i / 2] = static_cast<uint8_t>(code_bytes[i / 2] | codes[i] << (i % 2 == 0 ? 0 : 4));
  }
  for (size_t i = 0; i < scales.size(); ++i) {
    const float value = std::normal_distribution<float>(0.0f, 0.01f)(random);
    auto* base = static_cast<std::byte*>(encoded.view.plane(1));
    if (format_.scale == DType::f32) {
      std::memcpy(base + i * 4, &value, 4);
      scales[i] = value;
    } else {
      const bool half = format_.scale == DType::f16;
      const uint16_t bits = half ? f16_t::from_float(value).bits : bf16_t::from_float(value).bits;
      std::memcpy(base + i * 2, &bits, 2);
      scales[i] = half ? f16_t{bits}.to_float() : bf16_t{bits}.to_float();
    }
    if (format_.has_zeros) {
      zeros[i] = static_cast<int>(random() % (1u << format_.bits));
      static_cast<uint8_t*>(encoded.view.plane(2))[i] = static_cast<uint8_t>(zeros[i]);
    }
  }
  if (format_.has_order) std::memcpy(encoded.view.plane(format_.has_zeros ? 3 : 2), order.data(), order.size() * 4);

  const std::vector<float> values = decoded(encoded.view);
  for (size_t row = 0; row < 5; ++row)
    for (size_t j = 0; j < 384; ++j) {
      const size_t at = row * static_cast<size_t>(groups) + j / static_cast<size_t>(size);
      const double expected = scales[at] * (codes[row * 384 + j] - zeros[at]);  // exact: 24 bits times 9
      ASSERT_EQ(values[row * 384 + static_cast<size_t>(order[j])], static_cast<float>(expected)) << row << ", " << j;
    }
  EXPECT_EQ(encoding_.first_not_finite(encoded.view, 0, encoded.view.shape.num_rows()), -1);
}

// Half a step from the nearest level, or a whole one where the zero point is rounded, too; a level is off by at most
// max_code times what rounding moved the scale by, and the f32 division by one rounding of as many steps.
TEST_P(Groups, ErrorIsWithinTheBound) {
  const Shape shape{7, 256};
  std::vector<float> values = random_values(shape.num_elements(), 5, 0.02f);
  for (int64_t k = 0; k < 256; ++k) values[static_cast<size_t>(2 * 256 + k)] = 0.5f + static_cast<float>(k) / 1024;
  for (int64_t k = 0; k < 256; ++k) values[static_cast<size_t>(3 * 256 + k)] = 0.0f;
  const Tensor encoded = quantized(encoding_, values, shape);
  const std::vector<float> restored = decoded(encoded.view);
  const double roundoff = dtype_unit_roundoff(format_.scale) + 0x1p-22;
  const int64_t size = encoding_.group_columns(256);
  for (int64_t row = 0; row < 7; ++row)
    for (int64_t k = 0; k < 256; ++k) {
      const auto i = static_cast<size_t>(row * 256 + k);
      const double scale = encoding_.scale(encoded.view, row, k / size);
      const double step = std::max(scale, 0x1p-24);  // the smallest f16 is a step by itself
      const double bound = step * ((format_.has_zeros ? 1.0 : 0.5) + format_.max_code() * 1.01 * roundoff);
      ASSERT_LE(std::abs(static_cast<double>(restored[i]) - values[i]), bound) << "row " << row << ", column " << k;
    }
  for (int64_t k = 0; k < 256; ++k) EXPECT_EQ(restored[static_cast<size_t>(3 * 256 + k)], 0.0f);
}

TEST_P(Groups, EncodesFromOtherDtypesAndFromItself) {
  const Shape shape{6, 256};
  std::vector<float> values = random_values(shape.num_elements(), 6);
  for (float& value : values) value = bf16_t::from_float(value).to_float();
  const Tensor encoded = quantized(encoding_, values, shape);
  const Tensor narrow = converted_on_host(TensorView(values.data(), DType::f32, shape), DType::bf16);
  const Tensor from_bf16 = empty_of(encoding_, shape), copied = empty_of(encoding_, shape);
  encoding_.encode(from_bf16.view, narrow.view);
  EXPECT_EQ(bytes_of(from_bf16), bytes_of(encoded));
  // In pieces, as threads take them.
  for (int64_t row : {5, 0, 2, 1, 4, 3}) encoding_.encode_pieces(copied.view, encoded.view, row, row + 1);
  EXPECT_EQ(bytes_of(copied), bytes_of(encoded));
}

TEST_P(Groups, ImportanceMakesErrorsCheaper) {
  const Shape shape{12, 256};
  std::vector<float> values = random_values(shape.num_elements(), 30, 0.02f);
  for (int64_t k = 0; k < 256; ++k) values[static_cast<size_t>(2 * 256 + k)] = 0.5f + static_cast<float>(k) / 1024;
  for (int64_t k = 0; k < 256; ++k) values[static_cast<size_t>(3 * 256 + k)] = 0.0f;
  const std::vector<float> importance = random_importance(256, 31);
  const Tensor plain = quantized(encoding_, values, shape), weighted = empty_of(encoding_, shape),
               again = empty_of(encoding_, shape);
  const TensorView view(values.data(), DType::f32, shape);
  encoding_.encode_weighted(weighted.view, view, importance, 0, 12);
  const int64_t size = encoding_.group_columns(256);
  expect_cheaper(costs(weighted.view, values, importance, 1, size), costs(plain.view, values, importance, 1, size));
  for (int64_t row : {7, 0}) encoding_.encode_weighted(again.view, view, importance, row, row == 0 ? 7 : 12);
  EXPECT_EQ(bytes_of(again), bytes_of(weighted));
  values[5 * 256 + 9] = HUGE_VALF;
  expect_refused([&] { encoding_.encode_weighted(again.view, view, importance, 0, 12); },
                 {"row 5", "column 9", "not finite"});
}

TEST_P(Groups, CutsEqualSlices) {
  const Shape shape{6, 384};
  std::vector<float> values = random_values(shape.num_elements(), 7);
  const Tensor encoded = quantized(encoding_, values, shape);
  expect_cut(encoded, 0, 0, 6);
  expect_cut(encoded, 0, 2, 3);
  expect_cut(encoded, 0, 6, 0);
  if (format_.has_order) {
    const Tensor part = empty_of(encoding_, {6, 128});
    expect_refused([&] { encoding_.slice(part.view, encoded.view, 1, 128); }, {"128 to 256", "cannot be cut"});
    return;
  }
  expect_cut(encoded, 1, 128, 256);
  expect_cut(encoded, 1, 256, 128);
  if (format_.group_size == 0) {
    expect_cut(encoded, 1, 10, 50);
  } else {
    const Tensor part = empty_of(encoding_, {6, format_.group_size});
    expect_refused([&] { encoding_.slice(part.view, encoded.view, 1, 16); }, {"16 to", "cut through a group"});
  }
}

TEST_P(Groups, HostileShapesAreRefused) {
  expect_refused([&] { encoding_.planes({256}); }, {"[256]"});
  expect_refused([&] { encoding_.planes({2, 4, 256}); }, {"[2, 4, 256]"});
  expect_refused([&] { encoding_.planes({4, 0}); }, {"[4, 0]"});
  if (format_.group_size != 0) expect_refused([&] { encoding_.planes({4, 100}); }, {"100", "groups of"});
  if (format_.group_size == 0 && format_.bits == 4) expect_refused([&] { encoding_.planes({4, 33}); }, {"33", "bytes"});
  EXPECT_EQ(encoded_bytes(encoding_, {0, 128}), format_.has_order ? 512 : 0);
}

TEST_P(Groups, WhatIsNotFiniteIsRefused) {
  const Shape shape{3, 128};
  std::vector<float> values = random_values(shape.num_elements(), 8);
  values[128 + 70] = std::numeric_limits<float>::quiet_NaN();
  expect_refused([&] { quantized(encoding_, values, shape); }, {"row 1", "column 70", "not finite"});
  values[128 + 70] = std::numeric_limits<float>::max();
  if (format_.scale == DType::f16)
    expect_refused([&] { quantized(encoding_, values, shape); }, {"row 1", "beyond f16"});

  // A scale that is infinite, and one whose values are.
  for (float& value : values) value = 1.0f;
  const Tensor encoded = quantized(encoding_, values, shape);
  const auto set_scale = [&](float scale) {
    auto* at = static_cast<std::byte*>(encoded.view.plane(1)) +
               2 * encoding_.num_groups(128) * static_cast<int64_t>(dtype_size(format_.scale));
    const uint16_t half = format_.scale == DType::f16 ? f16_t::from_float(scale).bits : bf16_t::from_float(scale).bits;
    if (format_.scale == DType::f32)
      std::memcpy(at, &scale, 4);
    else
      std::memcpy(at, &half, 2);
  };
  set_scale(std::numeric_limits<float>::infinity());
  EXPECT_EQ(encoding_.first_not_finite(encoded.view, 0, encoded.view.shape.num_rows()), 2 * 128);
  if (format_.scale == DType::f16) return;
  set_scale(0x1p126f);
  EXPECT_EQ(encoding_.first_not_finite(encoded.view, 0, encoded.view.shape.num_rows()), 2 * 128);
  set_scale(0x1p100f);
  EXPECT_EQ(encoding_.first_not_finite(encoded.view, 0, encoded.view.shape.num_rows()), -1);
}

// ---- 8-bit floats --------------------------------------------------------------------------------------------------

std::vector<const Fp8Encoding*> every_fp8_encoding() {
  std::vector<const Fp8Encoding*> result;
  for (const Fp8Encoding& encoding : Fp8Encoding::all()) result.push_back(&encoding);
  return result;
}

// tests/data/encodings/fp8.f32, made by PyTorch: the value of every code of e4m3 and of e5m2; then 1024 values, and
// as what each is read back from e4m3 and from e5m2.
std::vector<float> fp8_vectors() {
  std::ifstream file(EADEM_SOURCE_DIR "/tests/data/encodings/fp8.f32", std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

TEST(Fp8, CodesMeanWhatPyTorchSays) {
  const std::vector<float> vectors = fp8_vectors();
  ASSERT_EQ(vectors.size(), 512u + 3 * 1024);
  for (const auto kind : {Fp8Format::Kind::e4m3, Fp8Format::Kind::e5m2})
    for (int code = 0; code < 256; ++code) {
      const float expected = vectors[static_cast<size_t>(kind) * 256 + static_cast<size_t>(code)];
      const float value = fp8_to_float(kind, static_cast<uint8_t>(code));
      EXPECT_EQ(std::isnan(value), std::isnan(expected)) << code;
      if (std::isnan(expected)) continue;
      EXPECT_EQ(std::bit_cast<uint32_t>(value), std::bit_cast<uint32_t>(expected)) << code;
      const int back = fp8_from_float(kind, value);
      EXPECT_EQ(back, std::isfinite(expected) ? code : code - 1);  // infinity becomes the largest
    }
}

TEST(Fp8, RoundsAsPyTorchDoes) {
  const std::vector<float> vectors = fp8_vectors();
  ASSERT_EQ(vectors.size(), 512u + 3 * 1024);
  for (const auto kind : {Fp8Format::Kind::e4m3, Fp8Format::Kind::e5m2})
    for (size_t i = 0; i < 1024; ++i) {
      const float value = vectors[512 + i], expected = vectors[512 + 1024 * (1 + static_cast<size_t>(kind)) + i];
      EXPECT_EQ(std::bit_cast<uint32_t>(fp8_to_float(kind, fp8_from_float(kind, value))),
                std::bit_cast<uint32_t>(expected))
          << value;
    }
  for (const auto kind : {Fp8Format::Kind::e4m3, Fp8Format::Kind::e5m2}) {
    EXPECT_EQ(fp8_to_float(kind, fp8_from_float(kind, 1e30f)), fp8_largest(kind));
    EXPECT_EQ(fp8_to_float(kind, fp8_from_float(kind, -HUGE_VALF)), -fp8_largest(kind));
    EXPECT_TRUE(std::isnan(fp8_to_float(kind, fp8_from_float(kind, std::numeric_limits<float>::quiet_NaN()))));
  }
}

// Against the definition: no other code is nearer, and of two as near the even one is taken.
TEST(Fp8, RoundsToTheNearestEven) {
  for (const auto kind : {Fp8Format::Kind::e4m3, Fp8Format::Kind::e5m2}) {
    const int largest = kind == Fp8Format::Kind::e4m3 ? 0x7e : 0x7b;
    for (int code = 0; code < largest; ++code) {
      const float below = fp8_to_float(kind, static_cast<uint8_t>(code)),
                  above = fp8_to_float(kind, static_cast<uint8_t>(code + 1)), middle = below + (above - below) / 2;
      const int even = code % 2 == 0 ? code : code + 1;
      for (const float sign : {1.0f, -1.0f}) {
        const int bit = sign < 0 ? 0x80 : 0;
        EXPECT_EQ(fp8_from_float(kind, sign * middle), bit | even) << middle;
        EXPECT_EQ(fp8_from_float(kind, sign * std::nextafter(middle, 0.0f)), bit | code) << middle;
        EXPECT_EQ(fp8_from_float(kind, sign * std::nextafter(middle, HUGE_VALF)), bit | (code + 1)) << middle;
      }
    }
  }
}

class Fp8Blocks : public testing::TestWithParam<const Fp8Encoding*> {
 protected:
  const Fp8Encoding& encoding_ = *GetParam();
  const Fp8Format& format_ = encoding_.format();
};
INSTANTIATE_TEST_SUITE_P(All, Fp8Blocks, testing::ValuesIn(every_fp8_encoding()),
                         [](const auto& info) { return std::string(info.param->name()); });

TEST_P(Fp8Blocks, DecodeIsTheSentenceOfTheHeader) {
  const Shape shape{200, 300};
  const Tensor encoded = empty_of(encoding_, shape);
  const int64_t rows = format_.block_rows == 0 ? 200 : format_.block_rows,
                columns = format_.block_columns == 0 ? 300 : format_.block_columns;
  const std::vector<PlaneSpec> planes = encoding_.planes(shape);
  ASSERT_EQ(planes.size(), 2u);
  const int64_t across = (300 + columns - 1) / columns;
  EXPECT_EQ(planes[1].shape, (Shape{(200 + rows - 1) / rows, across}));
  std::mt19937 random(4);
  auto* codes = static_cast<uint8_t*>(encoded.view.plane(0));
  for (int i = 0; i < 200 * 300; ++i) codes[i] = static_cast<uint8_t>(random() % 120 | (random() % 2 << 7));
  std::vector<float> scales = random_values(planes[1].shape.num_elements(), 9, 0.01f);
  std::memcpy(encoded.view.plane(1), scales.data(), scales.size() * sizeof(float));
  const std::vector<float> values = decoded(encoded.view);
  for (int64_t r = 0; r < 200; ++r)
    for (int64_t k = 0; k < 300; ++k) {
      const double scale = scales[static_cast<size_t>(r / rows * across + k / columns)];
      const double expected = scale * fp8_to_float(format_.kind, codes[r * 300 + k]);
      ASSERT_EQ(values[static_cast<size_t>(r * 300 + k)], static_cast<float>(expected));
    }
  EXPECT_EQ(encoding_.first_not_finite(encoded.view, 0, encoded.view.shape.num_rows()), -1);
  codes[17 * 300 + 5] = 0x7f;
  EXPECT_EQ(encoding_.first_not_finite(encoded.view, 0, encoded.view.shape.num_rows()), 17 * 300 + 5);
}

// Relative to itself a value is off by half a unit in its last place, 2^-4 or 2^-3; below the smallest normal by half
// the smallest subnormal of its block. Dividing by the scale and multiplying by it round twice more.
TEST_P(Fp8Blocks, ErrorIsWithinTheBound) {
  const Shape shape{150, 200};
  std::vector<float> values = random_values(shape.num_elements(), 10, 3.0f);
  const Tensor encoded = quantized(encoding_, values, shape);
  const std::vector<float> restored = decoded(encoded.view);
  const bool e4m3 = format_.kind == Fp8Format::Kind::e4m3;
  for (int64_t r = 0; r < 150; ++r)
    for (int64_t k = 0; k < 200; ++k) {
      const double value = values[static_cast<size_t>(r * 200 + k)];
      const double scale = encoding_.scale(encoded.view, r, k);
      const double bound =
          std::max(std::abs(value) * (e4m3 ? 0x1p-4 : 0x1p-3), scale * (e4m3 ? 0x1p-10 : 0x1p-17)) * (1 + 0x1p-20);
      ASSERT_LE(std::abs(restored[static_cast<size_t>(r * 200 + k)] - value), bound) << r << ", " << k;
    }
}

TEST_P(Fp8Blocks, ImportanceMakesErrorsCheaper) {
  const Shape shape{150, 200};
  std::vector<float> values = random_values(shape.num_elements(), 32, 3.0f);
  std::fill_n(values.begin() + 20 * 200, 200, 0.0f);
  const std::vector<float> importance = random_importance(200, 33);
  const Tensor plain = quantized(encoding_, values, shape), weighted = empty_of(encoding_, shape);
  const TensorView view(values.data(), DType::f32, shape);
  encoding_.encode_weighted(weighted.view, view, importance, 0, encoding_.num_pieces(shape));
  const int64_t rows = format_.block_rows == 0 ? 150 : format_.block_rows,
                columns = format_.block_columns == 0 ? 200 : format_.block_columns;
  expect_cheaper(costs(weighted.view, values, importance, rows, columns),
                 costs(plain.view, values, importance, rows, columns));
  values[100 * 200 + 7] = HUGE_VALF;
  expect_refused([&] { encoding_.encode_weighted(weighted.view, view, importance, 0, encoding_.num_pieces(shape)); },
                 {"row 100", "column 7", "not finite"});
}

TEST_P(Fp8Blocks, CutsEqualSlices) {
  const Shape shape{300, 270};
  std::vector<float> values = random_values(shape.num_elements(), 11);
  const Tensor encoded = quantized(encoding_, values, shape);
  for (int axis : {0, 1}) {
    expect_cut(encoded, axis, 0, 128);
    expect_cut(encoded, axis, 128, 128);
    expect_cut(encoded, axis, 128, shape[axis] - 128);  // the last block is smaller
    expect_cut(encoded, axis, 0, 0);
  }
  const Tensor part = empty_of(encoding_, {100, 270});
  if (format_.block_rows == 128)
    expect_refused([&] { encoding_.slice(part.view, encoded.view, 0, 100); }, {"rows 100 to 200", "block of 128"});
  else
    expect_cut(encoded, 0, 100, 100);
}

TEST_P(Fp8Blocks, EncodesFromItselfAndRefusesTheRest) {
  const Shape shape{150, 200};
  std::vector<float> values = random_values(shape.num_elements(), 12);
  const Tensor encoded = quantized(encoding_, values, shape), copied = empty_of(encoding_, shape);
  encoding_.encode(copied.view, encoded.view);
  EXPECT_EQ(bytes_of(copied), bytes_of(encoded));
  expect_refused([&] { encoding_.planes({4}); }, {"[4]"});
  values[100 * 200 + 7] = HUGE_VALF;
  expect_refused([&] { quantized(encoding_, values, shape); }, {"row 100", "column 7", "not finite"});
}

}  // namespace
}  // namespace eadem
