// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/amx.h"

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

bool has_tiles() {
  const std::vector<Isa> isas = available_isas();
  return std::find(isas.begin(), isas.end(), Isa::amx) != isas.end();
}

class Tiles : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_tiles()) GTEST_SKIP() << "no tiles here";
  }
};

struct Extent {
  int64_t rows, panels, tiles;
};
constexpr Extent kExtents[] = {{1, 1, 1},  {2, 1, 3},  {7, 2, 5},   {15, 3, 17}, {16, 2, 16}, {17, 1, 4},
                               {31, 4, 9}, {32, 2, 2}, {33, 3, 33}, {64, 4, 40}, {100, 2, 5}, {50, 1, 0}};

// Byte i of tile t of row r of a, and the byte of b that it meets for output n.
size_t at_a(const TileRows& a, int64_t r, int64_t t, int64_t i) {
  return static_cast<size_t>(t / kTileBlock * a.k_stride + r / 32 * a.pair_stride + t % kTileBlock * a.tile_stride +
                             r / 16 % 2 * a.half_stride + r % 16 * a.line_stride + i);
}
size_t at_b(const Extent& e, int64_t n, int64_t t, int64_t i) {
  return static_cast<size_t>((n / 16 * e.tiles + t) * kTileBytes + i / 4 * 64 + n % 16 * 4 + i % 4);
}

TEST_F(Tiles, SumsOfBytesAreExactAndScaledOnce) {
  std::mt19937 random(1);
  constexpr int64_t kScaleStride = 3;
  for (const Extent& e : kExtents) {
    if (e.tiles > kTileBlock) continue;
    std::vector<int8_t> a(static_cast<size_t>(TileRows::bytes_in_order(e.rows, e.tiles)));
    const TileRows rows = TileRows::in_order(a.data(), e.rows);
    std::vector<uint8_t> b(static_cast<size_t>(e.panels * e.tiles * kTileBytes));
    for (int8_t& value : a) value = static_cast<int8_t>(random());
    for (uint8_t& value : b) value = static_cast<uint8_t>(random());
    std::vector<int32_t> starts(static_cast<size_t>(e.rows * kScaleStride));
    std::vector<float> scales(starts.size());
    for (int32_t& start : starts) start = static_cast<int32_t>(random() % 100000) - 50000;
    for (float& scale : scales) scale = static_cast<float>(random() % 1000) / 77.0f;
    const int64_t stride = e.panels * 16 + 3;
    std::vector<float> before(static_cast<size_t>(e.rows * stride));
    for (float& value : before) value = static_cast<float>(random() % 1000);
    for (const void* next : {static_cast<const void*>(b.data()), static_cast<const void*>(nullptr)}) {
      std::vector<float> c = before;
      int8_tiles(c.data(), stride, rows, {b.data(), e.tiles * kTileBytes}, {starts.data(), scales.data(), kScaleStride},
                 e.rows, e.panels, e.tiles, next);
      for (int64_t r = 0; r < e.rows; ++r)
        for (int64_t n = 0; n < stride; ++n) {
          float expected = before[static_cast<size_t>(r * stride + n)];
          if (n < e.panels * 16) {
            int32_t sum = starts[static_cast<size_t>(r * kScaleStride)];
            for (int64_t t = 0; t < e.tiles; ++t)
              for (int64_t i = 0; i < kTileLine; ++i) sum += a[at_a(rows, r, t, i)] * b[at_b(e, n, t, i)];
            expected = std::fma(scales[static_cast<size_t>(r * kScaleStride)], static_cast<float>(sum), expected);
          }
          ASSERT_EQ(c[static_cast<size_t>(r * stride + n)], expected)
              << e.rows << " x " << e.panels << " x " << e.tiles << ": " << r << " " << n;
        }
    }
  }
}

float from_bf16(const uint8_t* bytes) {
  bf16_t value;
  std::memcpy(&value, bytes, sizeof(value));
  return value.to_float();
}

// Adds one tile by the rules of tiles.h in scalar C++ (nothing subnormal occurs).
float add_tile(float c, const Extent& e, const TileRows& rows, const std::vector<uint8_t>& a,
               const std::vector<uint8_t>& b, int64_t r, int64_t n, int64_t t) {
  float chains[2] = {0, 0};
  for (int64_t i = 0; i < kTileLine; i += 2) {
    float& chain = chains[i / 2 % 2];
    chain = std::fma(from_bf16(&a[at_a(rows, r, t, i)]), from_bf16(&b[at_b(e, n, t, i)]), chain);
  }
  return c + (chains[0] + chains[1]);
}

