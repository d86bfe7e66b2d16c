// SPDX-License-Identifier: Apache-2.0
//
// 8-bit floats with one scale: what is stored, along rows and transposed, with current and with given scales.
#include "eadem/core/encodings/fp8_tensor_encoding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "eadem/core/philox.h"
#include "eadem/core/tensor.h"

namespace eadem {
namespace {

using TensorKind = Fp8Format::Kind;

std::vector<const Fp8TensorEncoding*> every_tensor_encoding() {
  std::vector<const Fp8TensorEncoding*> all;
  for (const TensorKind kind : {TensorKind::e4m3, TensorKind::e5m2})
    for (const bool delayed : {false, true}) all.push_back(&Fp8TensorEncoding::of(kind, delayed));
  return all;
}

// Random values whose sizes span many octaves, so that some become subnormal codes.
Tensor tensor_of_many_sizes(int64_t rows, int64_t columns) {
  Tensor values = Tensor::on_host(DType::f32, {rows, columns});
  for (int64_t i = 0; i < rows * columns; ++i)
    values.view.as<float>()[i] = std::ldexp(2 * uniform_float(philox4x32(3, static_cast<uint64_t>(i)).words[0]) - 1,
                                            static_cast<int>(i % 29) - 20);
  return values;
}

uint8_t tensor_code_at(const TensorView& encoded, int plane, int64_t i) {
  return static_cast<const uint8_t*>(encoded.plane(plane))[i];
}

TEST(Fp8Tensor, EncodingsAreFoundByWhatTheyAre) {
  std::vector<std::string_view> names;
  for (const Fp8TensorEncoding* encoding : every_tensor_encoding()) {
    EXPECT_EQ(Fp8TensorEncoding::of(encoding), encoding);
    EXPECT_EQ(&Fp8TensorEncoding::of(encoding->kind(), encoding->is_delayed()), encoding);
    EXPECT_EQ(Fp8Encoding::of(encoding), nullptr);
    names.push_back(encoding->name());
  }
  EXPECT_EQ(names, (std::vector<std::string_view>{"fp8_e4m3_current", "fp8_e4m3_delayed", "fp8_e5m2_current",
                                                  "fp8_e5m2_delayed"}));
  EXPECT_EQ(Fp8TensorEncoding::of(static_cast<const Encoding*>(nullptr)), nullptr);
  EXPECT_EQ(Fp8TensorEncoding::of(Fp8Encoding::find("fp8_e4m3_tensor")), nullptr);
  EXPECT_THROW(every_tensor_encoding()[0]->planes({3}), InvalidArgument);
}

// The codes are those of Fp8Encoding with one scale, which PyTorch's vectors define.
TEST(Fp8Tensor, HasTheCodesOfFp8EncodingAndTheTransposedOnes) {
  for (const Fp8TensorEncoding* encoding : every_tensor_encoding())
    for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {16, 3}, {17, 5}, {40, 33}}) {
      const Fp8Encoding& plain = *Fp8Encoding::find({encoding->kind(), 0, 0});
      const Tensor values = tensor_of_many_sizes(rows, columns),
                   expected = Tensor::on_host(DType::f32, values.view.shape, plain),
                   encoded = Tensor::on_host(DType::f32, values.view.shape, *encoding),
                   decoded = Tensor::on_host(DType::f32, values.view.shape), same = decoded;
      plain.encode(expected.view, values.view);
      encoding->encode(encoded.view, values.view);
      EXPECT_EQ(Fp8TensorEncoding::scale(encoded.view), plain.scale(expected.view, 0, 0));
      const int64_t pitch = Fp8TensorEncoding::padded_rows(rows);
      EXPECT_EQ(pitch % 16, 0);
      for (int64_t r = 0; r < pitch; ++r)
        for (int64_t c = 0; c < columns; ++c) {
          const int code = r < rows ? tensor_code_at(expected.view, 0, r * columns + c) : 0;
          if (r < rows) {
            EXPECT_EQ(tensor_code_at(encoded.view, 0, r * columns + c), code);
          }
          EXPECT_EQ(tensor_code_at(encoded.view, 1, c * pitch + r), code);
        }
      encoding->decode(decoded.view, encoded.view);
      plain.decode(same.view, expected.view);
      EXPECT_EQ(std::memcmp(decoded.view.data, same.view.data, static_cast<size_t>(same.view.size_bytes())), 0);
    }
}

