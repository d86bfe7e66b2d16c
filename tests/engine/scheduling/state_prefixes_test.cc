// SPDX-License-Identifier: Apache-2.0
//
// Requests to models with states per sequence begin with blocks and a snapshot that others have left: which borders get
// one, which are given up, and that each request has the tokens and log-probabilities that it has alone, to the bit.
#include "tests/engine/engine_helpers.h"
#include "tests/engine/scheduling/simulation.h"

namespace eadem::engine::scheduling_test {
namespace {

Ids joined(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// --- Without a model. Blocks have 4 tokens, and prompts are cut for 8 tokens or more.

SchedulerLimits state_limits(int64_t snapshots = 6) {
  SchedulerLimits limits = small_limits();
  limits.max_num_batched_tokens = 64;
  limits.num_blocks = 40;
  limits.max_sequence_length = 60;
  limits.model_context = 64;
  limits.num_slots = limits.max_batch_size;
  limits.num_snapshots = snapshots;
  limits.snapshot_distance = 8;
  limits.prefix_caching = true;
  return limits;
}

class StatePrefixes : public testing::Test {
 protected:
  explicit StatePrefixes(const SchedulerLimits& limits = state_limits()) : simulation(limits) {}

  // Runs a request to its end. Returns how many tokens of its prompt were there.
  int64_t reused(const Ids& prompt, int64_t max_tokens = 1) {
    const int64_t before = scheduler.reused_tokens();
    const RequestId id = scheduler.add({.prompt = prompt, .max_tokens = max_tokens});
    EXPECT_EQ(simulation.run_all()[id], tokens_alone(prompt, max_tokens));
    return scheduler.reused_tokens() - before;
  }

  Simulation simulation;
  Scheduler& scheduler = simulation.scheduler;
};

TEST_F(StatePrefixes, TheLastBorderOfAPromptHasASnapshot) {
  EXPECT_EQ(reused(ids(22)), 0);
  EXPECT_EQ(simulation.num_saves, 1);
  EXPECT_EQ(simulation.steps, 2) << "the prompt was cut at 20 tokens";
  EXPECT_EQ(reused(ids(22)), 20);
  EXPECT_EQ(simulation.steps, 3);
  EXPECT_EQ(reused(ids(30)), 20);
  EXPECT_EQ(reused(ids(20)), 0) << "a snapshot of 20 tokens leads to no earlier place";
  EXPECT_EQ(scheduler.counters().hits, 5 + 5);
  EXPECT_EQ(scheduler.counters().misses, 5 + 2 + 4);
}

// A step holds 64 tokens in the other tests, and 16 here.
class SmallSteps : public StatePrefixes {
 protected:
  SmallSteps()
      : StatePrefixes([] {
          SchedulerLimits limits = state_limits(3);
          limits.max_num_batched_tokens = 17;
          return limits;
        }()) {}
};

TEST_F(SmallSteps, AChunkEndsAtABorderAndTheFirstOneIsKept) {
  const Ids first = joined(ids(18), ids(40, 100));
  EXPECT_EQ(reused(first), 0);
  EXPECT_EQ(simulation.num_saves, 4) << "behind 16, 32, 48 and 56 tokens";
  EXPECT_EQ(scheduler.cache().snapshots().num_evicted(), 1);
  EXPECT_EQ(reused(joined(ids(18), ids(5, 200))), 16) << "the common beginning is there for the second request";
  EXPECT_EQ(reused(joined(first, ids(1, 300))), 56);
}

TEST_F(StatePrefixes, AShortPromptIsNotCut) {
  EXPECT_EQ(reused(ids(7)), 0);
  EXPECT_EQ(simulation.steps, 1);
  EXPECT_EQ(simulation.num_saves, 0);
}

TEST_F(StatePrefixes, ATurnGoesOnFromTheLastBorderOfTheAnswer) {
  const Ids prompt = ids(10);
  reused(prompt, 20);  // 29 tokens are computed
  const Ids conversation = joined(joined(prompt, tokens_alone(prompt, 20)), ids(5, 300));
  EXPECT_EQ(reused(conversation), 28);
  EXPECT_EQ(reused(joined(prompt, ids(4, 400))), 8) << "the prompt's own is still there";
}

// The second request finds the blocks of the first, and no snapshot where it leaves them; the third finds one.
TEST_F(StatePrefixes, WhereAChainBranchesOffThereIsASnapshot) {
  const Ids system = ids(13);
  EXPECT_EQ(reused(joined(system, ids(12, 100))), 0);
  EXPECT_EQ(reused(joined(system, ids(12, 200))), 0);
  EXPECT_EQ(reused(joined(system, ids(12, 300))), 12);
  EXPECT_EQ(reused(joined(system, ids(12, 100))), 24) << "the end of the first";
}

TEST_F(StatePrefixes, OfABatchTheCommonBeginningIsComputedOnce) {
  const Ids system = ids(14);
  std::map<RequestId, Ids> prompts;
  for (const int32_t first : {100, 200, 300}) {
    const Ids prompt = joined(system, ids(9, first));
    prompts[scheduler.add({.prompt = prompt, .max_tokens = 3})] = prompt;
  }
  const auto tokens = simulation.run_all();
  for (const auto& [id, prompt] : prompts) EXPECT_EQ(tokens.at(id), tokens_alone(prompt, 3));
  EXPECT_EQ(scheduler.reused_tokens(), 12 + 12);
  EXPECT_EQ(scheduler.prompt_tokens(), 23 + 11 + 11);
}

TEST_F(StatePrefixes, AnswersToOnePromptComputeItOnce) {
  for (int i = 0; i < 3; ++i) scheduler.add({.prompt = ids(22), .max_tokens = 6});
  const auto tokens = simulation.run_all();
  for (const auto& [id, answer] : tokens) EXPECT_EQ(answer, tokens_alone(ids(22), 6)) << id;
  EXPECT_EQ(scheduler.prompt_tokens(), 22 + 2 + 2);
}

TEST_F(StatePrefixes, APreemptedRequestGoesOnFromItsSnapshot) {
  scheduler.add({.prompt = ids(21), .max_tokens = 30});
  for (int step = 0; step < 9; ++step) simulation.step();
  for (const int32_t first : {200, 300, 400}) scheduler.add({.prompt = ids(6, first), .max_tokens = 2, .priority = 1});
  simulation.step();
  EXPECT_EQ(scheduler.state(1), RequestState::preempted);
  const int64_t loads = simulation.num_loads, computed = scheduler.prompt_tokens();
  EXPECT_EQ(simulation.run_all()[1], [] {
    const Ids all = tokens_alone(ids(21), 30);
    return Ids(all.begin() + 8, all.end());
  }());
  EXPECT_EQ(simulation.num_loads, loads + 1);
  EXPECT_LE(scheduler.prompt_tokens() - computed, 4 + 1) << "a block that no step had followed, and the next token";
}

// A plan that was given up has saved nothing: neither its snapshot nor its names are there.
TEST_F(StatePrefixes, APlanThatIsGivenUpLeavesNoSnapshot) {
  scheduler.add({.prompt = ids(22), .max_tokens = 2});
  simulation.step();
  const auto plan = scheduler.plan(simulation.cache);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0].cached, 20);
  EXPECT_GE(plan[0].save_snapshot, 0);
  EXPECT_EQ(scheduler.cache().snapshots().num_held(), 1);
  const auto again = scheduler.plan(simulation.cache);
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].cached, 0);
  EXPECT_EQ(scheduler.cache().snapshots().num_held(), 0);
  EXPECT_EQ(simulation.run_all()[1], tokens_alone(ids(22), 2));
}

