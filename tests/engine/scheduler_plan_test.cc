// SPDX-License-Identifier: Apache-2.0
//
// The scheduler alone, without a model: what it plans, how requests change state, and that thousands of random
// schedules give every request the tokens that it would get alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "eadem/core/error.h"
#include "eadem/engine/cache/cache_plan.h"
#include "eadem/engine/scheduler.h"

namespace eadem::engine {
namespace {

using Ids = std::vector<int32_t>;

constexpr int64_t kVocab = 1000;

Ids ids(int64_t count, int32_t first = 0) {
  Ids result(static_cast<size_t>(count));
  std::iota(result.begin(), result.end(), first);
  return result;
}

// Stands in for a model: the next token is a hash of all tokens before it, read from the cache that the plan names.
int32_t next_token(uint64_t hash) { return static_cast<int32_t>(hash % kVocab); }
uint64_t hash_with(uint64_t hash, int32_t token) { return (hash ^ static_cast<uint64_t>(token)) * 0x9e3779b97f4a7c15u; }

Ids tokens_alone(const Ids& prompt, int64_t count) {
  uint64_t hash = 1;
  for (int32_t token : prompt) hash = hash_with(hash, token);
  Ids result;
  for (int64_t i = 0; i < count; ++i) {
    result.push_back(next_token(hash));
    hash = hash_with(hash, result.back());
  }
  return result;
}

// A scheduler and a cache, on which steps run as an engine runs them.
class Simulation {
 public:
  explicit Simulation(const SchedulerLimits& limits)
      : limits(limits), scheduler(limits), cache(limits.num_blocks, limits.block_size) {
    for (const modules::WindowGroup& group : limits.windows) windows.emplace_back(group.num_blocks, limits.block_size);
  }

  // Runs one step. Returns the events; none when no request is there.
  std::span<const StepEvent> step() {
    const auto plan = scheduler.plan(cache);
    check(plan);
    Ids tokens;
    std::vector<float> logprobs;
    for (const StepSequence& s : plan) {
      const uint64_t hash = run(s);
      if (!s.samples) continue;
      tokens.push_back(next_token(hash));
      logprobs.push_back(-1.0f);
    }
    return scheduler.commit(tokens, logprobs);
  }

  SchedulerLimits limits;
  Scheduler scheduler;
  CacheContents cache;
  std::vector<CacheContents> windows;  // of the groups with a window

 private:
  std::span<const int32_t> used(const StepSequence& s) const {
    const int64_t end = s.cached + std::ssize(s.tokens);
    return s.blocks.first(static_cast<size_t>((end + limits.block_size - 1) / limits.block_size));
  }

  // Limits are kept, and no block is used twice or read before it was written (CacheContents::check throws).
  void check(std::span<const StepSequence> plan) {
    EXPECT_LE(std::ssize(plan), limits.max_batch_size);
    int64_t tokens = 0;
    cache.begin_step();
    for (size_t i = 0; i < plan.size(); ++i) {
      tokens += std::ssize(plan[i].tokens);
      EXPECT_LE(plan[i].cached + std::ssize(plan[i].tokens), limits.max_sequence_length);
      cache.check(static_cast<int64_t>(i), used(plan[i]), plan[i].cached, std::ssize(plan[i].tokens));
    }
    EXPECT_LE(tokens, limits.max_num_batched_tokens);
    EXPECT_EQ(plan.empty(), scheduler.is_idle());
  }

