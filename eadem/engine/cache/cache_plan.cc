// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/cache_plan.h"

#include <algorithm>
#include <numeric>

#include "eadem/core/error.h"

namespace eadem::engine {

using modules::CacheLayout;
using modules::CacheSpec;
using modules::StateSpec;

namespace {

// `length` is a max_cache_len, where 0 stands for the context of a cache that states none.
int64_t longest_of(int64_t length, const CachePlanRequest& request) {
  const int64_t context = request.context;
  if (length < 0) throw InvalidArgument("max_cache_len is {}; expected at least 1", length);
  if (length > context) throw InvalidArgument("max_cache_len is {}; the model's context is {} tokens", length, context);
  if (length > 0) return length;
  return request.default_context > 0 ? request.default_context : context;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The memory that the sequences of a paged cache need at most.
struct PagedDemand {
  struct Window {
    int64_t window, blocks, token_bytes;
  };
  int64_t block_size, batch, longest;
  int64_t all_sequences;  // blocks of `batch` sequences of the longest kind
  int64_t token_bytes;    // of group 0
  bool only_tokens;       // no state lies in group 0
  int64_t slot_bytes;     // of all sequences
  int64_t state_bytes;    // of a snapshot of a sequence's states
  int64_t snapshots;      // at most
  bool fits_snapshots;    // no number was asked for
  std::vector<Window> windows;

  PagedDemand(const PagedKVCacheConfig& config, const CachePlanRequest& request)
      : block_size(config.block_size == 0 ? ceil_div(request.block_size, request.bytes.stride) * request.bytes.stride
                                          : config.block_size),
        batch(config.max_batch_size),
        longest(longest_of(config.max_cache_len, request)),
        token_bytes(request.bytes.per_token) {
    require_count("block_size", block_size, 1);
    require_count("max_batch_size", batch, 1);
    require_count("state_snapshots", config.state_snapshots, 0);
    all_sequences = batch * ceil_div(longest, block_size);
    state_bytes = request.bytes.per_sequence;
    slot_bytes = batch * request.slots_per_sequence * state_bytes;
    const int64_t step_tokens = std::max(request.max_num_batched_tokens, batch);
    for (const auto& [window, bytes] : request.bytes.windows)
      if (window >= longest)
        token_bytes += bytes;
      else
        windows.push_back(
            {window, std::min(all_sequences, window_blocks(window, block_size, batch, step_tokens)), bytes});
    only_tokens = token_bytes == 0;
    if (only_tokens) token_bytes = sizeof(int32_t);
    fits_snapshots = config.state_snapshots == 0;
    snapshots = fits_snapshots ? kSnapshotsPerSequence * batch : config.state_snapshots;
    if (!config.prefix_caching || state_bytes == 0 || !windows.empty()) snapshots = 0;
  }

  // Bytes of a cache with `num_blocks` blocks in group 0, without snapshots. A double is exact up to 2^53 and never
  // overflows.
  double cache_bytes(int64_t num_blocks) const {
    double bytes = static_cast<double>(num_blocks) * static_cast<double>(token_bytes);
    for (const Window& each : windows)
      bytes += static_cast<double>(std::min(num_blocks, each.blocks) + 1) * static_cast<double>(each.token_bytes);
    return bytes * static_cast<double>(block_size) + static_cast<double>(slot_bytes);
  }

  double snapshot_bytes(int64_t count) const { return static_cast<double>(count) * static_cast<double>(state_bytes); }

  // The number of snapshots beside blocks that take `bytes`.
  int64_t snapshots_beside(double bytes) const {
    if (snapshots == 0 || !fits_snapshots || only_tokens) return snapshots;
    return std::min(snapshots, static_cast<int64_t>(bytes / snapshot_bytes(1)));
  }
  // The number of snapshots in a cache of `bytes` in all. They take at most half of what the sequences' own states
  // leave, and leave room for a block.
  int64_t snapshots_in(int64_t bytes) const {
    if (snapshots == 0 || !fits_snapshots) return snapshots;
    const double half = static_cast<double>(bytes - slot_bytes) / 2;
    const double room = std::min(half, static_cast<double>(bytes) - cache_bytes(1));
    return std::clamp<int64_t>(static_cast<int64_t>(room / snapshot_bytes(1)), 0, snapshots);
  }

  // The most blocks of group 0 with which the cache takes at most `bytes`; 0: not even one fits.
  int64_t blocks_in(int64_t bytes) const {
    int64_t fits = 0, too_many = std::max<int64_t>(0, bytes) / block_size / token_bytes + 1;
    // Without a state that keeps every token, more blocks than all sequences have are of no use.
    if (only_tokens) too_many = std::min(too_many, all_sequences + 1);
    while (too_many - fits > 1) {
      const int64_t middle = fits + (too_many - fits) / 2;
      (cache_bytes(middle) <= static_cast<double>(bytes) ? fits : too_many) = middle;
    }
    return fits;
  }
};

CachePlan plan_static(const StaticKVCacheConfig& config, const CachePlanRequest& request) {
  require_count("max_batch_size", config.max_batch_size, 1);
  const int64_t length = longest_of(config.max_cache_len, request);
  CachePlan plan{{CacheLayout::contiguous, config.max_batch_size, length}, config.max_batch_size, length};
  if (request.bytes.per_sequence > 0) plan.spec.num_slots = plan.max_batch * request.slots_per_sequence;
  return plan;
}

CachePlan plan_paged(const PagedKVCacheConfig& config, const CachePlanRequest& request) {
  const PagedDemand demand(config, request);
  if (demand.block_size % request.bytes.stride != 0)
    throw InvalidArgument("block_size is {}; this model keeps rows for {} tokens each, which must divide it",
                          demand.block_size, request.bytes.stride);
  int64_t num_blocks = demand.all_sequences;
  int64_t snapshots = demand.snapshots_beside(demand.cache_bytes(num_blocks) - static_cast<double>(demand.slot_bytes));
  if (config.max_kv_memory_bytes != 0) {
    snapshots = demand.snapshots_in(config.max_kv_memory_bytes);
    const auto taken = static_cast<int64_t>(demand.snapshot_bytes(snapshots));
    num_blocks = demand.blocks_in(config.max_kv_memory_bytes - taken);
    if (num_blocks < 1)
      throw InvalidArgument("max_kv_memory_bytes is {}; one block of {} tokens takes {}{}", config.max_kv_memory_bytes,
                            demand.block_size, static_cast<int64_t>(demand.cache_bytes(1)),
                            taken == 0 ? "" : fmt::format(", and {} state_snapshots {}", snapshots, taken));
  }
  CachePlan plan{{CacheLayout::paged, num_blocks, demand.block_size},
                 demand.batch,
                 std::min(demand.longest, num_blocks * demand.block_size)};
  for (const PagedDemand::Window& each : demand.windows)
    plan.spec.windows.push_back({each.window, std::min(num_blocks, each.blocks)});
  plan.spec.num_snapshots = snapshots;
  if (demand.state_bytes > 0) plan.spec.num_slots = demand.batch * request.slots_per_sequence + snapshots;
  return plan;
}

}  // namespace

void require_count(const char* name, int64_t value, int64_t min) {
  constexpr int64_t kMost = int64_t{1} << 24;
  if (value < min || value > kMost) throw InvalidArgument("{} is {}; expected {} to {}", name, value, min, kMost);
}

StateBytes StateBytes::of(std::span<const StateSpec> states) {
  StateBytes bytes;
  for (const StateSpec& state : states) {
    const int64_t row = state.row.size_bytes({});
    if (state.kind == StateSpec::Kind::per_sequence) {
      bytes.per_sequence += row;
      continue;
    }
    (state.window > 0 ? bytes.windows[state.window] : bytes.per_token) += ceil_div(row, state.stride);
    bytes.stride = std::lcm(bytes.stride, state.stride);
  }
  return bytes;
}

int64_t StateBytes::all_per_token() const {
  int64_t total = per_token;
  for (const auto& [window, bytes] : windows) total += bytes;
  return total;
}

int64_t StateBytes::of_sequence(int64_t tokens) const {
  int64_t total = per_sequence + per_token * tokens;
  for (const auto& [window, bytes] : windows) total += bytes * std::min(tokens, window);
  return total;
}

int64_t CachePlan::blocks_per_sequence() const {
  return spec.layout == CacheLayout::contiguous ? 1 : ceil_div(max_length, spec.block_size);
}

CachePlan plan_cache(const CachePlanRequest& request) {
  if (const auto* fixed = std::get_if<StaticKVCacheConfig>(&request.config)) return plan_static(*fixed, request);
  return plan_paged(std::get<PagedKVCacheConfig>(request.config), request);
}

std::string_view why_no_prefix_caching(const CacheConfig& config, const CacheSpec& cache) {
  const auto* const paged = std::get_if<PagedKVCacheConfig>(&config);
  if (paged == nullptr) return "the cache is contiguous";
  if (!paged->prefix_caching) return "it is switched off";
  if (!cache.windows.empty()) return "the model has layers with a window, which keep no earlier tokens";
  if (cache.num_slots > 0 && cache.num_snapshots == 0)
    return "the model has states per sequence, and max_kv_memory_bytes leaves no room for a snapshot of them";
  return "";
}

int64_t paged_cache_bytes(const CachePlanRequest& request, int64_t tokens) {
  const PagedDemand demand(std::get<PagedKVCacheConfig>(request.config), request);
  // A last block that is not full counts as far as it is filled.
  const double spare =
      static_cast<double>(demand.token_bytes * (demand.block_size - 1 - (tokens - 1) % demand.block_size));
  const double bytes = demand.cache_bytes(ceil_div(tokens, demand.block_size)) - spare;
  const int64_t snapshots = demand.snapshots_beside(bytes - static_cast<double>(demand.slot_bytes));
  return static_cast<int64_t>(bytes + demand.snapshot_bytes(snapshots));
}

int64_t window_blocks(int64_t window, int64_t block_size, int64_t sequences, int64_t step_tokens) {
  return sequences * (ceil_div(window - 1, block_size) + 2) + step_tokens / block_size;
}

}  // namespace eadem::engine
