// SPDX-License-Identifier: Apache-2.0
//
// Golden ring: models that others wrote give the answers that others computed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "eadem/engine/llm.h"
#include "eadem/io/safetensors.h"
#include "eadem/models/config/model_config.h"
#include "tests/engine/golden_families.h"
#include "tests/engine/step_loop.h"
#include "tests/support/f32_error.h"

namespace eadem::engine {
namespace {

namespace fs = std::filesystem;

std::string device_name = "cpu";  // --device: the goldens hold on every device

// f32 throughout: what the reference programs computed in.
EngineOptions exact_options() {
  EngineOptions options;
  options.mode = HardwareMode::accuracy;
  return options;
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// llama2.c's reference program prints 200 tokens of greedy decoding from BOS, byte for byte.
void expect_reference_text(const fs::path& model) {
  const std::string expected = read_file(fs::path(EADEM_SOURCE_DIR) / "tests/data/stories260K/expected_t0_n200.txt");
  LLM llm(model.string(), open_device(device_name), exact_options());
  SamplingParams params;
  params.temperature = 0;
  params.max_tokens = 200;
  params.ignore_eos = true;
  const std::vector<Completion> completions = llm.generate({""}, params);
  ASSERT_EQ(completions[0].error, "");
  EXPECT_EQ(completions[0].text, expected) << model;
}

TEST(Golden, Stories260KWritesTheReferenceText) {
  expect_reference_text(fs::path(EADEM_SOURCE_DIR) / "tests/data/stories260K/stories260K.gguf");
}

// An independent conversion, in GGUF version 1.
TEST(Golden, Stories260KVersion1WritesTheReferenceText) {
  const fs::path model = fs::path(EADEM_SHARED_DATA) / "models/stories260K/tinyllamas-stories-260k-f32.crabml.gguf";
  if (!fs::exists(model)) GTEST_SKIP() << model << " is absent";
  expect_reference_text(model);
}

// A cancelled request has no text and no error, also when its prompt was not read yet.
TEST(Golden, APromptIsNotReadWhenCancelled) {
  LLM llm((fs::path(EADEM_SOURCE_DIR) / "tests/data/stories260K/stories260K.gguf").string(), open_device(device_name),
          exact_options());
  const std::atomic<bool> cancel = true;
  const auto completions = llm.generate({std::string(1 << 20, 'a'), "b"}, SamplingParams{}, {}, &cancel);
  ASSERT_EQ(completions.size(), 2u);
  for (const Completion& completion : completions) {
    EXPECT_EQ(completion.finish_reason, FinishReason::cancelled);
    EXPECT_EQ(completion.error, "");
    EXPECT_EQ(completion.text, "");
  }
}

// Logits of every position against PyTorch in f64, and greedy continuation against PyTorch.
void expect_logits_and_tokens(const fs::path& folder, const char* file, EngineOptions options) {
  const auto expected = io::open_weights((folder / file).string());
  const Tensor prompt = expected->get("prompt"), logits = expected->get("logits_f64"),
               logits_f32 = expected->get("logits");
  const Tensor greedy = expected->get("greedy");
  const models::Checkpoint checkpoint = models::open_checkpoint(folder.string());
  options.max_logit_rows = std::max<int64_t>(128, prompt.view.num_elements());
  std::unique_ptr<InferEngine> engine;
  try {
    engine = InferEngine::from_checkpoint(checkpoint, open_device(device_name), options);
  } catch (const Unsupported& refusal) {  // names the ops that the device has no kernel for
    if (device_name == "cpu") throw;
    GTEST_SKIP() << refusal.what();
  }

  InferEngine::Input input;
  for (int64_t i = 0; i < prompt.view.num_elements(); ++i)
    input.input_ids.push_back(prompt.dtype() == DType::i64 ? static_cast<int32_t>(prompt.view.as<int64_t>()[i])
                                                           : prompt.view.as<int32_t>()[i]);
  input.input_lengths = {static_cast<int32_t>(input.input_ids.size())};
  input.cache_lengths = {0};
  input.sampling = {{.prompt_length = input.input_lengths[0]}};
  input.all_logits = true;
  engine->forward(input);
  const Tensor actual = engine->logits();
  ASSERT_EQ(actual.shape(), logits.shape());

  const auto count = static_cast<size_t>(logits.view.num_elements());
  const auto of = [](const Tensor& tensor) { return [&](size_t i) { return tensor.view.as<float>()[i]; }; };
  test::expect_f32_error(test::deviation(count, of(actual), of(logits)),
                         test::deviation(count, of(logits_f32), of(logits)), folder.filename().string());

  std::vector<int32_t> drawn;
  StepLoop scheduler(*engine);
  scheduler.add({.prompt = input.input_ids, .sampling = {.temperature = 0}, .max_tokens = greedy.view.num_elements()});
  while (scheduler.step([&](const StepLoop::Drawn& d) {
    drawn.push_back(d.token);
    return true;
  })) {
  }
  ASSERT_EQ(static_cast<int64_t>(drawn.size()), greedy.view.num_elements());
  for (size_t i = 0; i < drawn.size(); ++i) {
    const int64_t want = greedy.dtype() == DType::i64 ? greedy.view.as<int64_t>()[i] : greedy.view.as<int32_t>()[i];
    EXPECT_EQ(drawn[i], want) << "token " << i;
  }
}

class GoldenModel : public testing::TestWithParam<const char*> {
 protected:
  fs::path folder() const { return fs::path(EADEM_SOURCE_DIR) / "tests/data/golden" / GetParam(); }
};

TEST_P(GoldenModel, LogitsAndGreedyTokensMatchTransformers) {
  expect_logits_and_tokens(folder(), "expected.safetensors", exact_options());
}

// Beyond the original context, longrope has other factors, for all positions. An engine that is asked for no context
// has the original one.
TEST(Golden, LongropeBeyondItsOriginalContext) {
  const fs::path folder = fs::path(EADEM_SOURCE_DIR) / "tests/data/golden/phi3";
  EngineOptions options = exact_options();
  const models::Checkpoint checkpoint = models::open_checkpoint(folder.string());
  const auto engine = InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 1}), options);
  EXPECT_EQ(engine->max_sequence_length(), 80);
  options.cache = StaticKVCacheConfig{.max_cache_len = 128};
  expect_logits_and_tokens(folder, "long.safetensors", options);
}