class FewPenalties : public StatePrefixes {
 protected:
  FewPenalties()
      : StatePrefixes([] {
          SchedulerLimits limits = state_limits();
          limits.max_penalized_tokens = 25;
          return limits;
        }()) {}
};

// A request that has started behind a snapshot of the same plan, and has no share of the step, does not load what was
// never saved.
TEST_F(FewPenalties, WhoStartedBehindASnapshotThatWasGivenUpStartsAgain) {
  for (int i = 0; i < 2; ++i)
    scheduler.add({.prompt = ids(22), .sampling = {.repetition_penalty = 1.5f}, .max_tokens = 2});
  simulation.step();
  const auto plan = scheduler.plan(simulation.cache);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_GE(plan[0].save_snapshot, 0);
  EXPECT_EQ(scheduler.state(2), RequestState::prefilling);
  for (const auto& [id, tokens] : simulation.run_all()) EXPECT_EQ(tokens, tokens_alone(ids(22), 2)) << id;
}

class WithDrafts : public StatePrefixes {
 protected:
  WithDrafts()
      : StatePrefixes([] {
          SchedulerLimits limits = state_limits();
          limits.max_draft_tokens = 4;
          return limits;
        }()) {}
};

// The conversation may go back to 14 tokens, where its last step began, but another request reads the block of these.
TEST_F(WithDrafts, AConversationDoesNotGoBackIntoABlockThatOthersRead) {
  const Ids prompt = ids(11);
  scheduler.add({.prompt = prompt, .max_tokens = 8, .keep = true});
  while (!scheduler.is_idle()) {
    for (const Draftable& each : scheduler.draftable())
      if (each.tokens.size() == 15) {
        scheduler.propose(each.id, tokens_alone({each.tokens.begin(), each.tokens.end()}, 3));
        break;
      }
    simulation.step();
  }
  EXPECT_EQ(scheduler.accepted_tokens(), 3);
  const Ids all = joined(prompt, tokens_alone(prompt, 7)), longer = joined(all, ids(6, 700));
  EXPECT_EQ(reused(longer), 12) << "the last border that the answer did not jump over";
  scheduler.add({.prompt = longer, .max_tokens = 6});
  EXPECT_EQ(scheduler.plan(simulation.cache)[0].cached, 20) << "in the block of tokens 12 to 15, too";
  simulation.step();
  const Ids edited = joined({all.begin(), all.begin() + 17}, ids(5, 800));
  const RequestId turn = scheduler.add({.prompt = edited, .max_tokens = 4, .keep = true});
  EXPECT_EQ(simulation.run_all()[turn], tokens_alone(edited, 4));
}

