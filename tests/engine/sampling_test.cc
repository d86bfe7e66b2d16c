// SPDX-License-Identifier: Apache-2.0
//
// What a request asks of its rows of logits: bad words, masks, processors, the likeliest tokens, and log-probabilities
// of the prompt. tests/data/sampling says what transformers makes of the same. Other requests do not notice.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <stdexcept>

#include "eadem/engine/llm.h"
#include "eadem/io/json.h"
#include "tests/engine/engine_helpers.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace {

using test::refusal;
using Ids = std::vector<int32_t>;

const io::JsonReader& expected() {
  static const io::JsonReader json = io::JsonReader::read(EADEM_SOURCE_DIR "/tests/data/sampling/sampling.json");
  return json;
}

Ids ids_of(const io::JsonReader& object, const char* key) {
  Ids ids;
  for (const int64_t id : object.integers(key, 0)) ids.push_back(static_cast<int32_t>(id));
  return ids;
}

std::vector<Ids> lists_of(const io::JsonReader& object, const char* key) {
  std::vector<Ids> lists;
  for (const io::JsonValue& list : object.raw(key)->as_array()) {
    Ids& ids = lists.emplace_back();
    for (const io::JsonValue& id : list.as_array()) ids.push_back(static_cast<int32_t>(id.as_integer()));
  }
  return lists;
}

// f32 throughout, as transformers computed, in steps of at most `step` tokens.
std::unique_ptr<InferEngine> exact_engine(int64_t step = 64, int64_t logit_rows = 0, bool paged = true) {
  EngineOptions options{.mode = HardwareMode::accuracy, .max_num_batched_tokens = step, .max_logit_rows = logit_rows};
  if (paged)
    options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 4, .max_batch_size = 3};
  else
    options.cache = StaticKVCacheConfig{.max_batch_size = 3};
  return InferEngine::from_checkpoint(models::open_checkpoint(golden("llama")), open_device("cpu", {.num_threads = 1}),
                                      options);
}

// --- Bad words.

GenerationRequest with_bad_words(const io::JsonReader& each) {
  GenerationRequest request{.prompt = ids_of(each, "prompt"), .max_tokens = std::ssize(ids_of(each, "tokens"))};
  for (const Ids& word : lists_of(each, "words")) {
    if (word.size() == 1)
      request.biases.push_back({.token = word[0], .bias = kNeverSampled});
    else
      request.bad_words.push_back(word);
  }
  return request;
}

TEST(BadWords, TextsAreThoseOfTransformers) {
  std::vector<GenerationRequest> requests;
  std::vector<Ids> tokens;
  for (const io::JsonReader& each : expected().elements("bad_words")) {
    requests.push_back(with_bad_words(each));
    tokens.push_back(ids_of(each, "tokens"));
    EXPECT_NE(tokens.back(), ids_of(each, "plain")) << "the words change nothing";
  }
  EXPECT_EQ(schedule(*exact_engine(), requests), tokens);
  EXPECT_EQ(schedule(*exact_engine(5, 0, false), requests), tokens);
}

TEST(BadWords, ATokenWithABiasOfItsOwnIsBannedWhereItCompletesAWord) {
  const auto engine = exact_engine();
  const io::JsonReader each = expected().elements("bad_words")[0];
  const Ids plain = ids_of(each, "plain");
  GenerationRequest request{.prompt = ids_of(each, "prompt"), .max_tokens = 2};
  request.biases = {{.token = plain[1], .bias = 50}};
  EXPECT_EQ(schedule(*engine, {request})[0], (Ids{plain[1], plain[1]}));
  request.bad_words = {{request.prompt.back(), plain[1]}, {request.prompt.back(), plain[1]}};
  const Ids text = schedule(*engine, {request})[0];
  EXPECT_NE(text[0], plain[1]);
  EXPECT_EQ(text[1], plain[1]);
}

