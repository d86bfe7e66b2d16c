// SPDX-License-Identifier: Apache-2.0
//
// Replays a workload on an engine: requests come by the clock, whether or not earlier ones have ended (an open loop),
// and each gets exactly as many tokens as it asks for, greedily and whatever they are. It plans, runs and commits steps
// as EngineLoop does, without text.
#pragma once

#include <atomic>
#include <functional>
#include <span>
#include <vector>

#include "eadem/cli/bench/trace.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/engine/speculation/speculator.h"

namespace eadem::cli {

// A request of the trace and its times, in seconds after the replay began.
struct ReplayedRequest {
  double arrival = 0;          // as the workload states it, whenever a step was over
  double first = 0, last = 0;  // the ends of the steps that drew its first and its last token so far
  int64_t prompt_tokens = 0, cached_tokens = 0;
  int64_t drawn = 0;
  bool finished = false;

  double to_first_token() const { return first - arrival; }
  double to_end() const { return last - arrival; }
  // The mean gap between its tokens, of which there are two at least.
  double per_token() const { return (last - first) / static_cast<double>(drawn - 1); }
};

struct Replay {
  std::vector<ReplayedRequest> requests;  // that have come, in order
  std::vector<double> gaps;  // seconds between a token of a request and the one before; 0 in one step (speculation)
  double seconds = 0;        // until the last step
  bool stopped = false;      // by `cancel`; requests that run then are not finished
  int64_t finished = 0, failed = 0;
  int64_t prompt_tokens = 0, drawn = 0;  // of the requests that have come
  int64_t cached_tokens = 0;             // of prompts, found in the cache
  int64_t proposed_tokens = 0, accepted_tokens = 0;
  int64_t steps = 0;
  int64_t computed_tokens = 0;  // of all steps; preempted requests compute theirs again
  int64_t most_running = 0, most_waiting = 0;
  int64_t blocks_in_use = 0;  // at the end; 0 unless it was stopped
  engine::CacheCounters counters;
};

// Called after each step and while nothing runs.
using OnReplay = std::function<void(const Replay&, int64_t running, int64_t waiting)>;

// Nobody else may use the engine meanwhile. `speculator` may be null. `cancel` may be set from any thread. Throws
// InvalidArgument when a request can never run on the engine, and what steps throw.
Replay replay(engine::InferEngine& engine, engine::Speculator* speculator, const Workload& workload,
              const std::atomic<bool>* cancel = nullptr, const OnReplay& on_replay = {});

// The least value that at least the share `part` of the values, at least one, do not exceed (nearest rank).
double percentile(std::span<const double> sorted, double part);

}  // namespace eadem::cli