std::vector<uint8_t> random_bf16(int64_t bytes, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<uint8_t> result(static_cast<size_t>(bytes));
  for (size_t i = 0; i < result.size(); i += 2) {
    const bf16_t value = bf16_t::from_float(normal(random) * (random() % 8 == 0 ? 100.0f : 1.0f));
    std::memcpy(&result[i], &value, sizeof(value));
  }
  return result;
}

TEST_F(Tiles, ChainsOfBf16AreAsLaidDown) {
  std::mt19937 random(2);
  for (const Extent& e : kExtents) {
    const std::vector<uint8_t> a = random_bf16(TileRows::bytes_in_order(e.rows, e.tiles), random);
    const TileRows rows = TileRows::in_order(a.data(), e.rows);
    const std::vector<uint8_t> b = random_bf16(e.panels * e.tiles * kTileBytes, random);
    const int64_t stride = e.panels * 16;
    std::vector<float> c(static_cast<size_t>(e.rows * stride)), row(static_cast<size_t>(stride));
    bf16_tiles(c.data(), stride, rows, {b.data(), e.tiles * kTileBytes}, e.rows, e.panels, e.tiles);
    for (int64_t r = 0; r < e.rows; ++r) {
      TileRows one = rows;
      one.data = a.data() + at_a(rows, r, 0, 0);
      bf16_row(row.data(), one, {b.data(), e.tiles * kTileBytes}, e.panels, e.tiles);
      for (int64_t n = 0; n < stride; ++n) {
        float expected = 0;
        for (int64_t t = 0; t < e.tiles; ++t) expected = add_tile(expected, e, rows, a, b, r, n, t);
        ASSERT_EQ(c[static_cast<size_t>(r * stride + n)], expected)
            << e.rows << " " << e.tiles << ": " << r << " " << n;
        ASSERT_EQ(row[static_cast<size_t>(n)], expected) << e.rows << " " << e.tiles << ": " << r << " " << n;
      }
    }
  }
}

// Numbers below the normal ones are zeros for tiles; a row alone must see them so, too, and leave the mode as it was.
TEST_F(Tiles, SubnormalNumbersAreZeros) {
  const Extent e{2, 1, 2};
  std::vector<uint8_t> a(static_cast<size_t>(TileRows::bytes_in_order(e.rows, e.tiles))),
      b(static_cast<size_t>(e.tiles * kTileBytes));
  std::mt19937 random(3);
  for (size_t i = 0; i < a.size(); i += 2) a[i] = static_cast<uint8_t>(random()), a[i + 1] = random() % 2 ? 0x00 : 0x20;
  for (size_t i = 0; i < b.size(); i += 2) b[i] = static_cast<uint8_t>(random()), b[i + 1] = random() % 2 ? 0x20 : 0x1f;
  TileRows rows = TileRows::in_order(a.data(), e.rows);
  const TilePanels panels{b.data(), e.tiles * kTileBytes};
  std::vector<float> c(32), row(16);
  bf16_tiles(c.data(), 16, rows, panels, 2, 1, e.tiles);
  for (int64_t r = 0; r < 2; ++r) {
    rows.data = a.data() + r * kTileLine;
    bf16_row(row.data(), rows, panels, 1, e.tiles);
    EXPECT_EQ(std::memcmp(row.data(), &c[static_cast<size_t>(r * 16)], 16 * sizeof(float)), 0);
  }
  volatile float smallest = 0x1p-126f;
  EXPECT_GT(smallest * 0.5f, 0.0f);
}

TEST_F(Tiles, RowsAreRoundedToNearestEven) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (int64_t n : {1, 15, 16, 127, 128, 129, 300}) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& value : x) value = normal(random);
    x[0] = 1.00390625f;  // halfway between two numbers of bf16
    constexpr int64_t kRows = 50, kRow = 21;
    const int64_t tiles = (n + 31) / 32;
    std::vector<uint8_t> a(static_cast<size_t>(TileRows::bytes_in_order(kRows, tiles)), 0xab);
    const TileRows rows = TileRows::in_order(a.data(), kRows);
    round_to_tiles(rows, kRow, x.data(), n);
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t k = 0; k < tiles * 32; ++k) {
        const uint8_t* got = &a[at_a(rows, r, k / 32, k % 32 * 2)];
        if (r == kRow) {
          ASSERT_EQ(from_bf16(got), k < n ? bf16_t::from_float(x[static_cast<size_t>(k)]).to_float() : 0.0f) << k;
        } else {
          ASSERT_EQ(*got, 0xab) << r << " " << k;
        }
      }
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu
