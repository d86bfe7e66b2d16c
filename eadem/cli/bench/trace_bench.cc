// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/bench/trace_bench.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "eadem/cli/bench/machine.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/terminal.h"

namespace eadem::cli {

namespace {

using io::JsonValue;

constexpr int64_t kUsualRunning = 16;
constexpr std::array<double, 3> kParts = {0.5, 0.9, 0.99};

// One of the measured times, sorted.
struct Times {
  std::string key, title;
  std::vector<double> values;
};

// Returns the times of all finished requests. The gaps between tokens include those of unfinished requests.
std::vector<Times> times_of(const Replay& replay) {
  Times first{"time_to_first_token", "time to first token", {}};
  Times token{"time_per_token", "time per token", {}};
  Times gap{"gap_between_tokens", "gap between tokens", replay.gaps};
  Times whole{"latency", "whole request", {}};
  for (const ReplayedRequest& request : replay.requests) {
    if (!request.finished) continue;
    first.values.push_back(request.to_first_token());
    whole.values.push_back(request.to_end());
    if (request.drawn > 1) token.values.push_back(request.per_token());
  }
  std::vector<Times> all = {std::move(first), std::move(token), std::move(gap), std::move(whole)};
  for (Times& times : all) std::sort(times.values.begin(), times.values.end());
  return all;
}

double per_second(int64_t tokens, const Replay& replay) {
  return replay.seconds > 0 ? static_cast<double>(tokens) / replay.seconds : 0;
}

double share(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

std::string scale_text(const Workload& workload) {
  const auto scaled = [](double by) { return by == 1 ? "as in the trace" : fmt::format("divided by {:g}", by); };
  const TraceScale& scale = workload.scale();
  return fmt::format("times {}, lengths {}", scaled(scale.rate), scaled(static_cast<double>(scale.divide)));
}

std::string settings_text(const engine::InferEngine& engine, const std::string& speculate) {
  const engine::SchedulerLimits limits = engine.limits();
  return fmt::format("at most {} running, steps of {} tokens, a cache of {} tokens, prefixes {}reused, {}",
                     limits.max_batch_size, limits.max_num_batched_tokens, limits.num_blocks * limits.block_size,
                     engine.reuses_prefixes() ? "" : "not ",
                     speculate == "none" ? "no speculation" : "speculation by " + speculate);
}

}  // namespace

void TraceOptions::add(Arguments& arguments) {
  arguments.section("Requests of a service");
  arguments.option("--trace", "FILE", file,
                   "instead of the above, replay a trace: requests come when it says, and have prompts and answers of "
                   "its lengths. FILE is a CSV with the header TIMESTAMP,ContextTokens,GeneratedTokens (Azure) or has "
                   "a JSON object with timestamp, input_length, output_length and hash_ids in each line (Mooncake)");
  arguments.option("--trace-requests", "N", requests, "the first N requests of the trace (default: all)");
  arguments.option("--trace-rate", "X", rate, "let them come X times as fast (default: 1)");
  arguments.option(
      "--trace-divide", "N", divide,
      "let prompts and answers have 1/N of their tokens, rounded up (default: 1). Requests that are longer "
      "than the model's context even so are left out, and counted");
  arguments.option("--running", "N", running, "requests that run at once, at most (default: 16)");
  arguments.option("--step-tokens", "N", step_tokens,
                   "tokens of a step, at most: longer prompts are read in chunks, between which others decode "
                   "(default: 512 on a CPU, else 2048)");
  arguments.option("--cache-tokens", "N", cache_tokens,
                   "tokens that the KV cache holds, of all requests together (default: of as many of the longest "
                   "request as may run at once)");
  arguments.flag("--no-prefix-caching", no_prefix_caching, "compute the beginnings of prompts that are cached, too");
}

void TraceOptions::check() const {
  if (!file) {
    const auto needs_trace = [](const char* name, bool given) {
      if (given) throw UsageError(fmt::format("{} is for --trace", name));
    };
    needs_trace("--trace-requests", requests.has_value());
    needs_trace("--trace-rate", rate.has_value());
    needs_trace("--trace-divide", divide.has_value());
    needs_trace("--running", running.has_value());
    needs_trace("--step-tokens", step_tokens.has_value());
    needs_trace("--cache-tokens", cache_tokens.has_value());
    needs_trace("--no-prefix-caching", no_prefix_caching);
    return;
  }
  const auto in_range = [](const char* name, const std::optional<int64_t>& value, int64_t most) {
    if (value && (*value < 1 || *value > most))
      throw UsageError(fmt::format("{} is {}; expected 1 to {}", name, *value, most));
  };
  constexpr int64_t kMost = int64_t{1} << 30;
  in_range("--trace-requests", requests, kMost);
  in_range("--trace-divide", divide, kMost);
  in_range("--running", running, 65536);
  in_range("--step-tokens", step_tokens, 1 << 24);
  in_range("--cache-tokens", cache_tokens, kMost);
  if (rate && !(*rate >= 1e-9 && *rate <= 1e9))
    throw UsageError(fmt::format("--trace-rate is {}; expected 1e-9 to 1e9", *rate));
  if (step_tokens && *step_tokens < running.value_or(kUsualRunning))
    throw UsageError(fmt::format("--step-tokens is {}; the {} requests of --running need a token each", *step_tokens,
                                 running.value_or(kUsualRunning)));
}

Workload TraceOptions::workload(int64_t context) const {
  Workload workload(read_trace(*file),
                    {.requests = requests.value_or(0), .rate = rate.value_or(1), .divide = divide.value_or(1)},
                    context);
  if (cache_tokens && *cache_tokens < workload.longest())
    throw InvalidArgument("--cache-tokens is {}; the longest request has {} tokens", *cache_tokens, workload.longest());
  return workload;
}

void TraceOptions::set(engine::EngineOptions& options, const Workload& workload) const {
  options.cache = engine::PagedKVCacheConfig{.max_batch_size = running.value_or(kUsualRunning),
                                             .max_cache_len = workload.longest(),
                                             .prefix_caching = !no_prefix_caching};
  options.max_num_batched_tokens = step_tokens.value_or(0);
}

void TraceOptions::set_cache_bytes(engine::EngineOptions& options, const models::Checkpoint& checkpoint,
                                   const Device& device) const {
  if (!cache_tokens) return;
  auto& cache = std::get<engine::PagedKVCacheConfig>(options.cache);
  cache.max_kv_memory_bytes =
      engine::paged_cache_bytes(engine::cache_request(checkpoint, device, options), *cache_tokens);
}

Replay run_replay(engine::InferEngine& engine, engine::Speculator* speculator, const Workload& workload) {
  ProgressBar bar("replaying");
  const auto total = static_cast<double>(workload.requests().size());
  return replay(engine, speculator, workload, &interrupt_flag(),
                [&](const Replay& so_far, int64_t running, int64_t waiting) {
                  bar.update(static_cast<double>(so_far.finished + so_far.failed), total,
                             fmt::format("{} run, {} wait", running, waiting));
                });
}

std::string replay_text(const TraceOptions& options, const Workload& workload, const Replay& replay,
                        const engine::InferEngine& engine, const std::string& speculate) {
  const int64_t planned = std::ssize(workload.requests());
  std::string text = fmt::format(
      "{}: {} of {} requests, {}{}\n{}\n\n", *options.file, planned, workload.trace_requests(), scale_text(workload),
      workload.left_out() == 0 ? ""
                               : fmt::format("; {} left out, longer than the model's context of {} tokens",
                                             workload.left_out(), engine.model().info().max_positions),
      settings_text(engine, speculate));
  text += fmt::format(
      "{} requests finished in {}, the last came after {}{}\n", replay.finished, seconds_text(replay.seconds),
      seconds_text(replay.requests.empty() ? 0 : replay.requests.back().arrival),
      replay.failed == 0 ? "" : fmt::format("; {} failed: their logits were not finite", replay.failed));
  text +=
      fmt::format("prompts    {:>9} tokens  {:>10.1f}/s, {:.1f} % of them from the cache\n", replay.prompt_tokens,
                  per_second(replay.prompt_tokens, replay), 100 * share(replay.cached_tokens, replay.prompt_tokens));
  text += fmt::format("answers    {:>9} tokens  {:>10.1f}/s", replay.drawn, per_second(replay.drawn, replay));
  if (replay.proposed_tokens > 0)
    text += fmt::format(", {} of {} proposed ones accepted", replay.accepted_tokens, replay.proposed_tokens);
  text += fmt::format("\nsteps      {:>9} of {:.1f} tokens; at most {} running and {} waiting; {} preemptions\n\n",
                      replay.steps, replay.steps == 0 ? 0.0 : share(replay.computed_tokens, replay.steps),
                      replay.most_running, replay.most_waiting, replay.counters.preemptions);
  text += fmt::format("{:<22} {:>12} {:>12} {:>12}\n", "", "p50", "p90", "p99");
  for (const Times& times : times_of(replay)) {
    text += fmt::format("{:<22}", times.title);
    for (const double part : kParts)
      text += fmt::format(" {:>12}", times.values.empty() ? "-" : seconds_text(percentile(times.values, part)));
    text += "\n";
  }
  text +=
      "\nThe first token counts from the arrival of its request. Time per token is the mean gap between the\n"
      "tokens of a request; gaps are those of all requests.\n";
  return text + fmt::format("\nmemory: {}\n", memory_text(memory_use(engine)));
}

void set_replay(JsonValue& json, const TraceOptions& options, const Workload& workload, const Replay& replay,
                const engine::InferEngine& engine, const std::string& speculate) {
  const engine::SchedulerLimits limits = engine.limits();
  json.set("trace", JsonValue::object()
                        .set("file", json_text(*options.file))
                        .set("requests", workload.trace_requests())
                        .set("replayed", std::ssize(workload.requests()))
                        .set("left_out", workload.left_out())
                        .set("rate", workload.scale().rate)
                        .set("divide", workload.scale().divide)
                        .set("has_prefixes", workload.has_blocks()));
  json.set("settings", JsonValue::object()
                           .set("running", limits.max_batch_size)
                           .set("step_tokens", limits.max_num_batched_tokens)
                           .set("cache_tokens", limits.num_blocks * limits.block_size)
                           .set("block_size", limits.block_size)
                           .set("prefix_caching", engine.reuses_prefixes())
                           .set("speculate", json_text(speculate))
                           .set("draft_tokens", engine.options().draft_tokens));
  json.set("arrived", std::ssize(replay.requests)).set("finished", replay.finished).set("failed", replay.failed);
  json.set("seconds", replay.seconds)
      .set("last_arrival_seconds", replay.requests.empty() ? 0.0 : replay.requests.back().arrival);
  json.set("prompt_tokens", replay.prompt_tokens)
      .set("prompt_tokens_per_second", per_second(replay.prompt_tokens, replay))
      .set("cached_tokens", replay.cached_tokens)
      .set("cached_share", share(replay.cached_tokens, replay.prompt_tokens));
  json.set("generated_tokens", replay.drawn)
      .set("generated_tokens_per_second", per_second(replay.drawn, replay))
      .set("proposed_tokens", replay.proposed_tokens)
      .set("accepted_tokens", replay.accepted_tokens);
  json.set("steps", replay.steps)
      .set("computed_tokens", replay.computed_tokens)
      .set("most_running", replay.most_running)
      .set("most_waiting", replay.most_waiting);
  json.set("preemptions", replay.counters.preemptions).set("evictions", replay.counters.evictions);
  for (const Times& times : times_of(replay)) {
    JsonValue entry = JsonValue::object().set("count", std::ssize(times.values));
    for (const double part : kParts)
      entry.set(fmt::format("p{:.0f}", 100 * part),
                times.values.empty() ? JsonValue() : JsonValue(percentile(times.values, part)));
    json.set(times.key + "_seconds", std::move(entry));
  }
  set_memory(json, memory_use(engine));
}

}  // namespace eadem::cli
