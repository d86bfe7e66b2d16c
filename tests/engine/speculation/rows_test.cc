// SPDX-License-Identifier: Apache-2.0
//
// Every row of a step with proposed tokens is sampled as its token would be alone: with the history, the position and
// the parameters that it has there.
#include "tests/engine/speculation/speculating_loop.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace speculation_rows_test {

using test::refusal;

std::unique_ptr<InferEngine> engine_of(const CacheConfig& cache, int64_t draft_tokens = 6) {
  EngineSetup setup;
  setup.options.cache = cache;
  setup.options.max_num_batched_tokens = 32;
  setup.options.draft_tokens = draft_tokens;
  return make_engine(setup);
}

// The plain answers to these are checked against a replay of their definitions in penalties_test and logit_bias_test.
std::vector<GenerationRequest> requests_with_history(int64_t vocab) {
  const std::vector<SamplingInput> settings = {
      {.repetition_penalty = 1.3f},
      {.presence_penalty = 1.5f},
      {.frequency_penalty = 0.6f},
      {.temperature = 0.9f, .top_k = 40, .top_p = 0.95f, .seed = 5, .repetition_penalty = 1.05f},
      {.temperature = 1.2f, .min_p = 0.02f, .seed = 6, .presence_penalty = 0.5f, .frequency_penalty = -0.3f},
      {.temperature = 0.7f, .seed = 7},
      {}};
  std::vector<GenerationRequest> requests;
  for (size_t i = 0; i < settings.size(); ++i)
    requests.push_back({.prompt = tokens_of(5 + 4 * static_cast<int64_t>(i), vocab, static_cast<int32_t>(i)),
                        .sampling = settings[i],
                        .max_tokens = 24});
  return requests;
}

// Bans the tokens of a request's plain answer at half of the places where they stand, so that biases begin and end
// within what is proposed.
void add_biases(std::vector<GenerationRequest>& requests, const std::vector<Answer>& answers) {
  for (size_t i = 0; i < requests.size(); ++i) {
    std::map<int32_t, bool> has;
    for (int64_t at = 1; at < std::ssize(answers[i].tokens); at += 2) {
      const int32_t token = answers[i].tokens[static_cast<size_t>(at)];
      if (!std::exchange(has[token], true))
        requests[i].biases.push_back({.token = token, .bias = kNeverSampled, .begin = at, .end = at + 3});
    }
  }
}

void expect_same_with_and_without(InferEngine& engine, const std::vector<GenerationRequest>& requests,
                                  const std::string& what) {
  const SpeculatingRun plain = run_requests(engine, requests);
  const SpeculatingRun speculating = run_requests(engine, requests, from_answers(plain.answers, 6, 3));
  expect_same_answers(speculating, plain, what);
  EXPECT_GT(speculating.accepted, 12) << what;
  EXPECT_GT(speculating.proposed, speculating.accepted) << what;
}

TEST(SpeculationRows, HaveTheirOwnHistory) {
  for (const CacheConfig& cache :
       {CacheConfig(StaticKVCacheConfig{.max_batch_size = 3}),
        CacheConfig(PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 4, .max_batch_size = 2})}) {
    const auto engine = engine_of(cache);
    std::vector<GenerationRequest> requests = requests_with_history(engine->model().info().vocab);
    expect_same_with_and_without(*engine, requests, "penalties");
    const SpeculatingRun plain = run_requests(*engine, requests);
    add_biases(requests, plain.answers);
    const SpeculatingRun biased = run_requests(*engine, requests);
    for (size_t i = 0; i < requests.size(); ++i) EXPECT_NE(biased.answers[i].tokens, plain.answers[i].tokens);
    expect_same_with_and_without(*engine, requests, "biases");
    // One alone, with every token that there is room for.
    for (const GenerationRequest& request : requests) expect_same_with_and_without(*engine, {request}, "alone");
  }
}

// A sampled answer has the tokens of its seed, and another seed others.
TEST(SpeculationRows, SampledTokensAreThoseOfTheSeed) {
  const auto engine = engine_of(StaticKVCacheConfig{});
  GenerationRequest request{.prompt = tokens_of(9, engine->model().info().vocab, 1),
                            .sampling = {.temperature = 1.0f, .seed = 1},
                            .max_tokens = 30};
  std::vector<Answer> answers;
  for (int64_t seed = 1; seed <= 3; ++seed) {
    request.sampling.seed = seed;
    answers.push_back(run_requests(*engine, {request}).answers[0]);
  }
  EXPECT_NE(answers[0].tokens, answers[1].tokens);
  // What is proposed are the tokens of another seed: few of them are right.
  for (int64_t seed = 1; seed <= 3; ++seed) {
    request.sampling.seed = seed;
    const std::vector<Answer> other = {answers[static_cast<size_t>(seed % 3)]};
    const SpeculatingRun run = run_requests(*engine, {request}, from_answers(other, 6, 3));
    EXPECT_EQ(run.answers[0].tokens, answers[static_cast<size_t>(seed - 1)].tokens);
    expect_same_bits(run.answers[0].logprobs, answers[static_cast<size_t>(seed - 1)].logprobs, "log-probabilities");
    EXPECT_GT(run.proposed, run.accepted);
  }
}

TEST(SpeculationRows, WhatContradictsItselfIsRefused) {
  const auto engine = engine_of(StaticKVCacheConfig{}, 2);
  const std::vector<int32_t> tokens = tokens_of(4, engine->model().info().vocab, 1);
  const std::vector<int32_t> row = {0};
  const auto refused = [&](int64_t drafts, bool samples) {
    const std::vector<StepSequence> plan = {{.tokens = tokens, .blocks = row, .samples = samples, .drafts = drafts}};
    return refusal([&] { engine->forward(plan); });
  };
  EXPECT_HAS(refused(4, true), "InvalidArgument: sequence 0 has 4 proposed tokens among 4 new ones");
  EXPECT_HAS(refused(-1, true), "InvalidArgument: sequence 0 has -1 proposed tokens");
  EXPECT_HAS(refused(1, false), "does not sample");
  EXPECT_EQ(refused(3, true), "");
  EXPECT_EQ(engine->limits().max_draft_tokens, 2);

  EngineSetup setup;
  setup.options.draft_tokens = -1;
  EXPECT_HAS(refusal([&] { make_engine(setup); }), "draft_tokens is -1; expected 0 to");
}

}  // namespace speculation_rows_test
}  // namespace eadem::engine
