// SPDX-License-Identifier: Apache-2.0
//
// Text in, text out: stop strings, special tokens in prompts, callbacks that throw.
#include <gtest/gtest.h>

#include <stdexcept>

#include "eadem/engine/llm.h"
#include "tests/engine/engine_helpers.h"

namespace eadem::engine {
namespace {

// Returns the text that is shown of `text`, fed in pieces of `size` bytes.
std::string shown(const std::vector<std::string>& stops, const std::string& text, size_t size,
                  bool* stopped = nullptr) {
  StopWatcher watcher(stops);
  std::string result;
  for (size_t at = 0; at < text.size() && !watcher.stopped(); at += size) result += watcher.feed(text.substr(at, size));
  if (!watcher.stopped()) result += watcher.finish();
  if (stopped != nullptr) *stopped = watcher.stopped();
  return result;
}

struct StopCase {
  std::vector<std::string> stops;
  std::string text, expected;
  bool stopped = true;
};

TEST(StopWatcher, ShowsTheTextBeforeTheFirstStopHoweverItIsCut) {
  const std::vector<StopCase> cases = {
      {{"END"}, "some text END more", "some text "},
      {{"END"}, "ENEND", "EN"},                       // the stop begins inside what looked like one
      {{"aab"}, "aaaab", "aa"},                       //
      {{"abab"}, "aababab", "a"},                     // overlaps itself
      {{"bc", "abcd"}, "xabcd", "xa"},                // the shorter is complete first
      {{"abcd", "cd"}, "xabcd", "x"},                 // both end here: the one that begins first
      {{"ab", "abc"}, "xabc", "x"},                   // one begins the other
      {{"x", "yx"}, "ayx", "a"},                      //
      {{"aaa", "ab"}, "aaab", ""},                    //
      {{"END"}, "almost EN", "almost EN", false},     // held back, and shown at the end
      {{"abc", "bcd"}, "abxbc", "abxbc", false},      //
      {{"\n\n"}, "one\n two\n\nthree", "one\n two"},  //
      {{"\xc3\xa9"}, "caf\xc3\xa9!", "caf"},          // across the bytes of one character
      {{}, "anything", "anything", false},
  };
  for (const StopCase& c : cases)
    for (size_t size = 1; size <= c.text.size(); ++size) {
      bool stopped = false;
      EXPECT_EQ(shown(c.stops, c.text, size, &stopped), c.expected) << c.text << " in pieces of " << size;
      EXPECT_EQ(stopped, c.stopped) << c.text << " in pieces of " << size;
    }
}

TEST(StopWatcher, NothingIsShownThatAStopMayTakeBack) {
  const std::vector<std::string> stops = {"</s>", "User:"};
  StopWatcher watcher(stops);
  EXPECT_EQ(watcher.feed("Hi <"), "Hi ");
  EXPECT_EQ(watcher.feed("/"), "");
  EXPECT_EQ(watcher.feed("b>"), "</b>");
  EXPECT_EQ(watcher.feed("Us"), "");
  EXPECT_EQ(watcher.feed("er: x"), "");
  EXPECT_TRUE(watcher.stopped());
  EXPECT_EQ(watcher.feed("more"), "");
}

const std::string kStories = EADEM_SOURCE_DIR "/assets/stories";

TEST(Llm, SpecialTokensOfAPromptAreTextUnlessAskedFor) {
  LLM llm(kStories, open_device("cpu", {.num_threads = 1}), {});
  const io::Tokenizer& tokenizer = llm.tokenizer();
  ASSERT_TRUE(tokenizer.eos());
  const std::string special(tokenizer.token_text(*tokenizer.eos()));
  const std::string prompt = "Once" + special + " upon";
  SamplingParams params;
  params.max_tokens = 1;
  const auto tokens_of_prompt = [&](bool parse_special) {
    return llm.generate({prompt}, params, {}, nullptr, parse_special)[0].prompt_tokens;
  };
  const auto as_text = tokenizer.encode(prompt, {.parse_special = false});
  EXPECT_EQ(std::count(as_text.begin(), as_text.end(), *tokenizer.eos()), 0);
  EXPECT_EQ(tokens_of_prompt(false), std::ssize(as_text));
  EXPECT_EQ(tokens_of_prompt(true), std::ssize(tokenizer.encode(prompt, {.parse_special = true})));
  EXPECT_LT(tokens_of_prompt(true), tokens_of_prompt(false));
}

TEST(Llm, AnExceptionOfTheCallbackComesOutAndLeavesNothingBehind) {
  EngineOptions options;
  options.cache = PagedKVCacheConfig{};
  LLM llm(kStories, open_device("cpu", {.num_threads = 1}), options);
  EXPECT_GT(llm.engine().max_batch_size(), 1);
  SamplingParams params;
  params.temperature = 0;
  params.max_tokens = 20;
  const std::vector<std::string> prompts = {"Once", "The dog", "A"};
  const std::vector<Completion> expected = llm.generate(prompts, params);
  int pieces = 0;
  EXPECT_THROW(llm.generate(prompts, params,
                            [&](size_t, std::string_view) {
                              if (++pieces == 5) throw std::runtime_error("enough");
                            }),
               std::runtime_error);
  EXPECT_EQ(pieces, 5);
  const std::vector<Completion> again = llm.generate(prompts, params);
  for (size_t i = 0; i < prompts.size(); ++i) EXPECT_EQ(again[i].text, expected[i].text);
}

TEST(Llm, NAnswersShareTheirPrompt) {
  EngineOptions options;
  options.cache = PagedKVCacheConfig{};
  LLM llm(kStories, open_device("cpu", {.num_threads = 1}), options);
  const int64_t block = llm.engine().cache_spec().block_size;
  const std::vector<int32_t> prompt = tokens_of(2 * block + 3, llm.engine().model().info().vocab, 1);
  SamplingParams params;
  params.seed = 5;
  params.max_tokens = 9;
  params.n = 4;
  params.ignore_eos = true;
  const std::vector<Completion> answers = llm.generate_ids({prompt, {1, 2}}, params);
  ASSERT_EQ(answers.size(), 8u);
  const GenerationStats stats = llm.last_stats();
  EXPECT_EQ(stats.prompt_tokens, 2 * block + 3 + 3 * 3 + 4 * 2) << "each answer computes the block that is not full";
  EXPECT_EQ(stats.reused_tokens, 3 * 2 * block);
  params.n = 1;
  LLM other(kStories, open_device("cpu", {.num_threads = 1}), {});
  for (size_t i = 0; i < answers.size(); ++i) {
    EXPECT_EQ(answers[i].seed, 5 + static_cast<int64_t>(i) % 4);
    params.seed = answers[i].seed;
    const Completion alone = other.generate_ids({i < 4 ? prompt : std::vector<int32_t>{1, 2}}, params)[0];
    EXPECT_EQ(answers[i].token_ids, alone.token_ids);
    EXPECT_EQ(answers[i].logprobs, alone.logprobs);
  }
  EXPECT_NE(answers[0].token_ids, answers[1].token_ids);
  params.n = 2;
  EXPECT_THROW(llm.continue_ids(prompt, params), InvalidArgument);
  params.n = 0;
  EXPECT_THROW(llm.generate_ids({prompt}, params), InvalidArgument);
  EXPECT_THROW(llm.generate({"Once"}, params), InvalidArgument);
}

TEST(Llm, ARefusedPromptLeavesTheOthersAlone) {
  LLM llm(kStories, open_device("cpu", {.num_threads = 1}), {});
  SamplingParams params;
  params.temperature = 0;
  params.max_tokens = 5;
  std::string longest;
  for (int i = 0; i < 5000; ++i) longest += "word ";
  const std::vector<Completion> completions = llm.generate({"Once", longest}, params);
  EXPECT_EQ(completions[0].error, "");
  EXPECT_EQ(completions[1].finish_reason, FinishReason::error);
  EXPECT_NE(completions[1].error, "");
}

}  // namespace
}  // namespace eadem::engine
