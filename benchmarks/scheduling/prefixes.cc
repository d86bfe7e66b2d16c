// SPDX-License-Identifier: Apache-2.0
//
//   eadem_prefix_bench CONFIG [--prefix 512] [--own 64] [--answer 48] [--rounds 7] [--threads 2] [--json]
//
// Times requests that begin alike, one after the other, with prefix reuse and without, on a model with random weights.
// The two engines take turns. A round has a prefix of its own, and three requests:
//
//   first   the prefix and tokens of its own: nothing of it is there
//   second  the prefix and other tokens
//   turn    the second with its answer, and a new message
//
// Printed are medians: the time to the first token, and of a token of the answer behind it.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "eadem/engine/infer_engine.h"

namespace {

using namespace eadem;
using namespace eadem::engine;
using Clock = std::chrono::steady_clock;
using Ids = std::vector<int32_t>;

struct Options {
  std::string config;
  int64_t prefix = 512, own = 64, answer = 48, rounds = 7;
  int threads = 2;
  bool json = false;
};

constexpr std::array kKinds = {"first", "second", "turn"};

struct Measured {
  std::vector<double> first_token, token;  // ms
  int64_t cached = 0;                      // tokens of the last prompt that were there
};

class Server {
 public:
  Server(const models::Checkpoint& config, const Options& options, bool reuses)
      : engine_(config.model, open_device("cpu", {.num_threads = options.threads}),
                engine_options(config.model->info().max_positions, reuses), models::spec_of(config)) {
    engine_.load_random(1);
    scheduler_ = std::make_unique<Scheduler>(engine_.limits());
  }

  // Answers a prompt, and appends the answer to it.
  void run(Ids& prompt, int64_t answer, Measured& measured) {
    const Clock::time_point start = Clock::now();
    const auto ms = [&] { return std::chrono::duration<double>(Clock::now() - start).count() * 1e3; };
    scheduler_->add({.prompt = prompt, .max_tokens = answer});
    double first = 0;
    measured.cached = 0;
    while (!scheduler_->is_idle()) {
      const InferEngine::Output& output = engine_.forward(scheduler_->plan(engine_.cache_contents()));
      for (const StepEvent& event : scheduler_->commit(output.output_ids, output.logprobs)) {
        measured.cached += event.reused;
        if (!event.sampled) continue;
        if (first == 0) first = ms();
        prompt.push_back(event.token);
      }
    }
    measured.first_token.push_back(first);
    measured.token.push_back((ms() - first) / static_cast<double>(answer - 1));
  }

  int64_t snapshots() const { return engine_.cache_spec().num_snapshots; }
  int64_t state_bytes() { return engine_.sequence_states().bytes_per_slot(); }

 private:
  static EngineOptions engine_options(int64_t context, bool reuses) {
    EngineOptions result;
    result.cache = PagedKVCacheConfig{
        .max_batch_size = 4, .max_cache_len = std::min<int64_t>(4096, context), .prefix_caching = reuses};
    return result;
  }

  InferEngine engine_;
  std::unique_ptr<Scheduler> scheduler_;
};

// Tokens that depend on the seed.
Ids tokens_of(int64_t count, int64_t seed, int64_t vocab) {
  Ids result;
  for (int64_t i = 0; i < count; ++i)
    result.push_back(static_cast<int32_t>((7919 * i * (i + seed) + 104729 * seed) % vocab));
  return result;
}

double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void measure(const Options& options) {
  const models::Checkpoint config = models::open_config(options.config);
  const int64_t vocab = config.model->info().vocab;
  std::array<std::unique_ptr<Server>, 2> servers = {std::make_unique<Server>(config, options, false),
                                                    std::make_unique<Server>(config, options, true)};
  std::array<std::array<Measured, kKinds.size()>, 2> measured;
  for (int64_t round = -1; round < options.rounds; ++round) {  // the first one warms up
    if (round == 0) measured = {};
    const auto with = [&](Ids begin, int64_t count, int64_t seed) {
      const Ids more = tokens_of(count, 1000 + 10 * round + seed, vocab);
      begin.insert(begin.end(), more.begin(), more.end());
      return begin;
    };
    const Ids prefix = with({}, options.prefix, 0);
    std::array<Ids, 2> turns;
    for (size_t kind = 0; kind < kKinds.size(); ++kind)
      for (size_t turn = 0; turn < 2; ++turn) {
        const size_t which = (turn + static_cast<size_t>(round + 1)) % 2;
        Ids& prompt = turns[which];
        prompt = kind < 2 ? with(prefix, options.own, 1 + static_cast<int64_t>(kind)) : with(prompt, options.own, 3);
        servers[which]->run(prompt, options.answer, measured[which][kind]);
      }
    if (turns[0] != turns[1]) throw Error("answers differ with and without prefix reuse");
  }
  if (!options.json)
    fmt::print("states {:.2f} MB a sequence, {} snapshots\n", static_cast<double>(servers[1]->state_bytes()) / 1e6,
               servers[1]->snapshots());
  for (size_t kind = 0; kind < kKinds.size(); ++kind)
    for (size_t which = 0; which < 2; ++which) {
      const Measured& row = measured[which][kind];
      const char* const reuse = which == 0 ? "without" : "with";
      if (options.json)
        fmt::print(
            "{{\"name\": \"prefixes/{}/{}\", \"rounds\": {}, \"cached_tokens\": {}, \"first_token_ms\": {:.3f}, "
            "\"token_ms\": {:.3f}}}\n",
            kKinds[kind], reuse, row.token.size(), row.cached, median(row.first_token), median(row.token));
      else
        fmt::print("{:<7} {:<8} first token {:>9.2f} ms   token {:>7.3f} ms   {} tokens were there\n", kKinds[kind],
                   reuse, median(row.first_token), median(row.token), row.cached);
    }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Times requests that begin alike, with and without prefix reuse");
  app.add_option("CONFIG", options.config, "a config.json")->required();
  app.add_option("--prefix", options.prefix, "tokens that prompts have in common")->check(CLI::Range(1, 1 << 20));
  app.add_option("--own", options.own, "further tokens of each")->check(CLI::Range(1, 1 << 20));
  app.add_option("--answer", options.answer, "tokens of each answer")->check(CLI::Range(2, 1 << 20));
  app.add_option("--rounds", options.rounds, "that are measured")->check(CLI::Range(1, 1000));
  app.add_option("--threads", options.threads, "of each engine")->check(CLI::Range(1, 1024));
  app.add_flag("--json", options.json, "a JSON object for each row");
  CLI11_PARSE(app, argc, argv);
  try {
    measure(options);
  } catch (const Error& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 1;
  }
  return 0;
}