TEST_F(StatePrefixes, SnapshotsEndWithTheContents) {
  reused(ids(22));
  simulation.cache.begin_epoch();
  EXPECT_EQ(reused(ids(22)), 0);
  EXPECT_EQ(reused(ids(22)), 20);
}

TEST_F(StatePrefixes, AnEvictedBlockTakesItsSnapshot) {
  reused(ids(22));
  EXPECT_EQ(scheduler.cache().snapshots().num_held(), 1);
  for (const int32_t first : {100, 200}) scheduler.add({.prompt = ids(58, first), .max_tokens = 3});
  scheduler.add({.prompt = ids(40, 300), .max_tokens = 1});
  simulation.run_all();
  EXPECT_GT(scheduler.counters().evictions, 0);
  EXPECT_EQ(reused(ids(22)), 0);
}

class FewSnapshots : public StatePrefixes {
 protected:
  FewSnapshots() : StatePrefixes(state_limits(2)) {}
};

TEST_F(FewSnapshots, TheLeastRecentlyUsedOneIsGivenUp) {
  reused(ids(22));
  reused(ids(22, 100));
  EXPECT_EQ(reused(ids(22)), 20);
  reused(ids(22, 200));
  EXPECT_EQ(scheduler.cache().snapshots().num_evicted(), 1);
  EXPECT_EQ(reused(ids(22)), 20);
  EXPECT_EQ(reused(ids(22, 100)), 0) << "its blocks are there, and no snapshot";
}

// A snapshot that an answer has passed is given up before one that other requests wait for.
TEST_F(FewSnapshots, AnAnswerGivesUpItsOwn) {
  reused(ids(22));
  const Ids prompt = ids(5, 100);
  reused(prompt, 30);
  EXPECT_EQ(reused(ids(22)), 20);
  EXPECT_EQ(reused(joined(prompt, tokens_alone(prompt, 30))), 32);
}

// --- Slots, without a scheduler.

TEST(StateSnapshots, AreTakenInOrder) {
  StateSnapshots snapshots(2);
  const auto name = [](uint64_t number) { return std::vector<BlockHash>{{number, 0}}; };
  const auto a = snapshots.take(name(1), true), b = snapshots.take(name(2), false);
  ASSERT_TRUE(a && b);
  EXPECT_NE(*a, *b);
  EXPECT_FALSE(snapshots.take(name(3), true)) << "both have references";
  snapshots.release(*a);
  snapshots.release(*b);
  EXPECT_EQ(snapshots.num_held(), 2);
  EXPECT_EQ(snapshots.take(name(3), true), b) << "a spare one goes first";
  EXPECT_FALSE(snapshots.has(name(2)));
  snapshots.release(*b);
  EXPECT_EQ(snapshots.find_last(name(1)).slot, *a);
  snapshots.share(*a);
  EXPECT_EQ(snapshots.take(name(4), false), b) << "somebody goes on from the other";
  snapshots.release(*b);
  snapshots.release(*a);
  snapshots.make_spare(name(1));
  EXPECT_EQ(snapshots.take(name(5), true), b) << "somebody has gone on from the other";
  snapshots.release(*b);
  snapshots.forget({1, 0});
  EXPECT_EQ(snapshots.take(name(6), true), a) << "it holds nothing";
  EXPECT_EQ(snapshots.num_evicted(), 3);
  snapshots.forget_all();
  EXPECT_EQ(snapshots.num_held(), 0);
  EXPECT_EQ(snapshots.find_last(name(6)).slot, -1);
}

