// SPDX-License-Identifier: Apache-2.0
//
// Who gives up room for whom: requests that outgrow the cache, priorities, and how long one may wait.
#include "tests/engine/scheduling/simulation.h"

namespace eadem::engine::scheduling_test {
namespace {

TEST(Preemption, BlocksAreTakenAsTokensNeedThem) {
  Simulation simulation(small_limits());
  simulation.scheduler.add({.prompt = ids(3), .max_tokens = 20});
  std::vector<int64_t> taken;
  while (!simulation.scheduler.is_idle()) {
    simulation.step();
    if (!simulation.scheduler.is_idle()) taken.push_back(16 - simulation.scheduler.num_free_blocks());
  }
  ASSERT_EQ(taken.size(), 19u);
  for (size_t step = 0; step < taken.size(); ++step)
    EXPECT_EQ(taken[step], (3 + static_cast<int64_t>(step) + 3) / 4) << "after step " << step;
}

// Three sequences of 32 tokens, and room for 64.
TEST(Preemption, WhoCameLastComputesItsTokensAgain) {
  Simulation simulation(small_limits());
  Scheduler& scheduler = simulation.scheduler;
  std::map<RequestId, Ids> prompts;
  for (int32_t i = 0; i < 3; ++i) {
    const Ids prompt = ids(10, 100 * i);
    prompts[scheduler.add({.prompt = prompt, .max_tokens = 23})] = prompt;
  }
  const RequestId first = prompts.begin()->first, last = prompts.rbegin()->first;
  bool preempted = false;
  std::map<RequestId, Ids> tokens;
  while (!scheduler.is_idle()) {
    for (const StepEvent& event : simulation.step())
      if (event.sampled) tokens[event.id].push_back(event.token);
    EXPECT_NE(scheduler.state(first), RequestState::preempted);
    preempted |= scheduler.state(last) == RequestState::preempted;
  }
  EXPECT_TRUE(preempted);
  EXPECT_GT(scheduler.counters().preemptions, 0);
  EXPECT_EQ(scheduler.count(RequestState::preempted), 0);
  for (const auto& [id, prompt] : prompts) EXPECT_EQ(tokens[id], tokens_alone(prompt, 23));
  EXPECT_EQ(scheduler.num_free_blocks(), 16);
}

TEST(Preemption, APreemptedRequestMayBeCancelled) {
  Simulation simulation(small_limits());
  Scheduler& scheduler = simulation.scheduler;
  for (int32_t i = 0; i < 3; ++i) scheduler.add({.prompt = ids(10, 100 * i), .max_tokens = 23});
  while (scheduler.state(3) != RequestState::preempted) simulation.step();
  scheduler.end(3, RequestState::cancelled);
  EXPECT_EQ(scheduler.state(3), std::nullopt);
  EXPECT_EQ(scheduler.count(RequestState::cancelled), 1);
  simulation.run_all();
  EXPECT_EQ(scheduler.num_free_blocks(), 16);
}

TEST(Preemption, TheGreaterPriorityGoesFirst) {
  SchedulerLimits limits = small_limits();
  limits.max_batch_size = 1;
  Simulation simulation(limits);
  Scheduler& scheduler = simulation.scheduler;
  const RequestId low = scheduler.add({.prompt = ids(2), .max_tokens = 3});
  const RequestId high = scheduler.add({.prompt = ids(2, 100), .max_tokens = 3, .priority = 5});
  const RequestId as_high = scheduler.add({.prompt = ids(2, 200), .max_tokens = 3, .priority = 5});
  std::vector<RequestId> ended;
  while (!scheduler.is_idle())
    for (const StepEvent& event : simulation.step())
      if (event.state == RequestState::finished) ended.push_back(event.id);
  EXPECT_EQ(ended, (std::vector<RequestId>{high, as_high, low}));
}

TEST(Preemption, AGreaterPriorityTakesARunningRequestsPlace) {
  SchedulerLimits limits = small_limits();
  limits.max_batch_size = 2;
  Simulation simulation(limits);
  Scheduler& scheduler = simulation.scheduler;
  const RequestId a = scheduler.add({.prompt = ids(2), .max_tokens = 9, .priority = 1});
  const RequestId b = scheduler.add({.prompt = ids(2, 100), .max_tokens = 9});
  simulation.step();
  const RequestId equal = scheduler.add({.prompt = ids(2, 200), .max_tokens = 2});
  const RequestId high = scheduler.add({.prompt = ids(2, 300), .max_tokens = 2, .priority = 1});
  simulation.step();
  EXPECT_EQ(scheduler.state(a), RequestState::decoding);
  EXPECT_EQ(scheduler.state(b), RequestState::preempted);
  EXPECT_EQ(scheduler.state(equal), RequestState::waiting);
  EXPECT_EQ(scheduler.state(high), RequestState::decoding);
  simulation.run_all();
  EXPECT_EQ(scheduler.count(RequestState::finished), 4);
}

TEST(Preemption, NobodyIsPreemptedInVain) {
  Simulation simulation(small_limits());
  Scheduler& scheduler = simulation.scheduler;
  const RequestId high = scheduler.add({.prompt = ids(30), .max_tokens = 3, .priority = 2});
  const RequestId low = scheduler.add({.prompt = ids(5, 100), .max_tokens = 20});
  for (int step = 0; step < 5; ++step) simulation.step();
  // Even without `low` there is no room for 32 tokens beside `high`, which has blocks for 32 of 64, and `another`.
  const RequestId another = scheduler.add({.prompt = ids(30, 200), .max_tokens = 3, .priority = 2});
  simulation.step();
  const RequestId middle = scheduler.add({.prompt = ids(30, 300), .max_tokens = 3, .priority = 1});
  EXPECT_NE(scheduler.state(high), RequestState::preempted);
  const int64_t before = scheduler.counters().preemptions;
  simulation.step();
  EXPECT_EQ(scheduler.counters().preemptions, before);
  EXPECT_EQ(scheduler.state(middle), RequestState::waiting);
  simulation.run_all();
  EXPECT_EQ(scheduler.count(RequestState::finished), 4);
  EXPECT_EQ(scheduler.state(low), std::nullopt);
  EXPECT_EQ(scheduler.state(another), std::nullopt);
}

// A stream of urgent requests without end cannot keep a plain one from its tokens.
TEST(Preemption, NobodyWaitsForever) {
  for (const int64_t batch : {1, 3}) {
    SchedulerLimits limits = small_limits();
    limits.max_batch_size = batch;
    limits.ageing_steps = 40;
    Simulation simulation(limits);
    Scheduler& scheduler = simulation.scheduler;
    for (int32_t i = 0; i < 3; ++i) scheduler.add({.prompt = ids(30, 100 * i), .max_tokens = 3, .priority = 1});
    const RequestId plain = scheduler.add({.prompt = ids(20), .max_tokens = 10});
    bool waited = false;
    for (int64_t added = 4; scheduler.state(plain);) {
      // Four others are always there.
      for (; added < scheduler.count(RequestState::finished) + 5; ++added)
        scheduler.add({.prompt = ids(30, 500), .max_tokens = 3, .priority = 1});
      simulation.step();
      waited |= simulation.steps == 39 && scheduler.state(plain) == RequestState::waiting;
      // The three that came before take 33 steps each at most.
      ASSERT_LE(simulation.steps, 40 + 3 * 33 + 30);
    }
    EXPECT_TRUE(waited);
  }
}

}  // namespace
}  // namespace eadem::engine::scheduling_test
