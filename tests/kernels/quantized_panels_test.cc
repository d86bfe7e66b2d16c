// SPDX-License-Identifier: Apache-2.0
//
// The packed layout of quantized weights, and the product over it: equal bit for bit to a scalar account of what it
// promises (quantized_matmul.h), whatever the rows, the blocking, the threads and the instruction set; and as close to
// the product in double precision as rounding x to 8 bits allows.
#include "eadem/kernels/cpu/linear/quantized/quantized_panels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "tests/kernels/run_product.h"
#include "tests/support/thread_counts.h"

namespace eadem::kernels::cpu {
namespace {

// A tensor of one buffer whose planes lie one after another.
Tensor allocate(const Encoding& encoding, const Shape& shape) {
  return Tensor::in_one_piece(DType::f32, shape, encoding);
}

// Blocks of random codes and sub-scales, with scales of either sign around 0.01.
Tensor random_blocks(const BlockEncoding& encoding, const Shape& shape, uint32_t seed) {
  const BlockFormat& format = encoding.format();
  Tensor result = allocate(encoding, shape);
  if (!encoding.is_writable()) {
    encoding.fill_random(static_cast<uint8_t*>(result.view.data), 0, shape.num_elements() / format.block_size, 0.1,
                         seed);
    return result;
  }
  std::mt19937 random(seed);
  const auto integer = [&](int min, int max) { return std::uniform_int_distribution<int>(min, max)(random); };
  auto* block = static_cast<uint8_t*>(result.view.data);
  for (int64_t b = 0; b < shape.num_elements() / format.block_size; ++b, block += format.block_bytes) {
    BlockParts parts{};
    for (int i = 0; i < format.block_size; ++i)
      parts.codes[static_cast<size_t>(i)] = static_cast<uint8_t>(integer(0, (1 << format.code_bits) - 1));
    for (size_t g = 0; g < static_cast<size_t>(format.num_groups()); ++g) {
      parts.sub_scales[g] = static_cast<int8_t>(integer(format.sub_scale_min, format.sub_scale_max));
      parts.sub_mins[g] = static_cast<uint8_t>(integer(format.sub_min_max == 1 ? 1 : 0, format.sub_min_max));
    }
    const float size = 0.001f * static_cast<float>(integer(1, 30));
    parts.scale = format.scale == BlockFormat::Scale::power_of_two
                      ? std::ldexp(1.0f, integer(-12, -3))
                      : f16_t::from_float(integer(0, 3) ? size : -size).to_float();
    parts.min = format.has_min ? f16_t::from_float(0.01f * static_cast<float>(integer(-9, 9))).to_float() : 0.0f;
    encoding.pack(block, parts);
  }
  return result;
}

Tensor random_rows(int64_t rows, int64_t k_size, uint32_t seed) {
  Tensor x = Tensor::on_host(DType::f32, Shape{rows, k_size});
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < rows * k_size; ++i) x.view.as<float>()[i] = normal(random);
  return x;
}

class QuantizedPanelsOf : public testing::TestWithParam<const BlockEncoding*> {};
INSTANTIATE_TEST_SUITE_P(Encodings, QuantizedPanelsOf, testing::ValuesIn(BlockEncoding::all()),
                         [](const auto& info) { return std::string(info.param->name()); });

TEST_P(QuantizedPanelsOf, DecodesToWhatTheBlocksDecodeTo) {
  const QuantizedPanels& packing = *QuantizedPanels::of(GetParam());
  EXPECT_EQ(QuantizedPanels::of(&packing), &packing);
  for (const int64_t outputs : {1, 16, 37})
    for (const int64_t blocks : {1, 3}) {
      const Shape shape{outputs, blocks * GetParam()->format().block_size};
      const Tensor stored = random_blocks(*GetParam(), shape, 1), packed = allocate(packing, shape);
      packing.encode(packed.view, stored.view);
      std::vector<float> expected(static_cast<size_t>(shape[1])), actual(expected.size());
      for (int64_t n = 0; n < outputs; ++n) {
        GetParam()->decode_row(expected.data(), stored.view, n);
        packing.decode_row(actual.data(), packed.view, n);
        ASSERT_EQ(std::memcmp(expected.data(), actual.data(), expected.size() * sizeof(float)), 0) << n;
      }
    }
}

TEST_P(QuantizedPanelsOf, TakesLittleMoreThanTheBlocks) {
  const Shape shape{64, 1024};
  int64_t bytes = 0;
  for (const PlaneSpec& plane : QuantizedPanels::of(GetParam())->planes(shape)) bytes += plane.size_bytes();
  if (GetParam()->is_writable()) {
    EXPECT_LE(static_cast<double>(bytes), 1.06 * static_cast<double>(64 * GetParam()->row_bytes(1024)));
    if (GetParam()->format().scale == BlockFormat::Scale::power_of_two) {
      EXPECT_EQ(bytes, 64 * GetParam()->row_bytes(1024));
    }
    return;
  }
  // The bits of a code, a byte for each sub-scale and an f16 for each block.
  const BlockFormat& format = GetParam()->format();
  EXPECT_DOUBLE_EQ(static_cast<double>(8 * bytes) / (64 * 1024),
                   format.code_bits + 8.0 / format.group_size + 16.0 / format.block_size);
}

// The product as its header promises it, one output at a time.
class Scalar {
 public:
  Scalar(Isa isa, const QuantizedLayout& layout) : fused_(isa != Isa::scalar && isa != Isa::sse4), layout_(layout) {}