TEST(BadWords, TextsAreSpelledWithAndWithoutASpace) {
  LLM llm(EADEM_SOURCE_DIR "/assets/stories", open_device("cpu", {.num_threads = 1}), {.cache = PagedKVCacheConfig{}});
  SamplingParams params{.temperature = 0, .max_tokens = 40};
  const std::string plain = llm.generate({"Once upon a time"}, params)[0].text;
  for (const std::string word : {"little", "girl", "there was", "Lily"}) {
    if (plain.find(word) == std::string::npos) continue;
    params.bad_words = {word};
    const std::string text = llm.generate({"Once upon a time"}, params)[0].text;
    EXPECT_EQ(text.find(" " + word), std::string::npos) << text;
    EXPECT_NE(text, plain);
  }
  params.bad_words = {"there was"};
  EXPECT_NE(plain.find("there was"), std::string::npos) << plain << ": the test bans what is not there";
  // A word that is the end of sequence alone is none, as in transformers.
  params.bad_words = {};
  params.bad_words_ids = {{llm.eos_token_ids()[0]}};
  EXPECT_EQ(llm.generate({"Once upon a time"}, params)[0].text, plain);
}

// --- Log-probabilities.

struct Scores {
  std::vector<float> logprobs;
  std::vector<Ids> top_tokens;
  std::vector<std::vector<float>> top_logprobs;
  Ids text;
  std::vector<float> text_logprobs;
};

// Runs the requests together.
std::vector<Scores> scores_of(InferEngine& engine, const std::vector<GenerationRequest>& requests) {
  Scheduler scheduler(engine.limits());
  std::map<RequestId, size_t> index;
  for (const GenerationRequest& request : requests) index.emplace(scheduler.add(request), index.size());
  std::vector<Scores> result(requests.size());
  while (!scheduler.is_idle()) {
    const InferEngine::Output& out = engine.forward(scheduler.plan(engine.cache_contents()));
    for (const StepEvent& event :
         scheduler.commit(StepResults{out.output_ids, out.logprobs, out.top_tokens, out.top_logprobs})) {
      Scores& scores = result[index.at(event.id)];
      if (event.sampled) {
        scores.text.push_back(event.token);
        scores.text_logprobs.push_back(event.logprob);
      }
      if (!event.scored) continue;
      EXPECT_TRUE(scores.text.empty()) << "the prompt comes first";
      EXPECT_EQ(event.token, requests[index.at(event.id)].prompt[scores.logprobs.size() + 1]);
      scores.logprobs.push_back(event.logprob);
      scores.top_tokens.emplace_back(event.top_tokens.begin(), event.top_tokens.end());
      scores.top_logprobs.emplace_back(event.top_logprobs.begin(), event.top_logprobs.end());
    }
  }
  return result;
}

std::vector<GenerationRequest> scored_requests(std::optional<int32_t> top = 5) {
  std::vector<GenerationRequest> requests;
  for (const io::JsonReader& each : expected().elements("scores"))
    requests.push_back({.prompt = ids_of(each, "prompt"), .prompt_logprobs = top, .max_tokens = 4});
  return requests;
}

TEST(PromptLogprobs, AreThoseOfTransformers) {
  const auto engine = exact_engine();
  const std::vector<Scores> scores = scores_of(*engine, scored_requests());
  // The golden logits of this model are compared within 1e-4 (tests/data/golden); a log softmax adds as much once more.
  constexpr double kTolerance = 2e-4;
  size_t i = 0;
  for (const io::JsonReader& each : expected().elements("scores")) {
    const Scores& got = scores[i++];
    const std::vector<double> logprobs = each.numbers("logprobs");
    ASSERT_EQ(got.logprobs.size(), logprobs.size());
    for (size_t t = 0; t < logprobs.size(); ++t) {
      EXPECT_NEAR(got.logprobs[t], logprobs[t], kTolerance);
      const io::JsonValue& top = each.raw("top_logprobs")->as_array()[t];
      for (size_t k = 0; k < 5; ++k) EXPECT_NEAR(got.top_logprobs[t][k], top.as_array()[k].as_number(), kTolerance);
      EXPECT_EQ(got.top_tokens[t][5], -1);
      EXPECT_TRUE(std::isnan(got.top_logprobs[t][5]));
    }
    const std::vector<Ids> top_tokens = lists_of(each, "top_tokens");
    for (size_t t = 0; t < logprobs.size(); ++t)
      EXPECT_EQ(std::set<int32_t>(got.top_tokens[t].begin(), got.top_tokens[t].begin() + 5),
                std::set<int32_t>(top_tokens[t].begin(), top_tokens[t].end()));
  }
}

