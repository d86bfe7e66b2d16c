// SPDX-License-Identifier: Apache-2.0
//
// Replays of a small trace on the bundled model: every request gets its tokens, what is counted is what the trace says,
// and a stopped replay says what was done. Nothing here depends on how long anything takes.
#include "eadem/cli/bench/replay.h"

#include <numeric>

#include "eadem/engine/llm.h"
#include "eadem/engine/speculation/speculation_options.h"
#include "tests/engine/engine_helpers.h"

namespace eadem::cli {
namespace {

using engine::InferEngine;

constexpr int64_t kBlock = 16, kContext = 512, kRunning = 3;
constexpr double kAtOnce = 1e9;

Workload small_workload(double rate = kAtOnce) {
  return Workload(read_trace(EADEM_SOURCE_DIR "/tests/data/traces/mooncake.jsonl"), {.rate = rate, .divide = 8},
                  kContext);
}

std::unique_ptr<InferEngine> stories(int64_t cache_tokens, bool prefix_caching = true, int64_t draft_tokens = 0) {
  engine::EngineSetup setup{.model = EADEM_SOURCE_DIR "/assets/stories"};
  setup.options.max_num_batched_tokens = 64;
  setup.options.draft_tokens = draft_tokens;
  engine::PagedKVCacheConfig paged{.block_size = kBlock,
                                   .max_batch_size = kRunning,
                                   .max_cache_len = small_workload().longest(),
                                   .prefix_caching = prefix_caching};
  setup.options.cache = paged;
  paged.max_kv_memory_bytes = engine::paged_cache_bytes(
      engine::cache_request(models::open_checkpoint(setup.model), *open_device("cpu"), setup.options), cache_tokens);
  setup.options.cache = paged;
  return engine::make_engine(setup);
}

int64_t sum_of(const Workload& workload, int64_t TraceRequest::*member) {
  return std::accumulate(workload.requests().begin(), workload.requests().end(), int64_t{0},
                         [&](int64_t sum, const TraceRequest& request) { return sum + request.*member; });
}

// Everything that a whole replay has in common, whatever the engine.
void expect_whole(const Replay& replay, const Workload& workload) {
  const auto count = std::ssize(workload.requests());
  EXPECT_FALSE(replay.stopped);
  EXPECT_EQ(replay.finished, count);
  EXPECT_EQ(replay.failed, 0);
  ASSERT_EQ(std::ssize(replay.requests), count);
  EXPECT_EQ(replay.prompt_tokens, sum_of(workload, &TraceRequest::prompt_tokens));
  EXPECT_EQ(replay.drawn, sum_of(workload, &TraceRequest::generated_tokens));
  EXPECT_EQ(std::ssize(replay.gaps), replay.drawn - count);
  EXPECT_EQ(replay.blocks_in_use, 0);
  EXPECT_LE(replay.most_running, kRunning);
  for (size_t i = 0; i < replay.requests.size(); ++i) {
    SCOPED_TRACE(i);
    const ReplayedRequest& request = replay.requests[i];
    EXPECT_TRUE(request.finished);
    EXPECT_EQ(request.drawn, workload.requests()[i].generated_tokens);
    EXPECT_EQ(request.arrival, workload.requests()[i].seconds);
    EXPECT_GT(request.to_first_token(), 0);
    EXPECT_LE(request.first, request.last);
    EXPECT_LE(request.last, replay.seconds);
  }
}

// The tokens of prompts that begin with whole blocks of an earlier prompt; the last token of a prompt is always
// computed.
int64_t shared_tokens(const Workload& workload) {
  int64_t shared = 0;
  for (size_t i = 0; i < workload.requests().size(); ++i) {
    const std::vector<int32_t> prompt = workload.prompt(i, 2048);
    int64_t most = 0;
    for (size_t before = 0; before < i; ++before) {
      const std::vector<int32_t> other = workload.prompt(before, 2048);
      const auto length = static_cast<ptrdiff_t>(std::min(other.size(), prompt.size() - 1));
      const auto alike = std::mismatch(prompt.begin(), prompt.begin() + length, other.begin()).first - prompt.begin();
      most = std::max<int64_t>(most, alike / kBlock * kBlock);
    }
    shared += most;
  }
  return shared;
}

TEST(Replay, FindsThePrefixesOfTheTrace) {
  const Workload workload = small_workload();
  const int64_t shared = shared_tokens(workload);
  ASSERT_GT(shared, 400);
  const auto engine = stories(4096);
  const Replay first = replay(*engine, nullptr, workload);
  expect_whole(first, workload);
  EXPECT_EQ(first.cached_tokens, shared);
  EXPECT_EQ(first.most_running, kRunning);
  EXPECT_EQ(first.counters.preemptions, 0);
  // A sampled token is fed back unless it is the last.
  EXPECT_EQ(first.computed_tokens, first.prompt_tokens - shared + first.drawn - std::ssize(workload.requests()));
  // A second replay has a scheduler of its own, which knows nothing of the first.
  const Replay second = replay(*engine, nullptr, workload);
  EXPECT_EQ(second.cached_tokens, shared);
  EXPECT_EQ(second.steps, first.steps);
}

TEST(Replay, WithoutPrefixCachingComputesThemAll) {
  const Workload workload = small_workload();
  const auto engine = stories(4096, false);
  const Replay result = replay(*engine, nullptr, workload);
  expect_whole(result, workload);
  EXPECT_EQ(result.cached_tokens, 0);
  EXPECT_EQ(result.computed_tokens, result.prompt_tokens + result.drawn - std::ssize(workload.requests()));
}

TEST(Replay, InASmallCachePreempts) {
  // Each starts in a block, and all together grow beyond the cache.
  const Workload workload({.requests = {4, {.prompt_tokens = 15, .generated_tokens = 200}}}, {}, kContext);
  const auto engine = stories(small_workload().longest(), false);
  const Replay result = replay(*engine, nullptr, workload);
  expect_whole(result, workload);
  EXPECT_GT(result.counters.preemptions, 0);
  EXPECT_GT(result.computed_tokens, result.prompt_tokens + result.drawn - std::ssize(workload.requests()));
}

TEST(Replay, WithProposedTokensDrawsAsMany) {
  const Workload workload = small_workload();
  const auto engine = stories(4096, true, 8);
  const auto checkpoint = models::open_checkpoint(EADEM_SOURCE_DIR "/assets/stories");
  const auto speculator = engine::make_speculator(engine::SpeculationOptions::of("lookup"), checkpoint, *engine,
                                                  engine::open_tokenizer(checkpoint), Logger(LogLevel::warning), {});
  const Replay result = replay(*engine, speculator.get(), workload);
  expect_whole(result, workload);
  EXPECT_LE(result.accepted_tokens, result.proposed_tokens);
  // Each accepted token spares one that is fed back.
  EXPECT_EQ(result.computed_tokens + result.accepted_tokens,
            result.prompt_tokens - result.cached_tokens + result.drawn - std::ssize(workload.requests()));
}

TEST(Replay, WaitsForTheTimesOfTheTrace) {
  const Workload workload = small_workload(1);
  const auto engine = stories(4096);
  const Replay result = replay(*engine, nullptr, workload);
  expect_whole(result, workload);
  EXPECT_GE(result.seconds, 0.15);  // the last one comes then
}

TEST(Replay, EndsWhenAskedTo) {
  const Workload workload = small_workload();
  const auto engine = stories(4096);
  std::atomic<bool> cancel = true;
  const Replay nothing = replay(*engine, nullptr, workload, &cancel);
  EXPECT_TRUE(nothing.stopped);
  EXPECT_TRUE(nothing.requests.empty());
  cancel = false;
  int64_t calls = 0;
  const Replay part = replay(*engine, nullptr, workload, &cancel, [&](const Replay& so_far, int64_t running, int64_t) {
    ++calls;
    EXPECT_LE(running, kRunning);
    cancel = so_far.finished >= 2;
  });
  EXPECT_TRUE(part.stopped);
  EXPECT_GE(part.finished, 2);
  EXPECT_LT(part.finished, std::ssize(workload.requests()));
  EXPECT_EQ(calls, part.steps);
  EXPECT_EQ(std::ssize(part.requests), std::ssize(workload.requests()));
  EXPECT_EQ(std::count_if(part.requests.begin(), part.requests.end(), [](const auto& each) { return each.finished; }),
            part.finished);
  EXPECT_LT(part.drawn, sum_of(workload, &TraceRequest::generated_tokens));
  EXPECT_GT(part.blocks_in_use, 0);
  cancel = false;
  expect_whole(replay(*engine, nullptr, workload, &cancel), workload);
}

TEST(Replay, RefusesWhatCanNeverRun) {
  const Workload workload(read_trace(EADEM_SOURCE_DIR "/tests/data/traces/mooncake.jsonl"), {.divide = 4}, 2048);
  const auto engine = stories(4096);  // whose sequences are half as long
  EXPECT_THROW(replay(*engine, nullptr, workload), InvalidArgument);
}

TEST(Percentile, IsTheNearestRank) {
  std::vector<double> values(200);
  std::iota(values.begin(), values.end(), 1);
  EXPECT_EQ(percentile(values, 0.5), 100);
  EXPECT_EQ(percentile(values, 0.9), 180);
  EXPECT_EQ(percentile(values, 0.99), 198);
  EXPECT_EQ(percentile(values, 0), 1);
  EXPECT_EQ(percentile(values, 1), 200);
  const std::vector<double> few = {3, 5, 9};
  EXPECT_EQ(percentile(few, 0.5), 5);
  EXPECT_EQ(percentile(few, 0.9), 9);
  EXPECT_EQ(percentile(std::span(few).first(1), 0.5), 3);
}

}  // namespace
}  // namespace eadem::cli
