// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic in which each kind of weight is counted for the share of the limit.
#include "eadem/cli/bench/products.h"

#include <gtest/gtest.h>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/ops/all_ops.h"

namespace eadem::cli {
namespace {

class ModelOfLinears {
 public:
  ModelOfLinears() : x_(graph_.add_input("x", TensorType(DType::f32, {Symbol::tokens, 256}))) {}

  void add(const std::string& scope, int64_t outputs, DType dtype, const Encoding* encoding = nullptr) {
    const pipeline::ValueId weight = graph_.add_parameter(scope + ".w", TensorType(dtype, {outputs, 256}, encoding));
    const pipeline::Graph::Scope inside(graph_, scope);
    graph_.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{}), {x_, weight});
  }
  void embed() {
    const pipeline::ValueId table = graph_.add_parameter("table", TensorType(DType::f32, {1000, 256}));
    const pipeline::ValueId ids = graph_.add_input("ids", TensorType(DType::i32, {Symbol::tokens}));
    graph_.add1(std::make_shared<ops::Embedding>(kernels::EmbeddingAttrs{DType::f32, 1000}), {table, ids});
  }
  ModelProducts products() const { return products_of(graph_); }

 private:
  pipeline::Graph graph_;
  pipeline::ValueId x_;
};

TEST(Products, CountByWhatMultipliesThem) {
  ModelOfLinears model;
  model.embed();
  model.add("layers.0.f32", 1, DType::f32);
  model.add("layers.0.f16", 2, DType::f16);
  model.add("layers.0.bf16", 4, DType::bf16);
  model.add("layers.0.blocks", 8, DType::f32, BlockEncoding::all().front());
  model.add("layers.0.groups", 16, DType::f32, GroupEncoding::find("int8_row_bf16"));
  model.add("layers.0.fp8", 32, DType::f32, Fp8Encoding::find("fp8_e4m3_channel"));
  model.add("layers.0.fp8_of_bf16", 64, DType::bf16, Fp8Encoding::find("fp8_e4m3_block128"));
  model.add("lm_head", 128, DType::bf16);
  const ModelProducts products = model.products();
  EXPECT_EQ(products.decoder.f32, 256 * (1 + 2 + 32 + 64));
  EXPECT_EQ(products.decoder.bf16, 256 * 4);
  EXPECT_EQ(products.decoder.int8, 256 * 8);
  EXPECT_EQ(products.decoder.int8_rows, 256 * 16);
  EXPECT_EQ(products.head.f32, 0);
  EXPECT_EQ(products.head.bf16, 256 * 128);
  EXPECT_EQ(products.head.int8 + products.head.int8_rows, 0);
}

// A token meets two of sixteen experts.
TEST(Products, CountTheExpertsOfAToken) {
  pipeline::Graph graph;
  const pipeline::ValueId x = graph.add_input("x", TensorType(DType::f32, {2 * Dim(Symbol::tokens), 64})),
                          offsets = graph.add_input("offsets", TensorType(DType::i32, {17}));
  for (const auto& [name, encoding] : {std::pair<const char*, const Encoding*>{"a", BlockEncoding::find("q8_0")},
                                       {"b", stack_encoding(Fp8Encoding::find("fp8_e4m3_channel"))},
                                       {"c", stack_encoding(GroupEncoding::find("int8_row_bf16"))}})
    graph.add1(std::make_shared<ops::GroupedLinear>(kernels::GroupedLinearAttrs{}),
               {x, graph.add_parameter(name, TensorType(DType::f32, {16, 3, 64}, encoding)), offsets});
  const ModelProducts products = products_of(graph);
  EXPECT_EQ(products.decoder.int8, 2 * 3 * 64);
  EXPECT_EQ(products.decoder.f32, 2 * 3 * 64);
  EXPECT_EQ(products.decoder.int8_rows, 2 * 3 * 64);
}

// A rank that has six of the sixteen computes 3/8 of the two.
TEST(Products, CountTheShareOfDividedExperts) {
  pipeline::Graph graph;
  const pipeline::ValueId x = graph.add_input("x", TensorType(DType::f32, {2 * Dim(Symbol::tokens), 64})),
                          offsets = graph.add_input("offsets", TensorType(DType::i32, {17}));
  const std::vector<pipeline::ValueId> own =
      graph.add(std::make_shared<ops::ExpertDispatch>(kernels::ExpertExchangeAttrs{
                    .ranks = 3, .rank = 0, .experts = 16, .top_k = 2, .same_tokens = true}),
                {x, offsets});
  graph.add1(std::make_shared<ops::GroupedLinear>(kernels::GroupedLinearAttrs{}),
             {own[0], graph.add_parameter("a", TensorType(DType::f32, {6, 3, 64})), own[1]});
  EXPECT_EQ(products_of(graph).decoder.f32, 2 * 6.0 / 16 * 3 * 64);
}

TEST(Products, ARateThatIsMissingIsThatOfTheNextBest) {
  const Products products{.f32 = 8, .bf16 = 16, .int8 = 32, .int8_rows = 64};
  MachineRates rates{.f32_flops_per_second = 4};
  EXPECT_EQ(products.seconds(rates, 1), 2 * (2 + 4 + 8 + 16));
  rates.int8_ops_per_second = 16;
  EXPECT_EQ(products.seconds(rates, 1), 2 * (2 + 4 + 2 + 4));
  rates.bf16_flops_per_second = 8;
  rates.int8_tile_ops_per_second = 64;
  EXPECT_EQ(products.seconds(rates, 10), 2 * 10 * (2 + 2 + 2 + 1));
}

}  // namespace
}  // namespace eadem::cli
