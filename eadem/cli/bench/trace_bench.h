// SPDX-License-Identifier: Apache-2.0
//
// `eadem bench --trace`: its options, and what it reports.
#pragma once

#include <optional>
#include <string>

#include "eadem/cli/bench/replay.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/engine/speculation/speculation_options.h"
#include "eadem/io/json.h"

namespace eadem::cli {

struct TraceOptions {
  std::optional<std::string> file;
  std::optional<int64_t> requests, divide, running, step_tokens, cache_tokens;
  std::optional<double> rate;
  bool no_prefix_caching = false;

  void add(Arguments& arguments);
  // Throws UsageError for values out of range, and for options of a trace without --trace.
  void check() const;
  // Reads the file. Throws as read_trace and Workload do, and InvalidArgument for a --cache-tokens that is less than
  // the longest request.
  Workload workload(int64_t context) const;
  // Sets the cache, but for its bytes, and the tokens of a step.
  void set(engine::EngineOptions& options, const Workload& workload) const;
  // Sets the bytes of the cache, where --cache-tokens asks for some.
  void set_cache_bytes(engine::EngineOptions& options, const models::Checkpoint& checkpoint,
                       const Device& device) const;
};

// Replays the workload with a progress bar, until the user asks to stop.
Replay run_replay(engine::InferEngine& engine, engine::Speculator* speculator, const Workload& workload);

// The report, after a line about the model: as text, and as members of an object.
std::string replay_text(const TraceOptions& options, const Workload& workload, const Replay& replay,
                        const engine::InferEngine& engine, const std::string& speculate);
void set_replay(io::JsonValue& json, const TraceOptions& options, const Workload& workload, const Replay& replay,
                const engine::InferEngine& engine, const std::string& speculate);

}  // namespace eadem::cli