// Few rows of logits, few tokens of a step, little memory, and blocks that others have computed.
TEST(PromptLogprobs, BitsDependOnNothingBeside) {
  const std::vector<GenerationRequest> requests = scored_requests(3);
  std::vector<Scores> alone;
  for (const GenerationRequest& request : requests) alone.push_back(scores_of(*exact_engine(64, 64), {request})[0]);
  const auto expect_alone = [&](const std::vector<Scores>& together, const std::string& what) {
    for (size_t i = 0; i < alone.size(); ++i) {
      expect_same_bits(together[i].logprobs, alone[i].logprobs, what);
      for (size_t t = 0; t < alone[i].top_logprobs.size(); ++t) {
        EXPECT_EQ(together[i].top_tokens[t], alone[i].top_tokens[t]) << what;
        EXPECT_EQ(std::memcmp(together[i].top_logprobs[t].data(), alone[i].top_logprobs[t].data(), 3 * sizeof(float)),
                  0)
            << what;
      }
      EXPECT_EQ(together[i].text, alone[i].text) << what;
      expect_same_bits(together[i].text_logprobs, alone[i].text_logprobs, what);
    }
  };
  for (const int64_t step : {3, 7, 64})
    for (const int64_t rows : {0, 5, 64}) {
      const auto engine = exact_engine(step, rows);
      const std::string what = fmt::format("step {} rows {}", step, rows);
      expect_alone(scores_of(*engine, requests), what);
      expect_alone(scores_of(*engine, requests), what + ", prompts in the cache");
    }
  EXPECT_EQ(schedule(*exact_engine(), {{.prompt = requests[0].prompt, .max_tokens = 4}})[0], alone[0].text);
}

TEST(PromptLogprobs, PreemptionReportsNothingTwice) {
  EngineOptions options{.mode = HardwareMode::accuracy, .max_num_batched_tokens = 16};
  options.cache = PagedKVCacheConfig{.block_size = 4, .max_batch_size = 3, .max_cache_len = 48};
  std::vector<GenerationRequest> requests = scored_requests(2);
  for (GenerationRequest& request : requests) request.max_tokens = 24;
  requests.push_back(requests[2]);
  requests.back().priority = 1;
  const auto roomy = exact_engine(64, 64);
  std::vector<Scores> alone;
  for (const GenerationRequest& request : requests) alone.push_back(scores_of(*roomy, {request})[0]);
  EngineSetup setup{.options = options};
  const auto tight = make_engine(setup);
  const std::vector<Scores> together = scores_of(*tight, requests);
  for (size_t i = 0; i < alone.size(); ++i) {
    expect_same_bits(together[i].logprobs, alone[i].logprobs, std::to_string(i));
    EXPECT_EQ(together[i].text, alone[i].text);
  }
}

// The likeliest tokens behind each prompt.
std::vector<std::vector<TokenLogprob>> first_tops(InferEngine& engine, const std::vector<GenerationRequest>& requests) {
  Scheduler scheduler(engine.limits());
  std::map<RequestId, size_t> index;
  for (const GenerationRequest& request : requests) index.emplace(scheduler.add(request), index.size());
  std::vector<std::vector<TokenLogprob>> tops(requests.size());
  while (!scheduler.is_idle()) {
    const InferEngine::Output& out = engine.forward(scheduler.plan(engine.cache_contents()));
    for (const StepEvent& event :
         scheduler.commit(StepResults{out.output_ids, out.logprobs, out.top_tokens, out.top_logprobs}))
      for (size_t i = 0; event.sampled && i < event.top_tokens.size() && event.top_tokens[i] >= 0; ++i)
        tops[index.at(event.id)].push_back({event.top_tokens[i], event.top_logprobs[i]});
  }
  return tops;
}

class Sampling : public testing::Test {
 protected:
  Sampling()
      : llm(EADEM_SOURCE_DIR "/assets/stories", open_device("cpu", {.num_threads = 1}),
            {.cache = PagedKVCacheConfig{}}) {
    plain.temperature = 0;
    plain.max_tokens = 20;
    plain.ignore_eos = true;
  }

  Completion run(const SamplingParams& params) { return llm.generate({kPrompt}, params)[0]; }
  int64_t vocab() { return llm.engine().model().info().vocab; }

