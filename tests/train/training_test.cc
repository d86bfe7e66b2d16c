// SPDX-License-Identifier: Apache-2.0
//
// Golden ring, training: ten losses and gradient norms as PyTorch computes them from the same weights and batches.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <tuple>

#include "eadem/io/json.h"
#include "eadem/train/trainer.h"

namespace eadem::train {
namespace {

namespace fs = std::filesystem;

fs::path golden(const std::string& name) { return fs::path(EADEM_SOURCE_DIR) / "tests/data/golden" / name; }

// A model and a device.
class GoldenTraining : public testing::TestWithParam<std::tuple<const char*, const char*>> {};

// ids [steps, batch, seq + 1] i32: every row is one document whose tokens but the last are inputs.
Batch batch_of(const Tensor& ids, int64_t step) {
  const int64_t rows = ids.shape()[1], length = ids.shape()[2];
  Batch batch;
  clear(batch);
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<uint32_t> document;
    for (int64_t i = 0; i < length; ++i)
      document.push_back(static_cast<uint32_t>(ids.view.as<int32_t>()[(step * rows + row) * length + i]));
    append_piece(batch, document, 0, length - 1);
  }
  return batch;
}

TEST_P(GoldenTraining, LossesAndGradientNormsMatchPyTorch) {
  const auto [model, device] = GetParam();
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
    const Tensor gradient = trainer.gradient(parameter.name);
    double squares = 0;
    for (int64_t i = 0; i < gradient.view.num_elements(); ++i) {
      const double value = gradient.view.as<float>()[i];
      squares += value * value;
    }
    const double norm32 = norms32.number(parameter.name), norm64 = norms64.number(parameter.name);
    // One step: PyTorch's own error is a measure of ours, and a hundred units in the last place no loss of precision.
    EXPECT_NEAR(std::sqrt(squares), norm64, 8 * std::abs(norm32 - norm64) + 100 * 0x1p-23 * norm64) << parameter.name;
  }
}

INSTANTIATE_TEST_SUITE_P(PyTorch, GoldenTraining,
                         testing::Combine(testing::Values("llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe",
                                                          "glm4_moe", "deepseek_v2", "deepseek_v3"),
                                          testing::Values("cpu", "reference")));

}  // namespace
}  // namespace eadem::train
