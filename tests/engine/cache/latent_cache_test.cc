// SPDX-License-Identifier: Apache-2.0
//
// Caches of latent rows, of every type, through a whole engine: a sequence has the same bits in any steps and batch and
// from a contiguous and a paged cache, requests may begin with rows that others have computed, and memory is what the
// type says.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/engine/engine_helpers.h"

namespace eadem::engine {
namespace latent_cache_test {

class LatentCaches : public testing::TestWithParam<const char*> {
 protected:
  static std::unique_ptr<InferEngine> engine_of(const char* model, const CacheConfig& cache, int threads = 2) {
    EngineSetup setup{.model = golden(model), .threads = threads, .options = {}};
    setup.options.hardware.kv_cache = kv_cache_type(GetParam()).value();
    setup.options.cache = cache;
    return make_engine(setup);
  }
};
INSTANTIATE_TEST_SUITE_P(Types, LatentCaches, testing::Values("f32", "bf16", "f16", "int8", "fp8_e4m3"),
                         [](const auto& info) { return std::string(info.param); });

// kimi_linear has states per sequence beside the rows of its layers with latent attention, and deepseek_v32 the keys of
// an indexer, which selects 13 tokens.
TEST_P(LatentCaches, StepsBatchesAndPlacesDoNotChangeBits) {
  for (const char* model : {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_linear"})
    expect_same_bits_everywhere([&](const CacheConfig& cache, int threads) { return engine_of(model, cache, threads); },
                                36, model);
}

// Latents as wide as tiles multiply (kernels/cpu/attention/tiled_rows.h), where their cache is bf16; 70 tokens are in
// two chunks of keys.
TEST_P(LatentCaches, OfWideLatentsDoNotChangeBitsEither) {
  expect_same_bits_on_every_isa(
      R"({"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_act": "silu",
          "hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
          "num_key_value_heads": 3, "kv_lora_rank": 64, "q_lora_rank": null, "qk_nope_head_dim": 10,
          "qk_rope_head_dim": 32, "v_head_dim": 12, "n_routed_experts": 6, "n_shared_experts": 2,
          "num_experts_per_tok": 3, "moe_intermediate_size": 10, "first_k_dense_replace": 1, "rms_norm_eps": 1e-06,
          "vocab_size": 72, "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": false})",
      GetParam(), 70);
}

struct Answers {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<float> logprobs;  // of all tokens, request by request
  int64_t reused = 0;
};

// Runs requests one after the other, so that each finds what those before it left.
Answers answers_of(InferEngine& engine, const std::vector<StepLoop::Request>& requests) {
  StepLoop loop(engine);
  Answers answers;
  for (const StepLoop::Request& request : requests) {
    loop.add(request);
    std::vector<int32_t>& tokens = answers.tokens.emplace_back();
    while (loop.step([&](const StepLoop::Drawn& drawn) {
      tokens.push_back(drawn.token);
      answers.logprobs.push_back(drawn.logprob);
      return true;
    })) {
    }
  }
  answers.reused = loop.reused_tokens();
  return answers;
}

// The second prompt begins with 20 tokens of the first, of which two blocks of 8 are there, and the third with the
// first and half of what it was answered: 35 tokens of 36 in four blocks.
TEST_P(LatentCaches, RowsThatOthersComputedGiveTheSameAnswers) {
  for (const char* model : {"deepseek_v2", "deepseek_v3", "deepseek_v32"}) {
    const auto paged = engine_of(model, PagedKVCacheConfig{.block_size = 8, .max_batch_size = 2, .max_cache_len = 64});
    const auto alone = engine_of(model, StaticKVCacheConfig{.max_cache_len = 64});
    const int64_t vocab = alone->model().info().vocab;
    std::vector<StepLoop::Request> requests;
    const auto add = [&](std::vector<int32_t> prompt) {
      requests.push_back({.prompt = std::move(prompt), .sampling = {.temperature = 0.8f, .seed = 3}, .max_tokens = 12});
    };
    const std::vector<int32_t> first = tokens_of(30, vocab, 1);
    add(first);
    std::vector<int32_t> second(first.begin(), first.begin() + 20), third = first;
    const std::vector<int32_t> other = tokens_of(9, vocab, 2), answer = answers_of(*alone, {requests[0]}).tokens[0];
    second.insert(second.end(), other.begin(), other.end());
    add(second);
    third.insert(third.end(), answer.begin(), answer.begin() + 6);
    add(third);

    const Answers shared = answers_of(*paged, requests);
    EXPECT_EQ(shared.reused, 16 + 32) << model;
    std::vector<float> logprobs;
    for (size_t i = 0; i < requests.size(); ++i) {
      alone->reset_cache();
      const Answers expected = answers_of(*alone, {requests[i]});
      EXPECT_EQ(shared.tokens[i], expected.tokens[0]) << model << ", request " << i;
      EXPECT_EQ(expected.reused, 0);
      logprobs.insert(logprobs.end(), expected.logprobs.begin(), expected.logprobs.end());
    }
    expect_same_bits(shared.logprobs, logprobs, model);
  }
}

TEST_P(LatentCaches, TakeTheMemoryThatTheTypeSays) {
  const auto engine = engine_of("deepseek_v3", StaticKVCacheConfig{.max_batch_size = 2, .max_cache_len = 32});
  const models::ModelConfig& config = *engine->model().config();
  const int64_t values = config.kv_lora_rank + config.rotary_dim;
  const std::string type = GetParam();
  const int64_t row = type == "f32"                     ? 4 * values
                      : type == "bf16" || type == "f16" ? 2 * values
                                                        : values + 4;  // codes and a scale
  EXPECT_EQ(engine->cache_bytes(), 2 * 32 * config.num_hidden_layers * row);
}

}  // namespace latent_cache_test
}  // namespace eadem::engine
