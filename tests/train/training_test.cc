// SPDX-License-Identifier: Apache-2.0
//
// Golden ring, training: ten losses and gradient norms as PyTorch computes them from the same weights and batches.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <tuple>

#include "eadem/io/json.h"
#include "eadem/kernels/backend.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/train/trainer.h"
#include "tests/train/golden_batches.h"

namespace eadem::train {
namespace {

namespace fs = std::filesystem;

// A model and a device.
class GoldenTraining : public testing::TestWithParam<std::tuple<const char*, const char*>> {};

// A build without CUDA, or a machine without a GPU, has none of its devices.
bool has_device(const std::string& name) {
  const std::vector<std::string> devices = list_devices();
  return name != "cuda" || std::find(devices.begin(), devices.end(), "cuda:0") != devices.end();
}

double l2(const Tensor& tensor) {
  double squares = 0;
  for (int64_t i = 0; i < tensor.view.num_elements(); ++i)
    squares += std::pow(static_cast<double>(tensor.view.as<float>()[i]), 2);
  return std::sqrt(squares);
}

TEST_P(GoldenTraining, LossesAndGradientNormsMatchPyTorch) {
  const auto [model, device] = GetParam();
  if (!has_device(device)) GTEST_SKIP() << "no device " << device;
  const fs::path folder = golden(model);
  const auto expected = io::open_weights((folder / "train.safetensors").string());
  const Tensor ids = expected->get("tokens");
  const io::JsonReader json = io::JsonReader::read((folder / "train.json").string());
  const std::vector<double> loss32 = json.object("f32").numbers("loss"), loss64 = json.object("f64").numbers("loss");
  const std::vector<double> norm32 = json.object("f32").numbers("grad_norm"),
                            norm64 = json.object("f64").numbers("grad_norm");
  Trainer trainer(models::open_checkpoint(folder.string()).model, open_device(device),
                  {.batch_tokens = 256, .weight_decay = 0.1, .max_grad_norm = 1.0});
  trainer.load(models::open_checkpoint(folder.string()));
  for (int64_t step = 0; step < ids.shape()[0]; ++step) {
    const Batch batch = batch_of(ids, step);
    const StepResult result = trainer.step(std::span(&batch, 1), 1e-3);
    const auto i = static_cast<size_t>(step);
    // An f32 run drifts from the exact one step by step. PyTorch's own drift measures it; a second f32 run may go
    // the other way, and one unit in the last place is the least that can be seen.
    const double loss_tol = 8 * std::abs(loss32[i] - loss64[i]) + 8 * 0x1p-23 * std::abs(loss64[i]);
    const double norm_tol = 8 * std::abs(norm32[i] - norm64[i]) + 64 * 0x1p-23 * std::abs(norm64[i]);
    EXPECT_NEAR(result.loss, loss64[i], loss_tol) << "step " << step;
    EXPECT_NEAR(result.grad_norm, norm64[i], norm_tol) << "step " << step;
  }
}

// Of every parameter by itself; PyTorch has gate and up of experts in one tensor, of which the golden has the halves.
TEST_P(GoldenTraining, TheFirstGradientOfEveryParameterMatchesPyTorch) {
  const auto [model, device] = GetParam();
  if (!has_device(device)) GTEST_SKIP() << "no device " << device;
  const fs::path folder = golden(model);
  const io::JsonReader json = io::JsonReader::read((folder / "train.json").string());
  const io::JsonReader norms32 = json.object("f32").object("first_grad_l2"),
                       norms64 = json.object("f64").object("first_grad_l2");
  const models::Checkpoint checkpoint = models::open_checkpoint(folder.string());
  Trainer trainer(checkpoint.model, open_device(device), {.batch_tokens = 256, .max_grad_norm = 1.0});
  trainer.load(checkpoint);
  const Batch batch = batch_of(io::open_weights((folder / "train.safetensors").string())->get("tokens"), 0);
  trainer.step(std::span(&batch, 1), 1e-3);
  for (const auto& parameter : checkpoint.model->parameters()) {
    if (!parameter.trainable) {
      EXPECT_THROW(trainer.gradient(parameter.name), NotFound);
      continue;
    }
    const double norm32 = norms32.number(parameter.name), norm64 = norms64.number(parameter.name);
    // One step: PyTorch's own error is a measure of ours, and a hundred units in the last place no loss of precision.
    EXPECT_NEAR(l2(trainer.gradient(parameter.name)), norm64, 8 * std::abs(norm32 - norm64) + 100 * 0x1p-23 * norm64)
        << parameter.name;
  }
}

// A model of experts whose config.json asks for the load-balancing loss, and what PyTorch's first step makes of it.
struct Balanced {
  fs::path folder = golden("qwen3_moe");
  models::Checkpoint checkpoint = models::open_checkpoint(folder.string());
  io::JsonReader json = io::JsonReader::read((folder / "balanced.json").string());
  Batch batch = batch_of(io::open_weights((folder / "train.safetensors").string())->get("tokens"), 0);

