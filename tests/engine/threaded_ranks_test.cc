// SPDX-License-Identifier: Apache-2.0
//
// Ranks that are threads beside the loop of an LLM and its callers, all in one process: what ThreadSanitizer can see of
// them. What ranks compute is the subject of ranks_test.cc, whose ranks are processes.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "eadem/distributed/thread_communicator.h"
#include "eadem/engine/llm.h"
#include "tests/engine/engine_helpers.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace threaded_ranks_test {

const std::string kModel = EADEM_SOURCE_DIR "/assets/stories";

std::shared_ptr<Device> device() { return open_device("cpu", {.num_threads = 1}); }

EngineOptions options_of(const std::shared_ptr<Communicator>& ranks) {
  EngineOptions options;
  options.mode = HardwareMode::accuracy;
  options.cache = PagedKVCacheConfig{.max_batch_size = 3, .max_cache_len = 64};
  options.ranks = ranks;
  return options;
}

// Ranks 1, 2, … on threads, until the group ends.
class FollowingThreads {
 public:
  explicit FollowingThreads(int size) : group_(size) {
    for (int rank = 1; rank < size; ++rank)
      threads_.emplace_back([ranks = group_.communicator(rank)] {
        const auto own = device();
        const std::string ended = test::refusal([&] {
          follow_engines(ranks, own, [&](const CacheConfig& cache, int64_t draft_tokens) {
            EngineOptions options = options_of(ranks);
            options.cache = cache;
            options.draft_tokens = draft_tokens;
            return InferEngine::from_checkpoint(models::open_checkpoint(kModel), own, options);
          });
        });
        EXPECT_HAS(ended, "RankFailed");
      });
  }
  ~FollowingThreads() { end("the test has ended"); }

  void end(const std::string& reason) {
    group_.fail(reason);
    for (std::thread& thread : threads_)
      if (thread.joinable()) thread.join();
  }
  std::shared_ptr<Communicator> communicator() const { return group_.communicator(0); }

 private:
  distributed::ThreadGroup group_;
  std::vector<std::thread> threads_;
};

SamplingParams params(int64_t max_tokens) {
  SamplingParams result;
  result.temperature = 0;
  result.max_tokens = max_tokens;
  result.ignore_eos = true;
  return result;
}

// More callers than sequences that run at once; one of them cancels, and one throws, while the others go on.
TEST(ThreadedRanks, ServeCallersThatCancelAndThrow) {
  const std::vector<std::string> prompts = {"Once upon a time", "Lily and Tom", "The dog", "A big red ball"};
  std::vector<std::vector<int32_t>> expected;
  {
    LLM one(kModel, device(), options_of(nullptr));
    for (const Completion& each : one.generate(prompts, params(16))) expected.push_back(each.token_ids);
  }
  FollowingThreads ranks(2);
  LLM llm(kModel, device(), options_of(ranks.communicator()));
  for (int round = 0; round < 2; ++round) {
    std::vector<std::vector<int32_t>> drawn(prompts.size());
    std::atomic<bool> cancel{false};
    Completion cancelled;
    std::string thrown;
    std::vector<std::thread> callers;
    for (size_t i = 0; i < prompts.size(); ++i)
      callers.emplace_back([&, i] { drawn[i] = llm.generate({prompts[i]}, params(16))[0].token_ids; });
    callers.emplace_back([&] {
      int pieces = 0;
      const auto on_text = [&](size_t, std::string_view) {
        if (++pieces == 2) cancel = true;
      };
      cancelled = llm.generate({"Tell me"}, params(32), on_text, &cancel)[0];
    });
    callers.emplace_back([&] {
      thrown = test::refusal([&] {
        llm.generate({"One day"}, params(32), [](size_t, std::string_view) { throw InvalidArgument("enough"); });
      });
    });
    for (std::thread& caller : callers) caller.join();
    EXPECT_EQ(drawn, expected) << "round " << round;
    EXPECT_EQ(cancelled.finish_reason, FinishReason::cancelled);
    EXPECT_HAS(thrown, "enough");
  }
}

// One caller: of an exception that several callers get, libstdc++ counts the owners where ThreadSanitizer does not see
// it.
TEST(ThreadedRanks, AGroupThatFailsEndsTheCall) {
  FollowingThreads ranks(3);
  LLM llm(kModel, device(), options_of(ranks.communicator()));
  std::atomic<int> pieces{0};
  std::string refused;
  std::thread caller([&] {
    refused = test::refusal([&] {
      for (;;) llm.generate({"Once upon a time"}, params(40), [&](size_t, std::string_view) { ++pieces; });
    });
  });
  while (pieces < 3) std::this_thread::yield();
  ranks.end("rank 2 is lost");
  caller.join();
  EXPECT_HAS(refused, "RankFailed: rank 2 is lost");
}

}  // namespace threaded_ranks_test
}  // namespace eadem::engine
