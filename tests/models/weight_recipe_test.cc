// SPDX-License-Identifier: Apache-2.0
//
// Recipes: each operation, its inverse, and what it makes of encodings.
#include "eadem/models/weight_recipe.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/core/encodings/stacked_encoding.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace {

using test::refusal;
using Tensors = std::map<std::string, Tensor>;

Tensor counting(const Shape& shape, float first = 0) {
  Tensor result = Tensor::on_host(DType::f32, shape);
  for (int64_t i = 0; i < shape.num_elements(); ++i) result.view.as<float>()[i] = first + static_cast<float>(i);
  return result;
}

Tensor encoded(const Tensor& values, const Encoding& encoding) {
  Tensor result = Tensor::in_one_piece(DType::f32, values.shape(), encoding);
  encoding.encode(result.view, values.view);
  return result;
}

std::vector<float> values_of(const Tensor& tensor) {
  const Tensor wide = values_in_f32(tensor.view);
  return {wide.view.as<float>(), wide.view.as<float>() + wide.view.num_elements()};
}

Tensor made(const WeightRecipe& recipe, const Tensors& tensors) {
  const auto read = [&](const std::string& name) { return tensors.at(name); };
  const auto known = [&](const std::string& name) -> std::optional<RecipeType> {
    const auto found = tensors.find(name);
    if (found == tensors.end()) return std::nullopt;
    return RecipeType{{found->second.dtype(), found->second.view.encoding}, found->second.shape()};
  };
  const Tensor result = evaluate(recipe, read, "the test");
  // What is said before anything is read is what comes.
  const std::optional<RecipeType> said = describe(recipe, known, "the test");
  EXPECT_TRUE(said.has_value());
  EXPECT_EQ(said->type, WeightType(result.dtype(), result.view.encoding));
  EXPECT_EQ(said->shape, result.shape());
  return result;
}

// Some experts of a parameter are a cut of the whole, and of tensors with one expert each no other is read.
TEST(WeightRecipe, PartOfTheFirstAxis) {
  const WeightRecipe all = WeightRecipe::name("all");
  const Encoding& q8 = *BlockEncoding::find("q8_0");
  const Tensors tensors = {{"a", counting(Shape{2, 3})},
                           {"b", counting(Shape{2, 3}, 10)},
                           {"c", counting(Shape{2, 3}, 20)},
                           {"d", counting(Shape{2, 3}, 30)},
                           {"all", counting(Shape{4, 6, 3})},
                           {"bias", counting(Shape{4, 6})},
                           {"blocks", encoded(counting(Shape{4, 2, 64}), q8)},
                           {"flat", counting(Shape{8, 3})}};
  const WeightRecipe stack = WeightRecipe::stack(
      {WeightRecipe::name("a"), WeightRecipe::name("b"), WeightRecipe::name("c"), WeightRecipe::name("d")});
  const std::vector<WeightRecipe> recipes = {stack,
                                             WeightRecipe::transpose(stack),
                                             WeightRecipe::scale(stack, 0.5),
                                             all,
                                             WeightRecipe::name("bias"),
                                             WeightRecipe::name("blocks"),
                                             WeightRecipe::slice("all", 1, 2, 3, 6),
                                             WeightRecipe::every("all", 1, 1, 2, 6),
                                             WeightRecipe::every("bias", 1, 0, 2, 6),
                                             WeightRecipe::concat({stack, all}, 1, {2, 6}),
                                             WeightRecipe::concat({stack, stack}, 0, {4, 4}),
                                             WeightRecipe::transpose(WeightRecipe::name("bias")),
                                             WeightRecipe::reshape(WeightRecipe::name("flat"), {8, 3}, {4, 2, 3})};
  for (size_t i = 0; i < recipes.size(); ++i)
    for (const PartRange& range : {PartRange{0, 1}, {1, 2}, {3, 1}}) {
      const Tensor whole = made(recipes[i], tensors);
      const WeightRecipe part = part_of_first_axis(recipes[i], range, whole.shape()[0], whole.shape().rank());
      const Tensor cut = made(part, tensors);
      Shape shape = whole.shape();
      shape[0] = range.size;
      EXPECT_EQ(cut.shape(), shape) << i;
      EXPECT_EQ(cut.view.encoding, whole.view.encoding) << i;
      const std::vector<float> values = values_of(whole);
      const int64_t each = whole.view.num_elements() / whole.shape()[0];
      EXPECT_EQ(values_of(cut), std::vector<float>(values.begin() + range.begin * each,
                                                   values.begin() + (range.begin + range.size) * each))
          << i;
    }
  EXPECT_EQ(part_of_first_axis(WeightRecipe::transpose(stack), {1, 2}, 4, 3).names(),
            (std::vector<std::string>{"b", "c"}));
  EXPECT_EQ(made(part_of_first_axis(all, {1, 2}, 4, 3), tensors).view.data, tensors.at("all").view.as<float>() + 18)
      << "without a copy";
}