// Experts that no token of a prompt chooses have no rows to compute. As many are chosen as in transformers.
TEST(Golden, SomeExpertsAreChosenByNobody) {
  struct Case {
    const char* folder;
    int64_t experts;
    std::vector<size_t> chosen;  // of each layer that has experts
  };
  for (const Case& c : {Case{"minimax_m2", 7, {4, 6}}, Case{"gpt_oss", 5, {4, 3}}, Case{"glm4_moe", 9, {8}},
                        Case{"deepseek_v3", 8, {7}}}) {
    const fs::path folder = fs::path(EADEM_SOURCE_DIR) / "tests/data/golden" / c.folder;
    const models::Checkpoint checkpoint = models::open_checkpoint(folder.string());
    EXPECT_EQ(checkpoint.model->config()->num_experts, c.experts) << c.folder;
    const auto engine =
        InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 1}), exact_options());
    std::map<int, std::set<int32_t>> chosen;
    engine->hooks().register_hook("*.route.experts", [&](const std::string&, const TensorView& rows, int layer) {
      chosen[layer].insert(rows.as<int32_t>(), rows.as<int32_t>() + rows.num_elements());
    });
    const Tensor prompt = io::open_weights((folder / "expected.safetensors").string())->get("prompt");
    const int32_t* ids = prompt.view.as<int32_t>();
    const auto count = static_cast<int32_t>(prompt.view.num_elements());
    engine->forward({.input_ids = {ids, ids + count}, .input_lengths = {count}, .cache_lengths = {0}});
    std::vector<size_t> counts;
    for (const auto& [layer, experts] : chosen) counts.push_back(experts.size());
    EXPECT_EQ(counts, c.chosen) << c.folder;
  }
}

INSTANTIATE_TEST_SUITE_P(Transformers, GoldenModel,
                         testing::Values("llama", "llama31", "mistral", "qwen2", "qwen3", "smollm2", "yarn", "linear",
                                         "gemma3", "gemma3_mixed", "qwen3_moe", "qwen3_moe_all", "mixtral", "qwen2_moe",
                                         "glm4_moe", "ernie4_5_moe", "deepseek_v2", "deepseek_v3", "gemma3_multimodal",
                                         "gemma4_multimodal", "mistral3_multimodal", "qwen3_vl_multimodal",
                                         "llama4_multimodal", "mistral4_multimodal", "lfm2_vl_multimodal",
                                         "deepseek_vl_multimodal"));

std::vector<const char*> family_folders() {
  std::vector<const char*> folders;
  for (const test::GoldenFamily& family : test::kGoldenFamilies) folders.push_back(family.folder);
  return folders;
}
INSTANTIATE_TEST_SUITE_P(Families, GoldenModel, testing::ValuesIn(family_folders()));

// Prompts whose keys and values are made of the latent rows.
class GoldenLatents : public GoldenModel {};

TEST_P(GoldenLatents, DecompressedLogitsAndTokensMatchTransformers) {
  EngineOptions options = exact_options();
  options.hardware.latent_form = LatentForm::decompressed;
  expect_logits_and_tokens(folder(), "expected.safetensors", options);
}
INSTANTIATE_TEST_SUITE_P(Transformers, GoldenLatents,
                         testing::Values("deepseek_v2", "deepseek_v3", "mistral4", "kimi_linear", "longcat_flash"));

}  // namespace
}  // namespace eadem::engine

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; ++i)
    if (std::string_view(argv[i]) == "--device") eadem::engine::device_name = argv[i + 1];
  return RUN_ALL_TESTS();
}
