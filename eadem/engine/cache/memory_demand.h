// SPDX-License-Identifier: Apache-2.0
//
// MemoryDemand: what an engine is about to allocate, known from its compiled programs before any of it is, so that a
// model that does not fit is refused with a plan and not by the system.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "eadem/engine/cache/cache_plan.h"
#include "eadem/pipeline/program.h"

namespace eadem::engine {

struct MemoryDemand {
  int64_t weights = 0;          // in the layouts that the programs read
  int64_t weights_in_file = 0;  // of these: may stay in mapped files, and need no memory of their own
  // The memory of the cache, by group: "all tokens", "window of 512", "per sequence", "snapshots per sequence".
  std::vector<std::pair<std::string, int64_t>> states;
  int64_t activations = 0;

  int64_t cache() const;
  int64_t total() const { return weights - weights_in_file + cache() + activations; }
};

// `states`: what the model keeps between steps. Layouts and states that exist already need nothing. `maps_files`: plain
// layouts may refer to the checkpoint's files; `maps_all`: so may packed ones, to a pack file.
struct DemandOptions {
  std::span<const modules::StateSpec> states;
  std::span<const std::string> existing_states;
  const modules::CacheSpec* cache = nullptr;  // null: has no snapshots
  bool maps_files = false, maps_all = false;
};
MemoryDemand demand_of(std::span<pipeline::Program* const> programs, const pipeline::ParameterStore& parameters,
                       const DemandOptions& options);

// Throws OutOfMemory unless `demand` fits into `free_bytes`, which are one rank's share of what `num_ranks` have: all
// of the demand, and which cache would fit beside the rest of it.
void require_memory(const MemoryDemand& demand, const CachePlanRequest& request, const CachePlan& plan,
                    int64_t free_bytes, int num_ranks);

}  // namespace eadem::engine
