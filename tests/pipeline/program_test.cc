// SPDX-License-Identifier: Apache-2.0
//
// Programs and the steps that make them: types, casts, kernels, parameters.
#include "eadem/pipeline/program.h"

#include <gtest/gtest.h>

#include <cmath>

#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/elementwise/softmax.h"
#include "eadem/ops/linear.h"
#include "eadem/ops/reshape.h"
#include "eadem/ops/rms_norm.h"
#include "eadem/pipeline/passes/precision.h"
#include "eadem/pipeline/passes/type_inference.h"
#include "tests/support/refusal.h"

namespace eadem::pipeline {
namespace {

bool mentions(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    if (text.find(part) == std::string::npos) return false;
  return true;
}

TEST(TypeInference, NamesTheNodeAndBothValues) {
  Graph graph;
  const Graph::Scope scope(graph, "layers.3");
  const ValueId x = graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, 8}));
  const ValueId w = graph.add_parameter("w", TensorType(DType::f32, {4, 9}));
  graph.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{}), {x, w});
  const std::string message = test::refusal([&] { infer_types(graph); });
  EXPECT_TRUE(mentions(message, {"InvalidArgument", "layers.3", "linear", "[4, 9]", "8"})) << message;
}

TEST(Precision, OneCastPerValueAndDtype) {
  Graph graph;
  const ValueId x = graph.add_input("x", TensorType(DType::bf16, {Symbol::tokens, 8}));
  const ValueId a = graph.add1(std::make_shared<ops::Softmax>(), {x});
  const ValueId b = graph.add1(std::make_shared<ops::Softmax>(), {x});
  graph.mark_output("y", graph.add1(std::make_shared<ops::Add>(), {a, b}));
  infer_types(graph);
  insert_casts(graph);
  int casts = 0;
  for (const Node& node : graph.nodes()) casts += node.op->name() == "cast";
  EXPECT_EQ(casts, 1);
  EXPECT_EQ(graph.value(graph.outputs()[0].value).type, TensorType(DType::f32, {Symbol::tokens, 8}));
}

TEST(KernelCover, WhatHasNoKernelIsNamedWithTheRefusals) {
  Graph graph;
  const ValueId x = graph.add_input("x", TensorType(DType::bf16, {Symbol::tokens, 8}));  // the CPU computes in f32
  const Graph::Scope scope(graph, "layers.0.norm");
  const ValueId w = graph.add_parameter("w", TensorType(DType::f32, {8}));
  graph.mark_output("y", graph.add1(std::make_shared<ops::RmsNorm>(kernels::RmsNormAttrs{}), {x, w}));
  const auto device = open_device("cpu", {.num_threads = 1});
  Environment environment{.device = device};
  environment.bounds[Symbol::tokens] = 2;
  const Program program(graph, environment, std::make_shared<ParameterStore>(device));
  EXPECT_FALSE(program.is_complete());
  const std::string message = test::refusal([&] { program.require_complete(); });
  EXPECT_TRUE(mentions(message, {"Unsupported", "layers.0.norm", "rms_norm", "bf16"})) << message;
}

// Rows of which there are a multiple of the tokens, as a token has with several experts, and rows counted by a symbol
// of the graph's own.
TEST(Program, RowsMayBeCountedByAnyLinearSymbol) {
  constexpr int64_t kExperts = 3, kWidth = 8, kMaxTokens = 5, kMaxPatches = 4;
  const Symbol patches = Symbol::named("patches");
  Graph graph;
  const ValueId x = graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, kExperts * kWidth}));
  const ValueId p = graph.add_input("p", TensorType(DType::f32, {Dim(patches) + 1, kWidth}));
  const Dim rows = kExperts * Dim(Symbol::tokens);
  const ValueId spread = graph.add1(std::make_shared<ops::Reshape>(rows, std::vector<int64_t>{kWidth}), {x});
  const ValueId soft = graph.add1(std::make_shared<ops::Softmax>(), {spread});
  graph.mark_output("rows", soft);
  graph.mark_output("y", graph.add1(std::make_shared<ops::Reshape>(Symbol::tokens, std::vector<int64_t>{24}), {soft}));
  graph.mark_output("q", graph.add1(std::make_shared<ops::Softmax>(), {p}));
  const auto device = open_device("cpu", {.num_threads = 2});
  Environment environment{.device = device};
  environment.bounds[Symbol::tokens] = kMaxTokens;
  environment.bounds[patches] = kMaxPatches;
  Program program(graph, environment, std::make_shared<ParameterStore>(device));
  program.require_complete();
  for (const auto& [tokens, num_patches] : {std::pair<int64_t, int64_t>{2, 4}, {5, 0}}) {
    std::vector<float> values(static_cast<size_t>(tokens * kExperts * kWidth));
    for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i * i + 1));
    const std::vector<float> zeros(static_cast<size_t>((num_patches + 1) * kWidth));
    program.set_input(program.input("x"), values.data(), std::ssize(values) * 4);
    program.set_input(program.input("p"), zeros.data(), std::ssize(zeros) * 4);
    SymbolValues symbols;
    symbols[Symbol::tokens] = tokens;
    symbols[patches] = num_patches;
    program.run(symbols);
    const TensorView y = program.view(program.output("y")), row_view = program.view(program.output("rows"));
    EXPECT_EQ(y.shape, (Shape{tokens, kExperts * kWidth}));
    EXPECT_EQ(row_view.shape, (Shape{tokens * kExperts, kWidth}));
    for (size_t i = 0; i < values.size(); ++i) {
      const size_t row = i / kWidth * kWidth;
      double sum = 0;
      for (size_t j = row; j < row + kWidth; ++j) sum += std::exp(static_cast<double>(values[j]));
      EXPECT_NEAR(y.as<float>()[i], std::exp(static_cast<double>(values[i])) / sum, 1e-6) << i;
    }
    const TensorView q = program.view(program.output("q"));
    EXPECT_EQ(q.shape, (Shape{num_patches + 1, kWidth}));
    for (int64_t i = 0; i < q.num_elements(); ++i) EXPECT_EQ(q.as<float>()[i], 0.125f);
  }
}