  struct Weights {
    std::vector<int> levels;          // [k]: code - zero, or the codebook's
    std::vector<float> scales, mins;  // [k / group]
    std::vector<int> sub_scales, sub_mins;
    std::vector<float> super_scales, super_mins;  // [k / group]: of its block
  };

  Weights weights(const BlockEncoding& encoding, const TensorView& stored, int64_t n) const {
    const BlockFormat& format = encoding.format();
    const int64_t blocks = stored.shape[1] / format.block_size;
    const auto* row = static_cast<const uint8_t*>(stored.data) + n * encoding.row_bytes(stored.shape[1]);
    Weights result;
    for (int64_t b = 0; b < blocks; ++b) {
      BlockParts parts{};
      encoding.unpack(parts, row + b * format.block_bytes);
      for (int i = 0; i < format.block_size; ++i)
        result.levels.push_back(format.level(parts.codes[static_cast<size_t>(i)]));
      for (size_t g = 0; g < static_cast<size_t>(format.num_groups()); ++g) {
        result.scales.push_back(parts.scale * static_cast<float>(parts.sub_scales[g]));
        result.mins.push_back(parts.min * static_cast<float>(parts.sub_mins[g]));
        result.sub_scales.push_back(parts.sub_scales[g]);
        result.sub_mins.push_back(parts.sub_mins[g]);
        result.super_scales.push_back(parts.scale);
        result.super_mins.push_back(parts.min);
      }
    }
    return result;
  }

  float product(const float* x, const Weights& w) const {
    const int64_t size = layout_.group_size;
    const auto groups = static_cast<size_t>(layout_.groups());
    float acc = 0;
    for (size_t s = 0; s < w.levels.size() / kStep; ++s) {
      const float* values = x + s * kStep;
      float largest = 0;
      for (int i = 0; i < kStep; ++i) largest = std::max(largest, std::fabs(values[i]));
      const float scale = largest * (1.0f / 127.0f), inverse = 127.0f / largest;
      int dots[kMaxStepGroups] = {}, sums[kMaxStepGroups] = {};
      for (int64_t i = 0; i < kStep; ++i) {
        const int code = static_cast<int>(std::nearbyint(values[i] * inverse));
        dots[i / size] += code * w.levels[s * kStep + static_cast<size_t>(i)];
        sums[i / size] += code;
      }
      const size_t at = s * groups;
      float f;
      if (layout_.folded) {
        f = static_cast<float>(dots[0] * w.sub_scales[at] + dots[1] * w.sub_scales[at + 1]) * w.super_scales[at];
        if (layout_.has_min)
          f = fma(-static_cast<float>(sums[0] * w.sub_mins[at] + sums[1] * w.sub_mins[at + 1]), w.super_mins[at], f);
      } else {
        f = static_cast<float>(dots[0]) * w.scales[at];
        if (groups == 2) f = fma(static_cast<float>(dots[1]), w.scales[at + 1], f);
        if (layout_.has_min) f = fma(-static_cast<float>(sums[0]), w.mins[at], f);
      }
      acc = fma(scale, f, acc);
    }
    return acc;
  }

