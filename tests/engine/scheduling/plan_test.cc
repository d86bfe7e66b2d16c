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

// Two requests decode; the step behind the planned one is planned before that one is committed.
class AheadOfCommit : public testing::Test {
 protected:
  AheadOfCommit() : simulation(small_limits()), scheduler(simulation.scheduler) {}

  // Both have one token of their answer.
  void begin(const GenerationRequest& request = {.prompt = ids(3), .max_tokens = 9}) {
    a = scheduler.add(request);
    b = scheduler.add({.prompt = ids(2, 50), .max_tokens = 9});
    simulation.step();
    ASSERT_EQ(scheduler.plan(simulation.cache).size(), 2u);
  }

  Simulation simulation;
  Scheduler& scheduler;
  RequestId a = 0, b = 0;
  std::vector<float> logprobs = {0, 0};
};

TEST_F(AheadOfCommit, SequencesGoOnWithTheRowsOfTheStepBefore) {
  begin();
  const auto ahead = scheduler.plan_ahead();
  ASSERT_EQ(ahead.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(ahead[i].row, static_cast<int32_t>(i));
    EXPECT_EQ(ahead[i].tokens.size(), 1u);
  }
  EXPECT_EQ(ahead[0].cached, 4);
  EXPECT_EQ(ahead[0].blocks.size(), 2u);  // the fifth token has a block of its own
  EXPECT_EQ(ahead[1].cached, 3);
  EXPECT_EQ(ahead[1].blocks.size(), 1u);
  EXPECT_FALSE(scheduler.commit(Ids{7, 8}, logprobs).empty());
  ASSERT_TRUE(scheduler.follow_ahead());
  EXPECT_EQ(scheduler.planned()[0], a);
  const auto events = scheduler.commit(Ids{17, 18}, logprobs);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].token, 17);
  EXPECT_TRUE(events[0].decoded);
  EXPECT_FALSE(scheduler.follow_ahead());
  EXPECT_EQ(scheduler.plan(simulation.cache)[0].cached, 5);
}

TEST_F(AheadOfCommit, WhoHasEndedIsLeftOutAndTheOtherGoesOn) {
  begin();
  ASSERT_EQ(scheduler.plan_ahead().size(), 2u);
  scheduler.commit(Ids{-1, 8}, logprobs);  // a fails
  ASSERT_TRUE(scheduler.follow_ahead());
  EXPECT_EQ(scheduler.planned()[0], 0);
  EXPECT_EQ(scheduler.planned()[1], b);
  EXPECT_TRUE(scheduler.plan_ahead().empty());  // the rows of the next step would be others
  const auto events = scheduler.commit(Ids{5, 18}, logprobs);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].id, b);
  EXPECT_EQ(events[0].token, 18);
  scheduler.plan(simulation.cache);
  ASSERT_EQ(scheduler.plan_ahead().size(), 1u);
  scheduler.commit(Ids{9}, std::vector<float>{0});
  scheduler.end(b, RequestState::cancelled);
  EXPECT_TRUE(scheduler.is_idle());
  EXPECT_TRUE(scheduler.has_ahead());
  ASSERT_TRUE(scheduler.follow_ahead());
  EXPECT_TRUE(scheduler.commit(Ids{10}, std::vector<float>{0}).empty());
  EXPECT_EQ(scheduler.num_free_blocks(), 16);
}

TEST_F(AheadOfCommit, NothingIsPlannedWhereTheStepMayBeAnother) {
  begin({.prompt = ids(3), .max_tokens = 2});
  EXPECT_TRUE(scheduler.plan_ahead().empty()) << "one ends with its second token";
  scheduler.commit(Ids{7, 8}, logprobs);
  scheduler.plan(simulation.cache);
  EXPECT_EQ(scheduler.plan_ahead().size(), 1u);
  scheduler.forget_ahead();
  scheduler.add({.prompt = ids(20, 100), .max_tokens = 2});
  scheduler.plan(simulation.cache);
  EXPECT_TRUE(scheduler.plan_ahead().empty()) << "a prompt is not read to its end";
}

TEST_F(AheadOfCommit, NothingIsPlannedForWhoStarts) {
  begin();
  const RequestId next = scheduler.add({.prompt = ids(2, 100), .max_tokens = 2});
  EXPECT_TRUE(scheduler.plan_ahead().empty()) << "there is no planned step";
  scheduler.plan(simulation.cache);
  EXPECT_EQ(scheduler.state(next), RequestState::prefilling);
  simulation.step();
  scheduler.add({.prompt = ids(2, 200), .max_tokens = 2});
  scheduler.plan(simulation.cache);
  EXPECT_TRUE(scheduler.plan_ahead().empty()) << "the third ends with this step";
}

TEST_F(AheadOfCommit, NothingIsPlannedWhereTheHostNeedsTheToken) {
  GenerationRequest penalized{.prompt = ids(3), .max_tokens = 9};
  penalized.sampling.frequency_penalty = 1;
  begin(penalized);
  EXPECT_TRUE(scheduler.plan_ahead().empty());
  scheduler.end(a, RequestState::cancelled);
  a = scheduler.add({.prompt = ids(3), .bad_words = {{1, 2}}, .max_tokens = 9});
  simulation.step();
  scheduler.plan(simulation.cache);
  EXPECT_TRUE(scheduler.plan_ahead().empty());
  scheduler.end(a, RequestState::cancelled);
  a = scheduler.add({.prompt = ids(3), .processor = [](auto, auto) {}, .max_tokens = 9});
  simulation.step();
  scheduler.plan(simulation.cache);
  EXPECT_TRUE(scheduler.plan_ahead().empty());
  scheduler.end(a, RequestState::cancelled);
  scheduler.plan(simulation.cache);
  EXPECT_EQ(scheduler.plan_ahead().size(), 1u);
}

// A full batch does not hold back who may take a place in it.
TEST(SchedulerPlan, TheGreaterPriorityEndsStepsAhead) {
  Simulation simulation(small_limits());
  Scheduler& scheduler = simulation.scheduler;
  for (int i = 0; i < 3; ++i) scheduler.add({.prompt = ids(2, 10 * i), .max_tokens = 9});
  simulation.step();
  scheduler.add({.prompt = ids(2, 100), .max_tokens = 9});
  scheduler.plan(simulation.cache);
  EXPECT_EQ(scheduler.plan_ahead().size(), 3u);
  scheduler.commit(Ids{1, 2, 3}, std::vector<float>(3));
  scheduler.add({.prompt = ids(2, 200), .max_tokens = 9, .priority = 1});
  ASSERT_TRUE(scheduler.follow_ahead());
  EXPECT_TRUE(scheduler.plan_ahead().empty());
  scheduler.commit(Ids{1, 2, 3}, std::vector<float>(3));
  EXPECT_FALSE(scheduler.follow_ahead());
  EXPECT_EQ(scheduler.plan(simulation.cache).back().cached, 0);  // who came last begins
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
