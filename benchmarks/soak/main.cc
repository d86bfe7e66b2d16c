// SPDX-License-Identifier: Apache-2.0
//
//   eadem_soak [--model assets/stories] [--seconds 60] [--seed 1] [--callers 6] [--running 8] [--cache-tokens 1024]
//   [--json]
//
// Serves requests at random from several threads for a while, in a cache that is too small for them, and looks for what
// accumulates. Requests share beginnings, several answers belong to one prompt, tokens are proposed, some calls are
// cancelled before or while they run, some callbacks throw, some prompts are too long. After each round of calls nobody
// runs; then
//
//   * no block of the cache may be held,
//   * memory from malloc and resident memory are noted, and may not grow: of what follows the first fifth of the time,
//     the least of the second half may not exceed the most of the first half by more than kHeapSlack and
//     kResidentSlack.
//
// Nor may the most resident memory exceed the plan (weights, cache, activations) by more than a twentieth and
// kBesidePlan, for the program, its libraries and the tokenizer.
//
// Every answer must be the one that its request got alone, at the beginning. Exits with 1 and says what was wrong, also
// if nothing was preempted, shared, cancelled, thrown or refused. Sanitizers have a malloc of their own, which tells
// nothing here.
#include <fmt/format.h>
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "eadem/engine/llm.h"
#include "eadem/io/json.h"

namespace {

using namespace eadem;
using namespace eadem::engine;
using Clock = std::chrono::steady_clock;
using Ids = std::vector<int32_t>;

constexpr int64_t kHeapSlack = 32 << 10, kResidentSlack = 2 << 20, kBesidePlan = 16 << 20;
constexpr int64_t kLongest = 320;  // tokens of a request, with its answer
constexpr size_t kRequests = 64, kCallsOfRound = 24;

struct Options {
  std::string model = EADEM_ASSETS_DIR "/stories";
  double seconds = 60;
  uint32_t seed = 1;
  int64_t callers = 6, running = 8, cache_tokens = 1024;
  bool json = false;
};

int64_t heap_bytes() {
  const struct mallinfo2 info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

int64_t resident_bytes() {
  int64_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

int64_t peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

// A call that may be made again and again, and its answers.
struct Known {
  Ids prompt;
  SamplingParams params;
  std::vector<Ids> answers;
};

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int64_t below(int64_t count) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(count)); }

 private:
  std::mt19937 engine_;
};

// Prompts of up to 200 tokens that begin like others, and answers of up to 120 tokens.
std::vector<Known> requests_of(Random& random, int64_t vocab) {
  std::vector<Known> requests(kRequests);
  for (size_t i = 0; i < requests.size(); ++i) {
    Known& known = requests[i];
    const int64_t text = random.below(4), length = 1 + random.below(200), alike = random.below(length + 1);
    for (int64_t at = 0; at < length; ++at)
      known.prompt.push_back(
          static_cast<int32_t>((7919 * at + 104729 * (at < alike ? text : 4 + static_cast<int64_t>(i)) + 13) % vocab));
    known.params.temperature = random.below(2) == 0 ? 0.0 : 0.8;
    known.params.seed = random.below(1000);
    known.params.max_tokens = 1 + random.below(kLongest - 200);
    known.params.ignore_eos = true;
    known.params.n = 1 + random.below(3);
  }
  return requests;
}

struct Counts {
  std::atomic<int64_t> whole = 0, cancelled = 0, thrown = 0, refused = 0, tokens = 0;
};

// Samples of memory in use, in bytes, after a warm-up of a fifth of the run: the largest of the first half of the rest
// and the smallest of the second. Memory grows without end if the smallest exceeds the largest. No samples are kept,
// since a list of them would grow, too.
struct Growth {
  int64_t most = 0, least = 0;

  void take(int64_t bytes, double part) {
    if (part >= 0.2 && part < 0.6) most = std::max(most, bytes);
    if (part >= 0.6) least = least == 0 ? bytes : std::min(least, bytes);
  }
};

