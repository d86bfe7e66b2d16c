// SPDX-License-Identifier: Apache-2.0
//
// Calibration against statistics that PyTorch's hooks measured, and the importance computed from it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <set>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/engine/calibration.h"
#include "eadem/io/weights.h"
#include "tests/support/f32_error.h"

namespace eadem::engine {
namespace {

namespace fs = std::filesystem;

fs::path golden_folder(const std::string& name) { return fs::path(EADEM_SOURCE_DIR) / "tests/data/golden" / name; }

std::vector<int32_t> prompt_of(const std::string& name) {
  const Tensor prompt = io::open_weights((golden_folder(name) / "expected.safetensors").string())->get("prompt");
  return {prompt.view.as<int32_t>(), prompt.view.as<int32_t>() + prompt.view.num_elements()};
}

Calibration calibrated(const std::string& name, std::span<const int32_t> tokens, CalibrationOptions options = {}) {
  options.engine.mode = HardwareMode::accuracy;
  return Calibration::run(models::open_checkpoint(golden_folder(name).string()), open_device("cpu", {.num_threads = 2}),
                          tokens, options);
}

class GoldenInputs : public testing::TestWithParam<const char*> {};

TEST_P(GoldenInputs, MatchPyTorchHooks) {
  const auto expected = io::open_weights((golden_folder(GetParam()) / "inputs.safetensors").string());
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
    // Relative to each number's size: the mean squares of one weight's columns differ by orders.
    const double* of_exact = exact.view.as<double>();
    const auto one = [](size_t) { return 1.0; };
    test::expect_f32_error(test::deviation(
                               actual.size(), [&](size_t i) { return actual[i] / of_exact[i]; }, one),
                           test::deviation(
                               actual.size(), [&](size_t i) { return torch.view.as<double>()[i] / of_exact[i]; }, one),
                           info.name);
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

// The definition, worked on the numbers that PyTorch's hooks saw: the text's rows and one more whose columns all have
// the mean, divided by their mean.
TEST(Calibration, ImportanceIsRelativeAndNeverZero) {
  const std::vector<int32_t> tokens = prompt_of("llama");
  const Calibration calibration = calibrated("llama", tokens);
  const auto inputs = io::open_weights((golden_folder("llama") / "inputs.safetensors").string());
  const double rows = static_cast<double>(tokens.size());
  for (const io::WeightInfo& info : inputs->tensors()) {
    if (info.name.starts_with("f32.")) continue;
    const Tensor exact = inputs->get(info.name), torch = inputs->get("f32." + info.name);
    const auto columns = static_cast<size_t>(exact.view.num_elements());
    const std::span<const double> seen(exact.view.as<double>(), columns);
    std::vector<double> squares(seen.begin(), seen.end());
    const double all_alike = std::accumulate(squares.begin(), squares.end(), 0.0) / static_cast<double>(columns);
    for (double& square : squares) square = (square * rows + all_alike) / (rows + 1);
    const double mean = std::accumulate(squares.begin(), squares.end(), 0.0) / static_cast<double>(columns);
    // Each square is off by the f32 error that MatchPyTorchHooks allows, and so is the mean; then one rounding to f32.
    const double error =
        test::kF32ErrorRatio *
        test::deviation(
            columns, [&](size_t i) { return torch.view.as<double>()[i] / seen[i]; }, [](size_t) { return 1.0; })
            .largest;
    const std::vector<float> importance = calibration.importance(info.name);
    ASSERT_EQ(importance.size(), columns) << info.name;
    double sum = 0;
    for (size_t i = 0; i < columns; ++i) {
      EXPECT_NEAR(importance[i], squares[i] / mean, (2 * error + 0x1p-24) * squares[i] / mean) << info.name << " " << i;
      EXPECT_GT(importance[i], 0);
      sum += static_cast<double>(importance[i]);
    }
    EXPECT_NEAR(sum / static_cast<double>(columns), 1, 0x1p-24) << info.name;
  }
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
