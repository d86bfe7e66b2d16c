// SPDX-License-Identifier: Apache-2.0
//
// Text in, text out, with speculation: completions are those without it, and fewer steps compute them.
#include <gtest/gtest.h>

#include <thread>

#include "eadem/engine/llm.h"
#include "eadem/engine/speculation/draft_model.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace speculating_llm_test {

const std::string kStories = EADEM_SOURCE_DIR "/assets/stories";

std::unique_ptr<LLM> open_llm(const std::string& speculate, int64_t draft_tokens = 8, int64_t batch = 3) {
  EngineOptions options;
  options.cache = PagedKVCacheConfig{.block_size = 16, .max_batch_size = batch, .max_cache_len = 512};
  return std::make_unique<LLM>(kStories, open_device("cpu", {.num_threads = 2}), options, Logger(LogLevel::warning),
                               std::function<void(int64_t, int64_t)>{},
                               SpeculationOptions::of(speculate, draft_tokens));
}

SamplingParams greedy(int64_t max_tokens) {
  SamplingParams params;
  params.temperature = 0;
  params.max_tokens = max_tokens;
  params.ignore_eos = true;
  params.seed = 3;
  return params;
}

void expect_same(const Completion& a, const Completion& b, const std::string& what) {
  EXPECT_EQ(a.text, b.text) << what;
  EXPECT_EQ(a.token_ids, b.token_ids) << what;
  EXPECT_EQ(a.logprobs, b.logprobs) << what;  // no NaN stands there: equal values have equal bits but for zeros
  EXPECT_EQ(a.finish_reason, b.finish_reason) << what;
  EXPECT_EQ(a.error, "") << what;
}

const std::vector<std::string> kPrompts = {
    "Once upon a time there was a dog. The dog was big. Once upon a time there was a",
    "The cat sat. The cat sat. The cat sat. The cat",
    "Tom and Lily went to the park. They saw a",
    "",
};

TEST(SpeculatingLlm, CompletionsAreThoseWithoutIt) {
  const auto plain = open_llm("none"), lookup = open_llm("lookup"), draft = open_llm(kStories);
  SamplingParams sampled = greedy(60);
  sampled.temperature = 0.8;
  sampled.top_p = 0.95;
  SamplingParams penalized = greedy(60);
  penalized.frequency_penalty = 0.4;
  penalized.min_tokens = 20;
  penalized.ignore_eos = false;
  SamplingParams several = sampled;
  several.n = 3;
  int64_t looked_up = 0;
  for (const SamplingParams& params : {greedy(120), sampled, penalized, several}) {
    const std::vector<Completion> expected = plain->generate(kPrompts, params);
    for (LLM* llm : {lookup.get(), draft.get()}) {
      const std::vector<Completion> completions = llm->generate(kPrompts, params);
      int64_t proposed = 0, accepted = 0;
      for (size_t i = 0; i < expected.size(); ++i) {
        expect_same(completions[i], expected[i], to_string(params) + ", completion " + std::to_string(i));
        proposed += completions[i].proposed_tokens;
        accepted += completions[i].accepted_tokens;
      }
      const GenerationStats stats = llm->last_stats();
      EXPECT_EQ(stats.proposed_tokens, proposed);
      EXPECT_EQ(stats.accepted_tokens, accepted);
      EXPECT_LE(accepted, proposed);
      if (llm == lookup.get()) looked_up += proposed;
    }
    EXPECT_EQ(plain->last_stats().proposed_tokens, 0);
  }
  EXPECT_GT(looked_up, 0);
}

// What a model proposes for itself is right, greedy and sampled. Proposing counts as free until it was measured, so
// that it begins on any machine.
TEST(SpeculatingLlm, AModelThatIsItsOwnDraftIsRight) {
  const auto llm = open_llm("lookup", 8, 1);
  const std::vector<int32_t> prompt = llm->tokenizer().encode("Once upon a time");
  for (const double temperature : {0.0, 0.9}) {
    SamplingParams params = greedy(100);
    params.temperature = temperature;
    EngineOptions options;
    options.cache = StaticKVCacheConfig{.max_batch_size = 1, .max_cache_len = 512};
    auto draft = InferEngine::from_checkpoint(models::open_checkpoint(kStories), llm->engine().device(), options);
    auto proposer = std::make_unique<DraftModel>(std::move(draft), llm->engine().model().info().vocab, 0);
    EngineLoop loop(llm->engine(), std::make_unique<Speculator>(std::move(proposer), 8, 8));
    std::vector<EngineLoop::Job> jobs;
    jobs.push_back({{.prompt = prompt, .sampling = params.settings(3), .max_tokens = params.max_tokens},
                    OutputProcessor(llm->tokenizer(), params, llm->eos_token_ids(), prompt, 3)});
    loop.run(jobs);
    const Completion& completion = jobs[0].output.completion();
    EXPECT_GT(completion.proposed_tokens, 0);
    EXPECT_EQ(completion.accepted_tokens, completion.proposed_tokens);
  }
}

