// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/tensor_type.h"

#include <gtest/gtest.h>

#include "tests/support/refusal.h"

namespace eadem {
namespace {

SymbolValues step() {
  SymbolValues symbols;
  symbols[Symbol::tokens] = 7;
  symbols[Symbol::sequences] = 2;
  return symbols;
}

TEST(TensorType, BindsSymbols) {
  const TensorType type(DType::bf16, {Symbol::tokens, 4, Dim(Symbol::sequences, 1)});
  EXPECT_EQ(type.bind(step()), (Shape{7, 4, 3}));
  EXPECT_EQ(type.num_elements(step()), 84);
  EXPECT_EQ(type.size_bytes(step()), 168);
  EXPECT_EQ(TensorType(DType::f32, {}).bind(step()), Shape());
  EXPECT_EQ(type.dim(-1), Dim(Symbol::sequences, 1));
  EXPECT_EQ(type.fixed(1), 4);
}

TEST(TensorType, Text) {
  EXPECT_EQ(to_string(TensorType(DType::bf16, {Symbol::tokens, 2048})), "bf16 [tokens, 2048]");
  EXPECT_EQ(to_string(TensorType(DType::i32, {Dim(Symbol::sequences, 1)})), "i32 [sequences+1]");
  TensorType type(DType::f32, {4096, 512});
  type.sharding = Sharding::along(1);
  EXPECT_EQ(to_string(type), "f32 [4096, 512] sharded(1)");
  EXPECT_EQ(to_string(Sharding::partial()), "partial");
  EXPECT_EQ(to_string(Sharding::replicated()), "replicated");
}

TEST(TensorType, EqualityLooksAtEveryPart) {
  const TensorType type(DType::f32, {Symbol::tokens, 4});
  EXPECT_EQ(type, TensorType(DType::f32, {Symbol::tokens, 4}));
  EXPECT_FALSE(type == type.with_dtype(DType::bf16));
  EXPECT_FALSE(type == TensorType(DType::f32, {Symbol::sequences, 4}));
  EXPECT_FALSE(type == TensorType(DType::f32, {Symbol::tokens, 4, 1}));
  TensorType divided = type;
  divided.sharding = Sharding::along(0);
  EXPECT_FALSE(type == divided);
  EXPECT_TRUE(type.same_dims(divided));
}

TEST(Symbol, IsItsName) {
  const Symbol patches = Symbol::named("patches");
  EXPECT_EQ(patches, Symbol::named("patches"));
  EXPECT_EQ(patches.name(), "patches");
  EXPECT_FALSE(patches == Symbol::named("patch"));
  EXPECT_EQ(Symbol::named("tokens"), Symbol::tokens);
  EXPECT_EQ(Symbol::penalties.name(), "penalties");
  SymbolValues symbols = step();
  symbols[patches] = 5;
  EXPECT_EQ(symbols[Symbol::named("patches")], 5);
  EXPECT_EQ(symbols[Symbol::tokens], 7);
  EXPECT_FALSE(symbols == step());
  for (const char* name : {"", "none", "two words", "8*tokens"})
    EXPECT_NE(test::refusal([&] { Symbol::named(name); }), "") << name;
}

TEST(Dim, IsLinearInOneSymbol) {
  const Dim rows = 8 * Dim(Symbol::tokens), offsets = 3 * (Dim(Symbol::sequences) + 1);
  EXPECT_EQ(rows.bind(step()), 56);
  EXPECT_EQ(offsets.bind(step()), 9);
  EXPECT_EQ(to_string(rows), "8*tokens");
  EXPECT_EQ(to_string(offsets), "3*sequences+3");
  EXPECT_EQ(2 * Dim(3) + 1, Dim(7));
  EXPECT_TRUE((0 * Dim(Symbol::tokens)).is_fixed());
  EXPECT_FALSE(rows == 4 * Dim(Symbol::tokens));
  EXPECT_EQ(TensorType(DType::f32, {rows, 2}).size_bytes(step()), 448);
}

// Two planes: 4-bit values in bytes, and one f32 scale a row.
class Packed final : public Encoding {
 public:
  std::string_view name() const override { return "packed"; }
  std::vector<PlaneSpec> planes(const Shape& shape) const override {
    return {{"data", DType::u8, Shape{shape[0], shape[1] / 2}}, {"scales", DType::f32, Shape{shape[0]}}};
  }
  int64_t num_pieces(const Shape& shape) const override { return shape[0]; }
  void encode_pieces(const TensorView&, const TensorView&, int64_t, int64_t) const override {}
  void decode_row(float*, const TensorView&, int64_t) const override {}
  void slice(const TensorView&, const TensorView&, int, int64_t) const override {}
};

TEST(TensorType, EncodedSizeIsThatOfItsPlanes) {
  const Packed packed;
  const TensorType type(DType::f32, {8, 32}, &packed);
  EXPECT_EQ(type.size_bytes({}), 8 * 16 + 8 * 4);
  EXPECT_EQ(to_string(type), "packed [8, 32]");
  EXPECT_FALSE(type == TensorType(DType::f32, {8, 32}));
}

}  // namespace
}  // namespace eadem
