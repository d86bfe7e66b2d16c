// SPDX-License-Identifier: Apache-2.0
//
// Quantized safetensors checkpoints give the logits that PyTorch computes with the weights that they mean.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "eadem/engine/llm.h"

namespace eadem::engine {
namespace {

namespace fs = std::filesystem;

struct Logits {
  std::vector<float> ours, f32, f64;
};

// Logits of every position of the checkpoint's prompt.
Logits logits_of(const std::string& name, EngineOptions options) {
  const fs::path folder = fs::path(EADEM_SOURCE_DIR) / "tests/data/checkpoints" / name;
  const auto expected = io::open_weights((folder / "expected.safetensors").string());
  const auto values = [](const Tensor& tensor) {
    const float* data = tensor.view.as<float>();
    return std::vector<float>(data, data + tensor.view.num_elements());
  };
  const Tensor prompt = expected->get("prompt");
  options.max_logit_rows = 64;
  auto engine = InferEngine::from_checkpoint(models::open_checkpoint(folder.string()), open_device("cpu"), options);
  InferEngine::Input input;
  for (int64_t i = 0; i < prompt.view.num_elements(); ++i) input.input_ids.push_back(prompt.view.as<int32_t>()[i]);
  input.input_lengths = {static_cast<int32_t>(input.input_ids.size())};
  input.cache_lengths = {0};
  input.all_logits = true;
  engine->forward(input);
  const Tensor logits = engine->logits();
  EXPECT_EQ(logits.shape(), expected->get("logits").shape());
  return {values(logits), values(expected->get("logits")), values(expected->get("logits_f64"))};
}

class Checkpoint : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Formats, Checkpoint,
                         testing::Values("gptq", "gptq_zeros", "gptq_mislabelled", "gptq_desc_act", "gptq_v2_int8",
                                         "gptq_qwen2", "awq", "packed_zeros", "packed_row", "packed_order",
                                         "packed_int8", "int8_row", "int8_zeros", "float8_tensor", "float8_row",
                                         "float8_block", "fp8_block", "fp8_e5m2"));

// Decoded to f32, where every weight is exact but for one rounding of some: the deviation of two f32 passes of one
// graph, as in golden_test.cc.
TEST_P(Checkpoint, DecodedWeightsGiveThePyTorchLogits) {
  EngineOptions options;
  options.mode = HardwareMode::accuracy;
  options.hardware.weights = DType::f32;
  const Logits logits = logits_of(GetParam(), options);
  double torch_error = 0, error = 0;
  for (size_t i = 0; i < logits.f64.size(); ++i) {
    torch_error = std::max<double>(torch_error, std::abs(logits.f32[i] - logits.f64[i]));
    error = std::max<double>(error, std::abs(logits.ours[i] - logits.f64[i]));
  }
  EXPECT_GT(torch_error, 0);
  EXPECT_LE(error, 8 * torch_error);
}

// As the checkpoint stores them. Products with integers quantize activations to 8 bits: the largest of 32 values is
// about 2.1 sigma, a unit 1 / 127 of that, and rounding to units leaves 0.5% of sigma in each product; weights that are
// decoded to bf16 are off by at most 2^-9, 0.2%. Eight products follow one another in a layer and the head: errors that
// do not know of each other add to 0.5% sqrt(8) = 1.4% of the logits.
TEST_P(Checkpoint, StoredWeightsGiveThemWithinTheirPrecision) {
  const Logits logits = logits_of(GetParam(), {});
  double error = 0, size = 0;
  for (size_t i = 0; i < logits.f64.size(); ++i) {
    error += std::pow(static_cast<double>(logits.ours[i]) - logits.f64[i], 2);
    size += std::pow(static_cast<double>(logits.f64[i]), 2);
  }
  EXPECT_LT(std::sqrt(error / size), 0.014);
}

}  // namespace
}  // namespace eadem::engine