  // Runs `params` beside two plain requests, which must not notice.
  Completion run_beside(const SamplingParams& params) {
    const Completion alone = run(plain);
    const Ids prompt = llm.tokenizer().encode(kPrompt);
    std::vector<EngineLoop::Job> jobs;
    const auto add = [&](const SamplingParams& each) {
      GenerationRequest request{.prompt = prompt,
                                .sampling = each.settings(1),
                                .biases = each.biases(llm.eos_token_ids()),
                                .token_mask = each.token_mask,
                                .max_tokens = each.max_tokens};
      if (each.allowed_token_ids) request.allowed = only_tokens(*each.allowed_token_ids, vocab());
      if (!each.logits_processors.empty()) request.processor = each.logits_processors[0];
      jobs.push_back({std::move(request), OutputProcessor(llm.tokenizer(), each, llm.eos_token_ids(), prompt, 1)});
    };
    add(plain);
    add(params);
    add(plain);
    EngineLoop(llm.engine()).run(jobs);
    for (const size_t job : {0, 2}) {
      EXPECT_EQ(jobs[job].output.completion().token_ids, alone.token_ids);
      EXPECT_EQ(jobs[job].output.completion().logprobs, alone.logprobs);
      EXPECT_EQ(jobs[job].output.completion().error, "");
    }
    return std::move(jobs[1].output.completion());
  }

  static constexpr const char* kPrompt = "Once upon a time";
  LLM llm;
  SamplingParams plain;
};

TEST_F(Sampling, TopLogprobsListTheLikeliestTokens) {
  SamplingParams params = plain;
  params.logprobs = 5;
  params.temperature = 1;
  params.seed = 3;
  const Completion completion = run(params);
  ASSERT_EQ(completion.top_logprobs.size(), completion.token_ids.size());
  for (size_t i = 0; i < completion.token_ids.size(); ++i) {
    const auto& top = completion.top_logprobs[i];
    ASSERT_EQ(top.size(), 5u);
    double total = 0;
    for (size_t k = 0; k < 5; ++k) {
      total += std::exp(static_cast<double>(top[k].logprob));
      EXPECT_LE(top[k].logprob, top[k > 0 ? k - 1 : 0].logprob);
      EXPECT_TRUE(top[k].token != completion.token_ids[i] || top[k].logprob == completion.logprobs[i]);
    }
    EXPECT_LE(total, 1 + 1e-5);
    EXPECT_GE(top[0].logprob, completion.logprobs[i]);
  }
  params.logprobs = 0;
  const Completion without = run(params);
  EXPECT_TRUE(without.top_logprobs.empty());
  EXPECT_EQ(without.token_ids, completion.token_ids);
  EXPECT_EQ(without.logprobs, completion.logprobs);
  params.temperature = 0;
  params.logprobs = 1;
  const Completion greedy = run_beside(params);
  for (size_t i = 0; i < greedy.token_ids.size(); ++i)
    EXPECT_EQ(greedy.top_logprobs[i], (std::vector<TokenLogprob>{{greedy.token_ids[i], greedy.logprobs[i]}}));
}

TEST_F(Sampling, PromptLogprobsOfSeveralAnswers) {
  SamplingParams params = plain;
  params.prompt_logprobs = 2;
  params.max_tokens = 3;
  params.n = 2;
  const std::vector<Completion> two = llm.generate({kPrompt, ""}, params);
  ASSERT_EQ(two.size(), 4u);
  EXPECT_EQ(std::ssize(two[0].prompt_logprobs), two[0].prompt_tokens);
  EXPECT_TRUE(std::isnan(two[0].prompt_logprobs[0]));
  EXPECT_TRUE(two[0].prompt_top_logprobs[0].empty());
  for (size_t i = 1; i < two[0].prompt_logprobs.size(); ++i) {
    EXPECT_LE(two[0].prompt_logprobs[i], 0);
    EXPECT_EQ(two[0].prompt_top_logprobs[i].size(), 2u);
  }
  EXPECT_EQ(two[1].prompt_top_logprobs, two[0].prompt_top_logprobs);
  EXPECT_EQ(two[2].prompt_logprobs.size(), 1u);  // the beginning of a text alone
  EXPECT_EQ(two[3].prompt_logprobs.size(), 1u);
  // They are what sampling would have said of the same tokens.
  params = plain;
  const Completion text = run(params);
  Ids longer = llm.tokenizer().encode(kPrompt);
  const size_t begin = longer.size();
  longer.insert(longer.end(), text.token_ids.begin(), text.token_ids.end());
  params.prompt_logprobs = 0;
  const Completion scored = llm.generate_ids({longer}, params)[0];
  EXPECT_TRUE(scored.prompt_top_logprobs.empty());
  expect_same_bits({scored.prompt_logprobs.begin() + static_cast<std::ptrdiff_t>(begin), scored.prompt_logprobs.end()},
                   text.logprobs, "scored and sampled");
}