  uint64_t run(const StepSequence& s) {
    cache.truncate(used(s), s.cached);
    cache.write(used(s), s.cached, s.tokens);
    for (size_t g = 0; g < windows.size(); ++g) {
      windows[g].write(s.windows[g], s.cached, s.tokens);
      // Every token that the step reads is there.
      const int64_t end = s.cached + std::ssize(s.tokens);
      for (int64_t at = std::max<int64_t>(0, s.cached - limits.windows[g].window + 1); at < end; ++at) {
        if (s.windows[g][static_cast<size_t>(at / limits.block_size)] == kNoBlock) {
          ADD_FAILURE() << "no block for position " << at;
        } else {
          EXPECT_EQ(windows[g].token(s.windows[g], at), cache.token(used(s), at)) << "position " << at;
        }
      }
    }
    uint64_t hash = 1;
    for (int64_t position = 0; position < s.cached + std::ssize(s.tokens); ++position)
      hash = hash_with(hash, cache.token(used(s), position));
    return hash;
  }
};

SchedulerLimits small_limits() {
  return {.max_batch_size = 3,
          .max_num_batched_tokens = 8,
          .max_sequence_length = 32,
          .num_blocks = 16,
          .block_size = 4,
          .vocab = kVocab,
          .model_context = 64};
}

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
  EXPECT_EQ(plan[0].blocks.size(), 4u);  // 11 tokens and the two that are fed back
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
  EXPECT_EQ(scheduler.state(last), RequestState::prefilling);
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
  Simulation simulation(small_limits());
  Scheduler& scheduler = simulation.scheduler;
  const RequestId large = scheduler.add({.prompt = ids(20), .max_tokens = 13});        // 8 blocks
  const RequestId larger = scheduler.add({.prompt = ids(20, 100), .max_tokens = 13});  // 8 blocks
  const RequestId small = scheduler.add({.prompt = ids(1, 200), .max_tokens = 1});     // 1 block
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

// Requests arrive, are cancelled and keep conversations at random. Each gets the tokens that it would get alone, and in
// the end every block is free.
TEST(SchedulerPlan, RandomSchedulesGiveEveryRequestItsTokens) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int64_t count) { return static_cast<int64_t>(random() % static_cast<uint64_t>(count)); };
    SchedulerLimits limits = small_limits();
    limits.max_batch_size = 1 + below(4);
    limits.max_num_batched_tokens = limits.max_batch_size + below(12);
    limits.block_size = 1 + below(6);
    limits.num_blocks = 1 + below(30);
    limits.max_sequence_length = std::min<int64_t>(limits.num_blocks * limits.block_size, 1 + below(40));
    for (int64_t window = 1 + below(4); seed % 2 == 1 && window < 20; window += 1 + below(10))
      limits.windows.push_back(
          {window, std::min(limits.num_blocks, window_blocks(window, limits.block_size, limits.max_batch_size,
                                                             limits.max_num_batched_tokens))});
    Simulation simulation(limits);
    struct Known {
      GenerationRequest request;
      Ids tokens;
      bool cancelled = false, ended = false;
    };
    std::map<RequestId, Known> requests;
    Ids conversation = ids(1 + below(5));
    int64_t arrivals = below(15);
    while (arrivals > 0 || !simulation.scheduler.is_idle()) {
      if (arrivals > 0 && below(3) == 0) {
        --arrivals;
        GenerationRequest request{
            .prompt = ids(1 + below(limits.max_sequence_length), static_cast<int32_t>(below(500))),
            .max_tokens = 1 + below(20),
            .keep = below(4) == 0};
        if (request.keep && std::ssize(conversation) <= limits.max_sequence_length) request.prompt = conversation;
        const RequestId id = simulation.scheduler.add(request);
        requests[id].request = std::move(request);
      }
      if (!requests.empty() && below(10) == 0) {
        auto victim = requests.begin();
        std::advance(victim, below(std::ssize(requests)));
        simulation.scheduler.end(victim->first, RequestState::cancelled);
        victim->second.cancelled = true;
      }
      if (below(8) == 0) simulation.scheduler.plan(simulation.cache);  // of a step that is abandoned
      for (const StepEvent& event : simulation.step()) {
        Known& known = requests.at(event.id);
        EXPECT_FALSE(known.cancelled || known.ended) << "an event after the end";
        if (event.sampled) known.tokens.push_back(event.token);
        known.ended = event.state == RequestState::finished;
        if (known.ended && known.request.keep) {
          conversation = known.request.prompt;
          conversation.insert(conversation.end(), known.tokens.begin(), known.tokens.end());
        }
      }
    }
    for (const auto& [id, known] : requests) {
      const int64_t room = limits.max_sequence_length - std::ssize(known.request.prompt) + 1;
      const int64_t most = std::min(known.request.max_tokens, room);
      if (!known.cancelled) {
        EXPECT_EQ(std::ssize(known.tokens), most) << "request " << id;
      }
      EXPECT_EQ(known.tokens, tokens_alone(known.request.prompt, std::ssize(known.tokens))) << "request " << id;
    }
    // A request of the whole cache takes the room of a kept sequence, too.
    const RequestId all =
        simulation.scheduler.add({.prompt = ids(limits.max_sequence_length), .max_tokens = limits.max_sequence_length});
    simulation.scheduler.plan(simulation.cache);
    EXPECT_EQ(simulation.scheduler.state(all), RequestState::prefilling);
    simulation.scheduler.end(all, RequestState::cancelled);
    // A kept sequence may hold its window.
    for (size_t g = 0; g < limits.windows.size(); ++g) {
      const auto& [window, num_blocks] = limits.windows[g];
      const int64_t held = (window + limits.block_size - 2) / limits.block_size + 1;
      EXPECT_GE(simulation.scheduler.cache().num_free(g), num_blocks - held);
    }
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace eadem::engine
