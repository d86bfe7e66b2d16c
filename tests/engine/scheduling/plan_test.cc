// SPDX-License-Identifier: Apache-2.0
//
// What a scheduler plans, and how requests change state.
#include "tests/engine/scheduling/simulation.h"

namespace eadem::engine::scheduling_test {
namespace {

TEST(SchedulerPlan, AnIdleSchedulerPlansNothing) {
  Simulation simulation(small_limits());
  EXPECT_TRUE(simulation.scheduler.plan(simulation.cache).empty());
  EXPECT_TRUE(simulation.scheduler.is_idle());
}

TEST(SchedulerPlan, ARequestPassesThroughItsStates) {
  Simulation simulation(small_limits());
  Scheduler& scheduler = simulation.scheduler;
  const RequestId id = scheduler.add({.prompt = ids(11), .max_tokens = 3});
  EXPECT_EQ(scheduler.state(id), RequestState::waiting);

  auto plan = scheduler.plan(simulation.cache);
  EXPECT_EQ(scheduler.state(id), RequestState::prefilling);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(Ids(plan[0].tokens.begin(), plan[0].tokens.end()), ids(8));
  EXPECT_EQ(plan[0].cached, 0);
  EXPECT_FALSE(plan[0].samples);
  EXPECT_EQ(plan[0].blocks.size(), 3u);  // of the 11 tokens; those that are fed back take more as they come
  EXPECT_EQ(plan[0].sampling.prompt_length, 11);
  auto events = scheduler.commit({}, {});
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].computed, 8);
  EXPECT_FALSE(events[0].sampled);
  EXPECT_EQ(events[0].state, RequestState::prefilling);

  simulation.cache.write(std::vector<int32_t>{0, 1, 2, 3}, 0, ids(11));  // nothing depends on it
  plan = scheduler.plan(simulation.cache);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(Ids(plan[0].tokens.begin(), plan[0].tokens.end()), ids(3, 8));
  EXPECT_EQ(plan[0].cached, 8);
  EXPECT_TRUE(plan[0].samples);
  events = scheduler.commit(Ids{42}, std::vector<float>{-0.5f});
  EXPECT_EQ(events[0].state, RequestState::decoding);
  EXPECT_FALSE(events[0].decoded);
  EXPECT_TRUE(events[0].sampled);
  EXPECT_EQ(events[0].token, 42);
  EXPECT_EQ(events[0].logprob, -0.5f);

  plan = scheduler.plan(simulation.cache);
  EXPECT_EQ(Ids(plan[0].tokens.begin(), plan[0].tokens.end()), Ids{42});
  EXPECT_EQ(plan[0].cached, 11);
  events = scheduler.commit(Ids{43}, std::vector<float>{-0.5f});
  EXPECT_EQ(events[0].state, RequestState::decoding);
  EXPECT_TRUE(events[0].decoded);
  plan = scheduler.plan(simulation.cache);
  EXPECT_EQ(plan[0].cached, 12);
  events = scheduler.commit(Ids{44}, std::vector<float>{-0.5f});
  EXPECT_EQ(events[0].state, RequestState::finished);
  EXPECT_EQ(scheduler.state(id), std::nullopt);
  EXPECT_TRUE(scheduler.is_idle());
  EXPECT_EQ(scheduler.count(RequestState::finished), 1);
  EXPECT_EQ(scheduler.num_free_blocks(), 16);
  EXPECT_EQ(scheduler.prompt_tokens(), 11);
  EXPECT_EQ(scheduler.decode_tokens(), 2);
}

TEST(SchedulerPlan, DecodingGoesBeforePromptsAndTheBudgetIsKept) {
  Simulation simulation(small_limits());
  Scheduler& scheduler = simulation.scheduler;
  scheduler.add({.prompt = ids(2), .max_tokens = 9});
  simulation.step();
  scheduler.add({.prompt = ids(20, 100), .max_tokens = 2});
  const RequestId last = scheduler.add({.prompt = ids(3, 200), .max_tokens = 2});
  const auto plan = scheduler.plan(simulation.cache);
  ASSERT_EQ(plan.size(), 2u);  // the budget is used up before the third
  EXPECT_EQ(plan[0].tokens.size(), 1u);
  EXPECT_TRUE(plan[0].samples);
  EXPECT_EQ(plan[1].tokens.size(), 7u);
  EXPECT_FALSE(plan[1].samples);
  EXPECT_EQ(scheduler.state(last), RequestState::waiting);
}

