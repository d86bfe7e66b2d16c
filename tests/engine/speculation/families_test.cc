// SPDX-License-Identifier: Apache-2.0
//
// Proposed tokens, right and wrong ones, change no bit of what a model of any family answers, also where states per
// sequence have to go back when one was wrong.
#include <algorithm>
#include <filesystem>

#include "tests/engine/speculation/speculating_loop.h"

namespace eadem::engine {
namespace speculating_families_test {

namespace fs = std::filesystem;

// native_sparse_attention is the golden of an op.
std::vector<std::string> golden_models() {
  std::vector<std::string> names;
  for (const auto& each : fs::directory_iterator(golden("")))
    if (fs::exists(each.path() / "config.json") && each.path().filename() != "native_sparse_attention")
      names.push_back(each.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

EngineOptions options(const std::string& model, int64_t draft_tokens) {
  EngineOptions options;
  // Blocks end within what is proposed, and windows within the prompt. Pooled rows divide a block: those of 12 tokens,
  // and of 128 in one model, whose blocks are longer than what it answers.
  options.cache = PagedKVCacheConfig{
      .block_size = model == "deepseek_v4_usual" ? 128 : 24, .max_batch_size = 2, .max_cache_len = 72};
  options.max_num_batched_tokens = 32;
  options.draft_tokens = draft_tokens;
  return options;
}

class SpeculatingFamilies : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Goldens, SpeculatingFamilies, testing::ValuesIn(golden_models()),
                         [](const auto& info) { return info.param; });

TEST_P(SpeculatingFamilies, AnswerTheSame) {
  const models::Checkpoint checkpoint = models::open_checkpoint(golden(GetParam()));
  const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = 2});
  const auto engine = InferEngine::from_checkpoint(checkpoint, device, options(GetParam(), 4));
  const int64_t vocab = engine->model().info().vocab;
  const std::vector<GenerationRequest> requests = {
      {.prompt = tokens_of(21, vocab, 1), .max_tokens = 26},
      {.prompt = tokens_of(33, vocab, 2), .sampling = {.temperature = 0.9f, .seed = 3}, .max_tokens = 20}};
  const SpeculatingRun plain = run_requests(*engine, requests);
  const SpeculatingRun speculating =
      run_requests(*engine, requests, from_answers(plain.answers, 4, static_cast<int32_t>(vocab - 1)));
  expect_same_answers(speculating, plain, GetParam());
  EXPECT_LT(speculating.steps, plain.steps);
  EXPECT_GT(speculating.accepted, 12);
  EXPECT_GT(speculating.proposed, speculating.accepted);
}

}  // namespace speculating_families_test
}  // namespace eadem::engine
