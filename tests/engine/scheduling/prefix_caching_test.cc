// SPDX-License-Identifier: Apache-2.0
//
// Requests begin with blocks that others have computed: who shares which, and what is evicted.
#include "tests/engine/scheduling/simulation.h"

namespace eadem::engine::scheduling_test {
namespace {

class PrefixCaching : public testing::Test {
 protected:
  static SchedulerLimits limits() {
    SchedulerLimits limits = small_limits();
    limits.prefix_caching = true;
    return limits;
  }

  // Runs a request to its end. Returns how many tokens of its prompt were there.
  int64_t reused(GenerationRequest request) {
    const int64_t before = scheduler.reused_tokens();
    const Ids prompt = request.prompt;
    const int64_t count = request.max_tokens;
    const RequestId id = scheduler.add(std::move(request));
    EXPECT_EQ(simulation.run_all()[id], tokens_alone(prompt, count));
    return scheduler.reused_tokens() - before;
  }

  Simulation simulation{limits()};
  Scheduler& scheduler = simulation.scheduler;
};

TEST_F(PrefixCaching, FullBlocksOfEarlierRequestsAreShared) {
  EXPECT_EQ(reused({.prompt = ids(11), .max_tokens = 1}), 0);
  EXPECT_EQ(reused({.prompt = ids(11), .max_tokens = 1}), 8);
  EXPECT_EQ(reused({.prompt = ids(7), .max_tokens = 1}), 4);
  EXPECT_EQ(reused({.prompt = ids(8), .max_tokens = 1}), 4) << "the last token is computed";
  EXPECT_EQ(reused({.prompt = ids(9), .max_tokens = 1}), 8);
  EXPECT_EQ(reused({.prompt = ids(11, 1), .max_tokens = 1}), 0) << "the same tokens at other positions";
  Ids other = ids(11);
  other[0] = 77;
  EXPECT_EQ(reused({.prompt = other, .max_tokens = 1}), 0) << "the same tokens behind others";
  EXPECT_EQ(scheduler.num_free_blocks(), 16);
  EXPECT_EQ(scheduler.counters().hits, 2 + 1 + 1 + 2);
  EXPECT_EQ(scheduler.counters().misses, 2 + 2 + 2);
}

TEST_F(PrefixCaching, SampledTokensAreShared) {
  const Ids prompt = ids(6);
  EXPECT_EQ(reused({.prompt = prompt, .max_tokens = 8}), 0);  // 13 tokens are computed
  Ids conversation = prompt;
  for (const int32_t token : tokens_alone(prompt, 8)) conversation.push_back(token);
  conversation.push_back(5);
  EXPECT_EQ(reused({.prompt = conversation, .max_tokens = 3}), 12);
}

TEST_F(PrefixCaching, RunningRequestsShareWhatTheyHaveComputed) {
  const RequestId a = scheduler.add({.prompt = ids(10), .max_tokens = 9});
  simulation.step();
  simulation.step();
  const RequestId b = scheduler.add({.prompt = ids(12), .max_tokens = 9});
  const auto plan = scheduler.plan(simulation.cache);
  ASSERT_EQ(plan.size(), 2u);
  EXPECT_EQ(plan[1].cached, 8);
  for (size_t place = 0; place < 2; ++place) {
    EXPECT_EQ(plan[0].blocks[place], plan[1].blocks[place]);
    EXPECT_EQ(scheduler.cache().references(plan[0].blocks[place]), 2);
  }
  EXPECT_NE(plan[0].blocks[2], plan[1].blocks[2]);
  auto tokens = simulation.run_all();
  EXPECT_EQ(tokens[b], tokens_alone(ids(12), 9));
  EXPECT_EQ(scheduler.state(a), std::nullopt);
  EXPECT_EQ(scheduler.num_free_blocks(), 16);
}

TEST(PrefixCachingOfABatch, EqualPromptsAreComputedOnce) {
  SchedulerLimits limits = small_limits();
  limits.prefix_caching = true;
  limits.max_batch_size = 5;
  limits.max_num_batched_tokens = 64;
  Simulation simulation(limits);
  Scheduler& scheduler = simulation.scheduler;
  std::map<RequestId, Ids> prompts;
  for (int64_t length : {14, 14, 14, 11})
    prompts.emplace(scheduler.add({.prompt = ids(length), .max_tokens = 3}), ids(length));
  prompts.emplace(scheduler.add({.prompt = ids(9, 500), .max_tokens = 3}), ids(9, 500));
  simulation.step();
  EXPECT_EQ(scheduler.prompt_tokens(), 14) << "the others wait for the step that computes what they share";
  const auto tokens = simulation.run_all();
  EXPECT_EQ(scheduler.prompt_tokens(), 14 + 2 + 2 + 3 + 9);
  EXPECT_EQ(scheduler.reused_tokens(), 12 + 12 + 8);
  for (const auto& [id, prompt] : prompts) {
    const Ids alone = tokens_alone(prompt, 3);
    if (id != 1) {
      EXPECT_EQ(tokens.at(id), alone);
    }
  }
  EXPECT_EQ(scheduler.num_free_blocks(), 16);
}

TEST_F(PrefixCaching, OneSaltDoesNotShareWithAnother) {
  EXPECT_EQ(reused({.prompt = ids(11), .max_tokens = 1, .cache_salt = "a"}), 0);
  EXPECT_EQ(reused({.prompt = ids(11), .max_tokens = 1, .cache_salt = "b"}), 0);
  EXPECT_EQ(reused({.prompt = ids(11), .max_tokens = 1}), 0);
  EXPECT_EQ(reused({.prompt = ids(11), .max_tokens = 1, .cache_salt = "a"}), 8);
}

TEST_F(PrefixCaching, TheLeastRecentlyUsedBlocksAreEvicted) {
  reused({.prompt = ids(28), .max_tokens = 1});       // 7 blocks
  reused({.prompt = ids(28, 100), .max_tokens = 1});  // 7 others
  EXPECT_EQ(scheduler.counters().evictions, 0);
  EXPECT_EQ(reused({.prompt = ids(6), .max_tokens = 1}), 4);
  reused({.prompt = ids(16, 200), .max_tokens = 1});  // two of its four blocks have to be those of the first
  EXPECT_EQ(scheduler.counters().evictions, 2);
  EXPECT_EQ(reused({.prompt = ids(28), .max_tokens = 1}), 20) << "the end of a sequence goes before its beginning";
  EXPECT_EQ(reused({.prompt = ids(16, 200), .max_tokens = 1}), 12);
}

TEST_F(PrefixCaching, APreemptedRequestFindsItsBlocks) {
  scheduler.add({.prompt = ids(10), .max_tokens = 20});
  scheduler.add({.prompt = ids(10, 100), .max_tokens = 20});
  for (int step = 0; step < 6; ++step) simulation.step();
  scheduler.add({.prompt = ids(3, 200), .max_tokens = 2, .priority = 1});
  scheduler.add({.prompt = ids(3, 300), .max_tokens = 2, .priority = 1});
  simulation.step();
  EXPECT_EQ(scheduler.state(2), RequestState::preempted);
  const int64_t computed = scheduler.prompt_tokens();
  auto tokens = simulation.run_all();
  EXPECT_LE(scheduler.prompt_tokens() - computed, 6 + 4) << "less than a block is computed again";
  EXPECT_EQ(scheduler.reused_tokens(), 0) << "these are no tokens of the prompt that others computed";
}

TEST_F(PrefixCaching, NamesEndWithTheContents) {
  reused({.prompt = ids(11), .max_tokens = 1});
  simulation.cache.clear();
  EXPECT_EQ(reused({.prompt = ids(11), .max_tokens = 1}), 0);
  EXPECT_EQ(reused({.prompt = ids(11), .max_tokens = 1}), 8);
}

// A conversation goes on in the middle of a block that others read: it leaves the block to them.
TEST_F(PrefixCaching, NobodyWritesToABlockThatOthersRead) {
  reused({.prompt = ids(14), .max_tokens = 1, .keep = true});
  const RequestId reader = scheduler.add({.prompt = ids(14), .max_tokens = 6});
  simulation.step();
  Ids edited = ids(14);
  edited[10] = 500;
  const RequestId writer = scheduler.add({.prompt = edited, .max_tokens = 6, .keep = true});
  const auto plan = scheduler.plan(simulation.cache);
  ASSERT_EQ(plan.size(), 2u);
  EXPECT_EQ(plan[1].cached, 8);
  auto tokens = simulation.run_all();
  EXPECT_EQ(tokens[writer], tokens_alone(edited, 6));
  EXPECT_EQ(scheduler.state(reader), std::nullopt);
  // Alone it goes on behind the last token that is the same.
  Ids again = edited;
  again[9] = 600;
  EXPECT_EQ(reused({.prompt = again, .max_tokens = 1, .keep = true}), 9);
}

}  // namespace
}  // namespace eadem::engine::scheduling_test