TEST(SchedulerPlan, APlanThatIsNotCommittedChangesNothing) {
  Simulation simulation(small_limits());
  Scheduler& scheduler = simulation.scheduler;
  scheduler.add({.prompt = ids(11), .max_tokens = 3});
  scheduler.add({.prompt = ids(5, 50), .max_tokens = 3});
  for (int step = 0; step < 4; ++step) {
    const auto first = scheduler.plan(simulation.cache);
    const std::vector<StepSequence> before(first.begin(), first.end());
    const auto second = scheduler.plan(simulation.cache);
    ASSERT_EQ(second.size(), before.size());
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_EQ(second[i].tokens.data(), before[i].tokens.data());
      EXPECT_EQ(second[i].tokens.size(), before[i].tokens.size());
      EXPECT_EQ(second[i].cached, before[i].cached);
      EXPECT_EQ(second[i].blocks.data(), before[i].blocks.data());
    }
    simulation.step();
  }
}

TEST(SchedulerPlan, RequestsStartInOrderAsRoomAllows) {
  SchedulerLimits limits = small_limits();
  limits.max_num_batched_tokens = 64;
  Simulation simulation(limits);
  Scheduler& scheduler = simulation.scheduler;
  const RequestId large = scheduler.add({.prompt = ids(29), .max_tokens = 4});        // 8 blocks
  const RequestId larger = scheduler.add({.prompt = ids(30, 100), .max_tokens = 3});  // 8 blocks
  const RequestId small = scheduler.add({.prompt = ids(1, 200), .max_tokens = 1});    // 1 block
  scheduler.plan(simulation.cache);
  EXPECT_EQ(scheduler.num_free_blocks(), 0);
  EXPECT_EQ(scheduler.state(small), RequestState::waiting);
  scheduler.end(large, RequestState::cancelled);
  scheduler.plan(simulation.cache);
  EXPECT_EQ(scheduler.state(larger), RequestState::prefilling);
  EXPECT_EQ(scheduler.state(small), RequestState::prefilling);
  EXPECT_EQ(scheduler.num_free_blocks(), 7);
}

TEST(SchedulerPlan, TheBatchIsBounded) {
  Simulation simulation(small_limits());
  for (int i = 0; i < 5; ++i) simulation.scheduler.add({.prompt = ids(1), .max_tokens = 2});
  EXPECT_EQ(simulation.scheduler.plan(simulation.cache).size(), 3u);
  EXPECT_EQ(simulation.scheduler.count(RequestState::waiting), 2);
}

TEST(SchedulerPlan, ATokenBelowZeroFailsItsRequestAlone) {
  Simulation simulation(small_limits());
  Scheduler& scheduler = simulation.scheduler;
  const RequestId bad = scheduler.add({.prompt = ids(1), .max_tokens = 5});
  const RequestId good = scheduler.add({.prompt = ids(1), .max_tokens = 5});
  scheduler.plan(simulation.cache);
  const auto events = scheduler.commit(Ids{-1, 7}, std::vector<float>{0, 0});
  EXPECT_EQ(events[0].state, RequestState::failed);
  EXPECT_EQ(events[1].state, RequestState::decoding);
  EXPECT_EQ(scheduler.state(bad), std::nullopt);
  EXPECT_EQ(scheduler.state(good), RequestState::decoding);
  EXPECT_EQ(scheduler.count(RequestState::failed), 1);
}

TEST(SchedulerPlan, WhatCanNeverRunIsRefused) {
  Scheduler scheduler(small_limits());
  const auto refusal = [&](GenerationRequest request) -> std::string {
    try {
      scheduler.add(std::move(request));
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(refusal({}).find("the prompt has no tokens"), std::string::npos);
  EXPECT_NE(refusal({.prompt = ids(33)}).find("33 tokens; the context holds 32 (model: 64)"), std::string::npos);
  EXPECT_NE(refusal({.prompt = {1, 1000}}).find("token 1 of the prompt is 1000; the vocabulary has 1000"),
            std::string::npos);
  EXPECT_EQ(refusal({.prompt = ids(32), .max_tokens = int64_t{1} << 40}), "");
}

}  // namespace
}  // namespace eadem::engine::scheduling_test