class Soak {
 public:
  explicit Soak(const Options& options) : options_(options), random_(options.seed) {
    EngineOptions engine_options;
    engine_options.max_num_batched_tokens = 64;
    engine_options.draft_tokens = 4;
    PagedKVCacheConfig cache{.max_batch_size = options.running, .max_cache_len = kLongest};
    engine_options.cache = cache;
    models::Checkpoint checkpoint = models::open_checkpoint(options.model);
    const std::shared_ptr<Device> device = open_device("cpu");
    cache.max_kv_memory_bytes =
        paged_cache_bytes(cache_request(checkpoint, *device, engine_options), options.cache_tokens);
    engine_options.cache = cache;
    llm_ = std::make_unique<LLM>(std::move(checkpoint), device, engine_options, Logger(LogLevel::warning),
                                 std::function<void(int64_t, int64_t)>(), SpeculationOptions::of("lookup", 4));
    requests_ = requests_of(random_, llm_->engine().model().info().vocab);
    for (Known& known : requests_)
      for (const Completion& each : llm_->generate_ids({known.prompt}, known.params))
        known.answers.push_back(each.token_ids);
  }

  // Returns what was wrong.
  std::vector<std::string> run() {
    const Clock::time_point start = Clock::now();
    const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
    while (wrong_.empty() && elapsed() < options_.seconds) {
      round();
      const InferEngine& engine = llm_->engine();
      if (const int64_t held = engine.cache_spec().num_blocks - llm_->num_free_blocks(); held != 0)
        say(fmt::format("{} blocks are held after round {}", held, rounds_));
      ++rounds_;
      seconds_ = elapsed();
      heap_.take(heap_bytes(), seconds_ / options_.seconds);
      resident_.take(resident_bytes(), seconds_ / options_.seconds);
    }
    check_growth("memory from malloc", heap_, kHeapSlack);
    check_growth("resident memory", resident_, kResidentSlack);
    if (const int64_t peak = most_resident(), most = plan() + plan() / 20 + kBesidePlan; peak > most)
      say(fmt::format("{} bytes were resident; the plan is {}, and at most {} are allowed", peak, plan(), most));
    check_variety();
    return wrong_;
  }

  io::JsonValue report() const {
    const CacheCounters counters = llm_->cache_counters();
    io::JsonValue report = io::JsonValue::object();
    report.set("name", "soak").set("seconds", seconds_).set("rounds", rounds_);
    report.set("whole", counts_.whole.load()).set("cancelled", counts_.cancelled.load());
    report.set("thrown", counts_.thrown.load()).set("refused", counts_.refused.load());
    report.set("tokens", counts_.tokens.load()).set("preemptions", counters.preemptions);
    report.set("hits", counters.hits).set("evictions", counters.evictions);
    report.set("heap_first_half", heap_.most).set("heap_second_half", heap_.least);
    report.set("resident_first_half", resident_.most).set("resident_second_half", resident_.least);
    report.set("most_resident_bytes", most_resident()).set("plan_bytes", plan());
    return report.set("wrong", std::ssize(wrong_));
  }

 private:
  void say(std::string what) {
    const std::lock_guard lock(mutex_);
    if (wrong_.size() < 10) wrong_.push_back(std::move(what));
  }