// Each name stands for all blocks before it: the last of them that has a snapshot counts.
TEST(StateSnapshots, TheLastOneIsFound) {
  StateSnapshots snapshots(3);
  const std::vector<BlockHash> names = {{1, 1}, {2, 2}, {3, 3}, {4, 4}};
  const std::span all(names);
  snapshots.take(all.first(1), true);
  const auto third = snapshots.take(all.first(3), true);
  EXPECT_EQ(snapshots.find_last(names).slot, *third);
  EXPECT_EQ(snapshots.find_last(names).blocks, 3);
  EXPECT_EQ(snapshots.find_last(all.first(2)).blocks, 1);
  EXPECT_EQ(snapshots.find_last(all.subspan(1)).blocks, 0) << "the same name behind other blocks";
}

// --- How many there are.

CachePlanRequest plan_request(const PagedKVCacheConfig& config, int64_t state_bytes = 1000) {
  return {.config = config,
          .bytes = {.per_token = 100, .per_sequence = state_bytes},
          .context = 4096,
          .block_size = 10,
          .max_num_batched_tokens = 512};
}

TEST(StateSnapshots, TakeNoMoreMemoryThanTheBlocks) {
  const auto planned = [](const PagedKVCacheConfig& config, int64_t state_bytes = 1000) {
    return plan_cache(plan_request(config, state_bytes)).spec;
  };
  EXPECT_EQ(planned({.max_batch_size = 4, .max_cache_len = 100}).num_snapshots, 8);
  EXPECT_EQ(planned({.max_batch_size = 4, .max_cache_len = 100}).num_slots, 4 + 8);
  EXPECT_EQ(planned({.max_batch_size = 4, .max_cache_len = 100}, 9000).num_snapshots, 4);
  EXPECT_EQ(planned({.max_batch_size = 4, .max_cache_len = 100, .state_snapshots = 7}, 9000).num_snapshots, 7);
  EXPECT_EQ(planned({.max_batch_size = 4, .max_cache_len = 100, .prefix_caching = false}).num_snapshots, 0);
  // Memory that is stated: four sequences have 4,000 bytes, a block takes 1,000.
  EXPECT_EQ(planned({.max_kv_memory_bytes = 14'000, .max_batch_size = 4}).num_snapshots, 5);
  EXPECT_EQ(planned({.max_kv_memory_bytes = 14'000, .max_batch_size = 4}).num_blocks, 5);
  EXPECT_EQ(planned({.max_kv_memory_bytes = 5'000, .max_batch_size = 4}).num_snapshots, 0);
  EXPECT_EQ(planned({.max_kv_memory_bytes = 5'000, .max_batch_size = 4}).num_blocks, 1);
  EXPECT_EQ(planned({.max_kv_memory_bytes = 100'000, .max_batch_size = 4}).num_snapshots, 8);
  for (const int64_t tokens : {10, 40, 160, 400}) {
    PagedKVCacheConfig config{.max_batch_size = 4};
    config.max_kv_memory_bytes = paged_cache_bytes(plan_request(config), tokens);
    EXPECT_EQ(planned(config).num_blocks, tokens / 10);
    EXPECT_EQ(planned(config).num_snapshots, std::min<int64_t>(8, tokens / 10));
  }
  const PagedKVCacheConfig none{.max_kv_memory_bytes = 5'000, .max_batch_size = 4};
  EXPECT_EQ(why_no_prefix_caching(none, planned(none)),
            "the model has states per sequence, and max_kv_memory_bytes leaves no room for a snapshot of them");
}

// --- With models.

struct Answer {
  Ids tokens;
  std::vector<float> logprobs;
  int64_t cached_tokens = 0;
};

std::unique_ptr<InferEngine> engine_of(const std::string& model, const CacheConfig& cache, int64_t draft_tokens = 0) {
  EngineSetup setup;
  setup.model = golden(model);
  setup.options.max_num_batched_tokens = 256;
  setup.options.draft_tokens = draft_tokens;
  setup.options.cache = cache;
  return make_engine(setup);
}

std::vector<Answer> answers_of(Scheduler& scheduler, InferEngine& engine,
                               const std::vector<GenerationRequest>& requests) {
  std::map<RequestId, size_t> places;
  std::vector<Answer> answers(requests.size());
  for (const GenerationRequest& request : requests) places.emplace(scheduler.add(request), places.size());
  while (!scheduler.is_idle()) {
    const InferEngine::Output& output = engine.forward(scheduler.plan(engine.cache_contents()));
    for (const StepEvent& event : scheduler.commit(output.output_ids, output.logprobs)) {
      Answer& answer = answers[places.at(event.id)];
      answer.cached_tokens += event.reused;
      if (!event.sampled) continue;
      answer.tokens.push_back(event.token);
      answer.logprobs.push_back(event.logprob);
    }
  }
  return answers;
}

class StatePrefixesOf : public testing::TestWithParam<const char*> {
 protected:
  static constexpr int64_t kBlock = 8;

  // Runs requests together, and compares each with what an engine answers that has seen nothing else. Returns how many
  // tokens of each prompt were there.
  std::vector<int64_t> cached(const std::vector<GenerationRequest>& requests) {
    const std::vector<Answer> answers = answers_of(scheduler_, *engine_, requests);
    std::vector<int64_t> counts;
    for (size_t i = 0; i < requests.size(); ++i) {
      other_->reset_cache();
      Scheduler alone(other_->limits());
      const Answer expected = answers_of(alone, *other_, {requests[i]})[0];
      EXPECT_EQ(answers[i].tokens, expected.tokens) << "request " << i;
      expect_same_bits(answers[i].logprobs, expected.logprobs, "request " + std::to_string(i));
      EXPECT_EQ(expected.cached_tokens, 0);
      counts.push_back(answers[i].cached_tokens);
      last_ = answers[i].tokens;
    }
    return counts;
  }
  Ids tokens(int64_t count, int32_t seed) const { return tokens_of(count, engine_->model().info().vocab, seed); }

  std::unique_ptr<InferEngine> engine_ = engine_of(
      GetParam(),
      PagedKVCacheConfig{.block_size = kBlock, .max_batch_size = 3, .max_cache_len = 128, .state_snapshots = 3});
  std::unique_ptr<InferEngine> other_ = engine_of(GetParam(), StaticKVCacheConfig{.max_cache_len = 128});
  Scheduler scheduler_{engine_->limits()};
  Ids last_;
};
INSTANTIATE_TEST_SUITE_P(Models, StatePrefixesOf,
                         testing::Values("qwen3_next_all", "qwen3_5", "qwen3_5_moe", "kimi_linear", "granitemoehybrid",
                                         "nemotron_h", "falcon_h1", "lfm2"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(StatePrefixesOf, AConversationOfTwoTurnsReusesTheFirst) {
  Ids conversation = tokens(70, 1);
  EXPECT_EQ(cached({{.prompt = conversation, .max_tokens = 20}}), std::vector<int64_t>{0});
  conversation = joined(joined(conversation, last_), tokens(15, 2));
  EXPECT_EQ(cached({{.prompt = conversation, .max_tokens = 10}}), std::vector<int64_t>{88});
  // The first turn once more, drawn.
  EXPECT_EQ(cached({{.prompt = tokens(70, 1), .sampling = {.temperature = 0.9f, .seed = 4}, .max_tokens = 10}}),
            std::vector<int64_t>{64});
}

TEST_P(StatePrefixesOf, ACommonBeginningIsReused) {
  const Ids system = tokens(80, 3);
  const auto request = [&](int32_t seed) {
    return GenerationRequest{.prompt = joined(system, tokens(30, seed)), .max_tokens = 6};
  };
  EXPECT_EQ(cached({request(4)}), std::vector<int64_t>{0});
  EXPECT_EQ(cached({request(5)}), std::vector<int64_t>{0}) << "leaves a snapshot where it leaves the first";
  EXPECT_EQ(cached({request(6), request(7)}), (std::vector<int64_t>{80, 80}));
}

TEST_P(StatePrefixesOf, SeveralAnswersToAPromptComputeItOnce) {
  std::vector<GenerationRequest> requests;
  for (int64_t seed = 0; seed < 3; ++seed)
    requests.push_back({.prompt = tokens(100, 8), .sampling = {.temperature = 1.0f, .seed = seed}, .max_tokens = 12});
  EXPECT_EQ(cached(requests), (std::vector<int64_t>{0, 96, 96}));
}

// Eight conversations and room for three snapshots: some are there, some are not, and bits are the same.
TEST_P(StatePrefixesOf, EvictedSnapshotsAreComputedAgain) {
  for (int round = 0; round < 2; ++round)
    for (int32_t seed = 0; seed < 8; ++seed) {
      const int64_t there = cached({{.prompt = tokens(80 + seed, 10 + seed), .max_tokens = 3}})[0];
      EXPECT_EQ(there, 0) << "the least recently used one goes first";
    }
  EXPECT_EQ(cached({{.prompt = tokens(87, 17), .max_tokens = 3}})[0], 80);
  EXPECT_GT(scheduler_.cache().snapshots().num_evicted(), 8);
}

}  // namespace
}  // namespace eadem::engine::scheduling_test