TEST(Program, StatesInputsAndOutputsAreCheckedByName) {
  Graph graph;
  const ValueId x = graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, 8}));
  graph.mark_output("y", graph.add1(std::make_shared<ops::Softmax>(), {x}));
  const auto device = open_device("cpu", {.num_threads = 1});
  Environment environment{.device = device};
  environment.bounds[Symbol::tokens] = 2;
  Program program(graph, environment, std::make_shared<ParameterStore>(device));
  EXPECT_TRUE(mentions(test::refusal([&] { program.input("z"); }), {"NotFound", "'z'"}));
  EXPECT_TRUE(mentions(test::refusal([&] { program.output("z"); }), {"NotFound", "'z'"}));
  EXPECT_TRUE(mentions(test::refusal([&] { program.bind_state("z", TensorView()); }), {"NotFound", "'z'"}));
  environment.disabled_fusions = {"nonsense"};
  EXPECT_TRUE(mentions(test::refusal([&] { Program(graph, environment, std::make_shared<ParameterStore>(device)); }),
                       {"nonsense", "add_rms_norm"}));
}

TEST(Autograd, AnOpWithoutBackwardPassIsRefusedByName) {
  Graph graph;
  const ValueId x = graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, 8}));
  const ValueId w = graph.add_parameter("w", TensorType(DType::f32, {8, 8}));
  const ValueId y = graph.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{}), {x, w});
  // grad_norm is no part of a model; here it stands for any op that cannot be trained through.
  struct OneWay final : ops::Op {
    std::string_view name() const override { return "one_way"; }
    std::vector<ops::Port> inputs() const override { return {{"x"}}; }
    std::vector<ops::Port> outputs() const override { return {{"y"}}; }
    kernels::AttrsRef attrs() const override { return {}; }
    std::vector<TensorType> infer_types(std::span<const TensorType> in) const override { return {in[0]}; }
    ops::Cost cost(Pass, std::span<const TensorType>, std::span<const TensorType>, const SymbolValues&) const override {
      return {};
    }
    void reference(Pass, std::span<const ops::RefTensor>, std::span<ops::RefTensor>) const override {}
  };
  graph.mark_output("y", graph.add1(std::make_shared<OneWay>(), {y}));
  infer_types(graph);
  EXPECT_TRUE(mentions(test::refusal([&] { differentiate(graph); }), {"Unsupported", "one_way", "no backward pass"}));
}

class Store : public testing::Test {
 protected:
  Store() : store_(open_device("cpu", {.num_threads = 1})) {
    store_.declare("w", TensorType(DType::f32, {2, 3}));
    store_.layout("w", nullptr);
  }
  Tensor matrix(const Shape& shape) {
    Tensor tensor = Tensor::on_host(DType::f32, shape);
    for (int64_t i = 0; i < shape.num_elements(); ++i) tensor.view.as<float>()[i] = static_cast<float>(i);
    return tensor;
  }
  ParameterStore store_;
};

TEST_F(Store, RefusesWhatDoesNotFit) {
  EXPECT_TRUE(mentions(test::refusal([&] {
                         store_.load("v", matrix({2, 3}).view, "f.safetensors");
                       }),
                       {"NotFound", "f.safetensors", "'v'"}));
  EXPECT_TRUE(mentions(test::refusal([&] {
                         store_.load("w", matrix({3, 2}).view, "f.safetensors");
                       }),
                       {"InvalidArgument", "f.safetensors", "'w'", "[3, 2]", "[2, 3]"}));
  Tensor bad = matrix({2, 3});
  bad.view.as<float>()[4] = std::nanf("");
  EXPECT_TRUE(
      mentions(test::refusal([&] { store_.load("w", bad.view, "f.safetensors"); }), {"'w'", "not finite", "4"}));
  EXPECT_TRUE(mentions(test::refusal([&] { store_.require_all_loaded("f.safetensors"); }),
                       {"NotFound", "f.safetensors", "'w'"}));
  store_.load("w", matrix({2, 3}).view, "f.safetensors");
  EXPECT_NO_THROW(store_.require_all_loaded("f.safetensors"));
}

TEST(ParameterStore, EachRankKeepsItsPart) {
  const auto device = open_device("cpu", {.num_threads = 1});
  Tensor whole = Tensor::on_host(DType::f32, {4, 6});
  for (int i = 0; i < 24; ++i) whole.view.as<float>()[i] = static_cast<float>(i);
  for (int axis : {0, 1})
    for (int rank : {0, 1}) {
      ParameterStore store(device, rank, 2);
      TensorType part(DType::f32, {axis == 0 ? 2 : 4, axis == 1 ? 3 : 6});
      part.sharding = Sharding::along(axis);
      store.declare("w", part);
      store.layout("w", nullptr);
      store.load("w", whole.view, "test");
      const Tensor kept = store.to_host("w");
      for (int64_t r = 0; r < kept.shape()[0]; ++r)
        for (int64_t c = 0; c < kept.shape()[1]; ++c)
          EXPECT_EQ(kept.view.as<float>()[r * kept.shape()[1] + c],
                    static_cast<float>((r + (axis == 0 ? 2 * rank : 0)) * 6 + c + (axis == 1 ? 3 * rank : 0)));
    }
}

}  // namespace
}  // namespace eadem::pipeline