  // Calls from every thread, until all have ended.
  void round() {
    std::atomic<size_t> begun = 0;
    std::vector<std::thread> callers;
    for (int64_t i = 0; i < options_.callers; ++i) {
      const auto seed = static_cast<uint32_t>(random_.below(int64_t{1} << 32));
      callers.emplace_back([this, &begun, seed] {
        Random random(seed);
        while (begun.fetch_add(1) < kCallsOfRound) {
          std::this_thread::sleep_for(std::chrono::microseconds(random.below(5000)));
          call(random);
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
  }

  void call(Random& random) {
    const Known& known = requests_[static_cast<size_t>(random.below(kRequests))];
    const int64_t kind = random.below(20);
    if (kind == 0) return call_too_long(known);
    if (kind == 1) return call_that_throws(known);
    std::atomic<bool> cancel = kind == 2;
    int64_t pieces = kind < 7 ? 1 + random.below(40) : -1;  // until it is cancelled; -1: never
    const auto on_text = [&](size_t, std::string_view) {
      if (--pieces == 0) cancel = true;
    };
    try {
      const std::vector<Completion> completions = llm_->generate_ids({known.prompt}, known.params, on_text, &cancel);
      check(known, completions, cancel);
    } catch (const std::exception& error) {
      say(fmt::format("a call failed: {}", error.what()));
    }
  }

  // Answers that were cancelled are beginnings.
  void check(const Known& known, const std::vector<Completion>& completions, bool cancelled) {
    ++(cancelled ? counts_.cancelled : counts_.whole);
    for (size_t i = 0; i < completions.size(); ++i) {
      const Ids& tokens = completions[i].token_ids;
      const Ids& expected = known.answers.at(i);
      counts_.tokens += std::ssize(tokens);
      if (!completions[i].error.empty()) say("a request failed: " + completions[i].error);
      if (tokens.size() > expected.size() || !std::equal(tokens.begin(), tokens.end(), expected.begin()) ||
          (!cancelled && tokens.size() != expected.size()))
        say(fmt::format("a request of seed {} got other tokens than alone", completions[i].seed));
    }
  }

  void call_too_long(const Known& known) {
    ++counts_.refused;
    const std::vector<Completion> completions = llm_->generate_ids({Ids(kLongest + 1, 5)}, known.params);
    if (completions.empty() || completions[0].error.empty()) say("a prompt that is too long was taken");
  }

  void call_that_throws(const Known& known) {
    ++counts_.thrown;
    try {
      llm_->generate_ids({known.prompt}, known.params,
                         [](size_t, std::string_view) { throw std::runtime_error("the caller"); });
      // An answer of which no text is complete has no piece.
    } catch (const std::exception& error) {
      if (std::string_view(error.what()) != "the caller") say(fmt::format("a call failed: {}", error.what()));
    }
  }

  // The system counts pages by processor and adds them up now and then, so that its maximum may lag behind.
  int64_t most_resident() const { return std::max({peak_bytes(), resident_.most, resident_.least}); }

  // Bytes of weights, cache and activations.
  int64_t plan() const {
    const InferEngine& engine = llm_->engine();
    return engine.parameters().size_bytes() + engine.cache_bytes() +
           std::max(engine.decode_program().memory_plan().arena_bytes,
                    engine.prefill_program().memory_plan().arena_bytes);
  }

  void check_growth(const char* what, const Growth& growth, int64_t slack) {
    if (growth.most == 0 || growth.least == 0)
      say(fmt::format("{} was not measured in both halves of the time", what));
    else if (growth.least > growth.most + slack)
      say(fmt::format("{} grew from at most {} bytes to at least {}; at most {} are allowed", what, growth.most,
                      growth.least, growth.most + slack));
  }

  void check_variety() {
    const CacheCounters counters = llm_->cache_counters();
    const std::pair<const char*, int64_t> seen[] = {{"preempted", counters.preemptions}, {"shared", counters.hits},
                                                    {"evicted", counters.evictions},     {"finished", counts_.whole},
                                                    {"cancelled", counts_.cancelled},    {"thrown", counts_.thrown},
                                                    {"refused", counts_.refused}};
    for (const auto& [what, count] : seen)
      if (count == 0) say(fmt::format("nothing was {}", what));
  }

  const Options& options_;
  Random random_;
  std::unique_ptr<LLM> llm_;
  std::vector<Known> requests_;
  Counts counts_;
  int64_t rounds_ = 0;
  double seconds_ = 0;  // until the last round had ended
  Growth heap_, resident_;
  std::mutex mutex_;
  std::vector<std::string> wrong_;  // guarded by mutex_ while callers run
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Serves random requests for a while and looks for what accumulates");
  app.add_option("--model", options.model, "a directory with a tokenizer; of at least 320 tokens of context");
  app.add_option("--seconds", options.seconds)->check(CLI::Range(0.1, 1e6));
  app.add_option("--seed", options.seed);
  app.add_option("--callers", options.callers, "threads")->check(CLI::Range(1, 256));
  app.add_option("--running", options.running, "requests at once")->check(CLI::Range(1, 64));
  app.add_option("--cache-tokens", options.cache_tokens)->check(CLI::Range(int64_t{kLongest}, int64_t{1} << 24));
  app.add_flag("--json", options.json, "a JSON object");
  CLI11_PARSE(app, argc, argv);
  try {
    Soak soak(options);
    const std::vector<std::string> wrong = soak.run();
    const io::JsonValue report = soak.report();
    if (options.json) {
      fmt::print("{}\n", io::to_compact_json(report));
    } else {
      for (const auto& [key, value] : report.as_object()) fmt::print("{:<22} {}\n", key, io::to_compact_json(value));
    }
    for (const std::string& each : wrong) fmt::print(stderr, "eadem_soak: {}\n", each);
    return wrong.empty() ? 0 : 1;
  } catch (const std::exception& error) {
    fmt::print(stderr, "eadem_soak: {}\n", error.what());
    return 1;
  }
}
