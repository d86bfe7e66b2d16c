// SPDX-License-Identifier: Apache-2.0
//
// A loop that gives the device each step before it reads the results of the one before: requests get the tokens that
// they get otherwise, however they end, and nothing of a step that was computed in vain is seen.
#include <gtest/gtest.h>

#include <stdexcept>

#include "eadem/engine/engine_loop.h"
#include "eadem/engine/llm.h"

namespace eadem::engine {
namespace {

using Ids = std::vector<int32_t>;

class StepsAhead : public testing::TestWithParam<bool> {
 protected:
  StepsAhead()
      : llm(EADEM_SOURCE_DIR "/assets/stories", open_device("cpu", {.num_threads = 2}), options()),
        loop(llm.engine(), nullptr, /*runs_ahead=*/true),
        plain_loop(llm.engine(), nullptr, /*runs_ahead=*/false) {}

  static EngineOptions options() {
    EngineOptions options;
    if (GetParam()) {
      options.cache = PagedKVCacheConfig{.block_size = 4, .max_batch_size = 4, .max_cache_len = 64};
    } else {
      options.cache = StaticKVCacheConfig{.max_batch_size = 4, .max_cache_len = 64};
    }
    return options;
  }
  static SamplingParams params(int64_t max_tokens, double temperature = 0) {
    SamplingParams result;
    result.temperature = temperature;
    result.seed = 7;
    result.max_tokens = max_tokens;
    result.ignore_eos = true;
    return result;
  }
  EngineLoop::Job job(const Ids& prompt, const SamplingParams& params) {
    return {{.prompt = prompt,
             .sampling = params.settings(1),
             .biases = params.biases(llm.eos_token_ids()),
             .max_tokens = params.max_tokens},
            OutputProcessor(llm.tokenizer(), params, llm.eos_token_ids(), prompt, 1)};
  }
  Ids encode(const char* text) { return llm.tokenizer().encode(text); }

  // Runs requests of several kinds, in both ways.
  void expect_same(const std::vector<SamplingParams>& all) {
    const char* const texts[] = {"Once upon a time", "The dog", "One day, a girl", "It was"};
    const auto run = [&](EngineLoop& how) {
      std::vector<EngineLoop::Job> jobs;
      for (size_t i = 0; i < all.size(); ++i) jobs.push_back(job(encode(texts[i]), all[i]));
      std::string shown;
      how.run(jobs, [&](size_t index, std::string_view piece) { shown += fmt::format("{}: {}\n", index, piece); });
      EXPECT_EQ(llm.engine().num_waiting(), 0);
      std::vector<Completion> completions;
      for (EngineLoop::Job& each : jobs) completions.push_back(std::move(each.output.completion()));
      return std::pair(std::move(completions), shown);
    };
    const auto [expected, expected_shown] = run(plain_loop);
    const auto [actual, actual_shown] = run(loop);
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(actual[i].token_ids, expected[i].token_ids) << i;
      EXPECT_EQ(actual[i].logprobs, expected[i].logprobs) << i;  // to the bit
      EXPECT_EQ(actual[i].text, expected[i].text) << i;
      EXPECT_EQ(actual[i].finish_reason, expected[i].finish_reason) << i;
    }
    EXPECT_EQ(actual_shown, expected_shown);
  }

