// SPDX-License-Identifier: Apache-2.0
//
// The packed layout of integers in groups, and the product over it: equal bit for bit to a scalar account of what it
// promises (quantized_matmul.h), whatever the rows, the threads and the instruction set.
#include "eadem/kernels/cpu/linear/group_panels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "tests/kernels/run_product.h"
#include "tests/support/thread_counts.h"

namespace eadem::kernels::cpu {
namespace group_panels_test {

Tensor allocate(const Encoding& encoding, const Shape& shape) {
  return Tensor::in_one_piece(DType::f32, shape, encoding);
}

// Random codes, zero points and order; scales of either sign around 0.01.
Tensor random_groups(const GroupEncoding& encoding, const Shape& shape, uint32_t seed) {
  const GroupFormat& format = encoding.format();
  Tensor result = allocate(encoding, shape);
  std::mt19937 random(seed);
  size_t index = 0;
  for (const PlaneSpec& plane : encoding.planes(shape)) {
    void* data = result.view.plane(static_cast<int>(index++));
    const int64_t count = plane.shape.num_elements();
    if (plane.name == "codes")
      for (int64_t i = 0; i < count; ++i) static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(random());
    if (plane.name == "zeros")
      for (int64_t i = 0; i < count; ++i)
        static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(random() % (1u << format.bits));
    if (plane.name == "scales")
      for (int64_t i = 0; i < count; ++i) {
        const float scale = std::normal_distribution<float>(0.0f, 0.01f)(random);
        const uint16_t bits =
            plane.dtype == DType::f16 ? f16_t::from_float(scale).bits : bf16_t::from_float(scale).bits;
        auto* to = static_cast<std::byte*>(data) + i * static_cast<int64_t>(dtype_size(plane.dtype));
        std::memcpy(to, plane.dtype == DType::f32 ? static_cast<const void*>(&scale) : &bits, dtype_size(plane.dtype));
      }
    if (plane.name == "order") {
      std::vector<int32_t> order(static_cast<size_t>(count));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      std::memcpy(data, order.data(), order.size() * sizeof(int32_t));
    }
  }
  return result;
}

class GroupPanelsOf : public testing::TestWithParam<const GroupEncoding*> {};
INSTANTIATE_TEST_SUITE_P(Encodings, GroupPanelsOf, testing::ValuesIn([] {
                           std::vector<const GroupEncoding*> result;
                           for (const GroupEncoding& encoding : GroupEncoding::all()) result.push_back(&encoding);
                           return result;
                         }()),
                         [](const auto& info) { return std::string(info.param->name()); });

TEST_P(GroupPanelsOf, DecodeToWhatTheGroupsDecodeTo) {
  const GroupPanels& packing = *GroupPanels::of(GetParam());
  EXPECT_EQ(GroupPanels::of(&packing), &packing);
  EXPECT_EQ(quantized_packing_of(GetParam()), &packing);
  EXPECT_EQ(QuantizedPanels::of(GetParam()), nullptr);
  for (const int64_t outputs : {1, 16, 37})
    for (const int64_t columns : {128, 384}) {
      const Shape shape{outputs, columns};
      const Tensor stored = random_groups(*GetParam(), shape, 1), packed = allocate(packing, shape);
      // In pieces, as threads take them.
      for (int64_t p = packing.num_pieces(shape) - 1; p >= 0; --p)
        packing.encode_pieces(packed.view, stored.view, p, p + 1);
      std::vector<float> expected(static_cast<size_t>(columns)), actual(expected.size());
      for (int64_t n = 0; n < outputs; ++n) {
        GetParam()->decode_row(expected.data(), stored.view, n);
        packing.decode_row(actual.data(), packed.view, n);
        ASSERT_EQ(std::memcmp(expected.data(), actual.data(), expected.size() * sizeof(float)), 0) << n;
      }
    }
}

// But for the outputs that fill the last panel.
TEST_P(GroupPanelsOf, TakeNoMoreThanTheGroups) {
  EXPECT_EQ(encoded_bytes(*GroupPanels::of(GetParam()), {64, 1024}), encoded_bytes(*GetParam(), {64, 1024}));
}

TEST(GroupPanels, TakeRowsOfWholeSteps) {
  const GroupPanels& packing = *GroupPanels::of(GroupEncoding::find("int8_row_f32"));
  EXPECT_THROW(packing.planes({4, 40}), InvalidArgument);
  EXPECT_THROW(packing.planes({4, 0}), InvalidArgument);
  EXPECT_THROW(packing.planes({4}), InvalidArgument);
  EXPECT_NO_THROW(packing.planes({4, 64}));
}

// Computes one output as the product promises: f32 additions over steps of 32 columns, or over chunks of 256 if the
// output has one scale, and integer sums within each.
float scalar_product(bool fused, const float* x, const GroupEncoding& encoding, const TensorView& stored, int64_t n) {
  const int64_t columns = stored.shape[1];
  const int middle = encoding.format().middle();
  const auto fma = [&](float a, float b, float c) {
    const float ab = a * b;
    return fused ? std::fma(a, b, c) : ab + c;
  };
  std::vector<uint8_t> codes(static_cast<size_t>(columns));
  encoding.unpack_codes(codes.data(), stored, n, 0, columns);
  float acc = 0, total = 0;
  const bool whole_row = encoding.format().group_size == 0;
  const int64_t size = whole_row ? 256 : kStep;
  for (int64_t begin = 0; begin < columns; begin += size) {
    const int64_t some = std::min(size, columns - begin);
    const auto value = [&](int64_t i) { return x[encoding.column(stored, begin + i)]; };
    float largest = 0;
    for (int64_t i = 0; i < some; ++i) largest = std::max(largest, std::fabs(value(i)));
    const float x_scale = largest * (1.0f / 127.0f), inverse = 127.0f / largest;
    int dot = 0, sum = 0;
    for (int64_t i = 0; i < some; ++i) {
      const int code = static_cast<int>(std::nearbyint(value(i) * inverse));
      dot += code * (codes[static_cast<size_t>(begin + i)] - middle);
      sum += code;
    }
    if (whole_row) {
      acc = fma(x_scale, static_cast<float>(dot), acc);
      total = fma(x_scale, static_cast<float>(sum), total);
      continue;
    }
    const int64_t g = begin / encoding.group_columns(columns);
    const float scale = encoding.scale(stored, n, g);
    float f = static_cast<float>(dot) * scale;
    if (encoding.format().has_zeros) {
      const float min = scale * static_cast<float>(encoding.zero(stored, n, g) - middle);
      f = fma(-static_cast<float>(sum), min, f);
    }
    acc = fma(x_scale, f, acc);
  }
  if (!whole_row) return acc;
  const float scale = encoding.scale(stored, n, 0), product = acc * scale;
  if (!encoding.format().has_zeros) return product;
  return fma(-total, scale * static_cast<float>(encoding.zero(stored, n, 0) - middle), product);
}

class GroupProduct : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(Isas, GroupProduct, testing::ValuesIn(available_isas()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

TEST_P(GroupProduct, IsTheScalarProductBitForBit) {
  const bool fused = GetParam() != Isa::scalar && GetParam() != Isa::sse4;
  for (int threads : test::thread_counts({1, 3})) {
    CpuDevice device(DeviceOptions{.num_threads = threads, .isa = isa_name(GetParam())});
    for (const GroupEncoding& encoding : GroupEncoding::all())
      for (const int64_t k_size : {int64_t{128}, int64_t{672}, int64_t{640}})
        for (const int64_t outputs : {5, 100}) {
          if (k_size % encoding.group_columns(k_size) != 0) continue;
          const GroupPanels& packing = *GroupPanels::of(&encoding);
          const Tensor stored = random_groups(encoding, Shape{outputs, k_size}, 2);
          const Tensor packed = allocate(packing, stored.view.shape);
          packing.encode(packed.view, stored.view);
          const GroupFormat& format = encoding.format();
          for (const int64_t rows : {1, 2, 7, 17, 300}) {
            // Many rows are shared out in pieces, on tiles of rows as well: one scale an output.
            if (rows == 300 && (format.group_size != 0 || k_size > 128)) continue;
            std::mt19937 random(3);
            std::vector<float> x(static_cast<size_t>(rows * k_size)), y(static_cast<size_t>(rows * outputs));
            for (float& value : x) value = std::normal_distribution<float>()(random);
            Matmul m;
            m.rows = rows, m.k_size = k_size, m.outputs = outputs;
            m.a = x.data(), m.a_row_stride = k_size;
            m.b.quantized.layout = &packing.layout();
            m.b.quantized.quants = static_cast<const uint8_t*>(packed.view.plane(0));
            m.b.quantized.scales = static_cast<const uint8_t*>(packed.view.plane(1));
            if (format.has_zeros) m.b.quantized.zeros = static_cast<const uint8_t*>(packed.view.plane(2));
            if (format.has_order)
              m.b.quantized.order = static_cast<const int32_t*>(packed.view.plane(format.has_zeros ? 3 : 2));
            m.y = y.data();
            run_product(device, {.source = MatmulTypes::Source::quantized, .layout = &packing.layout()}, m);
            for (int64_t r = 0; r < rows; r += 1 + rows / 4)
              for (int64_t n = 0; n < outputs; n += 1 + outputs / 20)
                ASSERT_EQ(y[static_cast<size_t>(r * outputs + n)],
                          scalar_product(fused, x.data() + r * k_size, encoding, stored.view, n))
                    << encoding.name() << " " << rows << " x " << k_size << " -> " << outputs << " at " << r << ", "
                    << n;
          }
        }
  }
}

}  // namespace group_panels_test
}  // namespace eadem::kernels::cpu
