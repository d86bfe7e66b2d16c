// SPDX-License-Identifier: Apache-2.0
//
// Names in a graph: one value each, whatever asks for them.
#include "eadem/pipeline/graph.h"

#include <gtest/gtest.h>

#include "eadem/ops/elementwise/softmax.h"

namespace eadem::pipeline {
namespace {

Tensor constant_of(float value, int64_t size) {
  Tensor tensor = Tensor::on_host(DType::f32, Shape{size});
  std::fill_n(tensor.view.as<float>(), size, value);
  return tensor;
}

TEST(Graph, ANameAddedAgainIsTheSameValue) {
  Graph graph;
  const TensorType type(DType::f32, {3});
  EXPECT_EQ(graph.add_state("cache", type), graph.add_state("cache", type));
  EXPECT_EQ(graph.add_constant("table", constant_of(1, 3)), graph.add_constant("table", constant_of(1, 3)));
  EXPECT_EQ(graph.add_parameter("weight", type), graph.add_parameter("weight", type));
  EXPECT_EQ(graph.values().size(), 3u);
}

TEST(GraphDeathTest, ANameOfAnotherTypeKindOrContentIsRefused) {
  Graph graph;
  graph.add_state("cache", TensorType(DType::f32, {3}));
  graph.add_constant("table", constant_of(1, 3));
  EXPECT_DEATH(graph.add_state("cache", TensorType(DType::f32, {4})), "'cache' is a state f32 \\[3\\] and a state f32");
  EXPECT_DEATH(graph.add_state("cache", TensorType(DType::bf16, {3})),
               "'cache' is a state f32 \\[3\\] and a state bf16");
  EXPECT_DEATH(graph.add_state("table", TensorType(DType::f32, {3})), "'table' is a constant f32 \\[3\\] and a state");
  EXPECT_DEATH(graph.add_constant("cache", constant_of(1, 3)), "'cache' is a state f32 \\[3\\] and a constant");
  EXPECT_DEATH(graph.add_constant("table", constant_of(1, 4)), "'table' is a constant f32 \\[3\\] and a constant f32");
  EXPECT_DEATH(graph.add_constant("table", constant_of(2, 3)), "constant 'table' is added .* with other bytes");
  EXPECT_DEATH(graph.add_input("cache", TensorType(DType::f32, {3})), "'cache' is added to the graph twice");
}

TEST(Graph, OpsOfOneKindInAScopeHaveNamesOfTheirOwn) {
  Graph graph;
  const ValueId x = graph.add_input("x", TensorType(DType::f32, {3, 4}));
  const auto name_of_next = [&] { return graph.value(graph.add1(std::make_shared<ops::Softmax>(), {x})).name; };
  const Graph::Scope scope(graph, "layers.0");
  EXPECT_EQ(name_of_next(), "layers.0.softmax.y");
  EXPECT_EQ(name_of_next(), "layers.0.softmax_2.y");
  const Graph::Scope inner(graph, "mlp");
  EXPECT_EQ(name_of_next(), "layers.0.mlp.softmax.y");
}

}  // namespace
}  // namespace eadem::pipeline
