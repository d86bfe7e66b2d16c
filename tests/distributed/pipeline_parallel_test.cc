// SPDX-License-Identifier: Apache-2.0
//
// Pipeline stages: serving and training on 2 and 3 stages give the bits of one rank, since no sum is regrouped; each
// stage has its own layers' parameters and states, and one value crosses.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <mutex>

#include "eadem/ops/linear.h"
#include "eadem/pipeline/passes/stages.h"
#include "eadem/pipeline/passes/type_inference.h"
#include "tests/distributed/rank_run.h"
#include "tests/support/refusal.h"

namespace eadem::test {
namespace pipeline_parallel_test {

using distributed::run_mesh;

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

TEST(PipelineParallel, ServingGivesTheBitsOfOneRank) {
  for (int stages : {2, 3}) {
    const auto model = SmallModel{.layers = 4, .tied = stages == 2}.make();
    for (bool greedy : {true, false}) {
      const Served one = serve(*model, {}, greedy, random_weights(7));
      int64_t state_bytes = 0;
      std::mutex mutex;
      run_mesh({.pp = stages}, [&](const Mesh& mesh) {
        const int stage = mesh.rank(MeshAxis::pp);
        const Served own = serve(*model, mesh, greedy, random_weights(7));
        EXPECT_EQ(own.ops.contains("recv"), stage > 0);
        EXPECT_EQ(own.ops.contains("send"), stage + 1 < stages);
        for (const char* name : {"send", "recv"})
          if (own.ops.contains(name)) {
            EXPECT_EQ(own.ops.at(name), 1) << "one value crosses: the hidden state";
          }
        EXPECT_EQ(own.ops.at("rope_table"), 1) << "made where it is read, not sent";
        const std::scoped_lock lock(mutex);
        state_bytes += own.state_bytes;
        if (stage + 1 < stages) {
          EXPECT_TRUE(own.logits.empty());
          EXPECT_FALSE(own.ops.contains("sample"));
          return;
        }
        EXPECT_TRUE(same_bits(own.logits, one.logits));
        EXPECT_EQ(own.token, one.token);
        EXPECT_TRUE(same_bits(own.logprob, one.logprob));
      });
      EXPECT_EQ(state_bytes, one.state_bytes) << "each layer's cache lies on one stage";
    }
  }
}

// What crosses is the hidden state, or a token's streams of hidden states.
TEST(PipelineParallel, AStageLoadsItsPartOfACheckpoint) {
  for (const char* model : {"llama", "deepseek_v4"}) {
    const models::Checkpoint checkpoint = models::open_checkpoint(golden(model));
    const Served one = serve(*checkpoint.model, {}, true, weights_of(checkpoint));
    run_mesh({.pp = 2}, [&](const Mesh& mesh) {
      const Served own = serve(*checkpoint.model, mesh, true, weights_of(checkpoint, /*one_stage=*/true));
      EXPECT_LT(own.parameter_bytes, one.parameter_bytes) << model;
      if (mesh.rank(MeshAxis::pp) == 1) {
        EXPECT_TRUE(same_bits(own.logits, one.logits)) << model;
      }
    });
  }
}

TEST(PipelineParallel, WithTensorParallelRanksInEachStage) {
  const auto model = SmallModel{.layers = 3}.make();
  std::vector<Served> one(2);
  run_mesh({.tp = 2}, [&](const Mesh& mesh) {
    one[static_cast<size_t>(mesh.rank(MeshAxis::tp))] = serve(*model, mesh, true, random_weights(7));
  });
  run_mesh({.tp = 2, .pp = 2}, [&](const Mesh& mesh) {
    const Served own = serve(*model, mesh, true, random_weights(7));
    if (mesh.rank(MeshAxis::pp) == 1) {
      EXPECT_TRUE(same_bits(own.logits, one[0].logits));
    }
  });
}

TEST(PipelineParallel, MoreStagesThanLayersAreRefused) {
  const auto model = SmallModel{}.make();
  EXPECT_HAS(
      refusal([&] { run_mesh({.pp = 3}, [&](const Mesh& mesh) { serve(*model, mesh, true, random_weights(1)); }); }),
      "2 layers for 3 pipeline stages");
}

// Layer 5 of gemma4 reads the cache of layer 2.
TEST(PipelineParallel, CachesOfOtherStagesAreRefused) {
  const models::Checkpoint checkpoint = models::open_checkpoint(golden("gemma4"));
  EXPECT_HAS(refusal([&] {
               run_mesh({.pp = 2},
                        [&](const Mesh& mesh) { serve(*checkpoint.model, mesh, true, weights_of(checkpoint)); });
             }),
             "pipeline stage 1 reads a state of stage 0");
}

using Gradients = std::map<std::string, std::vector<float>>;

// One forward and backward pass; returns the gradients of this rank's parameters and adds the token losses.
Gradients train(const models::Model& model, const Mesh& mesh, std::vector<float>& losses) {
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto hardware = modules::AutoHardwareConfig::from_model_spec(model.spec(), *device, HardwareMode::accuracy);
  const int ranks = mesh.size(MeshAxis::tp), rank = mesh.rank(MeshAxis::tp);
  auto built = models::build_training_graph(
      model, {.device = device.get(), .hardware = &hardware, .num_ranks = ranks, .rank = rank});
  const std::vector<int32_t> ids = prompt(model.info().vocab);
  const auto tokens = static_cast<int64_t>(ids.size());
  pipeline::Environment environment{.device = device, .mesh = mesh, .mode = pipeline::Mode::training};
  environment.bounds[Symbol::tokens] = tokens;
  environment.bounds[Symbol::sequences] = 1;
  auto parameters = std::make_shared<pipeline::ParameterStore>(device, rank, ranks);
  pipeline::Program program(std::move(built.graph), environment, parameters);
  program.require_complete();
  models::load_random(*parameters, 7, 0.15);
  std::map<std::string, Tensor> states;
  for (const auto& [name, id] : program.states()) {
    const TensorType& type = program.graph().value(id).type;
    states[name] = allocate_tensor(*device, type.dtype, type.bind({}));
    device->fill_zero(states[name].view.data, states[name].view.size_bytes());
    program.bind_state(name, states[name].view);
  }
  const auto set = [&](const char* name, const auto& values) {
    program.set_input(program.input(name), values.data(), static_cast<int64_t>(values.size() * sizeof(values[0])));
  };
  std::vector<int32_t> positions(ids.size()), labels(ids.begin() + 1, ids.end());
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i);
  labels.push_back(-1);
  set("token_ids", ids);
  set("positions", positions);
  set("labels", labels);
  set("query_start", std::vector<int32_t>{0, static_cast<int32_t>(tokens)});
  set("kv_length", std::vector<int32_t>{static_cast<int32_t>(tokens)});
  program.run_forward(environment.bounds);
  if (mesh.rank(MeshAxis::pp) + 1 == mesh.size(MeshAxis::pp)) {
    losses.resize(ids.size());
    program.read(program.output("loss"), losses.data());
    set("d.loss", std::vector<float>(ids.size(), 0.125f));
  }
  program.run_backward(environment.bounds);
  Gradients gradients;
  for (const auto& [name, tensor] : states)
    gradients[name] = {tensor.view.as<float>(), tensor.view.as<float>() + tensor.view.num_elements()};
  return gradients;
}

TEST(PipelineParallel, TrainingGivesTheGradientsOfOneRankToTheBit) {
  const auto model = SmallModel{.layers = 4}.make();
  std::vector<float> losses;
  const Gradients one = train(*model, {}, losses);
  for (int stages : {2, 4}) {
    Gradients all;
    std::mutex mutex;
    run_mesh({.pp = stages}, [&](const Mesh& mesh) {
      std::vector<float> own_losses;
      Gradients own = train(*model, mesh, own_losses);
      const std::scoped_lock lock(mutex);
      if (mesh.rank(MeshAxis::pp) + 1 == stages) {
        EXPECT_TRUE(same_bits(own_losses, losses));
      }
      for (auto& [name, values] : own) {
        EXPECT_FALSE(all.contains(name)) << name << " is trained on two stages";
        all[name] = std::move(values);
      }
    });
    ASSERT_EQ(all.size(), one.size());
    for (const auto& [name, values] : one) EXPECT_TRUE(same_bits(all.at(name), values)) << name;
  }
}

// Three products, one in each layer, with the weights of these names.
pipeline::Graph three_products(const std::array<const char*, 3>& weights) {
  pipeline::Graph graph;
  pipeline::ValueId x = graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, 8}));
  std::map<std::string, pipeline::ValueId> parameters;
  for (const char* name : weights)
    if (!parameters.contains(name)) parameters[name] = graph.add_parameter(name, TensorType(DType::f32, {8, 8}));
  for (int layer = 0; layer < 3; ++layer) {
    x = graph.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{.out_dtype = DType::f32}),
                   {x, parameters.at(weights[static_cast<size_t>(layer)])});
    graph.nodes().back().layer = layer;
  }
  graph.mark_output("y", x);
  pipeline::infer_types(graph);
  return graph;
}

