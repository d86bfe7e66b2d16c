// SPDX-License-Identifier: Apache-2.0
//
//   eadem_scheduling_bench [--steps 2000] [--json]
//
// Times Scheduler::plan and commit, without a model, on one thread: what a step costs beside the device's work. The
// cache's contents, which an engine keeps, are not part of the time.
//
//   decode     all sequences decode, in a cache with room for all
//   serving    each request that ends is followed by another: prompts of 256 tokens, of which 128 are those of others,
//              and 64 sampled tokens, so that in the mean step one of 68 sequences starts
//   pressure   as serving, in a cache with room for half of what could run: requests are preempted
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "eadem/engine/scheduler.h"

namespace {

using namespace eadem;
using namespace eadem::engine;
using Clock = std::chrono::steady_clock;

constexpr int64_t kBlock = 16, kPrompt = 256, kSampled = 64, kVocab = 32000;

struct Row {
  std::string name;
  int64_t running = 0;
  double median_us = 0, p99_us = 0, mean_us = 0;
  CacheCounters counters;
};

// Half of a prompt's tokens are those of every eighth request, the others its own.
GenerationRequest request_of(int64_t index, int64_t max_tokens) {
  GenerationRequest request{.max_tokens = max_tokens};
  for (int64_t at = 0; at < kPrompt; ++at) {
    const int64_t text = at < kPrompt / 2 ? index % 8 : 8 + index;
    request.prompt.push_back(static_cast<int32_t>((7919 * at + 104729 * text) % kVocab));
  }
  return request;
}

SchedulerLimits limits_of(int64_t running, int64_t sequence_tokens, double room) {
  const auto blocks = static_cast<int64_t>(room * static_cast<double>(running * sequence_tokens / kBlock));
  return {.max_batch_size = running,
          .max_num_batched_tokens = std::max<int64_t>(2 * running, 2048),
          .max_sequence_length = sequence_tokens,
          .num_blocks = std::max(blocks, sequence_tokens / kBlock),
          .block_size = kBlock,
          .vocab = kVocab,
          .model_context = sequence_tokens,
          .prefix_caching = true};
}

// Runs steps, with requests that follow those that end. Sampled tokens are all different.
Row measure(const std::string& name, int64_t running, int64_t steps, int64_t max_tokens, double room) {
  Scheduler scheduler(limits_of(running, kPrompt + max_tokens, room));
  const CacheContents contents(1, kBlock);
  int64_t added = 0;
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<double> times;
  for (int64_t step = 0, next_token = 0; std::ssize(times) < steps; ++step) {
    while (scheduler.count(RequestState::finished) + running > added) scheduler.add(request_of(added++, max_tokens));
    const Clock::time_point start = Clock::now();
    const auto plan = scheduler.plan(contents);
    const double planned = std::chrono::duration<double>(Clock::now() - start).count();
    tokens.clear();
    for (const StepSequence& sequence : plan)
      if (sequence.samples) tokens.push_back(static_cast<int32_t>(++next_token % kVocab));
    logprobs.assign(tokens.size(), -1.0f);
    const bool decodes = std::ssize(tokens) == running && std::ssize(plan) == running;
    const Clock::time_point sampled = Clock::now();
    scheduler.commit(tokens, logprobs);
    const double committed = std::chrono::duration<double>(Clock::now() - sampled).count();
    const bool counts = name == "decode" ? decodes : step >= 200;
    if (counts) times.push_back((planned + committed) * 1e6);
  }
  Row row{.name = name, .running = running, .counters = scheduler.counters()};
  for (const double time : times) row.mean_us += time / static_cast<double>(times.size());
  std::sort(times.begin(), times.end());
  row.median_us = times[times.size() / 2];
  row.p99_us = times[times.size() * 99 / 100];
  return row;
}

void print(const Row& row, bool json) {
  if (json)
    fmt::print(
        "{{\"name\": \"scheduling/{}\", \"running\": {}, \"median_us\": {:.3f}, \"p99_us\": {:.3f}, "
        "\"mean_us\": {:.3f}, \"hits\": {}, \"misses\": {}, \"evictions\": {}, \"preemptions\": {}}}\n",
        row.name, row.running, row.median_us, row.p99_us, row.mean_us, row.counters.hits, row.counters.misses,
        row.counters.evictions, row.counters.preemptions);
  else
    fmt::print(
        "{:<10} {:>5} running   median {:>8.1f} us   p99 {:>8.1f} us   mean {:>8.1f} us   hits {}, misses {}, "
        "evictions {}, preemptions {}\n",
        row.name, row.running, row.median_us, row.p99_us, row.mean_us, row.counters.hits, row.counters.misses,
        row.counters.evictions, row.counters.preemptions);
}

}  // namespace

int main(int argc, char** argv) {
  int64_t steps = 2000;
  bool json = false;
  CLI::App app("Times the planning of steps");
  app.add_option("--steps", steps, "steps of each row")->check(CLI::Range(1, 1000000));
  app.add_flag("--json", json, "a JSON object for each row");
  CLI11_PARSE(app, argc, argv);
  for (const int64_t running : {8, 64, 256, 1024}) {
    print(measure("decode", running, steps, steps + 1000, 1.0), json);
    print(measure("serving", running, steps, kSampled, 1.0), json);
    print(measure("pressure", running, steps, kSampled, 0.5), json);
  }
  return 0;
}