// A proposer that always proposes, whatever steps cost, through a loop.
class Fixed : public Proposer {
 public:
  explicit Fixed(std::vector<int32_t> tokens) : tokens_(std::move(tokens)) {}
  void propose(std::span<Proposal> proposals) override {
    for (Proposal& each : proposals) {
      const auto done = std::ssize(each.tokens) - each.request->sampling.prompt_length;
      for (int64_t i = done; i < std::min(done + each.depth, std::ssize(tokens_)); ++i)
        each.drafts.push_back(tokens_[static_cast<size_t>(i)]);
      asked += 1;
    }
  }
  void end(RequestId /*id*/) override { ended += 1; }
  static inline int64_t asked = 0, ended = 0;

 private:
  std::vector<int32_t> tokens_;
};

// Text that ends among accepted tokens ends where it does without speculation.
TEST(SpeculatingLlm, TextEndsAmongAcceptedTokens) {
  const auto llm = open_llm("lookup", 15, 1);
  const std::vector<int32_t> prompt = llm->tokenizer().encode("Once upon a time");
  const Completion whole = llm->generate_ids({prompt}, greedy(150))[0];
  int64_t asked = 0;
  // Text from the middle of the completion, so that a step takes tokens before and behind its end.
  for (const size_t at : {20u, 60u, 100u, 101u, 102u, 103u}) {
    SamplingParams params = greedy(150);
    params.stop = {whole.text.substr(whole.text.size() * at / 150, 9)};
    SamplingParams by_token = greedy(150);
    by_token.stop_token_ids = {whole.token_ids[at]};
    for (const SamplingParams& each : {params, by_token}) {
      std::vector<EngineLoop::Job> jobs;
      for (int job = 0; job < 2; ++job)
        jobs.push_back({{.prompt = prompt, .sampling = each.settings(3), .max_tokens = each.max_tokens},
                        OutputProcessor(llm->tokenizer(), each, llm->eos_token_ids(), prompt, 3)});
      EngineLoop plain(llm->engine());
      plain.run(std::span(jobs).first(1));
      Fixed::asked = Fixed::ended = 0;
      EngineLoop loop(llm->engine(), std::make_unique<Speculator>(std::make_unique<Fixed>(whole.token_ids), 15, 15));
      loop.run(std::span(jobs).last(1));
      expect_same(jobs[1].output.completion(), jobs[0].output.completion(), "text from " + std::to_string(at));
      EXPECT_EQ(jobs[1].output.completion().finish_reason, FinishReason::stop);
      EXPECT_EQ(Fixed::ended, 1);
      asked += Fixed::asked;
    }
  }
  EXPECT_GT(asked, 0);
}

TEST(SpeculatingLlm, ConversationsGoOnFromAcceptedTokensOnly) {
  const auto plain = open_llm("none", 8, 1), lookup = open_llm("lookup", 8, 1), draft = open_llm(kStories, 8, 1);
  std::vector<int32_t> conversation = plain->tokenizer().encode(kPrompts[1]);
  for (int turn = 0; turn < 4; ++turn) {
    const Completion expected = plain->continue_ids(conversation, greedy(40));
    for (LLM* llm : {lookup.get(), draft.get()}) {
      const Completion completion = llm->continue_ids(conversation, greedy(40));
      expect_same(completion, expected, "turn " + std::to_string(turn));
      EXPECT_EQ(completion.cached_tokens, expected.cached_tokens);
    }
    conversation.insert(conversation.end(), expected.token_ids.begin(), expected.token_ids.end());
    const std::vector<int32_t> more = plain->tokenizer().encode(" The cat sat.");
    conversation.insert(conversation.end(), more.begin(), more.end());
  }
}

TEST(SpeculatingLlm, CallersShareSteps) {
  const auto plain = open_llm("none"), lookup = open_llm("lookup");
  const std::vector<Completion> expected = plain->generate(kPrompts, greedy(60));
  std::vector<std::thread> callers;
  for (size_t i = 0; i < kPrompts.size(); ++i)
    callers.emplace_back([&, i] {
      for (int round = 0; round < 3; ++round)
        expect_same(lookup->generate({kPrompts[i]}, greedy(60))[0], expected[i], "caller " + std::to_string(i));
    });
  for (std::thread& caller : callers) caller.join();
}

TEST(SpeculatingLlm, TokensAStepAreCounted) {
  GenerationStats stats;
  EXPECT_EQ(stats.tokens_per_step(), 0);
  stats.decode_tokens = 30;
  EXPECT_EQ(stats.tokens_per_step(), 1);
  stats.accepted_tokens = 20;
  EXPECT_EQ(stats.tokens_per_step(), 3);
}

TEST(SpeculatingLlm, OtherTokensAreRefused) {
  const std::string refused = test::refusal([] { open_llm(EADEM_SOURCE_DIR "/assets/chat"); });
  EXPECT_HAS(refused, "Unsupported: the draft model: token ");
}

}  // namespace speculating_llm_test
}  // namespace eadem::engine
