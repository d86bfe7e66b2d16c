// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/bf16_dots.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "eadem/core/dtype.h"
#include "eadem/core/machine/isa.h"

namespace eadem::kernels::cpu {
namespace {

class Bf16Dots : public testing::Test {
 protected:
  void SetUp() override {
    const std::vector<Isa> isas = available_isas();
    if (std::ranges::none_of(isas, has_bf16_products)) GTEST_SKIP() << "no products of bf16 here";
  }
};

struct DotProduct {
  int64_t rows, panels, tiles;
};

// Value `i` of tile `t` of row `r` of a, and of output `n` of b, as indices of bf16 values.
size_t in_rows(const TileRows& a, int64_t r, int64_t t, int64_t i) {
  return static_cast<size_t>(t / kTileBlock * a.k_stride + r / 32 * a.pair_stride + t % kTileBlock * a.tile_stride +
                             r / 16 % 2 * a.half_stride + r % 16 * a.line_stride) /
             2 +
         static_cast<size_t>(i);
}
size_t in_panels(const DotProduct& e, int64_t n, int64_t t, int64_t i) {
  return static_cast<size_t>((n / 16 * e.tiles + t) * kTileBytes / 2 + i / 2 * 32 + n % 16 * 2 + i % 2);
}

float flushed(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }
float value_of(bf16_t stored) { return flushed(stored.to_float()); }

// The chain that bf16_dots.h states, in scalar C++.
float chain_of(const DotProduct& e, const TileRows& rows, const std::vector<bf16_t>& a, const std::vector<bf16_t>& b,
               int64_t r, int64_t n) {
  float sum = 0;
  for (int64_t t = 0; t < e.tiles; ++t)
    for (int64_t i = 0; i < 32; i += 2)
      for (const int64_t half : {1, 0})
        sum = flushed(
            std::fma(value_of(a[in_rows(rows, r, t, i + half)]), value_of(b[in_panels(e, n, t, i + half)]), sum));
  return sum;
}

// Every number of rows and panels, and the chain whatever block a row falls into.
TEST_F(Bf16Dots, AreTheChainThatIsLaidDown) {
  std::mt19937 random(1);
  const auto draw = [&](size_t count, bool small) {
    std::normal_distribution<float> normal;
    std::vector<bf16_t> values(count);
    for (bf16_t& value : values) {
      const float scale = random() % 8 == 0 ? 100.0f : 1.0f;
      value = bf16_t::from_float(normal(random) * (small ? 0x1p-64f : scale));
    }
    return values;
  };
  std::vector<DotProduct> products = {{50, 1, 0}, {33, 7, 9}, {64, 8, 17}, {100, 3, 8}, {300, 5, 3}, {2, 13, 40}};
  for (int64_t rows = 1; rows <= 20; ++rows) products.push_back({rows, rows % 7 + 1, rows % 3 * 8 + rows});
  for (const bool small : {false, true})  // sums and products on both sides of the smallest normal number
    for (const DotProduct& e : products) {
      const std::vector<bf16_t> a = draw(static_cast<size_t>(TileRows::bytes_in_order(e.rows, e.tiles)) / 2, small),
                                b = draw(static_cast<size_t>(e.panels * e.tiles * kTileBytes) / 2, small);
      const TileRows rows = TileRows::in_order(a.data(), e.rows);
      const int64_t width = e.panels * 16, stride = width + 5;
      std::vector<float> c(static_cast<size_t>(e.rows * stride), -1.0f);
      bf16_dots(c.data(), stride, rows, {b.data(), e.tiles * kTileBytes}, e.rows, e.panels, e.tiles);
      for (int64_t r = 0; r < e.rows; ++r)
        for (int64_t n = 0; n < stride; ++n) {
          const float expected = n < width ? chain_of(e, rows, a, b, r, n) : -1.0f;
          ASSERT_EQ(std::memcmp(&c[static_cast<size_t>(r * stride + n)], &expected, sizeof(float)), 0)
              << e.rows << " x " << e.panels << " x " << e.tiles << (small ? ", small" : "") << ": " << r << " " << n
              << ": " << c[static_cast<size_t>(r * stride + n)] << ", expected " << expected;
        }
    }
}

}  // namespace
}  // namespace eadem::kernels::cpu
