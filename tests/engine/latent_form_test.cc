// SPDX-License-Identifier: Apache-2.0
//
// The option latent_form through a whole engine: in each form a prompt's bits do not depend on how it is cut into steps
// or on the cache, and where no token is of a prompt both forms are one.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/engine/engine_helpers.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace latent_form_test {

constexpr int64_t kLength = 40;

EngineOptions options_of(LatentForm form, const CacheConfig& cache = StaticKVCacheConfig{.max_batch_size = 2}) {
  EngineOptions options;
  options.cache = cache;
  options.hardware.latent_form = form;
  options.max_logit_rows = 128;
  return options;
}

std::unique_ptr<InferEngine> engine_of(const std::string& model, const EngineOptions& options,
                                       const std::string& isa = "") {
  return make_engine({.model = golden(model), .isa = isa, .options = options});
}

// Logits of every token of a sequence whose first `prompt` tokens are its prompt, in steps of `chunk`. With `beside`,
// another sequence takes a token in each step.
std::vector<float> logits_of_prompt(InferEngine& engine, const std::vector<int32_t>& tokens, int64_t prompt,
                                    int64_t chunk, bool beside = false) {
  engine.reset_cache();
  const modules::CacheSpec& cache = engine.cache_spec();
  const int64_t blocks = (std::ssize(tokens) + cache.block_size - 1) / cache.block_size;
  std::vector<float> result;
  for (int64_t begin = 0; begin < std::ssize(tokens); begin += chunk) {
    const int64_t end = std::min(begin + chunk, std::ssize(tokens));
    InferEngine::Input input;
    input.all_logits = true;
    const auto add = [&](int64_t s, int64_t first, int64_t last, int64_t own_prompt) {
      input.input_ids.insert(input.input_ids.end(), tokens.begin() + first, tokens.begin() + last);
      input.input_lengths.push_back(static_cast<int32_t>(last - first));
      input.cache_lengths.push_back(static_cast<int32_t>(first));
      input.sampling.push_back({.prompt_length = static_cast<int32_t>(own_prompt)});
      if (cache.layout != modules::CacheLayout::paged) return;
      std::vector<int32_t>& table = input.block_tables.emplace_back();
      for (int64_t b = 0; b < blocks; ++b) table.push_back(static_cast<int32_t>(cache.num_blocks - 1 - s * blocks - b));
    };
    add(0, begin, end, prompt);
    if (beside) add(1, begin / chunk, begin / chunk + 1, 0);
    engine.forward(input);
    const Tensor logits = engine.logits();
    const float* row = logits.view.as<float>();
    result.insert(result.end(), row, row + (end - begin) * logits.shape()[1]);
  }
  return result;
}

class LatentModels : public testing::TestWithParam<const char*> {
 protected:
  std::vector<int32_t> tokens() const {
    return tokens_of(kLength, models::open_checkpoint(golden(GetParam())).model->info().vocab, 5);
  }
};

TEST_P(LatentModels, BitsDependNeitherOnStepsNorOnTheCache) {
  const std::vector<int32_t> sequence = tokens();
  for (const LatentForm form : {LatentForm::absorbed, LatentForm::decompressed})
    for (const Isa isa : available_isas()) {
      const std::string name(isa_name(isa));
      const auto contiguous = engine_of(GetParam(), options_of(form), name);
      for (const int64_t prompt : {kLength, int64_t{25}}) {
        const std::vector<float> whole = logits_of_prompt(*contiguous, sequence, prompt, kLength);
        const auto expect = [&](InferEngine& engine, int64_t chunk, bool beside, const char* cache) {
          expect_same_bits(whole, logits_of_prompt(engine, sequence, prompt, chunk, beside),
                           fmt::format("{} {}, a prompt of {} in steps of {}, {}, {}", latent_form_name(form), name,
                                       prompt, chunk, cache, beside ? "beside another" : "alone"));
        };
        for (const int64_t chunk : {1, 3, 16}) {
          expect(*contiguous, chunk, false, "contiguous");
          if (HasFailure()) return;
        }
        const auto paged = engine_of(
            GetParam(), options_of(form, PagedKVCacheConfig{.block_size = 8, .max_batch_size = 2, .max_cache_len = 64}),
            name);
        for (const int64_t chunk : {int64_t{1}, int64_t{3}, int64_t{16}, kLength})
          for (const bool beside : {false, true}) expect(*paged, chunk, beside, "paged");
        if (HasFailure()) return;
      }
    }
}

