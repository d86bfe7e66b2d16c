// SPDX-License-Identifier: Apache-2.0
//
// The sharding step on two ranks: threads that share a communicator, each with half of the weights, must give what one
// rank gives.
#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <map>
#include <thread>

#include "eadem/models/auto_model.h"
#include "eadem/models/graphs.h"
#include "eadem/pipeline/program.h"
#include "eadem/pipeline/sharding.h"
#include "eadem/pipeline/type_inference.h"

namespace eadem::pipeline {
namespace {

// Sums over the threads of one process, in rank order.
class ThreadCommunicator final : public Communicator {
 public:
  struct Shared {
    explicit Shared(int size) : views(static_cast<size_t>(size)), barrier(size) {}
    std::vector<const float*> views;
    std::vector<float> sum;
    std::barrier<> barrier;
  };
  ThreadCommunicator(std::shared_ptr<Shared> shared, int rank) : shared_(std::move(shared)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(shared_->views.size()); }
  void all_reduce_sum(Device&, const TensorView& data) override {
    const auto count = static_cast<size_t>(data.num_elements());
    shared_->views[static_cast<size_t>(rank_)] = data.as<float>();
    shared_->barrier.arrive_and_wait();
    if (rank_ == 0) {
      shared_->sum.assign(count, 0.0f);
      for (const float* part : shared_->views)
        for (size_t i = 0; i < count; ++i) shared_->sum[i] += part[i];
    }
    shared_->barrier.arrive_and_wait();
    std::copy_n(shared_->sum.begin(), count, data.as<float>());
    shared_->barrier.arrive_and_wait();
  }

 private:
  std::shared_ptr<Shared> shared_;
  int rank_;
};

std::vector<float> logits_of_rank(const models::Checkpoint& checkpoint, std::shared_ptr<Communicator> communicator) {
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto hardware =
      modules::AutoHardwareConfig::from_model_spec(models::spec_of(checkpoint), *device, HardwareMode::accuracy);
  const int ranks = communicator->size();
  models::BuiltGraph built =
      models::build_inference_graph(*checkpoint.model, {.device = device.get(),
                                                        .hardware = &hardware,
                                                        .cache = {modules::CacheLayout::contiguous, 1, 32},
                                                        .num_ranks = ranks});
  Environment environment{.device = device, .communicator = communicator};
  environment.bounds[Symbol::tokens] = 8;
  environment.bounds[Symbol::sequences] = 1;
  environment.bounds[Symbol::logit_rows] = 8;
  environment.bounds[Symbol::max_blocks] = 1;
  auto parameters = std::make_shared<ParameterStore>(device, communicator->rank(), ranks);
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
  const std::vector<float> expected = logits_of_rank(checkpoint, std::make_shared<SingleRank>());
  auto shared = std::make_shared<ThreadCommunicator::Shared>(2);
  std::vector<std::vector<float>> actual(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      actual[static_cast<size_t>(rank)] =
          logits_of_rank(checkpoint, std::make_shared<ThreadCommunicator>(shared, rank));
    });
  for (std::thread& thread : threads) thread.join();
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

INSTANTIATE_TEST_SUITE_P(Models, TwoRanks, testing::Values("llama", "qwen2", "qwen3"));

TEST(Sharding, WhatDoesNotDivideIsRefusedWithBothNumbers) {
  const models::Checkpoint checkpoint =
      models::open_checkpoint(EADEM_SOURCE_DIR "/tests/data/golden/smollm2");  // 3 heads
  auto shared = std::make_shared<ThreadCommunicator::Shared>(2);
  try {
    logits_of_rank(checkpoint, std::make_shared<ThreadCommunicator>(shared, 0));
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
  shard(built.graph, 1);
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
  shard(built.graph, 2);
  int64_t count = 0;
  for (const Node& node : built.graph.nodes()) count += node.op->name() == "all_reduce";
  EXPECT_EQ(count, 2 * model->info().layers);
}

}  // namespace
}  // namespace eadem::pipeline