TEST(PipelineParallel, WhatStagesShareIsKnownToAll) {
  run_mesh({.pp = 3}, [&](const Mesh& mesh) {
    const auto shared = [&](const std::array<const char*, 3>& weights, bool training, std::vector<std::string> frozen) {
      pipeline::Graph graph = three_products(weights);
      std::vector<std::string> found;
      for (const pipeline::SharedParameter& one : pipeline::keep_stage(graph, mesh, training, frozen))
        found.push_back(fmt::format("{} {} {}", one.name, one.first, one.last));
      return found;
    };
    using Names = std::vector<std::string>;
    EXPECT_EQ(shared({"a", "b", "c"}, true, {}), Names{});
    EXPECT_EQ(shared({"a", "b", "a"}, true, {}), Names{"a 0 2"});
    EXPECT_EQ(shared({"a", "b", "b"}, true, {}), Names{"b 1 2"});
    EXPECT_EQ(shared({"a", "b", "a"}, true, {"a"}), Names{}) << "it has no gradient";
    EXPECT_EQ(shared({"a", "a", "a"}, false, {}), Names{});
    EXPECT_EQ(shared({"a", "a", "a"}, true, {"a"}), Names{});
    EXPECT_HAS(refusal([&] { shared({"a", "a", "a"}, true, {}); }), "3 pipeline stages read 'a'; tied weights of two");
  });
}

// The first of two stages leaves its term of a tied weight's gradient for the end, when it has that of the last one.
TEST(PipelineParallel, TheFirstStageAddsItsTermOfTiedWeightsLast) {
  const auto model = SmallModel{.tied = true}.make();
  const std::string name = "grad.model.embed_tokens.weight";
  std::vector<float> losses;
  const Gradients one = train(*model, {}, losses);
  run_mesh({.pp = 2}, [&](const Mesh& mesh) {
    std::vector<float> own_losses;
    const Gradients own = train(*model, mesh, own_losses);
    const auto is_zero = [](float value) { return value == 0; };
    EXPECT_EQ(std::all_of(own.at(name).begin(), own.at(name).end(), is_zero), mesh.rank(MeshAxis::pp) == 0);
    for (const auto& [other, values] : own) {
      if (other == name) continue;
      EXPECT_TRUE(same_bits(values, one.at(other))) << other;
    }
  });
}

}  // namespace pipeline_parallel_test
}  // namespace eadem::test
