// SPDX-License-Identifier: Apache-2.0
//
// Products with weights as their files store them have the bits of those with packed weights.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <span>

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/cpu/weight_reader.h"
#include "tests/support/thread_counts.h"

namespace eadem::kernels::cpu {
namespace {

class StoredWeight : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(Isas, StoredWeight, testing::ValuesIn(available_isas()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

Tensor random_values(const Shape& shape, uint32_t seed) {
  Tensor values = Tensor::on_host(DType::f32, shape);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < shape.num_elements(); ++i) values.view.as<float>()[i] = normal(random);
  return values;
}

Tensor random_weight(const WeightType& type, const Shape& shape, uint32_t seed) {
  if (type.encoding == nullptr) return converted_on_host(random_values(shape, seed).view, type.dtype);
  Tensor weight = Tensor::in_one_piece(DType::f32, shape, *type.encoding);
  const BlockEncoding& blocks = *BlockEncoding::of(type.encoding);
  if (blocks.is_writable())
    blocks.encode(weight.view, random_values(shape, seed).view);
  else
    blocks.fill_random(static_cast<uint8_t*>(weight.view.data), 0, shape.num_elements() / blocks.format().block_size,
                       0.1, seed);
  return weight;
}

// y of one product, or of one that is gated. Scratch ends where it was said to: what follows stays as it was.
std::vector<float> product_of(CpuDevice& device, const WeightReader& reader, const TensorView& x,
                              const TensorView& weight, const TensorView* up) {
  MatmulTypes types = reader.types();
  if (up != nullptr) types.finish = MatmulTypes::Finish::gated;
  const MatmulPlan plan(device, types);
  Matmul m;
  m.rows = x.shape[0], m.k_size = m.a_row_stride = x.shape[1], m.outputs = weight.shape[0];
  m.a = x.as<float>();
  m.b = reader.read_or_pack(weight);
  if (up != nullptr) m.b_up = reader.read_or_pack(*up);
  std::vector<float> y(static_cast<size_t>(m.rows * m.outputs), -1.0f);
  m.y = y.data();
  const int64_t bytes = m.b.stored == nullptr
                            ? plan.scratch_bytes(device, m.rows, m.k_size)
                            : plan.scratch_bytes_stored(device, m.rows, m.k_size, reader.panel_bytes(m.k_size), false);
  constexpr int64_t kGuard = 256;
  const Buffer scratch = device.allocate(bytes + kGuard);
  auto* guard = static_cast<unsigned char*>(scratch.data()) + bytes;
  std::memset(guard, 0x5a, kGuard);
  plan.run(device, m, scratch.data());
  for (int64_t i = 0; i < kGuard; ++i) EXPECT_EQ(guard[i], 0x5a) << i << " bytes behind scratch";
  return y;
}

struct ProductShape {
  int64_t outputs, rows;
  int64_t k_units = 1;
};

// One panel that is not full; several, the last one full or not; more rows than a block of them.
constexpr ProductShape kShapes[] = {{5, 1}, {100, 2}, {96, 17, 3}, {20, 40}, {5, 300}};

void expect_same(Isa isa, const WeightType& type, const Encoding& packing, MatmulInput input, int64_t k_unit,
                 std::span<const ProductShape> shapes) {
  const WeightReader reader(&packing, input);
  ASSERT_GT(reader.panel_bytes(k_unit), 0);
  for (const auto& [outputs, rows, k_units] : shapes) {
    const int64_t k_size = k_units * k_unit;
    const Tensor gate = random_weight(type, Shape{outputs, k_size}, 1),
                 up = random_weight(type, Shape{outputs, k_size}, 2), x = random_values(Shape{rows, k_size}, 3);
    const Tensor packed_gate = Tensor::in_one_piece(type.dtype, gate.shape(), packing),
                 packed_up = Tensor::in_one_piece(type.dtype, up.shape(), packing);
    packing.encode(packed_gate.view, gate.view);
    packing.encode(packed_up.view, up.view);
    for (const int threads : test::thread_counts({1, 3})) {
      CpuDevice device(DeviceOptions{.num_threads = threads, .isa = isa_name(isa)});
      const bool gated = (threads == 1) == (rows % 2 == 0);
      const std::vector<float> stored = product_of(device, reader, x.view, gate.view, gated ? &up.view : nullptr);
      const std::vector<float> packed =
          product_of(device, reader, x.view, packed_gate.view, gated ? &packed_up.view : nullptr);
      ASSERT_EQ(std::memcmp(stored.data(), packed.data(), stored.size() * sizeof(float)), 0)
          << packing.name() << " " << rows << " x " << k_size << " -> " << outputs << ", " << threads << " threads"
          << (gated ? ", gated" : "");
    }
  }
}

TEST_P(StoredWeight, OfPlainValuesGivesTheBitsOfPackedOnes) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const MatmulInput input : {MatmulInput::f32, MatmulInput::int8})
      for (const int64_t k_unit : {1, 31, 64, 75})
        expect_same(GetParam(), dtype, *PackedPanels::of_forward(dtype, GetParam(), input), input, k_unit, kShapes);
}

TEST_P(StoredWeight, OfBlocksGivesTheBitsOfPackedOnes) {
  // Every type in one shape, and one in all of them.
  for (const BlockEncoding* blocks : BlockEncoding::all()) {
    const std::span<const ProductShape> shapes(kShapes);
    for (const MatmulInput input : {MatmulInput::f32, MatmulInput::int8})
      expect_same(GetParam(), {DType::f32, blocks}, *QuantizedPanels::of(blocks), input, blocks->format().block_size,
                  blocks->name() == "q8_0" ? shapes : shapes.subspan(1, 1));
  }
}

// Rows that are packed the other way round cannot be taken from the file.
TEST(WeightReaders, APackingOfColumnsIsAlwaysPacked) {
  const PackedPanels& transposed = *PackedPanels::of(DType::f32, PackedPanels::Side::transposed);
  EXPECT_EQ(WeightReader(&transposed, MatmulInput::f32).panel_bytes(64), 0);
}

}  // namespace
}  // namespace eadem::kernels::cpu