  Trainer trainer(const std::string& device, std::optional<double> coef) const {
    models::ModelConfig config = *checkpoint.model->config();
    config.router_aux_loss_coef = json.number("router_aux_loss_coef");
    Trainer result(std::make_shared<models::Decoder>(config), open_device(device),
                   {.batch_tokens = 256, .router_aux_loss_coef = coef});
    result.load(checkpoint);
    return result;
  }
};

TEST(LoadBalancing, LossesAndGradientsMatchPyTorch) {
  const Balanced balanced;
  const io::JsonReader run32 = balanced.json.object("f32"), run64 = balanced.json.object("f64");
  const auto expect_near = [](double value, double exact32, double exact64, int ulps, const std::string& what) {
    EXPECT_NEAR(value, exact64, 8 * std::abs(exact32 - exact64) + ulps * 0x1p-23 * std::abs(exact64)) << what;
  };
  for (const char* device : {"cpu", "reference"}) {
    Trainer trainer = balanced.trainer(device, std::nullopt);
    const StepResult result = trainer.step(std::span(&balanced.batch, 1), 1e-3);
    const auto first = [](const io::JsonReader& run, const char* key) { return run.numbers(key)[0]; };
    expect_near(result.loss, first(run32, "loss"), first(run64, "loss"), 8, "loss");
    ASSERT_TRUE(result.load_balancing_loss);
    expect_near(*result.load_balancing_loss, first(run32, "load_balancing_loss"), first(run64, "load_balancing_loss"),
                8, "load-balancing loss");
    expect_near(result.grad_norm, first(run32, "grad_norm"), first(run64, "grad_norm"), 64, "norm");
    for (const std::string& name : trainer.trained_names())
      expect_near(l2(trainer.gradient(name)), run32.object("first_grad_l2").number(name),
                  run64.object("first_grad_l2").number(name), 100, name);
  }
}

TEST(LoadBalancing, TheOptionComesBeforeTheConfig) {
  const Balanced balanced;
  Trainer off = balanced.trainer("cpu", 0.0), half = balanced.trainer("cpu", 0.25);
  const StepResult plain = off.step(std::span(&balanced.batch, 1), 1e-3);
  EXPECT_FALSE(plain.load_balancing_loss);
  const StepResult result = half.step(std::span(&balanced.batch, 1), 1e-3);
  EXPECT_DOUBLE_EQ(result.loss, plain.loss + 0.25 * result.load_balancing_loss.value());
}

// A step over the same batch twice has the gradient of a step over it once, but for the rounding of sums.
TEST(LoadBalancing, IsTheMeanOverTheStepsPasses) {
  const Balanced balanced;
  Trainer once = balanced.trainer("cpu", std::nullopt), twice = balanced.trainer("cpu", std::nullopt);
  const StepResult one = once.step(std::span(&balanced.batch, 1), 1e-3);
  const StepResult two = twice.step(std::vector<Batch>(2, balanced.batch), 1e-3);
  EXPECT_DOUBLE_EQ(*two.load_balancing_loss, *one.load_balancing_loss);
  EXPECT_DOUBLE_EQ(two.loss, one.loss);
  EXPECT_NEAR(two.grad_norm, one.grad_norm, 64 * 0x1p-23 * one.grad_norm);
}

// With everything frozen that routers read, the loss is reported and has no gradient.
TEST(LoadBalancing, OfFrozenRouters) {
  const Balanced balanced;
  Trainer trainer(balanced.checkpoint.model, open_device("cpu"),
                  {.batch_tokens = 256, .frozen = {"model.*"}, .router_aux_loss_coef = 0.5});
  trainer.load(balanced.checkpoint);
  const StepResult result = trainer.step(std::span(&balanced.batch, 1), 1e-3);
  const io::JsonReader run = balanced.json.object("f64");
  EXPECT_NEAR(*result.load_balancing_loss, run.numbers("load_balancing_loss")[0], 1e-5);
  EXPECT_NEAR(l2(trainer.gradient("lm_head.weight")), run.object("first_grad_l2").number("lm_head.weight"), 1e-5);
}

TEST(LoadBalancing, IsRefusedWhereThereIsNone) {
  for (const char* model : {"llama", "glm4_moe"}) {
    const auto checkpoint = models::open_checkpoint(golden(model).string());
    EXPECT_THROW(Trainer(checkpoint.model, open_device("cpu"), {.router_aux_loss_coef = 0.1}), Unsupported) << model;
    EXPECT_NO_THROW(Trainer(checkpoint.model, open_device("cpu"), {.router_aux_loss_coef = 0.0})) << model;
  }
  EXPECT_THROW(Trainer(models::open_checkpoint(golden("qwen3_moe").string()).model, open_device("cpu"),
                       {.router_aux_loss_coef = -1.0}),
               InvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(PyTorch, GoldenTraining,
                         testing::Combine(testing::Values("llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe",
                                                          "glm4_moe", "deepseek_v2", "deepseek_v3"),
                                          testing::Values("cpu", "reference")));
INSTANTIATE_TEST_SUITE_P(PyTorchOnGpu, GoldenTraining,
                         testing::Combine(testing::Values("llama", "qwen2", "qwen3"), testing::Values("cuda")));

}  // namespace
}  // namespace eadem::train
