// SPDX-License-Identifier: Apache-2.0
//
// The sharding step on two ranks: threads that share a communicator, each with half of the weights, must give what one
// rank gives.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "eadem/distributed/thread_communicator.h"
#include "eadem/models/auto_model.h"
#include "eadem/models/graphs.h"
#include "eadem/pipeline/passes/sharding.h"
#include "eadem/pipeline/passes/type_inference.h"
#include "eadem/pipeline/program.h"

namespace eadem::pipeline {
namespace {

std::vector<float> logits_of_rank(const models::Checkpoint& checkpoint, const Mesh& mesh) {
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto hardware =
      modules::AutoHardwareConfig::from_model_spec(models::spec_of(checkpoint), *device, HardwareMode::accuracy);
  const int ranks = mesh.size(MeshAxis::tp), rank = mesh.rank(MeshAxis::tp);
  models::BuiltGraph built =
      models::build_inference_graph(*checkpoint.model, {.device = device.get(),
                                                        .hardware = &hardware,
                                                        .cache = {modules::CacheLayout::contiguous, 1, 32},
                                                        .num_ranks = ranks,
                                                        .rank = rank});
  Environment environment{.device = device, .mesh = mesh, .whole_outputs = {"logits"}};
  environment.bounds[Symbol::tokens] = 8;
  environment.bounds[Symbol::sequences] = 1;
  environment.bounds[Symbol::logit_rows] = 8;
  environment.bounds[Symbol::max_blocks] = 1;
  auto parameters = std::make_shared<ParameterStore>(device, rank, ranks);
  Program program(std::move(built.graph), environment, parameters);
  program.require_complete();
  models::load_weights(*parameters, checkpoint);
  std::map<std::string, Tensor> states;
  for (const auto& [name, id] : program.states()) {
    const TensorType& type = program.graph().value(id).type;
    states[name] = allocate_tensor(*device, type.dtype, type.bind({}));
    program.bind_state(name, states[name].view);
  }
  const std::vector<int32_t> ids = {3, 14, 15, 92, 65, 35, 89, 79}, positions = {0, 1, 2, 3, 4, 5, 6, 7},
                             start = {0, 8}, length = {8}, table = {0};
  const std::vector<int64_t> slots(positions.begin(), positions.end());
  const auto set = [&](const char* name, const auto& values) {
    program.set_input(program.input(name), values.data(), static_cast<int64_t>(values.size() * sizeof(values[0])));
  };
  set("token_ids", ids);
  set("positions", positions);
  set("query_start", start);
  set("kv_length", length);
  set("block_table", table);
  set("slots", slots);
  set("logit_rows", positions);
  program.run(environment.bounds);
  const TensorView view = program.view(program.output("logits"));
  return {view.as<float>(), view.as<float>() + view.num_elements()};
}

class TwoRanks : public testing::TestWithParam<const char*> {};

TEST_P(TwoRanks, GiveTheLogitsOfOne) {
  const models::Checkpoint checkpoint =
      models::open_checkpoint(std::string(EADEM_SOURCE_DIR "/tests/data/golden/") + GetParam());
  const std::vector<float> expected = logits_of_rank(checkpoint, {});
  std::vector<std::vector<float>> actual(2);
  distributed::run_mesh({.tp = 2}, [&](const Mesh& mesh) {
    actual[static_cast<size_t>(mesh.rank(MeshAxis::tp))] = logits_of_rank(checkpoint, mesh);
  });
  EXPECT_EQ(actual[0], actual[1]) << "every rank has the same bits";
  double largest = 0;
  for (float value : expected) largest = std::max(largest, std::abs(static_cast<double>(value)));
  // Splitting a sum in two changes the rounding of each of its terms' partial sums: per product at most its length,
  // here at most 445 terms, in units of 2^-24 of the sum of magnitudes; the square root of that as errors are of both
  // signs, and four products a layer in two layers.
  const double bound = 8 * std::sqrt(445.0) * 0x1p-24 * 16 * largest;
  ASSERT_EQ(expected.size(), actual[0].size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(actual[0][i], expected[i], bound) << i;
}

INSTANTIATE_TEST_SUITE_P(Models, TwoRanks,
                         testing::Values("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "llama4_usual"));

TEST(Sharding, WhatDoesNotDivideIsRefusedWithBothNumbers) {
  const models::Checkpoint checkpoint =
      models::open_checkpoint(EADEM_SOURCE_DIR "/tests/data/golden/smollm2");  // 3 heads
  try {
    distributed::run_mesh({.tp = 2}, [&](const Mesh& mesh) { logits_of_rank(checkpoint, mesh); });
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("3 attention heads do not divide into 2"), std::string::npos)
        << error.what();
  }
}

TEST(Sharding, OneRankChangesNothing) {
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto model = models::model_from_config(EADEM_SOURCE_DIR "/tests/data/golden/llama/config.json");
  const auto hardware = modules::AutoHardwareConfig::from_model_spec(model->spec(), *device, HardwareMode::accuracy);
  models::BuiltGraph built = models::build_inference_graph(
      *model, {.device = device.get(), .hardware = &hardware, .cache = {modules::CacheLayout::contiguous, 1, 32}});
  infer_types(built.graph);
  const size_t nodes = built.graph.nodes().size();
  shard(built.graph, Mesh());
  EXPECT_EQ(built.graph.nodes().size(), nodes);
}

TEST(Sharding, TwoRanksGetOneAllReducePerRowParallelProduct) {
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto model = models::model_from_config(EADEM_SOURCE_DIR "/tests/data/golden/llama/config.json");
  const auto hardware = modules::AutoHardwareConfig::from_model_spec(model->spec(), *device, HardwareMode::accuracy);
  models::BuiltGraph built = models::build_inference_graph(*model, {.device = device.get(),
                                                                    .hardware = &hardware,
                                                                    .cache = {modules::CacheLayout::contiguous, 1, 32},
                                                                    .num_ranks = 2});
  const distributed::ThreadGroup group(2);
  shard(built.graph, Mesh(MeshAxis::tp, group.communicator(0)));
  std::map<std::string_view, int64_t> count;
  for (const Node& node : built.graph.nodes()) ++count[node.op->name()];
  EXPECT_EQ(count["all_reduce"], 1 + 2 * model->info().layers) << "of the embedding, and two a layer";
  EXPECT_EQ(count["all_gather"], 1) << "of the logits, to sample";
}

// An op that wants its input divided in one way and leaves it so.
class Wants final : public ops::Op {
 public:
  explicit Wants(Sharding wanted) : wanted_(wanted) {}
  std::string_view name() const override { return "wants"; }
  std::vector<ops::Port> inputs() const override { return {{"x"}}; }
  std::vector<ops::Port> outputs() const override { return {{"y"}}; }
  ops::AttrsRef attrs() const override { return {}; }
  std::vector<TensorType> infer_types(std::span<const TensorType> in) const override {
    return {ops::plain_type(in[0].dtype, in[0].dims())};
  }
  Sharding wanted_sharding(std::span<const TensorType>, int) const override { return wanted_; }
  std::vector<Sharding> infer_sharding(std::span<const TensorType> in) const override {
    EXPECT_EQ(in[0].sharding, wanted_);
    return {in[0].sharding};
  }
  ops::Cost cost(Pass, std::span<const TensorType>, std::span<const TensorType>, const SymbolValues&) const override {
    return {};
  }
  void reference(Pass, std::span<const ops::RefTensor>, std::span<ops::RefTensor>) const override {}

 private:
  Sharding wanted_;
};

TEST(Sharding, EachConversionIsOneCollectiveThatItsReadersShare) {
  const distributed::ThreadGroup group(2);
  const Sharding whole = Sharding::replicated(), partial = Sharding::partial();
  struct Row {
    Sharding has, wanted;
    std::string_view op;  // "": none
    TensorType result;
  };
  const auto type = [](int64_t rows, int64_t columns) { return TensorType(DType::f32, {rows, columns}); };
  for (const Row& row :
       {Row{whole, whole, "", type(4, 6)}, Row{Sharding::along(1), Sharding::along(1), "", type(4, 6)},
        Row{partial, whole, "all_reduce", type(4, 6)}, Row{partial, Sharding::along(1), "reduce_scatter", type(4, 3)},
        Row{Sharding::along(0), whole, "all_gather", type(8, 6)},
        Row{Sharding::along(1), whole, "all_gather", type(4, 12)},
        Row{Sharding::along(0), Sharding::along(1), "all_to_all", type(8, 3)}}) {
    SCOPED_TRACE(to_string(row.has) + " to " + to_string(row.wanted));
    Graph graph;
    TensorType has = type(4, 6);
    has.sharding = row.has;
    const ValueId x = graph.add_input("x", has);
    const ValueId y = graph.add1(std::make_shared<Wants>(row.wanted), {x});
    graph.add1(std::make_shared<Wants>(row.wanted), {x});
    shard(graph, Mesh(MeshAxis::tp, group.communicator(1)));
    ASSERT_EQ(graph.nodes().size(), row.op.empty() ? 2u : 3u);
    if (!row.op.empty()) {
      EXPECT_EQ(graph.nodes()[0].op->name(), row.op);
    }
    EXPECT_TRUE(graph.value(y).type.same_dims(row.result)) << to_string(graph.value(y).type);
  }
  Graph graph;
  const ValueId x = graph.add_input("x", type(4, 6));
  graph.add1(std::make_shared<Wants>(Sharding::along(1)), {x});
  EXPECT_THROW(shard(graph, Mesh(MeshAxis::tp, group.communicator(0))), InvalidArgument) << "whole to divided";
}

}  // namespace
}  // namespace eadem::pipeline
