// SPDX-License-Identifier: Apache-2.0
//
// The bundled model, and small ones with states per sequence, under random schedules: requests share prefixes, are
// preempted, overtake each other and are cancelled, right and wrong tokens are proposed for them, and each has the
// tokens and log-probabilities that it has alone, to the bit.
#include <map>
#include <random>

#include "eadem/core/encodings/row_encoding.h"
#include "tests/engine/engine_helpers.h"
#include "tests/support/thread_counts.h"

namespace eadem::engine {
namespace bits_test {

using Ids = std::vector<int32_t>;

constexpr int64_t kLength = 96;  // of the longest sequence

struct Answer {
  Ids tokens;
  std::vector<float> logprobs;
};

// The expected answers come from an engine with another cache, which shares nothing, one request at a time.
Answer alone(InferEngine& engine, const GenerationRequest& request) {
  engine.reset_cache();
  StepLoop loop(engine);
  Answer answer;
  loop.add(request);
  while (loop.step([&](const StepEvent& event) {
    answer.tokens.push_back(event.token);
    answer.logprobs.push_back(event.logprob);
    return true;
  })) {
  }
  return answer;
}

// An engine with a paged cache of so many tokens, or a contiguous one of a sequence.
std::unique_ptr<InferEngine> make(const std::string& model, std::string_view kv_type, int64_t cache_tokens) {
  EngineSetup setup;
  setup.model = model;
  setup.options.max_num_batched_tokens = 24;
  setup.options.draft_tokens = 3;
  if (kv_type != "f32") setup.options.hardware.kv_cache = {*kv_cache_type(kv_type), "test"};
  setup.options.cache = StaticKVCacheConfig{.max_cache_len = kLength};
  if (cache_tokens > 0) {
    const models::Checkpoint checkpoint = models::open_checkpoint(setup.model);
    PagedKVCacheConfig paged{.block_size = 8, .max_batch_size = 4, .max_cache_len = kLength};
    setup.options.cache = paged;
    paged.max_kv_memory_bytes =
        paged_cache_bytes(cache_request(checkpoint, *open_device("cpu"), setup.options), cache_tokens);
    setup.options.cache = paged;
  }
  return make_engine(setup);
}

// What all schedules did together: they are worth little if nothing of this happens often.
struct Totals {
  int64_t preemptions = 0, hits = 0, evictions = 0, accepted = 0, rejected = 0, compared = 0;
};

// Runs random schedules on `engine` and compares each answer with that of the request alone on `other`.
Totals run_random_schedules(InferEngine& engine, InferEngine& other, uint32_t seeds) {
  const int64_t vocab = engine.model().info().vocab;
  Totals totals;
  for (uint32_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int64_t count) { return static_cast<int64_t>(random() % static_cast<uint64_t>(count)); };
    SchedulerLimits limits = engine.limits();
    limits.snapshot_distance = limits.block_size;
    Scheduler scheduler(limits);
    std::map<RequestId, GenerationRequest> requests;
    std::map<RequestId, Answer> answers, expected_answers;
    // Proposes what follows in the answer alone, of which a token may be wrong.
    const auto propose = [&] {
      std::vector<std::pair<RequestId, Ids>> proposals;
      for (const Draftable& each : scheduler.draftable()) {
        const Ids& tokens = expected_answers.at(each.id).tokens;
        const auto done = static_cast<int64_t>(answers[each.id].tokens.size());
        Ids drafts(tokens.begin() + done, tokens.begin() + std::min(done + below(5), std::ssize(tokens)));
        if (!drafts.empty() && below(3) == 0) drafts[static_cast<size_t>(below(std::ssize(drafts)))] = 18;
        proposals.emplace_back(each.id, std::move(drafts));
      }
      for (const auto& [id, drafts] : proposals) scheduler.propose(id, drafts);
    };
    for (int64_t arrivals = 10; arrivals > 0 || !scheduler.is_idle();) {
      if (arrivals > 0 && below(3) == 0) {
        --arrivals;
        // One of two texts, of which the end may be another one.
        Ids prompt = tokens_of(1 + below(70), vocab, static_cast<int32_t>(below(2)));
        if (below(2) == 0) prompt[static_cast<size_t>(below(std::ssize(prompt)))] = 17;
        GenerationRequest request{.prompt = prompt,
                                  .sampling = {.temperature = below(2) == 0 ? 0.0f : 0.8f,
                                               .seed = below(1000),
                                               .repetition_penalty = below(3) == 0 ? 1.3f : 1.0f},
                                  .max_tokens = 1 + below(24),
                                  .priority = below(2)};
        const RequestId id = scheduler.add(request);
        requests[id] = request;
        expected_answers[id] = alone(other, request);
      }
      if (!requests.empty() && below(25) == 0) {
        auto victim = requests.begin();
        std::advance(victim, below(std::ssize(requests)));
        scheduler.end(victim->first, RequestState::cancelled);
      }
      propose();
      const auto plan = scheduler.plan(engine.cache_contents());
      if (plan.empty()) continue;
      if (below(10) == 0) {  // the step is given up
        const std::atomic<bool> cancel = true;
        EXPECT_THROW(engine.forward(plan, &cancel), Cancelled);
        continue;
      }
      const InferEngine::Output& output = engine.forward(plan);
      for (const StepEvent& event : scheduler.commit(output.output_ids, output.logprobs)) {
        if (!event.sampled) continue;
        answers[event.id].tokens.push_back(event.token);
        answers[event.id].logprobs.push_back(event.logprob);
      }
    }
    for (auto& [id, answer] : answers) {
      Answer& expected = expected_answers.at(id);
      EXPECT_LE(answer.tokens.size(), expected.tokens.size());
      expected.tokens.resize(answer.tokens.size());  // of those that were cancelled
      expected.logprobs.resize(answer.tokens.size());
      EXPECT_EQ(answer.tokens, expected.tokens) << "request " << id;
      expect_same_bits(answer.logprobs, expected.logprobs, "request " + std::to_string(id));
      totals.compared += std::ssize(answer.tokens);
    }
    EXPECT_EQ(scheduler.num_free_blocks(), engine.cache_spec().num_blocks);
    totals.preemptions += scheduler.counters().preemptions;
    totals.hits += scheduler.counters().hits;
    totals.evictions += scheduler.counters().evictions;
    totals.accepted += scheduler.accepted_tokens();
    totals.rejected += scheduler.proposed_tokens() - scheduler.accepted_tokens();
    if (testing::Test::HasFailure()) break;
  }
  return totals;
}

class Bits : public testing::TestWithParam<const char*> {
 protected:
  static std::unique_ptr<InferEngine> make(int64_t cache_tokens) {
    return bits_test::make(EADEM_SOURCE_DIR "/assets/stories", GetParam(), cache_tokens);
  }
};
INSTANTIATE_TEST_SUITE_P(KvTypes, Bits, testing::Values("f32", "int8"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Bits, AreThoseOfTheRequestAlone) {
  const auto engine = make(160), other = make(0);
  ASSERT_TRUE(engine->reuses_prefixes());
  ASSERT_FALSE(other->reuses_prefixes());
  constexpr uint32_t kSchedules = test::kEveryCase == 1 ? 12 : 4;
  const Totals totals = run_random_schedules(*engine, *other, kSchedules);
  EXPECT_GT(totals.compared, 500 * kSchedules / 12);
  EXPECT_GT(totals.preemptions, 10 * kSchedules / 12);
  EXPECT_GT(totals.hits, 100 * kSchedules / 12);
  EXPECT_GT(totals.evictions, 100 * kSchedules / 12);
  EXPECT_GT(totals.accepted, 100 * kSchedules / 12);
  EXPECT_GT(totals.rejected, 100 * kSchedules / 12);
}

// Models with states per sequence, which go back when a proposed token was wrong, and of which snapshots are kept.
class StatesPerSequence : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Models, StatesPerSequence,
                         testing::Values("qwen3_next_all", "qwen3_5", "granitemoehybrid", "nemotron_h", "falcon_h1",
                                         "lfm2", "kimi_linear"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(StatesPerSequence, AreThoseOfTheRequestAlone) {
  const auto engine = make(golden(GetParam()), "f32", 160), other = make(golden(GetParam()), "f32", 0);
  ASSERT_TRUE(engine->reuses_prefixes());
  ASSERT_FALSE(other->reuses_prefixes());
  const Totals totals = run_random_schedules(*engine, *other, 8);
  EXPECT_GT(totals.compared, 150);
  EXPECT_GT(totals.preemptions, 3);
  EXPECT_GT(totals.accepted, 20);
  EXPECT_GT(totals.rejected, 20);
  EXPECT_GT(totals.hits, 40);
  EXPECT_GT(totals.evictions, 40);
}

// Steps that a caller put together himself may have written to any block.
TEST_P(Bits, BlocksThatOthersWroteAreNotReused) {
  const auto engine = make(160), other = make(0);
  StepLoop loop(*engine);
  const GenerationRequest request{.prompt = tokens_of(40, engine->model().info().vocab, 1), .max_tokens = 3};
  const auto run = [&] {
    std::vector<float> logprobs;
    loop.add(request);
    while (loop.step([&](const StepEvent& event) {
      logprobs.push_back(event.logprob);
      return true;
    })) {
    }
    return logprobs;
  };
  const std::vector<float> expected = alone(*other, request).logprobs;
  expect_same_bits(run(), expected, "first");
  expect_same_bits(run(), expected, "again");
  EXPECT_EQ(loop.reused_tokens(), 32);
  Ids blocks;
  for (int32_t block = 0; block < 12; ++block) blocks.push_back(block);
  Ids wrong = request.prompt;
  wrong[0] += 1;  // the tokens of the other blocks are the same
  for (size_t at = 0; at < 40; at += 20)
    engine->forward({.input_ids = {wrong.begin() + static_cast<std::ptrdiff_t>(at),
                                   wrong.begin() + static_cast<std::ptrdiff_t>(at) + 20},
                     .input_lengths = {20},
                     .cache_lengths = {static_cast<int32_t>(at)},
                     .block_tables = {blocks}});
  expect_same_bits(run(), expected, "after a step of the caller's own");
  EXPECT_EQ(loop.reused_tokens(), 32);
}

}  // namespace bits_test
}  // namespace eadem::engine