 private:
  float fma(float a, float b, float c) const {
    const float ab = a * b;
    return fused_ ? std::fma(a, b, c) : ab + c;
  }
  bool fused_;
  const QuantizedLayout& layout_;
};

class QuantizedProduct : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(Isas, QuantizedProduct, testing::ValuesIn(available_isas()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

struct Product {
  Product(CpuDevice& device, const BlockEncoding& encoding, const TensorView& stored, const Tensor& x,
          MatmulTypes::Source source = MatmulTypes::Source::quantized)
      : packed(allocate(*QuantizedPanels::of(&encoding), stored.shape)),
        y(Tensor::on_host(DType::f32, Shape{x.shape()[0], stored.shape[0]})) {
    const QuantizedPanels& packing = *QuantizedPanels::of(&encoding);
    packing.encode(packed.view, stored);
    Matmul m;
    m.rows = x.shape()[0], m.k_size = stored.shape[1], m.outputs = stored.shape[0];
    m.a = x.view.as<float>(), m.a_row_stride = m.k_size;
    m.b.quantized = {&packing.layout(), static_cast<const uint8_t*>(packed.view.plane(0)),
                     static_cast<const uint8_t*>(packed.view.plane(1)),
                     static_cast<const f16_t*>(packed.view.plane(2))};
    m.y = y.view.as<float>();
    run_product(device, {.source = source, .layout = &packing.layout()}, m);
  }
  float at(int64_t r, int64_t n) const { return y.view.as<float>()[r * y.shape()[1] + n]; }

  Tensor packed;
  Tensor y;
};

TEST_P(QuantizedProduct, IsTheScalarProductBitForBit) {
  int64_t cases = 0;
  for (int threads : test::thread_counts({1, 3})) {
    CpuDevice device(DeviceOptions{.num_threads = threads, .isa = isa_name(GetParam())});
    for (const BlockEncoding* encoding : BlockEncoding::all()) {
      const Scalar scalar(GetParam(), QuantizedPanels::of(encoding)->layout());
      for (const int64_t k_size : {int64_t{encoding->format().block_size}, int64_t{768}})
        for (const int64_t outputs : {5, 100}) {
          const Tensor stored = random_blocks(*encoding, Shape{outputs, k_size}, 2);
          std::vector<Scalar::Weights> weights;
          for (int64_t n = 0; n < outputs; ++n) weights.push_back(scalar.weights(*encoding, stored.view, n));
          // 45: some rows on tiles, some not; 530: more than a block.
          for (const int64_t rows : {1, 2, 3, 5, 7, 8, 9, 17, 45, 200, 530}) {
            const bool many = rows >= 45;
            if (many && outputs == 5) continue;  // the scalar product is the cost of this test
            if (!test::tries_case(cases++)) continue;
            const Tensor x = random_rows(rows, k_size, 3);
            const Product product(device, *encoding, stored.view, x);
            for (int64_t r = 0; r < rows; r += many ? rows / 6 : 1)
              for (int64_t n = 0; n < outputs; ++n)
                ASSERT_EQ(product.at(r, n),
                          scalar.product(x.view.as<float>() + r * k_size, weights[static_cast<size_t>(n)]))
                    << encoding->name() << " " << rows << " x " << k_size << " -> " << outputs << " at " << r << ", "
                    << n;
          }
        }
    }
  }
}

// Every byte of a power of two, the subnormal ones of 0 and 1 and the format's NaN, which reads as a number, included.
TEST_P(QuantizedProduct, EveryPowerOfTwoIsMultiplied) {
  CpuDevice device(DeviceOptions{.num_threads = 1, .isa = isa_name(GetParam())});
  const BlockEncoding& mxfp4 = *BlockEncoding::find("mxfp4");
  const QuantizedLayout& layout = QuantizedPanels::of(&mxfp4)->layout();
  const Scalar scalar(GetParam(), layout);
  const Tensor stored = random_blocks(mxfp4, Shape{256, kStep}, 6);
  for (int64_t n = 0; n < 256; ++n) static_cast<uint8_t*>(stored.view.data)[n * 17] = static_cast<uint8_t>(n);
  for (const int64_t rows : {1, 3, 9, 40}) {
    const Tensor x = random_rows(rows, kStep, 7);
    const Product product(device, mxfp4, stored.view, x);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t n = 0; n < 256; ++n)
        ASSERT_EQ(product.at(r, n),
                  scalar.product(x.view.as<float>() + r * kStep, scalar.weights(mxfp4, stored.view, n)))
            << rows << " rows, " << r << ", 2^(" << n << " - 128)";
  }
  // What is decoded, one value of k a row, of scales with which every value is finite.
  const Tensor x = Tensor::on_host(DType::f32, Shape{kStep, kStep});
  for (int64_t i = 0; i < kStep * kStep; ++i) x.view.as<float>()[i] = i % (kStep + 1) == 0 ? 1.0f : 0.0f;
  const Product product(device, mxfp4, stored.view, x, MatmulTypes::Source::decoded);
  std::vector<float> values(static_cast<size_t>(kStep));
  for (int64_t n = 0; n < 250; ++n) {
    mxfp4.decode_row(values.data(), stored.view, n);
    for (int64_t k = 0; k < kStep; ++k) ASSERT_EQ(product.at(k, n), values[static_cast<size_t>(k)]) << n << ", " << k;
  }
}

// Rounding x to 8 bits changes a value by at most half a unit, 1 / 254 of the largest of its 32; on top come the f32
// roundings of the chain: at most k / 32 + 4 of them, each of a partial sum that is no larger than the sum of
// magnitudes.
TEST_P(QuantizedProduct, IsCloseToTheProductOfWhatTheBlocksMean) {
  CpuDevice device(DeviceOptions{.num_threads = 2, .isa = isa_name(GetParam())});
  for (const BlockEncoding* encoding : BlockEncoding::all()) {
    const int64_t k_size = 512, outputs = 48, rows = 4;
    const Tensor stored = random_blocks(*encoding, Shape{outputs, k_size}, 4);
    const Tensor x = random_rows(rows, k_size, 5);
    const Product product(device, *encoding, stored.view, x);
    std::vector<float> w(static_cast<size_t>(k_size));
    for (int64_t n = 0; n < outputs; ++n) {
      encoding->decode_row(w.data(), stored.view, n);
      for (int64_t r = 0; r < rows; ++r) {
        const float* values = x.view.as<float>() + r * k_size;
        double sum = 0, magnitude = 0, bound = 0;
        const Scalar scalar(GetParam(), QuantizedPanels::of(encoding)->layout());
        const Scalar::Weights parts = scalar.weights(*encoding, stored.view, n);
        for (int64_t k = 0; k < k_size; ++k) {
          const int64_t step = k / kStep * kStep;
          float largest = 0;
          for (int64_t i = step; i < step + kStep; ++i) largest = std::max(largest, std::fabs(values[i]));
          const size_t g = static_cast<size_t>(k / QuantizedPanels::of(encoding)->layout().group_size);
          const double terms = std::fabs(static_cast<double>(parts.scales[g]) * parts.levels[static_cast<size_t>(k)]) +
                               std::fabs(static_cast<double>(parts.mins[g]));
          sum += static_cast<double>(values[k]) * w[static_cast<size_t>(k)];
          bound += largest * (0.5 / 127.0) * std::fabs(static_cast<double>(w[static_cast<size_t>(k)]));
          magnitude += largest * terms;
        }
        bound += (static_cast<double>(k_size) / kStep + 8) * 0x1p-24 * magnitude;
        ASSERT_NEAR(product.at(r, n), sum, bound) << encoding->name() << " " << r << ", " << n;
      }
    }
  }
}

TEST_P(QuantizedProduct, ARowIsNotFiniteOnlyByItself) {
  CpuDevice device(DeviceOptions{.num_threads = 1, .isa = isa_name(GetParam())});
  const BlockEncoding& encoding = *BlockEncoding::find("q4_0");
  const Tensor stored = random_blocks(encoding, Shape{16, 64}, 6);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    const Tensor x = random_rows(3, 64, 7);
    x.view.as<float>()[64 + 40] = bad;
    const Product product(device, encoding, stored.view, x);
    for (int64_t n = 0; n < 16; ++n) {
      EXPECT_TRUE(std::isfinite(product.at(0, n)));
      EXPECT_FALSE(std::isfinite(product.at(1, n))) << bad;
      EXPECT_TRUE(std::isfinite(product.at(2, n)));
    }
  }
}

TEST_P(QuantizedProduct, ZeroAndVanishingRowsGiveZero) {
  CpuDevice device(DeviceOptions{.num_threads = 1, .isa = isa_name(GetParam())});
  const BlockEncoding& encoding = *BlockEncoding::find("q4_k");
  const Tensor stored = random_blocks(encoding, Shape{16, 256}, 8);
  const Tensor x = random_rows(2, 256, 9);
  for (int64_t k = 0; k < 256; ++k) {
    x.view.as<float>()[k] = 0;
    x.view.as<float>()[256 + k] = 0x1p-140f;  // subnormal: 127 / x is not finite
  }
  const Product product(device, encoding, stored.view, x);
  for (int64_t n = 0; n < 16; ++n) {
    EXPECT_EQ(product.at(0, n), 0.0f);
    EXPECT_EQ(product.at(1, n), 0.0f);
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu
