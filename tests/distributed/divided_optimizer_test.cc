// SPDX-License-Identifier: Apache-2.0
//
// The optimizer's states divided over dp: weights and states have the bits of AdamW on whole states, which the test
// keeps, and a rank keeps its share of the bytes.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <mutex>

#include "eadem/ops/training/optimizer.h"
#include "eadem/train/optimizer.h"
#include "tests/distributed/training_batches.h"

namespace eadem::test {
namespace divided_optimizer_test {

using distributed::run_mesh;
using train::divide_states;
using train::StatePart;
using train::Trainer;

constexpr double kRate = 1e-2;

bool equal(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.view.data, b.view.data, static_cast<size_t>(a.view.size_bytes())) == 0;
}

Tensor copy_of(const TensorView& view) { return converted_on_host(view, view.dtype); }

// One step of AdamW on a whole parameter: the op, with states of its own.
struct WholeAdamW {
  Tensor weight, master, m, v;  // master: of a rounded weight

  explicit WholeAdamW(const Tensor& start) : weight(copy_of(start.view)) {
    master = converted_on_host(start.view, DType::f32);
    m = Tensor::on_host(DType::f32, start.shape());
    v = Tensor::on_host(DType::f32, start.shape());
    for (const Tensor* zero : {&m, &v}) std::memset(zero->view.data, 0, static_cast<size_t>(zero->view.size_bytes()));
  }
  void step(const std::shared_ptr<Device>& device, const Tensor& gradient, double norm, int step,
            const train::TrainerOptions& options) {
    const bool rounded = weight.dtype() != DType::f32;
    pipeline::Graph graph;
    const auto state = [&](const char* name, const Tensor& values) {
      std::vector<Dim> dims;
      for (int i = 0; i < values.shape().rank(); ++i) dims.emplace_back(values.shape()[i]);
      return graph.add_state(name, TensorType(values.dtype(), dims));
    };
    const auto norm_input = graph.add_input("norm", TensorType(DType::f32, {1}));
    const auto hyper_input = graph.add_input("hyper", TensorType(DType::f32, {8}));
    graph.add(std::make_shared<ops::AdamW>(kernels::AdamWAttrs{.decay = weight.shape().rank() >= 2}),
              {state("grad", gradient), norm_input, hyper_input, state("master", rounded ? master : weight),
               state("m", m), state("v", v), rounded ? state("weight", weight) : pipeline::kNoValue});
    pipeline::Program program(std::move(graph), {.device = device}, std::make_shared<pipeline::ParameterStore>(device));
    const auto bind = [&](const char* name, const Tensor& values) { program.bind_state(name, values.view); };
    bind("grad", gradient);
    bind("master", rounded ? master : weight);
    bind("m", m);
    bind("v", v);
    if (rounded) bind("weight", weight);
    const auto length = static_cast<float>(norm);
    const std::array<float, 8> hyper = {static_cast<float>(kRate),
                                        static_cast<float>(options.beta1),
                                        static_cast<float>(options.beta2),
                                        static_cast<float>(options.eps),
                                        static_cast<float>(options.weight_decay),
                                        static_cast<float>(1 - std::pow(options.beta1, step)),
                                        static_cast<float>(1 - std::pow(options.beta2, step)),
                                        static_cast<float>(options.max_grad_norm)};
    program.set_input(norm_input, &length, sizeof length);
    program.set_input(hyper_input, hyper.data(), sizeof hyper);
    program.run({});
  }
};

struct RankBytes {
  int64_t states = 0, elements = 0;  // elements of this rank's trained parts
};

// Three steps on a mesh, each beside the whole states. Returns the bytes of each rank of dp, of the first of tp and ep.
std::vector<RankBytes> compare(const models::Model& model, const MeshShape& shape, DType weights) {
  std::vector<RankBytes> bytes(static_cast<size_t>(shape.dp));
  std::mutex mutex;
  run_mesh(shape, [&](const Mesh& mesh) {
    train::TrainerOptions options{.weights = weights, .batch_tokens = 64, .router_aux_loss_coef = 0.0};
    const auto device = open_device("cpu", {.num_threads = 1});
    Trainer trainer(std::shared_ptr<const models::Model>(std::shared_ptr<void>(), &model), device, options, mesh);
    trainer.load_random(7, 0.15);
    std::map<std::string, WholeAdamW> whole;
    for (const auto& [name, tensor] : trainer.state_dict()) whole.emplace(name, tensor);
    const int seed = 1 + mesh.rank(MeshAxis::dp) * mesh.size(MeshAxis::ep) + mesh.rank(MeshAxis::ep);
    const std::vector<train::Batch> batches = {make_batch(model.info().vocab, 3, seed)};
    RankBytes own;
    for (int step = 1; step <= 3; ++step) {
      const train::StepResult result = trainer.step(batches, kRate);
      std::map<std::string, Tensor> states, now;
      for (auto& [name, tensor] : trainer.state_dict()) now[name] = tensor;
      for (auto& [name, tensor] : trainer.optimizer_state()) states[name] = tensor;
      for (const std::string& name : trainer.trained_names()) {
        WholeAdamW& expected = whole.at(name);
        expected.step(device, trainer.gradient(name), result.grad_norm, step, options);
        EXPECT_TRUE(equal(now.at(name), expected.weight)) << name << ", step " << step;
        EXPECT_TRUE(equal(states.at("m." + name), expected.m)) << name << ", step " << step;
        EXPECT_TRUE(equal(states.at("v." + name), expected.v)) << name << ", step " << step;
        const bool has_master = expected.weight.dtype() != DType::f32;
        EXPECT_EQ(states.contains("master." + name), has_master) << name;
        if (has_master) {
          EXPECT_TRUE(equal(states.at("master." + name), expected.master)) << name << ", step " << step;
        }
      }
    }
    for (const std::string& name : trainer.trained_names()) own.elements += whole.at(name).weight.view.num_elements();
    own.states = trainer.state_bytes();
    const std::scoped_lock lock(mutex);
    if (mesh.rank(MeshAxis::tp) == 0 && mesh.rank(MeshAxis::ep) == 0)
      bytes[static_cast<size_t>(mesh.rank(MeshAxis::dp))] = own;
  });
  return bytes;
}

// Two f32 states of each element, and a master of each element of a rounded weight.
void expect_shares(const std::vector<RankBytes>& bytes, DType weights) {
  const auto ranks = std::ssize(bytes);
  int64_t sum = 0;
  for (const RankBytes& rank : bytes) {
    EXPECT_EQ(rank.elements, bytes[0].elements);
    EXPECT_LE(rank.states, (weights == DType::f32 ? 2 : 3) * 4 * (rank.elements / ranks + train::kStateUnit));
    sum += rank.states;
  }
  // Norms are f32 whatever the matrices are.
  EXPECT_GE(sum, 2 * 4 * bytes[0].elements);
  if (weights == DType::f32) {
    EXPECT_EQ(sum, 2 * 4 * bytes[0].elements);
  }
}

TEST(DividedOptimizer, HasTheBitsOfWholeStates) {
  const auto model = SmallModel{}.make();
  for (const DType weights : {DType::f32, DType::bf16})
    for (const MeshShape& shape : {MeshShape{}, {.dp = 2}, {.dp = 3}, {.dp = 2, .tp = 2}, {.dp = 2, .tp = 3}}) {
      SCOPED_TRACE(fmt::format("dp {} tp {} {}", shape.dp, shape.tp, dtype_name(weights)));
      expect_shares(compare(*model, shape, weights), weights);
    }
}

TEST(DividedOptimizer, HasTheBitsOfWholeStatesOverExpertRanks) {
  for (const char* name : {"qwen3_moe", "deepseek_v3"})
    for (const DType weights : {DType::f32, DType::bf16})
      for (const MeshShape& shape : {MeshShape{.dp = 2, .ep = 2}, {.dp = 3, .ep = 2}}) {
        SCOPED_TRACE(fmt::format("{} dp {} {}", name, shape.dp, dtype_name(weights)));
        expect_shares(compare(*models::model_from_config(golden(name) + "/config.json"), shape, weights), weights);
      }
}

TEST(DividedOptimizer, SharesCoverEveryElementOnce) {
  using Sizes = std::vector<std::pair<std::string, int64_t>>;
  for (const Sizes& sizes : {Sizes{{"a", 1000}, {"b", 7}, {"c", 64}, {"d", 3}, {"e", 4096}}, Sizes{{"a", 1}},
                             Sizes{{"a", 63}, {"b", 64}, {"c", 65}}, Sizes{{"a", 1 << 20}}})
    for (int ranks : {1, 2, 3, 4, 7}) {
      const std::vector<std::vector<StatePart>> shares = divide_states(sizes, ranks);
      ASSERT_EQ(std::ssize(shares), ranks);
      int64_t total = 0;
      for (const auto& size : sizes) total += size.second;
      // In the order of ranks the parts are the elements in their order.
      size_t parameter = 0;
      int64_t next = 0;
      for (const std::vector<StatePart>& share : shares) {
        int64_t own = 0;
        for (const StatePart& part : share) {
          if (next == sizes[parameter].second) {
            ++parameter;
            next = 0;
          }
          ASSERT_LT(parameter, sizes.size());
          EXPECT_EQ(part.parameter, sizes[parameter].first);
          EXPECT_EQ(part.elements.begin, next);
          EXPECT_EQ(part.elements.begin % train::kStateUnit, 0);
          EXPECT_GT(part.elements.size, 0);
          next = part.elements.begin + part.elements.size;
          own += part.elements.size;
        }
        EXPECT_LE(own, (total + ranks - 1) / ranks + train::kStateUnit - 1) << ranks << " ranks";
      }
      EXPECT_EQ(parameter, sizes.size() - 1);
      EXPECT_EQ(next, sizes.back().second);
    }
}

// A rank may have no share at all: it has the weights of the others all the same.
TEST(DividedOptimizer, FewerElementsThanRanks) {
  const auto model = SmallModel{.bias = false}.make();
  run_mesh({.dp = 3}, [&](const Mesh& mesh) {
    const auto device = open_device("cpu", {.num_threads = 1});
    Trainer trainer(model, device,
                    {.batch_tokens = 64, .frozen = {"*_proj.*", "*embed*", "lm_head*", "model.layers.*"}}, mesh);
    ASSERT_EQ(trainer.trained_names(), std::vector<std::string>{"model.norm.weight"});
    trainer.load_random(7, 0.15);
    const auto weight = [&] {
      for (const auto& [name, tensor] : trainer.state_dict())
        if (name == "model.norm.weight") return tensor;
      return Tensor();
    };
    WholeAdamW expected(weight());
    const std::vector<train::Batch> batches = {make_batch(512, 3, 1 + mesh.rank(MeshAxis::dp))};
    const double norm = trainer.step(batches, kRate).grad_norm;
    expected.step(device, trainer.gradient("model.norm.weight"), norm, 1, {});
    EXPECT_TRUE(equal(weight(), expected.weight));
    EXPECT_EQ(trainer.state_bytes(), mesh.rank(MeshAxis::dp) == 2 ? 2 * 4 * 48 : 0);
  });
}

}  // namespace divided_optimizer_test
}  // namespace eadem::test
