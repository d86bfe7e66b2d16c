// SPDX-License-Identifier: Apache-2.0
//
// Many callers of one LLM: their requests share steps, each gets what it would get alone, and what ends one of them
// leaves the others as they are.
#include <gtest/gtest.h>

#include <future>
#include <stdexcept>
#include <thread>

#include "eadem/engine/llm.h"

namespace eadem::engine {
namespace {

class ManyCallers : public testing::Test {
 protected:
  ManyCallers() : llm(EADEM_SOURCE_DIR "/assets/stories", open_device("cpu", {.num_threads = 2}), options()) {}

  static EngineOptions options() {
    EngineOptions options;
    options.cache = PagedKVCacheConfig{};
    options.max_num_batched_tokens = 16;
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

  static void expect_same(const Completion& a, const Completion& b) {
    EXPECT_EQ(a.text, b.text);
    EXPECT_EQ(a.token_ids, b.token_ids);
    EXPECT_EQ(a.logprobs, b.logprobs);  // to the bit
    EXPECT_EQ(a.finish_reason, b.finish_reason);
    EXPECT_EQ(a.error, b.error);
  }

  LLM llm;
};

// Each callback waits for progress of the other caller, which is made only if the other caller drives meanwhile, and if
// the step that it runs has both of them in it.
TEST_F(ManyCallers, ShareStepsWhileCallbacksBlock) {
  const Completion alone_a = llm.generate({"Once upon a time"}, params(30))[0];
  const Completion alone_b = llm.generate({"The dog"}, params(30, 0.8))[0];
  std::vector<int64_t> rows;
  llm.engine().hooks().register_hook(
      "sample.token", [&](const std::string&, const TensorView& token, int) { rows.push_back(token.shape[0]); });
  std::promise<void> a_began, b_began, a_went_on;
  int a_pieces = 0, b_pieces = 0;
  std::thread other([&] {
    a_began.get_future().wait();
    expect_same(llm.generate({"The dog"}, params(30, 0.8),
                             [&](size_t, std::string_view) {
                               if (++b_pieces == 1) b_began.set_value();
                               if (b_pieces == 3) a_went_on.get_future().wait();
                             })[0],
                alone_b);
  });
  expect_same(llm.generate({"Once upon a time"}, params(30),
                           [&](size_t, std::string_view) {
                             if (++a_pieces == 1) {
                               a_began.set_value();
                               b_began.get_future().wait();
                             }
                             if (a_pieces == 4) a_went_on.set_value();
                           })[0],
              alone_a);
  other.join();
  EXPECT_GT(std::count(rows.begin(), rows.end(), 2), 0);
}

TEST_F(ManyCallers, GetWhatTheyWouldGetAlone) {
  constexpr size_t kCallers = 6;
  const std::vector<std::string> prompts = {"Once", "The dog and the cat went to the park and", "A", "Lily", "Tom",
                                            "My"};
  std::vector<std::vector<Completion>> alone;
  const auto params_of = [](size_t caller) {
    SamplingParams result = params(10 + 7 * static_cast<int64_t>(caller), caller % 2 == 0 ? 0.0 : 0.9);
    if (caller == 3) result.repetition_penalty = 1.3;
    if (caller == 4) result.stop = {"a "};
    return result;
  };
  const auto prompts_of = [&](size_t caller) {
    return std::vector<std::string>{prompts[caller], prompts[(caller + 1) % kCallers]};
  };
  for (size_t caller = 0; caller < kCallers; ++caller)
    alone.push_back(llm.generate(prompts_of(caller), params_of(caller)));
  std::vector<std::thread> threads;
  for (size_t caller = 0; caller < kCallers; ++caller)
    threads.emplace_back([&, caller] {
      for (int repeat = 0; repeat < 4; ++repeat) {
        std::vector<std::string> streamed(2);
        const LLM::OnText on_text = [&](size_t request, std::string_view piece) { streamed[request] += piece; };
        const auto completions =
            llm.generate(prompts_of(caller), params_of(caller), repeat % 2 == 0 ? on_text : LLM::OnText());
        for (size_t i = 0; i < 2; ++i) {
          expect_same(completions[i], alone[caller][i]);
          if (repeat % 2 == 0) {
            EXPECT_EQ(streamed[i], completions[i].text);
          }
        }
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST_F(ManyCallers, ACallbackThatThrowsEndsItsCallAlone) {
  const Completion alone = llm.generate({"Once"}, params(60))[0];
  std::promise<void> began;
  int pieces = 0;
  std::thread other([&] {
    began.get_future().wait();
    EXPECT_THROW(llm.generate({"The dog", "A"}, params(60),
                              [&](size_t, std::string_view) {
                                if (++pieces == 5) throw std::runtime_error("enough");
                              }),
                 std::runtime_error);
    EXPECT_EQ(pieces, 5);
  });
  bool first = true;
  expect_same(llm.generate({"Once"}, params(60),
                           [&](size_t, std::string_view) {
                             if (std::exchange(first, false)) began.set_value();
                           })[0],
              alone);
  other.join();
  expect_same(llm.generate({"Once"}, params(60))[0], alone);
}

TEST_F(ManyCallers, ACancelledCallEndsAlone) {
  const Completion alone = llm.generate({"Once"}, params(60))[0];
  std::promise<void> began, cancelled;
  std::atomic<bool> cancel = false;
  std::thread other([&] {
    int pieces = 0;
    const Completion victim = llm.generate(
        {"The dog"}, params(200),
        [&](size_t, std::string_view) {
          if (++pieces == 1) began.set_value();
          while (pieces == 2 && !cancel) std::this_thread::yield();  // the other caller drives meanwhile
        },
        &cancel)[0];
    EXPECT_EQ(victim.finish_reason, FinishReason::cancelled);
    EXPECT_EQ(victim.error, "");
    cancelled.set_value();
  });
  began.get_future().wait();
  int pieces = 0;
  expect_same(llm.generate({"Once"}, params(60),
                           [&](size_t, std::string_view) {
                             if (++pieces != 3) return;
                             cancel = true;
                             cancelled.get_future().wait();  // which needs nobody but itself
                           })[0],
              alone);
  other.join();
}

TEST_F(ManyCallers, AStepThatThrowsEndsTheCallsInItAndNoLaterOne) {
  const Completion alone = llm.generate({"Once"}, params(20))[0];
  int samples = 0;
  const auto hook = llm.engine().hooks().register_hook("sample.token", [&](const std::string&, const TensorView&, int) {
    if (++samples == 5) throw std::runtime_error("a hook");
  });
  std::string shown;
  EXPECT_THROW(llm.generate({"Once", "A"}, params(20), [&](size_t, std::string_view piece) { shown += piece; }),
               std::runtime_error);
  EXPECT_NE(shown, "");
  llm.engine().hooks().remove(hook);
  expect_same(llm.generate({"Once"}, params(20))[0], alone);
}

TEST_F(ManyCallers, ACallbackMayGenerate) {
  const Completion alone = llm.generate({"Once"}, params(10))[0];
  const Completion inner_alone = llm.generate({"A"}, params(10))[0];
  bool first = true;
  expect_same(llm.generate({"Once"}, params(10),
                           [&](size_t, std::string_view) {
                             if (std::exchange(first, false))
                               expect_same(llm.generate({"A"}, params(10))[0], inner_alone);
                           })[0],
              alone);
}

TEST_F(ManyCallers, NoPromptsAndRefusedPromptsEndAtOnce) {
  EXPECT_TRUE(llm.generate(std::vector<std::string>{}, params(10)).empty());
  std::string longest;
  for (int i = 0; i < 20000; ++i) longest += "word ";
  EXPECT_EQ(llm.generate({longest}, params(10))[0].finish_reason, FinishReason::error);
  EXPECT_EQ(llm.last_stats().prompt_tokens, 0);
}

TEST_F(ManyCallers, SharePrefixesThatAnyOfThemComputed) {
  const std::vector<int32_t> prompt =
      llm.tokenizer().encode("Once upon a time there was a little dog who lived in a park");
  ASSERT_TRUE(llm.engine().reuses_prefixes());
  const int64_t block = llm.engine().cache_spec().block_size;
  std::vector<int32_t> longer = prompt;
  while (std::ssize(longer) < 3 * block + 2) longer.push_back(longer[longer.size() % 7]);
  const Completion first = llm.generate_ids({longer}, params(10))[0];
  EXPECT_EQ(first.cached_tokens, 0);
  std::vector<std::thread> threads;
  for (int caller = 0; caller < 4; ++caller)
    threads.emplace_back([&] {
      const Completion again = llm.generate_ids({longer}, params(10))[0];
      expect_same(again, first);
      EXPECT_EQ(again.cached_tokens, 3 * block);
      EXPECT_GE(llm.cache_counters().hits, 3);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(llm.cache_counters().hits, 12);
  EXPECT_EQ(llm.generate_ids({longer}, params(10))[0].cached_tokens, 3 * block);
  EXPECT_EQ(llm.last_stats().reused_tokens, 3 * block);
}

TEST_F(ManyCallers, NothingOutlivesTheParametersThatItWasComputedWith) {
  std::vector<int32_t> prompt = llm.tokenizer().encode("Once upon a time there was a little dog who lived in a park");
  while (std::ssize(prompt) < 2 * llm.engine().cache_spec().block_size) prompt.push_back(prompt[prompt.size() % 7]);
  const Completion trained = llm.continue_ids(prompt, params(10));
  llm.generate_ids({prompt}, params(10));
  EXPECT_GT(llm.generate_ids({prompt}, params(10))[0].cached_tokens, 0);
  std::vector<std::pair<std::string, Tensor>> parameters = llm.engine().state_dict();
  llm.engine().load_random(3);
  const Completion random = llm.continue_ids(prompt, params(10)), again = llm.generate_ids({prompt}, params(10))[0];
  EXPECT_EQ(random.cached_tokens, 0);
  EXPECT_NE(random.token_ids, trained.token_ids);
  expect_same(again, random);
  for (const auto& [name, tensor] : parameters) llm.engine().load_param(name, tensor.view);
  const Completion restored = llm.generate_ids({prompt}, params(10))[0];
  EXPECT_EQ(restored.cached_tokens, 0);
  expect_same(restored, trained);
}

TEST_F(ManyCallers, ConversationsOfSeveralCallersAreRight) {
  const std::vector<int32_t> a = llm.tokenizer().encode("Once upon a time there was"),
                             b = llm.tokenizer().encode("The dog saw");
  const Completion alone_a = llm.generate_ids({a}, params(25))[0], alone_b = llm.generate_ids({b}, params(25))[0];
  const auto talk = [&](const std::vector<int32_t>& conversation, const Completion& expected) {
    for (int turn = 0; turn < 5; ++turn) expect_same(llm.continue_ids(conversation, params(25)), expected);
  };
  std::thread other([&] { talk(b, alone_b); });
  talk(a, alone_a);
  other.join();
}

}  // namespace
}  // namespace eadem::engine
