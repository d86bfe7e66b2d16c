// SPDX-License-Identifier: Apache-2.0
//
// The packed layout of 8-bit floats, and the product over it: the bits of a product with the f32 values that they mean.
#include "eadem/kernels/cpu/linear/fp8_panels.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "tests/kernels/run_product.h"
#include "tests/support/thread_counts.h"

namespace eadem::kernels::cpu {
namespace fp8_panels_test {

Tensor allocate(const Encoding& encoding, const Shape& shape) {
  return Tensor::in_one_piece(DType::f32, shape, encoding);
}

// Every finite code, subnormals among them; scales of either sign.
Tensor random_floats(const Fp8Encoding& encoding, const Shape& shape, uint32_t seed) {
  Tensor result = allocate(encoding, shape);
  std::mt19937 random(seed);
  const uint32_t codes = encoding.format().kind == Fp8Format::Kind::e4m3 ? 0x7f : 0x7c;
  for (int64_t i = 0; i < shape.num_elements(); ++i)
    static_cast<uint8_t*>(result.view.plane(0))[i] = static_cast<uint8_t>(random() % codes | (random() % 2) << 7);
  for (int64_t i = 0; i < encoding.planes(shape)[1].shape.num_elements(); ++i) {
    const float scale = std::normal_distribution<float>(0.0f, 0.01f)(random);
    std::memcpy(static_cast<std::byte*>(result.view.plane(1)) + i * 4, &scale, 4);
  }
  return result;
}

std::vector<const Fp8Encoding*> every_encoding() {
  std::vector<const Fp8Encoding*> result;
  for (const Fp8Encoding& encoding : Fp8Encoding::all()) result.push_back(&encoding);
  return result;
}

class Fp8PanelsOf : public testing::TestWithParam<const Fp8Encoding*> {};
INSTANTIATE_TEST_SUITE_P(Encodings, Fp8PanelsOf, testing::ValuesIn(every_encoding()),
                         [](const auto& info) { return std::string(info.param->name()); });

TEST_P(Fp8PanelsOf, DecodeToWhatTheEncodingDecodesTo) {
  const Fp8Panels& packing = *Fp8Panels::of(GetParam());
  EXPECT_EQ(Fp8Panels::of(&packing), &packing);
  for (const Shape& shape : {Shape{1, 1}, Shape{16, 128}, Shape{150, 333}}) {
    const Tensor stored = random_floats(*GetParam(), shape, 1), packed = allocate(packing, shape);
    for (int64_t p = packing.num_pieces(shape) - 1; p >= 0; --p)
      packing.encode_pieces(packed.view, stored.view, p, p + 1);
    std::vector<float> expected(static_cast<size_t>(shape[1])), actual(expected.size());
    for (int64_t n = 0; n < shape[0]; ++n) {
      GetParam()->decode_row(expected.data(), stored.view, n);
      packing.decode_row(actual.data(), packed.view, n);
      ASSERT_EQ(std::memcmp(expected.data(), actual.data(), expected.size() * sizeof(float)), 0) << n;
    }
  }
  EXPECT_THROW(packing.planes({4}), InvalidArgument);

  const Tensor stored = random_floats(*GetParam(), {2, 16}, 4), packed = allocate(packing, {2, 16});
  const float huge = 0x1p119f;
  std::memcpy(stored.view.plane(1), &huge, 4);
  try {
    packing.encode(packed.view, stored.view);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("row 0, column 0"), std::string::npos) << error.what();
  }
}

class Fp8Product : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(Isas, Fp8Product, testing::ValuesIn(available_isas()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

TEST_P(Fp8Product, HasTheBitsOfTheDecodedWeights) {
  for (int threads : test::thread_counts({1, 3})) {
    CpuDevice device(DeviceOptions{.num_threads = threads, .isa = isa_name(GetParam())});
    for (const Fp8Encoding* encoding : every_encoding())
      for (const Shape& shape : {Shape{5, 31}, Shape{150, 128}, Shape{130, 600}}) {
        const int64_t outputs = shape[0], k_size = shape[1];
        const Fp8Panels& packing = *Fp8Panels::of(encoding);
        const PackedPanels& plain = *PackedPanels::of(DType::f32, PackedPanels::Side::normal);
        const Tensor stored = random_floats(*encoding, shape, 2);
        const Tensor packed = allocate(packing, shape), plain_packed = allocate(plain, shape);
        packing.encode(packed.view, stored.view);
        Tensor decoded = Tensor::on_host(DType::f32, shape);
        encoding->decode(decoded.view, stored.view);
        plain.encode(plain_packed.view, decoded.view);
        for (const int64_t rows : {1, 2, 7, 8, 9, 25, 200}) {
          std::mt19937 random(3);
          std::vector<float> x(static_cast<size_t>(rows * k_size)), y(static_cast<size_t>(rows * outputs)),
              expected = y;
          for (float& value : x) value = std::normal_distribution<float>()(random);
          Matmul m;
          m.rows = rows, m.k_size = k_size, m.outputs = outputs;
          m.a = x.data(), m.a_row_stride = k_size;
          m.b.data = plain_packed.view.data;
          m.y = expected.data();
          run_product(device, {.b_dtype = DType::f32}, m);
          const Fp8Format& format = encoding->format();
          m.b.fp8 = {static_cast<const uint8_t*>(packed.view.plane(0)), static_cast<const float*>(packed.view.plane(1)),
                     format.block_columns};
          m.y = y.data();
          run_product(device, {.source = MatmulTypes::Source::fp8, .is_e5m2 = format.kind == Fp8Format::Kind::e5m2}, m);
          ASSERT_EQ(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)), 0)
              << encoding->name() << " " << rows << " x " << to_string(shape);
        }
      }
  }
}

}  // namespace fp8_panels_test
}  // namespace eadem::kernels::cpu
