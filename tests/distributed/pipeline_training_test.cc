// SPDX-License-Identifier: Apache-2.0
//
// Trainers on stages of pp: passes in groups through the stages give the losses, weights and evaluations of the ranks
// without stages, to the bit where gradients are not clipped; the norm of all stages within the bound of its roundings.
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "tests/distributed/training_batches.h"
#include "tests/support/refusal.h"

namespace eadem::test {
namespace pipeline_training_test {

using distributed::run_mesh;
using train::Batch;
using train::Trainer;

struct TrainedStage {
  std::vector<double> losses, norms;
  std::pair<double, int64_t> evaluated;
  std::map<std::string, std::vector<float>> weights, gradients;  // of this rank, in f32
};

std::vector<float> values_of(const Tensor& tensor) {
  const Tensor wide = converted_on_host(tensor.view, DType::f32);
  return {wide.view.as<float>(), wide.view.as<float>() + wide.view.num_elements()};
}

// Three steps of `passes` passes, which differ over dp and ep.
TrainedStage train(const models::Model& model, const Mesh& mesh, int passes, const train::TrainerOptions& options) {
  Trainer trainer(std::shared_ptr<const models::Model>(std::shared_ptr<void>(), &model),
                  open_device("cpu", {.num_threads = 1}), options, mesh);
  trainer.load_random(7, 0.15);
  const int seed = 20 * (mesh.rank(MeshAxis::dp) * mesh.size(MeshAxis::ep) + mesh.rank(MeshAxis::ep));
  std::vector<Batch> batches;
  for (int pass = 0; pass < passes; ++pass)
    batches.push_back(make_batch(model.info().vocab, 1 + pass % 3, 1 + seed + pass));
  TrainedStage run;
  for (int step = 0; step < 3; ++step) {
    const train::StepResult result = trainer.step(batches, 1e-2);
    run.losses.push_back(result.loss);
    run.norms.push_back(result.grad_norm);
  }
  run.evaluated = trainer.evaluate(batches[0]);
  for (const auto& [name, tensor] : trainer.state_dict()) run.weights[name] = values_of(tensor);
  for (const std::string& name : trainer.trained_names()) run.gradients[name] = values_of(trainer.gradient(name));
  return run;
}

// Ranks with stages against the rank without that has the same place along the other axes.
void compare(const models::Model& model, MeshShape shape, int passes, const train::TrainerOptions& options) {
  const int stages = shape.pp;
  shape.pp = 1;
  std::mutex mutex;
  std::map<std::array<int, 3>, TrainedStage> expected;
  const auto place = [](const Mesh& mesh) {
    return std::array{mesh.rank(MeshAxis::dp), mesh.rank(MeshAxis::tp), mesh.rank(MeshAxis::ep)};
  };
  run_mesh(shape, [&](const Mesh& mesh) {
    TrainedStage run = train(model, mesh, passes, options);
    const std::scoped_lock lock(mutex);
    expected[place(mesh)] = std::move(run);
  });
  std::map<std::array<int, 3>, std::set<std::string>> seen;
  shape.pp = stages;
  run_mesh(shape, [&](const Mesh& mesh) {
    const TrainedStage own = train(model, mesh, passes, options);
    const std::scoped_lock lock(mutex);
    const TrainedStage& want = expected.at(place(mesh));
    EXPECT_EQ(own.losses, want.losses);
    EXPECT_EQ(own.evaluated, want.evaluated);
    // Each stage's length is rounded to f32, which costs the root of the sum of squares 2^-24 at most; so do the
    // rounding of that root, and that of one rank's.
    for (size_t step = 0; step < own.norms.size(); ++step)
      EXPECT_NEAR(own.norms[step], want.norms[step], 0x1p-22 * want.norms[step]);
    for (const auto& [name, values] : own.weights) {
      EXPECT_TRUE(seen[place(mesh)].insert(name).second) << name << " is on two stages";
      EXPECT_TRUE(same_bits(values, want.weights.at(name))) << name;
    }
    for (const auto& [name, values] : own.gradients) EXPECT_TRUE(same_bits(values, want.gradients.at(name))) << name;
  });
  for (const auto& [at, names] : seen) EXPECT_EQ(names.size(), expected.at(at).weights.size());
}

train::TrainerOptions unclipped(DType weights = DType::f32) {
  return {.weights = weights, .batch_tokens = 64, .max_grad_norm = 0, .router_aux_loss_coef = 0.0};
}

TEST(PipelineTraining, HasTheBitsOfOneRank) {
  const auto model = SmallModel{.layers = 4}.make();
  for (const DType weights : {DType::f32, DType::bf16})
    for (const int stages : {2, 3, 4})
      for (const int passes : {1, 2, 5}) {  // fewer than a group, a group, several and a part
        SCOPED_TRACE(fmt::format("{} stages, {} passes, {}", stages, passes, dtype_name(weights)));
        compare(*model, {.pp = stages}, passes, unclipped(weights));
      }
}

TEST(PipelineTraining, TogetherWithOtherAxes) {
  const auto model = SmallModel{.layers = 3}.make();
  for (const MeshShape& shape :
       {MeshShape{.dp = 2, .tp = 1, .pp = 2}, {.dp = 1, .tp = 2, .pp = 2}, {.dp = 2, .tp = 3, .pp = 2}}) {
    SCOPED_TRACE(fmt::format("dp {} tp {}", shape.dp, shape.tp));
    compare(*model, shape, 3, unclipped());
  }
  const auto experts = models::model_from_config(golden("qwen3_moe") + "/config.json");
  SCOPED_TRACE("experts");
  compare(*experts, {.pp = 2}, 3, unclipped());
  compare(*experts, {.pp = 2, .ep = 2}, 3, unclipped());
}

// A clipped gradient is multiplied by a factor that has the norm's roundings: the first losses are one rank's to the
// bit, and the next ones as close as the factor.
TEST(PipelineTraining, ClipsByTheNormOfAllStages) {
  const auto model = SmallModel{.layers = 4}.make();
  train::TrainerOptions options = unclipped();
  options.max_grad_norm = 0.1;
  const TrainedStage one = train(*model, {}, 3, options);
  EXPECT_GT(one.norms[0], 0.1) << "it is clipped";
  run_mesh({.pp = 4}, [&](const Mesh& mesh) {
    const TrainedStage own = train(*model, mesh, 3, options);
    EXPECT_EQ(own.losses[0], one.losses[0]);
    for (size_t step = 0; step < 3; ++step) EXPECT_NEAR(own.losses[step], one.losses[step], 1e-4);
    EXPECT_NEAR(own.norms[0], one.norms[0], 0x1p-22 * one.norms[0]);
  });
}

// A stage may have nothing to train. It hands gradients on, or waits for them.
TEST(PipelineTraining, AStageWithFrozenParametersAlone) {
  const auto model = SmallModel{.layers = 4}.make();
  for (const char* frozen : {"model.layers.[01].*", "model.layers.[23].*"}) {
    SCOPED_TRACE(frozen);
    train::TrainerOptions options = unclipped();
    options.frozen = {frozen, "model.embed_tokens.*", "model.norm.*", "lm_head.*"};
    compare(*model, {.pp = 2}, 3, options);
  }
}

TEST(PipelineTraining, WhatStagesCannotTrainIsRefused) {
  const auto refused = [](const models::Model& model, int stages, double balancing) {
    train::TrainerOptions options = unclipped();
    options.router_aux_loss_coef = balancing;
    return refusal([&] { run_mesh({.pp = stages}, [&](const Mesh& mesh) { train(model, mesh, 1, options); }); });
  };
  EXPECT_HAS(refused(*SmallModel{.tied = true}.make(), 2, 0), "tied weights cannot be trained on several stages");
  EXPECT_HAS(refused(*SmallModel{}.make(), 3, 0), "2 layers for 3 pipeline stages");
  EXPECT_HAS(refused(*models::model_from_config(golden("qwen3_moe") + "/config.json"), 2, 0.5),
             "router_aux_loss_coef is 0.5; 2 stages of pp");
}

}  // namespace pipeline_training_test
}  // namespace eadem::test
