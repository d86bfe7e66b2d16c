// SPDX-License-Identifier: Apache-2.0
//
// logit_bias and min_tokens, as the OpenAI API and vLLM define them: they change what is drawn of their own request,
// and neither log-probabilities nor other requests.
#include <gtest/gtest.h>

#include <algorithm>

#include "eadem/engine/llm.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace {

using test::refusal;
using Ids = std::vector<int32_t>;

class LogitBias : public testing::Test {
 protected:
  LogitBias()
      : llm(EADEM_SOURCE_DIR "/assets/stories", open_device("cpu", {.num_threads = 1}),
            {.cache = PagedKVCacheConfig{}}) {
    plain.temperature = 0;
    plain.max_tokens = 30;
    plain.ignore_eos = true;
  }

  Completion run(const SamplingParams& params) { return llm.generate({"Once upon a time"}, params)[0]; }

  LLM llm;
  SamplingParams plain;
};

TEST_F(LogitBias, AHundredMakesATokenTheOnlyOne) {
  const int32_t token = run(plain).token_ids[7];
  for (const double temperature : {0.0, 1.0}) {
    SamplingParams params = plain;
    params.temperature = temperature;
    params.logit_bias = {{token, 100}};
    EXPECT_EQ(run(params).token_ids, Ids(30, token));
  }
}

TEST_F(LogitBias, MinusAHundredBansATokenAndTheLogProbabilityIsTheModels) {
  const Completion first = run(plain);
  SamplingParams params = plain;
  params.logit_bias = {{first.token_ids[5], -100}};
  const Completion other = run(params);
  EXPECT_EQ(std::count(other.token_ids.begin(), other.token_ids.end(), first.token_ids[5]), 0);
  const auto same = std::mismatch(first.token_ids.begin(), first.token_ids.end(), other.token_ids.begin());
  const auto count = same.first - first.token_ids.begin();
  EXPECT_LE(count, 5);
  for (std::ptrdiff_t i = 0; i < count; ++i)
    EXPECT_EQ(first.logprobs[static_cast<size_t>(i)], other.logprobs[static_cast<size_t>(i)]);
  // The largest logit was taken away: the model thought less of what was drawn instead.
  EXPECT_LT(other.logprobs[static_cast<size_t>(count)], first.logprobs[static_cast<size_t>(count)]);
}

TEST_F(LogitBias, RequestsBesideDoNotNotice) {
  const Completion alone = run(plain);
  SamplingParams biased = plain;
  biased.logit_bias = {{alone.token_ids[0], -100}, {alone.token_ids[3], 20}};
  biased.frequency_penalty = 0.5;
  const Completion biased_alone = run(biased);
  std::vector<EngineLoop::Job> jobs;
  const Ids prompt = llm.tokenizer().encode("Once upon a time");
  for (const SamplingParams* params : {&plain, &biased, &plain})
    jobs.push_back({{.prompt = prompt,
                     .sampling = params->settings(1),
                     .biases = params->biases(llm.eos_token_ids()),
                     .max_tokens = params->max_tokens},
                    OutputProcessor(llm.tokenizer(), *params, llm.eos_token_ids(), prompt, 1)});
  EngineLoop loop(llm.engine());
  loop.run(jobs);
  EXPECT_EQ(jobs[0].output.completion().token_ids, alone.token_ids);
  EXPECT_EQ(jobs[0].output.completion().logprobs, alone.logprobs);
  EXPECT_EQ(jobs[1].output.completion().token_ids, biased_alone.token_ids);
  EXPECT_EQ(jobs[2].output.completion().token_ids, alone.token_ids);
}

TEST_F(LogitBias, MinTokensHoldsStopTokensBack) {
  const Completion whole = run(plain);
  SamplingParams stopping = plain;
  stopping.stop_token_ids = {whole.token_ids[3]};
  const Completion stopped = run(stopping);
  EXPECT_EQ(stopped.finish_reason, FinishReason::stop);
  EXPECT_LE(stopped.token_ids.size(), 3u);
  for (const int64_t min_tokens : {4, 9, 30}) {
    SamplingParams params = stopping;
    params.min_tokens = min_tokens;
    const Completion completion = run(params);
    EXPECT_GE(std::ssize(completion.token_ids), min_tokens);
    EXPECT_EQ(std::count(completion.token_ids.begin(), completion.token_ids.end(), whole.token_ids[3]), 0);
    EXPECT_TRUE(std::equal(stopped.token_ids.begin(), stopped.token_ids.end(), completion.token_ids.begin()));
    if (min_tokens < 30) {
      // From there on, the token ends the text as before: a bias of 100 draws it at once.
      params.logit_bias = {{whole.token_ids[3], 100}};
      const Completion ended = run(params);
      EXPECT_EQ(std::ssize(ended.token_ids), min_tokens);
      EXPECT_EQ(ended.finish_reason, FinishReason::stop);
    }
  }
}

TEST_F(LogitBias, MinTokensHoldsTheEndOfSequenceBack) {
  SamplingParams params = plain;
  params.ignore_eos = false;
  ASSERT_FALSE(llm.eos_token_ids().empty());
  params.logit_bias = {{llm.eos_token_ids()[0], 100}};
  EXPECT_TRUE(run(params).token_ids.empty());
  params.min_tokens = 12;
  const Completion completion = run(params);
  EXPECT_EQ(std::ssize(completion.token_ids), 12);
  EXPECT_EQ(completion.finish_reason, FinishReason::stop);
}

TEST_F(LogitBias, MinTokensHoldsStopStringsBack) {
  const Completion whole = run(plain);
  SamplingParams params = plain;
  params.stop = {whole.text.substr(0, 4)};
  EXPECT_EQ(run(params).text, "");
  params.min_tokens = 10;
  const Completion completion = run(params);
  EXPECT_GE(std::ssize(completion.token_ids), 10);
  EXPECT_TRUE(completion.text.starts_with(params.stop[0]));
}

TEST_F(LogitBias, OutOfRangeIsRefused) {
  const auto refused = [&](auto change) {
    SamplingParams params = plain;
    change(params);
    return refusal([&] { params.validate(); });
  };
  EXPECT_HAS(refused([](auto& p) { p.logit_bias = {{1, 100.5}}; }), "logit_bias is 100.5 for token 1; expected -100");
  EXPECT_HAS(refused([](auto& p) { p.logit_bias = {{-1, 1}}; }), "logit_bias is for token -1");
  EXPECT_HAS(refused([](auto& p) {
               for (int i = 0; i < 301; ++i) p.logit_bias[i] = 1;
             }),
             "logit_bias is 301 tokens; expected at most 300");
  EXPECT_HAS(refused([](auto& p) { p.min_tokens = -1; }), "min_tokens is -1; expected 0 to max_tokens");
  EXPECT_HAS(refused([](auto& p) { p.min_tokens = 31; }), "min_tokens is 31; expected 0 to max_tokens, 30");
  SamplingParams params = plain;
  params.logit_bias = {{1 << 30, 1}};
  EXPECT_NE(run(params).error.find("a bias or a bad word is for token 1073741824; the vocabulary has"),
            std::string::npos);
}

}  // namespace
}  // namespace eadem::engine
