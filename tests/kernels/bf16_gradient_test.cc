// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/bf16_gradient.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "eadem/core/tensor.h"

namespace eadem::kernels::cpu {
namespace {

struct Sizes {
  int64_t tokens, outputs, inputs;
};

// Every fifth value is tiny: as a bf16 value subnormal, which counts as zero.
std::vector<float> draw(int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random) * (random() % 5 == 0 ? 0x1p-130f : 1.0f);
  return values;
}

std::vector<float> turned(const std::vector<float>& values, int64_t rows, int64_t columns) {
  std::vector<float> result(values.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      result[static_cast<size_t>(c * rows + r)] = values[static_cast<size_t>(r * columns + c)];
  return result;
}

// dweight += a b for the rows dy^T of a, and x^T as a weight of `tokens` inputs, which the product rounds as it rounds
// any activations and weights.
void multiply(CpuDevice& device, float* dweight, const std::vector<float>& x, const std::vector<float>& dy,
              const Sizes& sizes) {
  std::vector<float> weight = turned(x, sizes.tokens, sizes.inputs);
  const Shape shape{sizes.inputs, sizes.tokens};
  const PackedPanels& packing = *PackedPanels::of(DType::bf16, PackedPanels::Side::vnni);
  const Tensor panels = Tensor::on_host(DType::bf16, shape, packing);
  packing.encode_pieces(panels.view, TensorView(weight.data(), DType::f32, shape), 0, packing.num_pieces(shape));
  const MatmulPlan plan(device, {.source = MatmulTypes::Source::vnni, .finish = MatmulTypes::Finish::accumulate});
  const std::vector<float> rows = turned(dy, sizes.tokens, sizes.outputs);
  Matmul m;
  m.rows = sizes.outputs;
  m.k_size = m.a_row_stride = sizes.tokens;
  m.outputs = sizes.inputs;
  m.a = rows.data();
  m.b.data = panels.view.data;
  m.y = dweight;
  const Tensor scratch = Tensor::on_host(DType::u8, {plan.scratch_bytes(device, sizes.outputs, sizes.tokens)});
  plan.run(device, m, scratch.view.data);
}

// On every instruction set that has products of bf16, with full and partial tiles of tokens, outputs and inputs, and
// with any number of threads.
TEST(Bf16WeightGradient, HasTheBitsOfTheProductOfTurnedOperands) {
  int64_t compared = 0;
  for (const Isa isa : available_isas()) {
    if (!has_bf16_products(isa)) continue;
    std::mt19937 random(3);
    for (const Sizes& sizes :
         {Sizes{1, 1, 1}, {31, 15, 17}, {32, 16, 16}, {33, 49, 5}, {64, 300, 40}, {290, 33, 130}}) {
      const std::vector<float> x = draw(sizes.tokens * sizes.inputs, random),
                               dy = draw(sizes.tokens * sizes.outputs, random),
                               before = draw(sizes.outputs * sizes.inputs, random);
      for (const int threads : {1, 3}) {
        CpuDevice device({.num_threads = threads, .isa = isa_name(isa)});
        std::vector<float> expected = before, sums = before;
        multiply(device, expected.data(), x, dy, sizes);
        const Bf16WeightGradient gradient(device);
        constexpr size_t kGuard = 64;
        const auto bytes =
            static_cast<size_t>(gradient.scratch_bytes(device, sizes.tokens, sizes.outputs, sizes.inputs));
        const Tensor scratch = Tensor::on_host(DType::u8, {static_cast<int64_t>(bytes + kGuard)});
        auto* const begin = static_cast<std::byte*>(scratch.view.data);
        std::memset(begin, 0xa5, bytes + kGuard);
        gradient.add(device, sums.data(), {x.data(), dy.data(), sizes.tokens, sizes.outputs, sizes.inputs}, begin);
        EXPECT_EQ(std::memcmp(sums.data(), expected.data(), sums.size() * sizeof(float)), 0)
            << isa_name(isa) << ": " << sizes.tokens << " tokens, " << sizes.outputs << " x " << sizes.inputs;
        for (size_t i = 0; i < kGuard; ++i) ASSERT_EQ(begin[bytes + i], std::byte{0xa5}) << "past the scratch";
        ++compared;
      }
    }
  }
  if (compared == 0) GTEST_SKIP() << "no products of bf16 here";
}

}  // namespace
}  // namespace eadem::kernels::cpu