  LLM llm;
  EngineLoop loop, plain_loop;
};

TEST_P(StepsAhead, GiveTheTokensOfStepsOneByOne) {
  expect_same({params(30), params(12, 0.8), params(20, 1.2), params(1)});
  SamplingParams biased = params(20);
  biased.logit_bias = {{encode("a")[0], -100}};
  SamplingParams penalized = params(15);  // the host needs its tokens
  penalized.frequency_penalty = 0.5;
  expect_same({params(25), biased, penalized});
}

TEST_P(StepsAhead, StopStringsAndTokensEndRequestsWhereTheyDoOtherwise) {
  std::vector<EngineLoop::Job> jobs;
  const SamplingParams whole = params(30);
  jobs.push_back(job(encode("Once upon a time"), whole));
  plain_loop.run(jobs);
  SamplingParams stopping = params(30), ending = params(30);
  stopping.stop = {jobs[0].output.completion().text.substr(20, 4)};
  ending.stop_token_ids = {jobs[0].output.completion().token_ids[9]};
  expect_same({stopping, params(28)});
  expect_same({ending, params(28), stopping});
  expect_same({ending});
}

TEST_P(StepsAhead, AreGivenToTheDeviceInTime) {
  std::vector<EngineLoop::Job> jobs;
  const SamplingParams wanted = params(20);
  jobs.push_back(job(encode("Once upon a time"), wanted));
  const int64_t before = llm.engine().num_uploads();
  std::vector<int> waiting;
  // Text of a step is delivered while the next one is under way.
  loop.run(jobs, [&](size_t, std::string_view) { waiting.push_back(llm.engine().num_waiting()); });
  EXPECT_EQ(llm.engine().num_uploads() - before, 20);  // no step in vain: the end is known
  EXPECT_GT(std::count(waiting.begin(), waiting.end(), 1), 10);
  EXPECT_EQ(waiting.back(), 0);
}

TEST_P(StepsAhead, ACancelledRequestLeavesNothingUnderWay) {
  std::vector<EngineLoop::Job> jobs;
  const SamplingParams wanted = params(50);
  jobs.push_back(job(encode("Once upon a time"), wanted));
  std::atomic<bool> cancel = false;
  int pieces = 0;
  loop.run(
      jobs, [&](size_t, std::string_view) { cancel = ++pieces == 3; }, &cancel);
  EXPECT_EQ(jobs[0].output.completion().finish_reason, FinishReason::cancelled);
  EXPECT_EQ(llm.engine().num_waiting(), 0);
  expect_same({params(20), params(9)});
}

TEST_P(StepsAhead, ACallbackThatThrowsLeavesNothingUnderWay) {
  std::vector<EngineLoop::Job> jobs;
  const SamplingParams wanted = params(50);
  jobs.push_back(job(encode("Once upon a time"), wanted));
  EXPECT_THROW(loop.run(jobs, [](size_t, std::string_view) { throw std::runtime_error("a callback"); }),
               std::runtime_error);
  EXPECT_EQ(llm.engine().num_waiting(), 0);
  expect_same({params(20), params(9)});
}

// A kept sequence has the same tokens in the cache either way, also if a stop token ended it while another step ran.
TEST_P(StepsAhead, ConversationsGoOnFromTheirTokens) {
  Ids conversation = encode("Once upon a time");
  std::vector<Ids> answers[2];
  for (const bool ahead : {false, true}) {
    Ids tokens = conversation;
    for (int turn = 0; turn < 3; ++turn) {
      SamplingParams wanted = params(12);
      if (turn == 1) wanted.stop_token_ids = {answers[ahead].back()[5]};
      std::vector<EngineLoop::Job> jobs;
      jobs.push_back(job(tokens, wanted));
      jobs[0].request.keep = true;
      (ahead ? loop : plain_loop).run(jobs);
      const Completion& completion = jobs[0].output.completion();
      answers[ahead].push_back(completion.token_ids);
      if (turn > 0) {
        EXPECT_GT(completion.cached_tokens, 0) << turn;
      }
      tokens.insert(tokens.end(), completion.token_ids.begin(), completion.token_ids.end());
      tokens.push_back(conversation[0]);
    }
  }
  EXPECT_EQ(answers[0], answers[1]);
}

INSTANTIATE_TEST_SUITE_P(Caches, StepsAhead, testing::Bool(),
                         [](const auto& info) { return info.param ? "paged" : "contiguous"; });

}  // namespace
}  // namespace eadem::engine