TEST(WeightRecipe, Operations) {
  const Tensors tensors = {{"m", counting(Shape{4, 3})}, {"n", counting(Shape{2, 3}, 100)}};
  const WeightRecipe m = WeightRecipe::name("m"), n = WeightRecipe::name("n");
  EXPECT_EQ(values_of(made(WeightRecipe::slice("m", 0, 1, 2, 4), tensors)), (std::vector<float>{3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(values_of(made(WeightRecipe::slice("m", 1, 1, 2, 3), tensors)),
            (std::vector<float>{1, 2, 4, 5, 7, 8, 10, 11}));
  EXPECT_EQ(values_of(made(WeightRecipe::every("m", 0, 1, 2, 4), tensors)), (std::vector<float>{3, 4, 5, 9, 10, 11}));
  EXPECT_EQ(values_of(made(WeightRecipe::concat({n, m}, 0, {2, 4}), tensors)),
            (std::vector<float>{100, 101, 102, 103, 104, 105, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(values_of(made(WeightRecipe::transpose(n), tensors)), (std::vector<float>{100, 103, 101, 104, 102, 105}));
  EXPECT_EQ(made(WeightRecipe::stack({n, n, n}), tensors).shape(), (Shape{3, 2, 3}));
  EXPECT_EQ(values_of(made(WeightRecipe::add(n, 1), tensors)), (std::vector<float>{101, 102, 103, 104, 105, 106}));
  const Tensor seen = made(WeightRecipe::reshape(n, {2, 3}, {3, 1, 2}), tensors);
  EXPECT_EQ(seen.shape(), (Shape{3, 1, 2}));
  EXPECT_EQ(seen.view.data, tensors.at("n").view.data);
  // Extents of 1 in front say nothing, others do.
  EXPECT_EQ(made(WeightRecipe::reshape(n, {1, 1, 2, 3}, {6}), tensors).shape(), (Shape{6}));
  EXPECT_HAS(refusal([&] { made(WeightRecipe::reshape(n, {2, 1, 3}, {6}), tensors); }), "'n' is [2, 3]");
  // Matrices in 8-bit floats are a stack where no block of scales is of two of them, and decoded where one is.
  const Fp8Encoding *blocks = Fp8Encoding::find("fp8_e4m3_block128"), *channels = Fp8Encoding::find("fp8_e4m3_channel");
  const Tensors floats = {{"b", encoded(counting(Shape{512, 3}), *blocks)},
                          {"c", encoded(counting(Shape{512, 3}), *channels)}};
  const auto in_parts = [&](const char* name, int64_t parts) {
    return WeightRecipe::reshape(WeightRecipe::name(name), {512, 3}, {parts, 512 / parts, 3});
  };
  for (const auto& [name, parts, encoding] :
       {std::tuple<const char*, int64_t, const Encoding*>{"b", 2, stack_encoding(blocks)},
        {"b", 8, nullptr},
        {"c", 8, stack_encoding(channels)}}) {
    const Tensor stack = made(in_parts(name, parts), floats);
    EXPECT_EQ(stack.shape(), (Shape{parts, 512 / parts, 3}));
    EXPECT_EQ(stack.view.encoding, encoding) << name << parts;
    EXPECT_EQ(values_of(stack), values_of(floats.at(name))) << name << parts;
    const Tensor joined =
        made(WeightRecipe::reshape(WeightRecipe::name("stack"), {parts, 512 / parts, 3}, {512, 3}), {{"stack", stack}});
    EXPECT_EQ(joined.shape(), (Shape{512, 3}));
    EXPECT_EQ(joined.view.encoding, matrix_encoding(encoding)) << name << parts;
    EXPECT_EQ(values_of(joined), values_of(floats.at(name))) << name << parts;
  }
  EXPECT_HAS(refusal([&] {
               made(WeightRecipe::reshape(WeightRecipe::name("b"), {512, 3}, {1536}), floats);
             }),
             "cannot be seen in another shape");
  EXPECT_EQ(values_of(made(WeightRecipe::negative_exp(WeightRecipe::slice("m", 0, 0, 1, 4)), tensors)),
            (std::vector<float>{-1, -std::exp(1.0f), -std::exp(2.0f)}));
  EXPECT_EQ(values_of(made(WeightRecipe::scale(n, 0.5), tensors)), (std::vector<float>{50, 50.5, 51, 51.5, 52, 52.5}));
  EXPECT_EQ(values_of(made(WeightRecipe::log_of_negative(WeightRecipe::add(n, -200)), tensors))[0], std::log(100.0f));
  // Rows 0 1 2 3 of a head, interleaved, are 0 2 1 3 in halves.
  EXPECT_EQ(values_of(made(WeightRecipe::reorder(m, 4, HeadOrder::halves), tensors)),
            (std::vector<float>{0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11}));
}

TEST(WeightRecipe, RowsOfATensorShareItsMemory) {
  const Tensors tensors = {{"m", counting(Shape{4, 3})}};
  EXPECT_EQ(made(WeightRecipe::name("m"), tensors).view.data, tensors.at("m").view.data);
  EXPECT_EQ(made(WeightRecipe::slice("m", 0, 1, 2, 4), tensors).view.as<float>(), tensors.at("m").view.as<float>() + 3);
}

// Of each matrix of a stack, too.
TEST(WeightRecipe, TransposesTheLastTwoAxes) {
  const Tensors tensors = {{"m", counting(Shape{2, 2, 3})}};
  const Tensor result = made(WeightRecipe::transpose(WeightRecipe::name("m")), tensors);
  EXPECT_EQ(result.shape(), (Shape{2, 3, 2}));
  EXPECT_EQ(values_of(result), (std::vector<float>{0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11}));
}

// GPT-OSS's experts: gate and up in turn, as columns of what is transposed, and in a bias.
TEST(WeightRecipe, InvertsWhatStandsInTurn) {
  const Tensors file = {{"gate_up", counting(Shape{2, 3, 4})}, {"bias", counting(Shape{2, 4}, 50)}};
  std::vector<NamedRecipe> parameters;
  for (int64_t i : {0, 1}) {
    const std::string name = i == 0 ? "gate" : "up";
    parameters.emplace_back(name, WeightRecipe::transpose(WeightRecipe::every("gate_up", 2, i, 2, 4)));
    parameters.emplace_back(name + "_bias", WeightRecipe::every("bias", 1, i, 2, 4));
  }
  Tensors model;
  for (const auto& [name, recipe] : parameters) model[name] = made(recipe, file);
  EXPECT_EQ(model.at("up").shape(), (Shape{2, 2, 3}));
  EXPECT_EQ(values_of(model.at("up")), (std::vector<float>{1, 5, 9, 3, 7, 11, 13, 17, 21, 15, 19, 23}));
  EXPECT_EQ(values_of(model.at("gate_bias")), (std::vector<float>{50, 52, 54, 56}));
  const std::vector<NamedRecipe> tensors = invert(parameters);
  ASSERT_EQ(tensors.size(), file.size());
  for (const auto& [name, recipe] : tensors) {
    const Tensor back = made(recipe, model);
    EXPECT_EQ(back.shape(), file.at(name).shape()) << name;
    EXPECT_EQ(values_of(back), values_of(file.at(name))) << name;
  }
  parameters.resize(2);  // gate alone
  EXPECT_HAS(refusal([&] { invert(parameters); }), "InvalidArgument: 'gate_up': 1 of each 2 are used");
}

// Parameters q and k in one tensor, experts in one of three axes, a transposed matrix, a tied one, a norm of 1 + w.
TEST(WeightRecipe, InvertsWhatFilesDo) {
  const Tensors file = {{"qk", counting(Shape{6, 4})},          {"gate_up", counting(Shape{2, 6, 4}, 50)},
                        {"conv1d", counting(Shape{4, 3}, 200)}, {"e.0", counting(Shape{2, 4}, 300)},
                        {"e.1", counting(Shape{2, 4}, 400)},    {"head", counting(Shape{4, 4}, 500)},
                        {"norm", counting(Shape{4}, 0.5f)},     {"conv", counting(Shape{4, 1, 3}, 7)}};
  const std::vector<NamedRecipe> parameters = {
      {"q", WeightRecipe::reorder(WeightRecipe::slice("qk", 0, 0, 4, 6), 4, HeadOrder::halves)},
      {"k", WeightRecipe::slice("qk", 0, 4, 2, 6)},
      {"gate", WeightRecipe::slice("gate_up", 1, 0, 3, 6)},
      {"up", WeightRecipe::slice("gate_up", 1, 3, 3, 6)},
      {"out", WeightRecipe::transpose(WeightRecipe::name("conv1d"))},
      {"experts", WeightRecipe::stack({WeightRecipe::name("e.0"), WeightRecipe::name("e.1")})},
      {"embedding", WeightRecipe::name("head")},
      {"tied", WeightRecipe::name("head")},
      {"norm", WeightRecipe::add(WeightRecipe::name("norm"), 1)},
      {"taps", WeightRecipe::transpose(WeightRecipe::reshape(WeightRecipe::name("conv"), {4, 1, 3}, {4, 3}))}};
  Tensors model;
  for (const auto& [name, recipe] : parameters) model[name] = made(recipe, file);
  EXPECT_EQ(model.at("gate").shape(), (Shape{2, 3, 4}));
  EXPECT_EQ(model.at("out").shape(), (Shape{3, 4}));
  const std::vector<NamedRecipe> tensors = invert(parameters);
  EXPECT_EQ(tensors.size(), file.size());
  for (const auto& [name, recipe] : tensors) {
    const Tensor back = made(recipe, model);
    EXPECT_EQ(back.shape(), file.at(name).shape()) << name;
    EXPECT_EQ(values_of(back), values_of(file.at(name))) << name;
  }
  // Several parts of one parameter that are joined, too.
  const NamedRecipe joined = {"w", WeightRecipe::concat({WeightRecipe::name("a"), WeightRecipe::name("b")}, 0, {1, 3})};
  const Tensors whole = {{"w", counting(Shape{4, 2})}};
  const std::vector<NamedRecipe> parts = invert({&joined, 1});
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(values_of(made(parts[1].second, whole)), (std::vector<float>{2, 3, 4, 5, 6, 7}));
}

TEST(WeightRecipe, RatesOfDecayAreLogarithms) {
  const NamedRecipe decay = {"a", WeightRecipe::log_of_negative(WeightRecipe::name("file"))};
  const Tensors model = {{"a", counting(Shape{3}, -1)}};
  const std::vector<float> stored = values_of(made(invert({&decay, 1})[0].second, model));
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(stored[i], -std::exp(static_cast<float>(i) - 1));
}

// Of either width; they come back as i64.
TEST(WeightRecipe, WholeNumbersStayInTheirRange) {
  const auto numbers = [](DType dtype, std::initializer_list<int64_t> values) {
    Tensor result = Tensor::on_host(dtype, Shape{std::ssize(values)});
    int64_t i = 0;
    for (const int64_t value : values)
      if (dtype == DType::i64)
        result.view.as<int64_t>()[i++] = value;
      else
        result.view.as<int32_t>()[i++] = static_cast<int32_t>(value);
    return Tensors{{"m", std::move(result)}};
  };
  const WeightRecipe recipe = WeightRecipe::whole_numbers(WeightRecipe::name("m"), 7);
  for (const DType dtype : {DType::i32, DType::i64}) {
    EXPECT_EQ(values_of(made(recipe, numbers(dtype, {0, 6, 3}))), (std::vector<float>{0, 6, 3}));
    for (const int64_t wrong : {-1, 7})
      EXPECT_HAS(refusal([&] { made(recipe, numbers(dtype, {0, wrong})); }), "number 1 of 'm'");
  }
  EXPECT_HAS(refusal([&] { made(recipe, {{"m", counting(Shape{3})}}); }), "'m' is f32; expected i32 or i64");
  const std::vector<NamedRecipe> parameters = {{"p", recipe}};
  const std::vector<NamedRecipe> tensors = invert(parameters);
  ASSERT_EQ(tensors.size(), 1u);
  EXPECT_EQ(tensors[0].first, "m");
  const Tensor back = made(tensors[0].second, {{"p", counting(Shape{3})}});
  EXPECT_EQ(back.dtype(), DType::i64);
  EXPECT_EQ(back.view.as<int64_t>()[2], 2);
  const std::vector<NamedRecipe> narrow = {{"p", WeightRecipe::whole_numbers(WeightRecipe::name("m"), 7, DType::i32)}};
  const Tensor small = made(invert(narrow)[0].second, {{"p", counting(Shape{3})}});
  EXPECT_EQ(small.dtype(), DType::i32);
  EXPECT_EQ(small.view.as<int32_t>()[2], 2);
}

TEST(WeightRecipe, WhatIsNotUsedOnceHasNoInverse) {
  const auto refused = [](std::vector<NamedRecipe> parameters) { return refusal([&] { invert(parameters); }); };
  const NamedRecipe q = {"q", WeightRecipe::slice("qkv", 0, 0, 4, 8)};
  EXPECT_HAS(refused({q}), "InvalidArgument: 'qkv' is used up to 4 of 8");
  EXPECT_HAS(refused({q, {"k", WeightRecipe::slice("qkv", 0, 5, 3, 8)}}), "used up to 4 and from 5");
  EXPECT_HAS(refused({q, {"k", WeightRecipe::name("qkv")}}), "'qkv' is used up to");
}

TEST(WeightRecipe, BlocksMoveAsTheyAre) {
  const BlockEncoding& q8 = *BlockEncoding::find("q8_0");
  const Tensors tensors = {{"m", encoded(counting(Shape{4, 64}), q8)},
                           {"n", encoded(counting(Shape{4, 64}, 900), q8)},
                           {"plain", counting(Shape{4, 64})}};
  const WeightRecipe m = WeightRecipe::name("m"), n = WeightRecipe::name("n");
  const std::vector<float> whole = values_of(tensors.at("m")), other = values_of(tensors.at("n"));
  const Tensor rows = made(WeightRecipe::slice("m", 0, 1, 2, 4), tensors);
  EXPECT_EQ(rows.view.encoding, &q8);
  EXPECT_EQ(values_of(rows), std::vector<float>(whole.begin() + 64, whole.begin() + 192));
  for (const WeightRecipe& recipe : {WeightRecipe::concat({m, n}, 0, {4, 4}), WeightRecipe::stack({m, n})}) {
    const Tensor both = made(recipe, tensors);
    EXPECT_EQ(both.view.encoding, &q8);
    std::vector<float> expected = whole;
    expected.insert(expected.end(), other.begin(), other.end());
    EXPECT_EQ(values_of(both), expected);
  }
  EXPECT_EQ(made(WeightRecipe::reorder(m, 4, HeadOrder::halves), tensors).view.encoding, &q8);
  const Tensor odd = made(WeightRecipe::every("m", 0, 1, 2, 4), tensors);
  EXPECT_EQ(odd.view.encoding, &q8);
  std::vector<float> expected(whole.begin() + 64, whole.begin() + 128);
  expected.insert(expected.end(), whole.begin() + 192, whole.end());
  EXPECT_EQ(values_of(odd), expected);
  // Types that differ meet in f32.
  EXPECT_EQ(made(WeightRecipe::concat({m, WeightRecipe::name("plain")}, 0, {4, 4}), tensors).view.encoding, nullptr);
}

TEST(WeightRecipe, EncodingsOfSeveralPlanesAreCutOrDecoded) {
  const Encoding* groups = GroupEncoding::find("int4_g32_bf16");
  ASSERT_NE(groups, nullptr);
  const Tensors tensors = {{"m", encoded(counting(Shape{4, 64}), *groups)}};
  const std::vector<float> whole = values_of(tensors.at("m"));
  const Tensor rows = made(WeightRecipe::slice("m", 0, 1, 2, 4), tensors);
  EXPECT_EQ(rows.view.encoding, groups);
  EXPECT_EQ(values_of(rows), std::vector<float>(whole.begin() + 64, whole.begin() + 192));
  const WeightRecipe m = WeightRecipe::name("m");
  const Tensor twice = made(WeightRecipe::concat({m, m}, 0, {4, 4}), tensors);
  EXPECT_EQ(twice.view.encoding, nullptr);
  EXPECT_EQ(values_of(made(WeightRecipe::reorder(m, 2, HeadOrder::halves), tensors)), whole);
  const Tensor turned = made(WeightRecipe::transpose(m), tensors);
  EXPECT_EQ(turned.view.encoding, nullptr);
  EXPECT_EQ(values_of(turned)[1], whole[64]);
}

TEST(WeightRecipe, RefusalsNameTensorAndBothShapes) {
  const Tensors tensors = {{"m", encoded(counting(Shape{4, 64}), *BlockEncoding::find("q8_0"))},
                           {"v", counting(Shape{5})},
                           {"p", counting(Shape{4, 6})}};
  const auto refused = [&](const WeightRecipe& recipe) { return refusal([&] { made(recipe, tensors); }); };
  const WeightRecipe m = WeightRecipe::name("m"), v = WeightRecipe::name("v"), p = WeightRecipe::name("p");
  EXPECT_HAS(refused(WeightRecipe::slice("m", 1, 0, 32, 64)), "cannot be cut within a row");
  EXPECT_HAS(refused(WeightRecipe::slice("p", 0, 0, 2, 5)),
             "DataCorrupted: the test: 'p' is [4, 6]; expected 5 along axis 0");
  EXPECT_HAS(refused(WeightRecipe::transpose(v)), "'v' is [5]; expected a matrix");
  EXPECT_HAS(refused(WeightRecipe::reorder(v, 2, HeadOrder::halves)), "'v' is [5]; expected heads of 2 rows");
  EXPECT_HAS(refused(WeightRecipe::stack({p, v})), "'v' is [5]; 'p' is [4, 6]");
  EXPECT_HAS(refused(WeightRecipe::concat({p, p}, 0, {4, 5})), "'p' is [4, 6]; expected [5, 6]");
}

}  // namespace
}  // namespace eadem::models