// --- Which tokens are drawn.

TEST_F(Sampling, AllowedTokensAreTheOnlyOnes) {
  const std::set<int64_t> allowed = {5, 300, vocab() - 1};
  for (const double temperature : {0.0, 5.0}) {
    SamplingParams params = plain;
    params.temperature = temperature;
    params.seed = 1;
    params.allowed_token_ids = {allowed.begin(), allowed.end()};
    const Completion completion = run(params);
    EXPECT_EQ(completion.error, "");
    for (const int32_t token : completion.token_ids) EXPECT_TRUE(allowed.contains(token)) << token;
    EXPECT_EQ(completion.token_ids.size(), 20u);
    EXPECT_EQ(run_beside(params).token_ids, completion.token_ids);
  }
  SamplingParams one = plain;
  one.allowed_token_ids = {run(plain).token_ids[0]};
  const Completion completion = run(one);
  EXPECT_EQ(completion.token_ids, Ids(20, run(plain).token_ids[0]));
  EXPECT_EQ(completion.logprobs[0], run(plain).logprobs[0]) << "the model's, whatever is allowed";
}

// A grammar: the tokens of a text in order.
TEST_F(Sampling, MasksFollowTheText) {
  const size_t begin = llm.tokenizer().encode(kPrompt).size();
  const Ids wanted = llm.tokenizer().encode("a dog and a cat", {.add_special_tokens = false});
  SamplingParams params = plain;
  params.max_tokens = std::ssize(wanted);
  params.token_mask = [&](std::span<const int32_t> tokens, std::span<int32_t> words) {
    const std::vector<int32_t> only = only_tokens(std::vector<int64_t>{wanted[tokens.size() - begin]}, vocab());
    for (size_t i = 0; i < words.size(); ++i) words[i] &= only[i];
  };
  EXPECT_EQ(run(params).token_ids, wanted);
  EXPECT_EQ(run_beside(params).token_ids, wanted);
  params.temperature = 3;
  EXPECT_EQ(run_beside(params).token_ids, wanted);
}

TEST_F(Sampling, AMaskThatAllowsNothingOrThrowsFailsItsRequestAlone) {
  const size_t begin = llm.tokenizer().encode(kPrompt).size();
  SamplingParams params = plain;
  params.token_mask = [&](std::span<const int32_t> tokens, std::span<int32_t> words) {
    if (tokens.size() == begin + 3) std::fill(words.begin(), words.end(), 0);
  };
  Completion completion = run_beside(params);
  EXPECT_EQ(completion.finish_reason, FinishReason::error);
  EXPECT_EQ(completion.error, fmt::format("the token mask allows no token behind {} tokens", begin + 3));
  EXPECT_EQ(completion.token_ids.size(), 3u);
  params.token_mask = [&](std::span<const int32_t> tokens, std::span<int32_t>) {
    if (tokens.size() == begin + 2) throw std::runtime_error("no such rule");
  };
  completion = run_beside(params);
  EXPECT_EQ(completion.error, "a token mask failed: no such rule");
  EXPECT_EQ(completion.token_ids.size(), 2u);
}