// The forms are not the same computation, but for tokens that are of no prompt.
TEST_P(LatentModels, TokensOfNoPromptHaveTheBitsOfTheAbsorbedForm) {
  const std::vector<int32_t> sequence = tokens();
  const auto absorbed = engine_of(GetParam(), options_of(LatentForm::absorbed)),
             decompressed = engine_of(GetParam(), options_of(LatentForm::decompressed));
  const std::vector<float> expected = logits_of_prompt(*absorbed, sequence, 0, 16);
  expect_same_bits(expected, logits_of_prompt(*absorbed, sequence, kLength, 16), "the absorbed form knows no prompt");
  expect_same_bits(expected, logits_of_prompt(*decompressed, sequence, 0, 16), GetParam());
  EXPECT_NE(expected, logits_of_prompt(*decompressed, sequence, kLength, 16));
}

// A scheduler states what is a prompt: requests get the same tokens and probabilities however their prompts are cut,
// and where they are computed again after others had taken their blocks.
TEST_P(LatentModels, RequestsGetTheSameTokensInAnySteps) {
  const std::vector<int32_t> sequence = tokens();
  std::vector<StepLoop::Request> requests;
  for (const int64_t length : {11, 30, 5})
    requests.push_back({.prompt = {sequence.begin(), sequence.begin() + length},
                        .sampling = {.temperature = 0.8f, .seed = 3},
                        .max_tokens = 12});
  std::vector<std::vector<int32_t>> expected;
  const auto device = open_device("cpu", {.num_threads = 2});
  const models::Checkpoint checkpoint = models::open_checkpoint(golden(GetParam()));
  const bool has_states = std::string_view(GetParam()) == "kimi_linear";  // which take memory besides
  for (const auto& [step, tight] : {std::pair(64, false), {64, true}, {7, true}, {4, true}, {5, false}}) {
    EngineOptions options = options_of(LatentForm::decompressed);
    options.max_num_batched_tokens = step;
    // Tight: room for half of what the requests need together.
    options.cache = PagedKVCacheConfig{
        .max_kv_memory_bytes = tight && !has_states ? 44 * kv_bytes_per_token(checkpoint, *device, options) : 0,
        .block_size = 4,
        .max_batch_size = 3,
        .max_cache_len = 44};
    const auto engine = InferEngine::from_checkpoint(checkpoint, device, options);
    const auto drawn = schedule(*engine, requests);
    if (expected.empty())
      expected = drawn;
    else
      EXPECT_EQ(drawn, expected) << "steps of " << step << (tight ? ", little room" : "");
  }
  for (const std::vector<int32_t>& drawn : expected) EXPECT_EQ(drawn.size(), 12u);
}

INSTANTIATE_TEST_SUITE_P(Transformers, LatentModels, testing::Values("deepseek_v2", "deepseek_v3", "kimi_linear"));

TEST(LatentForm, IsRefusedWhereNothingHasIt) {
  EXPECT_HAS(test::refusal([] { engine_of("llama", options_of(LatentForm::decompressed)); }), "latent_form");
  EXPECT_HAS(test::refusal([] { engine_of("deepseek_v32", options_of(LatentForm::decompressed)); }), "latent_form");
  EXPECT_HAS(test::refusal([] { latent_form_from_name("both"); }), "'both'; expected absorbed or decompressed");
  EXPECT_EQ(test::refusal([] { engine_of("llama", options_of(LatentForm::absorbed)); }), "");
}

}  // namespace latent_form_test
}  // namespace eadem::engine
