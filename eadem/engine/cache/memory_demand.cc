// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/memory_demand.h"

#include <algorithm>
#include <map>
#include <set>

#include "eadem/core/printable.h"

namespace eadem::engine {

namespace {

std::string size_text(int64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

std::string group_of(const modules::StateSpec& state) {
  if (state.kind == modules::StateSpec::Kind::per_sequence) return "per sequence";
  return state.window == 0 ? "all tokens" : fmt::format("window of {}", state.window);
}

// What can be asked for instead, with `bytes` left for the cache.
std::string fitting_cache(const CachePlanRequest& request, const CachePlan& plan, int64_t bytes) {
  const int64_t per_token = std::max<int64_t>(1, request.bytes.all_per_token());
  if (std::holds_alternative<PagedKVCacheConfig>(request.config)) {
    const int64_t least = paged_cache_bytes(request, 1);
    if (bytes < least) return fmt::format("no KV cache fits beside the rest: its smallest takes {}", size_text(least));
    return fmt::format("max_kv_memory_bytes of {} would fit", bytes);
  }
  for (int64_t batch = plan.max_batch; batch >= 1; batch /= 2) {
    const int64_t length = (bytes / batch - request.slots_per_sequence * request.bytes.per_sequence) / per_token;
    if (length >= 1)
      return fmt::format("max_cache_len {} with max_batch_size {} would fit", std::min(length, request.context), batch);
  }
  return fmt::format("no KV cache fits beside the rest: a token takes {}", size_text(per_token));
}

}  // namespace

int64_t MemoryDemand::cache() const {
  int64_t sum = 0;
  for (const auto& [group, bytes] : states) sum += bytes;
  return sum;
}

MemoryDemand demand_of(std::span<pipeline::Program* const> programs, const pipeline::ParameterStore& parameters,
                       const DemandOptions& options) {
  MemoryDemand demand;
  std::set<std::pair<std::string, const Encoding*>> layouts;
  std::map<std::string, int64_t> groups;
  std::set<std::string> seen(options.existing_states.begin(), options.existing_states.end());
  int64_t shared_arena = 0;
  for (const pipeline::Program* program : programs) {
    program->each_parameter([&](size_t, size_t, pipeline::ValueId id, const Encoding* packing) {
      const pipeline::Value& value = program->graph().value(id);
      const std::vector<const Encoding*> there = parameters.packings(value.name);
      if (std::find(there.begin(), there.end(), packing) != there.end()) return;
      if (!layouts.emplace(value.name, packing).second) return;
      const Encoding* const encoding = packing != nullptr ? packing : value.type.encoding;
      const Shape shape = value.type.bind({});
      const int64_t bytes = encoding != nullptr ? encoded_bytes(*encoding, shape) : value.type.size_bytes({});
      demand.weights += bytes;
      if (options.maps_all || (options.maps_files && packing == nullptr && !value.columns))
        demand.weights_in_file += bytes;
    });
    for (const auto& [name, id] : program->states()) {
      if (!seen.insert(name).second) continue;
      const auto state = std::find_if(options.states.begin(), options.states.end(),
                                      [&, &name = name](const modules::StateSpec& spec) { return spec.name == name; });
      const int64_t bytes = program->graph().value(id).type.size_bytes({});
      if (state == options.states.end()) {
        groups["other"] += bytes;
        continue;
      }
      const bool in_slots = state->kind == modules::StateSpec::Kind::per_sequence && options.cache != nullptr;
      const int64_t snapshots = in_slots ? bytes / options.cache->num_slots * options.cache->num_snapshots : 0;
      groups[group_of(*state)] += bytes - snapshots;
      if (snapshots > 0) groups["snapshots per sequence"] += snapshots;
    }
    // The first program's arena serves the others as far as it suffices (Program::assign_storage).
    const int64_t arena = program->memory_plan().arena_bytes;
    if (shared_arena == 0 || arena > shared_arena) demand.activations += arena;
    if (shared_arena == 0) shared_arena = arena;
  }
  demand.states.assign(groups.begin(), groups.end());
  return demand;
}

void require_memory(const MemoryDemand& demand, const CachePlanRequest& request, const CachePlan& plan,
                    int64_t free_bytes, int num_ranks) {
  if (demand.total() <= free_bytes) return;
  std::string groups;
  for (const auto& [group, bytes] : demand.states)
    groups += fmt::format("{}{} {}", groups.empty() ? " (" : ", ", group, size_text(bytes));
  if (!groups.empty()) groups += ")";
  std::string weights;
  if (demand.weights > 0) weights = fmt::format("weights {} + ", size_text(demand.weights));
  if (demand.weights_in_file > 0)
    weights = fmt::format("weights {}, of which {} stay in the file, + ", size_text(demand.weights),
                          size_text(demand.weights_in_file));
  throw OutOfMemory("the model needs {}KV cache {}{} + activations {} = {} of memory{}; {} are free{}; {}", weights,
                    size_text(demand.cache()), groups, size_text(demand.activations), size_text(demand.total()),
                    num_ranks == 1 ? "" : fmt::format(" on each of {} ranks", num_ranks), size_text(free_bytes),
                    num_ranks == 1 ? "" : " for each",
                    fitting_cache(request, plan, free_bytes - (demand.total() - demand.cache())));
}

}  // namespace eadem::engine