TEST_F(Sampling, ProcessorsChangeWhatTheirRequestDraws) {
  const Ids prompt = llm.tokenizer().encode(kPrompt);
  std::vector<Ids> seen;
  SamplingParams params = plain;
  params.logits_processors = {[&](std::span<const int32_t> tokens, std::span<float> logits) {
    seen.emplace_back(tokens.begin(), tokens.end());
    std::fill(logits.begin(), logits.end(), 0.0f);
    logits[tokens.size()] = 9;
  }};
  const Completion completion = run_beside(params);
  Ids text, all = prompt;
  for (size_t i = 0; i < 20; ++i) {
    text.push_back(static_cast<int32_t>(prompt.size() + i));
    EXPECT_EQ(seen[i], all);
    all.push_back(text.back());
  }
  EXPECT_EQ(seen.size(), 20u);
  EXPECT_EQ(completion.token_ids, text);
  // 9 less the log-sum-exp of 9 and zeros. The sum, below 2, is one of `vocab` terms in f32; its logarithm errs no
  // more.
  const double expected = -std::log1p(static_cast<double>(vocab() - 1) * std::exp(-9.0));
  for (const float logprob : completion.logprobs)
    EXPECT_NEAR(logprob, expected, static_cast<double>(vocab()) * 0x1p-24);
  // Several are called in order.
  params.logits_processors.push_back([](std::span<const int32_t>, std::span<float> logits) {
    EXPECT_EQ(*std::max_element(logits.begin(), logits.end()), 9);
    logits[7] = 10;
  });
  EXPECT_EQ(run(params).token_ids, Ids(20, 7));
}

TEST_F(Sampling, AProcessorThatThrowsFailsItsRequestAlone) {
  const size_t begin = llm.tokenizer().encode(kPrompt).size();
  SamplingParams params = plain;
  params.logits_processors = {[&](std::span<const int32_t> tokens, std::span<float>) {
    if (tokens.size() == begin + 4) throw std::runtime_error("out of ideas");
  }};
  const Completion completion = run_beside(params);
  EXPECT_EQ(completion.finish_reason, FinishReason::error);
  EXPECT_EQ(completion.error, "a logits processor failed: out of ideas");
  const Ids whole = run(plain).token_ids;
  EXPECT_EQ(completion.token_ids, Ids(whole.begin(), whole.begin() + 4));
}

TEST_F(Sampling, OutOfRangeIsRefused) {
  const auto refused = [&](auto change) {
    SamplingParams params = plain;
    change(params);
    return refusal([&] { params.validate(); });
  };
  EXPECT_HAS(refused([](auto& p) { p.typical_p = 0; }), "typical_p is 0; expected more than 0, at most 1");
  EXPECT_HAS(refused([](auto& p) { p.logprobs = 21; }), "logprobs is 21; expected 0 to 20");
  EXPECT_HAS(refused([](auto& p) { p.prompt_logprobs = -1; }), "prompt_logprobs is -1; expected 0 to 20");
  EXPECT_HAS(refused([](auto& p) { p.bad_words = {""}; }), "bad_words is \"\"; expected strings that are not empty");
  EXPECT_HAS(refused([](auto& p) { p.bad_words_ids = {{}}; }), "bad_words_ids is []; expected words of at least one");
  EXPECT_HAS(refused([](auto& p) { p.bad_words_ids = {{1, -2}}; }), "bad_words_ids is for token -2");
  EXPECT_HAS(refused([](auto& p) { p.allowed_token_ids.emplace(); }), "allowed_token_ids is []; expected at least one");
  EXPECT_HAS(refused([](auto& p) { p.allowed_token_ids = {-3}; }), "allowed_token_ids is for token -3");
  EXPECT_HAS(refused([](auto& p) { p.stop_token_ids = {-1}; }), "stop_token_ids is for token -1");
  EXPECT_HAS(refused([](auto& p) { p.stop_token_ids = {(int64_t{1} << 32) + 5}; }),
             "stop_token_ids is for token 42949");
  SamplingParams params = plain;
  params.allowed_token_ids = {1 << 30};
  EXPECT_HAS(run(params).error, "allowed_token_ids is for token 1073741824; the vocabulary has");
  params = plain;
  params.stop_token_ids = {1 << 30};
  EXPECT_HAS(run(params).error, "stop_token_ids is for token 1073741824; the vocabulary has");
  params.num_beams = 2;
  EXPECT_HAS(run(params).error, "stop_token_ids is for token 1073741824; the vocabulary has");
  // bad_words_ids and min_tokens forbid every token that allowed_token_ids names.
  params = plain;
  params.allowed_token_ids = {7, 9};
  params.bad_words_ids = {{7}};
  params.stop_token_ids = {9};
  EXPECT_EQ(run(params).error, "");
  params.min_tokens = 3;
  EXPECT_EQ(run(params).error,
            "allowed_token_ids has no token that may be drawn: bad words and min_tokens, 3, forbid all of them");
  params = plain;
  params.bad_words_ids = {{3, 1 << 30}};
  EXPECT_HAS(run(params).error, "a bad word has token 1073741824; the vocabulary has");
  params.bad_words_ids.clear();
  for (int64_t i = 0; i < 1025; ++i) params.bad_words_ids.push_back({i / 40, i % 40});
  EXPECT_HAS(run(params).error, "the request has 1025 biases");
}

