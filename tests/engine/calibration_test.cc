// SPDX-License-Identifier: Apache-2.0
//
// What calibration measures against what PyTorch's hooks saw, and what it makes of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <set>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/engine/calibration.h"
#include "eadem/io/weights.h"

namespace eadem::engine {
namespace {

namespace fs = std::filesystem;

fs::path golden(const std::string& name) { return fs::path(EADEM_SOURCE_DIR) / "tests/data/golden" / name; }

std::vector<int32_t> prompt_of(const std::string& name) {
  const Tensor prompt = io::open_weights((golden(name) / "expected.safetensors").string())->get("prompt");
  return {prompt.view.as<int32_t>(), prompt.view.as<int32_t>() + prompt.view.num_elements()};
}

Calibration calibrated(const std::string& name, std::span<const int32_t> tokens, CalibrationOptions options = {}) {
  options.engine.mode = HardwareMode::accuracy;
  return Calibration::run(models::open_checkpoint(golden(name).string()), open_device("cpu", {.num_threads = 2}),
                          tokens, options);
}

class GoldenInputs : public testing::TestWithParam<const char*> {};

TEST_P(GoldenInputs, MatchPyTorchHooks) {
  const auto expected = io::open_weights((golden(GetParam()) / "inputs.safetensors").string());
  const std::vector<int32_t> prompt = prompt_of(GetParam());
  const Calibration calibration = calibrated(GetParam(), prompt);
  EXPECT_EQ(calibration.tokens(), std::ssize(prompt));
  size_t weights = 0;
  for (const io::WeightInfo& info : expected->tensors()) {
    if (info.name.starts_with("f32.")) continue;
    ++weights;
    const auto found = calibration.weights().find(info.name);
    ASSERT_NE(found, calibration.weights().end()) << info.name;
    EXPECT_EQ(found->second.rows, std::ssize(prompt)) << info.name;
    const Tensor exact = expected->get(info.name), torch = expected->get("f32." + info.name);
    const std::vector<double>& actual = found->second.mean_squares;
    ASSERT_EQ(std::ssize(actual), exact.view.num_elements()) << info.name;
    // As for logits (golden_test.cc): PyTorch's own largest deviation from f64 measures what f32 rounding does to these
    // numbers, ours may be that times the slack of a maximum. Relative to each number's size.
    double torch_error = 0, error = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      const double value = exact.view.as<double>()[i];
      torch_error = std::max(torch_error, std::abs(torch.view.as<double>()[i] - value) / value);
      error = std::max(error, std::abs(actual[i] - value) / value);
    }
    EXPECT_LE(error, 8 * torch_error) << info.name;
    EXPECT_LE(error, 1e-3) << info.name;
  }
  EXPECT_EQ(calibration.weights().size(), weights);
}

INSTANTIATE_TEST_SUITE_P(Transformers, GoldenInputs, testing::Values("llama", "llama31"));

// How a text is cut into sequences: each starts anew, and BOS is one of its tokens.
TEST(Calibration, SequencesAreIndependent) {
  const std::vector<int32_t> tokens = prompt_of("llama");
  const auto sum_of = [](const Calibration& calibration, const std::string& weight) {
    const InputStatistics& statistics = calibration.weights().at(weight);
    std::vector<double> sums = statistics.mean_squares;
    for (double& sum : sums) sum *= static_cast<double>(statistics.rows);
    return sums;
  };
  const Calibration whole = calibrated("llama", tokens, {.context = 9, .max_tokens = 20, .bos = 1});
  EXPECT_EQ(whole.tokens(), 9 + 9 + 5);
  const std::string weight = "model.layers.1.mlp.down_proj.weight";
  std::vector<double> sums(whole.weights().at(weight).mean_squares.size());
  for (const auto& [begin, count] : {std::pair{0, 8}, {8, 8}, {16, 4}}) {
    std::vector<int32_t> part = {1};
    part.insert(part.end(), tokens.begin() + begin, tokens.begin() + begin + count);
    const std::vector<double> add = sum_of(calibrated("llama", part), weight);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += add[i];
  }
  const std::vector<double> expected = sum_of(whole, weight);
  for (size_t i = 0; i < sums.size(); ++i) EXPECT_NEAR(sums[i], expected[i], 1e-12 * expected[i]) << i;
}

TEST(Calibration, ImportanceIsRelativeAndNeverZero) {
  const std::vector<int32_t> tokens = prompt_of("llama");
  const Calibration calibration = calibrated("llama", tokens);
  const std::string weight = "model.layers.0.self_attn.q_proj.weight";
  const std::vector<float> importance = calibration.importance(weight);
  const std::vector<double>& squares = calibration.weights().at(weight).mean_squares;
  ASSERT_EQ(importance.size(), squares.size());
  const double n = static_cast<double>(tokens.size());
  const double mean = std::accumulate(squares.begin(), squares.end(), 0.0) / static_cast<double>(squares.size());
  for (size_t i = 0; i < squares.size(); ++i)
    EXPECT_NEAR(importance[i], (n * squares[i] / mean + 1) / (n + 1), 1e-6 * importance[i]);
  // An embedding with a head beside it is only looked up.
  EXPECT_TRUE(calibration.importance("model.embed_tokens.weight").empty());
  EXPECT_TRUE(calibration.importance("model.norm.weight").empty());
  EXPECT_FALSE(calibration.importance("lm_head.weight").empty());
}

TEST(Calibration, RefusesWhatItCannotRun) {
  const std::vector<int32_t> tokens = {5, 6};
  EXPECT_THROW(calibrated("llama", {}), InvalidArgument);
  EXPECT_THROW(calibrated("llama", tokens, {.max_tokens = 0}), InvalidArgument);
  EXPECT_THROW(calibrated("llama", tokens, {.context = 1, .bos = 1}), InvalidArgument);
  const std::vector<int32_t> unknown = {1 << 20};
  EXPECT_THROW(calibrated("llama", unknown), InvalidArgument);
}

}  // namespace
}  // namespace eadem::engine