TEST(Fp8Tensor, GivenScalesSaturateAndWhatIsNotFiniteShows) {
  for (const Fp8TensorEncoding* encoding : every_tensor_encoding()) {
    const float largest = encoding->largest(), infinity = std::numeric_limits<float>::infinity();
    const std::vector<float> row = {1.0f,  -1.0f,    2.0f * largest, -1e38f,       0.0f,
                                    -0.0f, infinity, -infinity,      std::nanf("")};
    const Tensor values = Tensor::on_host(DType::f32, {1, std::ssize(row)}),
                 encoded = Tensor::on_host(DType::f32, values.view.shape, *encoding),
                 decoded = Tensor::on_host(DType::f32, values.view.shape);
    std::copy(row.begin(), row.end(), values.view.as<float>());
    const float scale = encoding->scale_of(largest);  // 1
    Fp8TensorEncoding::set_scale(encoded.view, scale);
    encoding->encode_rows(encoded.view, values.view, scale, 0, 1);
    encoding->decode(decoded.view, encoded.view);
    const float* got = decoded.view.as<float>();
    EXPECT_EQ(std::vector<float>(got, got + 6), (std::vector<float>{1, -1, largest, -largest, 0, -0.0f}));
    for (int i = 6; i < 9; ++i) EXPECT_TRUE(std::isnan(got[i])) << i;
    EXPECT_TRUE(std::isnan(Fp8TensorEncoding::largest_magnitude(values.view, 0, 1)));
    encoding->encode(encoded.view, values.view);
    EXPECT_TRUE(std::isnan(Fp8TensorEncoding::scale(encoded.view)));
    // Zeros have no scale and decode to zeros.
    std::fill_n(values.view.as<float>(), row.size(), 0.0f);
    encoding->encode(encoded.view, values.view);
    EXPECT_EQ(Fp8TensorEncoding::scale(encoded.view), 0.0f);
    encoding->decode(decoded.view, encoded.view);
    for (size_t i = 0; i < row.size(); ++i) EXPECT_EQ(got[i], 0.0f);
  }
}

TEST(Fp8Tensor, IsCutAlongBothSides) {
  const Fp8TensorEncoding& encoding = Fp8TensorEncoding::of(TensorKind::e4m3, false);
  const Tensor values = tensor_of_many_sizes(37, 20), whole = Tensor::on_host(DType::f32, values.view.shape, encoding),
               plain = Tensor::on_host(DType::f32, values.view.shape);
  encoding.encode(whole.view, values.view);
  encoding.decode(plain.view, whole.view);
  for (const int axis : {0, 1}) {
    const Shape shape = axis == 0 ? Shape{9, 20} : Shape{37, 9};
    const int64_t begin = 4, row0 = axis == 0 ? begin : 0, column0 = axis == 1 ? begin : 0;
    const Tensor part = Tensor::on_host(DType::f32, shape, encoding), cut = Tensor::on_host(DType::f32, shape);
    encoding.slice(part.view, whole.view, axis, begin);
    encoding.decode(cut.view, part.view);
    for (int64_t r = 0; r < shape[0]; ++r)
      for (int64_t c = 0; c < shape[1]; ++c) {
        EXPECT_EQ(cut.view.as<float>()[r * shape[1] + c], plain.view.as<float>()[(row0 + r) * 20 + column0 + c]);
        EXPECT_EQ(tensor_code_at(part.view, 1, c * Fp8TensorEncoding::padded_rows(shape[0]) + r),
                  tensor_code_at(part.view, 0, r * shape[1] + c));
      }
  }
}

}  // namespace
}  // namespace eadem