// --- Beam search.

// Runs a search with an engine, a request for each beam and step.
std::vector<Beam> searched(InferEngine& engine, const Ids& prompt, const BeamOptions& options) {
  BeamSearch search(options);
  while (!search.has_ended()) {
    std::vector<GenerationRequest> requests;
    for (const Beam& beam : search.running()) {
      Ids tokens = prompt;
      tokens.insert(tokens.end(), beam.tokens.begin(), beam.tokens.end());
      requests.push_back(
          {.prompt = tokens, .sampling = {.top_logprobs = static_cast<int32_t>(search.num_candidates())}});
    }
    std::vector<std::vector<TokenLogprob>> next;
    for (const auto& top : first_tops(engine, requests)) next.push_back(top);
    search.advance(next);
  }
  return {search.finished().begin(), search.finished().end()};
}

TEST(Beams, AreThoseOfTransformers) {
  const auto engine = exact_engine();
  for (const io::JsonReader& each : expected().elements("beams")) {
    const io::JsonReader given = *each.optional_object("options");
    const io::JsonValue* const early = given.raw("early_stopping");
    const Ids ends = ids_of(each, "eos");
    const std::vector<Beam> beams = searched(*engine, ids_of(each, "prompt"),
                                             {.num_beams = given.integer("num_beams", 1),
                                              .length_penalty = given.optional_number("length_penalty").value_or(1.0),
                                              .early_stopping = early == nullptr     ? EarlyStopping::no
                                                                : early->is_string() ? EarlyStopping::never
                                                                                     : EarlyStopping::yes,
                                              .max_tokens = 16,
                                              .ends = {ends.begin(), ends.end()}});
    const std::vector<Ids> tokens = lists_of(each, "tokens");
    ASSERT_LE(tokens.size(), beams.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      EXPECT_EQ(beams[i].tokens, tokens[i]) << "beam " << i;
      EXPECT_LE(beams[i].score, beams[i > 0 ? i - 1 : 0].score);
    }
  }
}

TEST(Beams, MinTokensHoldsTheirEndsBack) {
  const auto engine = exact_engine();
  const io::JsonReader each = expected().elements("beams")[1];
  const Ids ends = ids_of(each, "eos"), prompt = ids_of(each, "prompt");
  BeamOptions options{.num_beams = 2, .max_tokens = 16, .ends = {ends.begin(), ends.end()}};
  const auto length = std::ssize(searched(*engine, prompt, options)[0].tokens);
  ASSERT_LT(length, 10);
  options.min_tokens = 10;
  for (const Beam& beam : searched(*engine, prompt, options)) {
    EXPECT_GT(std::ssize(beam.tokens), 10);
    for (size_t i = 0; i < 10; ++i) EXPECT_FALSE(options.ends.contains(beam.tokens[i]));
  }
}

TEST_F(Sampling, BeamsOfATextAreTheLikeliestThatWereFound) {
  SamplingParams params = plain;
  params.num_beams = 4;
  params.n = 3;
  params.logprobs = 2;
  params.max_tokens = 12;
  std::map<size_t, std::string> pieces;
  const std::vector<Completion> beams =
      llm.generate({kPrompt, "The"}, params, [&](size_t i, std::string_view piece) { pieces[i] += piece; });
  ASSERT_EQ(beams.size(), 6u);
  const std::vector<Completion> alone = llm.generate({"The"}, params);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(beams[i].error, "");
    EXPECT_EQ(beams[i].token_ids.size(), 12u);
    EXPECT_EQ(pieces[i], beams[i].text);
    EXPECT_EQ(beams[i].top_logprobs[3].size(), 2u);
    double sum = 0;
    for (const float logprob : beams[i].logprobs) sum += static_cast<double>(logprob);
    EXPECT_DOUBLE_EQ(beams[i].score, sum / 12);
    EXPECT_LE(beams[i].score, beams[i / 3 * 3].score);
    if (i < 3) continue;
    EXPECT_EQ(beams[i].token_ids, alone[i - 3].token_ids);
    EXPECT_EQ(beams[i].logprobs, alone[i - 3].logprobs);
  }
  params.num_beams = 1;
  params.n = 1;
  const Completion greedy = run(params);
  double sum = 0;
  for (const float logprob : greedy.logprobs) sum += static_cast<double>(logprob);
  EXPECT_GE(beams[0].score, sum / 12);
}

