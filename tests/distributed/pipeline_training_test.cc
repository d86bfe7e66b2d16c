// SPDX-License-Identifier: Apache-2.0
//
// Trainers on stages of pp: passes in groups through the stages give the losses, weights and evaluations of the ranks
// without stages, to the bit where gradients are not clipped; the norm of all stages within the bound of its roundings.
// So do tied weights, which the first and the last stage have, and the load-balancing loss of the experts of all
// stages.
#include <gtest/gtest.h>

#include <limits>
#include <mutex>
#include <optional>
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
  std::vector<std::optional<double>> balances;
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
    run.balances.push_back(result.load_balancing_loss);
  }
  run.evaluated = trainer.evaluate(batches[0]);
  for (const auto& [name, tensor] : trainer.state_dict()) run.weights[name] = values_of(tensor);
  for (const std::string& name : trainer.trained_names()) run.gradients[name] = values_of(trainer.gradient(name));
  return run;
}

// Ranks with stages against the rank without, trained by these options or by others, that has the same place along the
// other axes. A tied weight is on the first stage and on the last.
void compare(const models::Model& model, MeshShape shape, int passes, const train::TrainerOptions& options,
             const std::optional<train::TrainerOptions>& without_stages = {}) {
  const int stages = shape.pp;
  shape.pp = 1;
  std::mutex mutex;
  std::map<std::array<int, 3>, TrainedStage> expected;
  const auto place = [](const Mesh& mesh) {
    return std::array{mesh.rank(MeshAxis::dp), mesh.rank(MeshAxis::tp), mesh.rank(MeshAxis::ep)};
  };
  run_mesh(shape, [&](const Mesh& mesh) {
    TrainedStage run = train(model, mesh, passes, without_stages.value_or(options));
    const std::scoped_lock lock(mutex);
    expected[place(mesh)] = std::move(run);
  });
  std::map<std::array<int, 3>, std::multiset<std::string>> seen;
  shape.pp = stages;
  run_mesh(shape, [&](const Mesh& mesh) {
    const TrainedStage own = train(model, mesh, passes, options);
    const std::scoped_lock lock(mutex);
    const TrainedStage& want = expected.at(place(mesh));
    EXPECT_EQ(own.losses, want.losses);
    EXPECT_EQ(own.balances, want.balances);
    EXPECT_EQ(own.evaluated, want.evaluated);
    // Each stage's length is rounded to f32, which costs the root of the sum of squares 2^-24 at most; so do the
    // rounding of that root, and that of one rank's.
    for (size_t step = 0; step < own.norms.size(); ++step)
      EXPECT_NEAR(own.norms[step], want.norms[step], 0x1p-22 * want.norms[step]);
    for (const auto& [name, values] : own.weights) {
      seen[place(mesh)].insert(name);
      EXPECT_TRUE(same_bits(values, want.weights.at(name))) << name;
    }
    for (const auto& [name, values] : own.gradients) EXPECT_TRUE(same_bits(values, want.gradients.at(name))) << name;
  });
  for (const auto& [at, names] : seen)
    for (const auto& [name, values] : expected.at(at).weights) {
      const bool on_two = model.info().tied && name == "model.embed_tokens.weight";
      EXPECT_EQ(names.count(name), on_two ? 2 : 1) << name;
    }
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

// The first stage adds the gradients that the last one made of the head to those of the embedding, pass by pass, as one
// rank does: the head's of a pass, then the rows of its tokens, some of which stand in it twice.
TEST(PipelineTraining, TiedWeightsHaveTheBitsOfOneRank) {
  const auto model = SmallModel{.layers = 4, .tied = true}.make();
  for (const DType weights : {DType::f32, DType::bf16})
    for (const int stages : {2, 4})
      for (const int passes : {1, 2, 5}) {
        SCOPED_TRACE(fmt::format("{} stages, {} passes, {}", stages, passes, dtype_name(weights)));
        compare(*model, {.pp = stages}, passes, unclipped(weights));
      }
  for (const MeshShape& shape : {MeshShape{.dp = 2, .pp = 2}, {.tp = 2, .pp = 2}, {.dp = 2, .tp = 3, .pp = 2}}) {
    SCOPED_TRACE(fmt::format("dp {} tp {}", shape.dp, shape.tp));
    compare(*model, shape, 3, unclipped());
  }
  SCOPED_TRACE("the op that makes the loss with its gradients is off");
  train::TrainerOptions options = unclipped();
  options.disabled_fusions = {"all"};
  compare(*model, {.pp = 2}, 3, options);
}

// The norm has the tied gradient once, and the factor that clips it is the same on both stages.
TEST(PipelineTraining, TiedWeightsAreClippedAlike) {
  const auto model = SmallModel{.layers = 2, .tied = true}.make();
  train::TrainerOptions options = unclipped();
  options.max_grad_norm = 0.1;
  const TrainedStage one = train(*model, {}, 3, options);
  EXPECT_GT(one.norms[0], 0.1) << "it is clipped";
  std::array<std::vector<float>, 2> tied;
  run_mesh({.pp = 2}, [&](const Mesh& mesh) {
    TrainedStage own = train(*model, mesh, 3, options);
    EXPECT_EQ(own.losses[0], one.losses[0]);
    EXPECT_NEAR(own.norms[0], one.norms[0], 0x1p-22 * one.norms[0]);
    tied[static_cast<size_t>(mesh.rank(MeshAxis::pp))] = own.weights.at("model.embed_tokens.weight");
  });
  EXPECT_TRUE(same_bits(tied[0], tied[1]));
}

TEST(PipelineTraining, TiedWeightsAloneAreTrained) {
  const auto model = SmallModel{.layers = 2, .tied = true}.make();
  train::TrainerOptions options = unclipped();
  options.frozen = {"model.layers.*", "model.norm.*"};
  compare(*model, {.pp = 2}, 3, options);
  options.frozen = {"model.embed_tokens.*"};
  compare(*model, {.pp = 2}, 3, options);
}

// The logits of all routers reach the last stage, which makes the loss that one rank makes of them.
TEST(PipelineTraining, TheLoadOfExpertsOfAllStagesIsBalanced) {
  const auto experts = models::model_from_config(golden("qwen3_moe") + "/config.json");
  train::TrainerOptions options = unclipped();
  options.router_aux_loss_coef = 0.5;
  for (const int passes : {1, 3}) compare(*experts, {.pp = 2}, passes, options);
  compare(*experts, {.dp = 2, .pp = 2}, 3, options);
  compare(*experts, {.tp = 2, .pp = 2}, 3, options);
  compare(*experts, {.pp = 2, .ep = 2}, 3, options);
  options.frozen = {"model.layers.0.*", "model.embed_tokens.*"};
  compare(*experts, {.pp = 2}, 3, options);
  options.frozen.clear();
  compare(*experts, {.pp = 3}, 4, options);
}

TEST(PipelineTraining, LayersThatAreComputedAgainHaveTheBitsOfKeptOnes) {
  const train::TrainerOptions kept = unclipped();
  train::TrainerOptions again = kept;
  again.recompute_layers = true;
  const auto model = SmallModel{.layers = 3, .tied = true}.make();
  compare(*model, {.pp = 3}, 4, again, kept);
  compare(*model, {.tp = 2, .pp = 2}, 2, again, kept);
  const auto experts = models::model_from_config(golden("qwen3_moe") + "/config.json");
  compare(*experts, {.pp = 2, .ep = 2}, 2, again, kept);
}

// A stage keeps the histories of what it rounds.
TEST(PipelineTraining, ProductsIn8BitFloatsHaveTheBitsOfOneRank) {
  const auto model = SmallModel{.layers = 3, .tied = true}.make();
  for (const char* products : {"fp8_tensor", "fp8_tensor_delayed"}) {
    SCOPED_TRACE(products);
    train::TrainerOptions options = unclipped();
    options.products = options.head_products = train::products_from_name(products);
    for (const int passes : {1, 3, 4}) compare(*model, {.pp = 3}, passes, options);
    compare(*model, {.dp = 2, .pp = 2}, 2, options);
    options.head_products = nullptr;  // refused over tp
    compare(*model, {.tp = 2, .pp = 2}, 3, options);
  }
}

// Every stage hears of a value that is not finite on one of them, and none has changed its weights.
TEST(PipelineTraining, AValueThatIsNotFiniteEndsTheStepOnEveryStage) {
  const auto model = SmallModel{.layers = 2}.make();
  run_mesh({.pp = 2}, [&](const Mesh& mesh) {
    train::TrainerOptions options = unclipped();
    options.products = train::products_from_name("fp8_tensor_delayed");
    Trainer trainer(model, open_device("cpu", {.num_threads = 1}), options, mesh);
    trainer.load_random(7, 0.15);
    const std::vector<Batch> batches = {make_batch(512, 2, 1)};
    // A rounding on the last stage records a magnitude that is not a number.
    const pipeline::StepObserver observer = [&](const pipeline::Node& node, std::span<const TensorView>,
                                                std::span<const TensorView> outputs) {
      if (mesh.rank(MeshAxis::pp) == 1 && node.op->name() == "quantize")
        outputs[1].as<float>()[1] = std::numeric_limits<float>::quiet_NaN();
    };
    EXPECT_HAS(refusal([&] { trainer.step(batches, 1e-2, &observer); }), "is not finite; the parameters are unchanged");
    EXPECT_EQ(trainer.num_steps(), 0);
    trainer.step(batches, 1e-2);  // they still meet
  });
}

TEST(PipelineTraining, MoreStagesThanLayersAreRefused) {
  const auto model = SmallModel{}.make();
  EXPECT_HAS(refusal([&] { run_mesh({.pp = 3}, [&](const Mesh& mesh) { train(*model, mesh, 1, unclipped()); }); }),
             "2 layers for 3 pipeline stages");
}

}  // namespace pipeline_training_test
}  // namespace eadem::test