TEST_F(Sampling, WhatBeamSearchDoesNotGoWithIsRefused) {
  const auto refused = [&](auto change) {
    SamplingParams params = plain;
    params.num_beams = 3;
    change(params);
    return refusal([&] { params.validate(); });
  };
  EXPECT_HAS(refused([](auto& p) { p.num_beams = 17; }), "num_beams is 17; expected 1 to 16");
  EXPECT_HAS(refused([](auto& p) { p.temperature = 0.5; }), "temperature is 0.5; expected 0 with num_beams 3");
  EXPECT_HAS(refused([](auto& p) { p.n = 4; }), "n is 4; expected at most num_beams, 3");
  EXPECT_HAS(refused([](auto& p) { p.length_penalty = 11; }), "length_penalty is 11; expected -10 to 10");
  EXPECT_HAS(refused([](auto& p) { p.stop = {"x"}; }), "num_beams is 3 and stop is given");
  EXPECT_HAS(refused([](auto& p) { p.repetition_penalty = 2; }), "num_beams is 3 and repetition_penalty is given");
  SamplingParams params = plain;
  params.num_beams = 16;
  params.stop_token_ids = {1, 2, 3, 4, 5};
  EXPECT_HAS(refusal([&] { run(params); }), "num_beams is 16 with 5 tokens that end a text");
}

TEST(Masks, CountWhatTheyAllow) {
  for (const int64_t vocab : {1, 31, 32, 33, 64, 70}) {
    EXPECT_EQ(num_allowed(all_tokens(vocab), vocab), vocab);
    EXPECT_EQ(num_allowed(only_tokens(std::vector<int64_t>{vocab - 1, 0, 0}, vocab), vocab), vocab > 1 ? 2 : 1);
    std::vector<int32_t> behind(static_cast<size_t>((vocab + 31) / 32), 0);
    if (vocab % 32 != 0) behind.back() = static_cast<int32_t>(~uint32_t{0} << (vocab % 32));
    EXPECT_EQ(num_allowed(behind, vocab), 0) << "bits behind the vocabulary say nothing";
  }
}

// The engine refuses what a step says of its rows and cannot be.
TEST(Rows, WhatCannotBeIsRefused) {
  const auto engine = exact_engine();
  const Ids tokens = {1, 2, 3}, block = {0}, next = {4, 5}, mask = {1, 2};
  const auto refused = [&](auto change) {
    StepSequence sequence{.tokens = tokens, .blocks = block};
    change(sequence);
    return refusal([&] { engine->forward(std::span(&sequence, 1)); });
  };
  EXPECT_HAS(refused([&](auto& s) { s.allowed = mask; }), "sequence 0 has a mask of 2 words; 256 tokens take 8");
  EXPECT_HAS(refused([&](auto& s) { s.scored = next, s.scored_begin = 1; }),
             "sequence 0 has scored tokens behind its new tokens 1 to 2; expected places 0 to 1");
  const Ids word = {7};
  const std::vector<Ids> words = {word};
  EXPECT_HAS(refused([&](auto& s) { s.bad_words = words; }), "has a bad word of 1 tokens that ends in token 7");
  const Ids unknown = {256};
  EXPECT_HAS(refused([&](auto& s) { s.scored = unknown; }), "has scored token 256; the vocabulary has 256");
  EXPECT_HAS(refused([&](auto& s) { s.sampling.top_logprobs = 21; }), "top_logprobs is 21; expected 0 to 20");
}

}  // namespace
}  // namespace eadem::engine
