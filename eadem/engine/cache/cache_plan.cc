// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/cache_plan.h"

#include <algorithm>

#include "eadem/core/error.h"

namespace eadem::engine {

using modules::CacheLayout;
using modules::CacheSpec;
using modules::StateSpec;

namespace {

// The largest value of anything that counts tokens or sequences: products of two such numbers and of a model's sizes,
// which its config bounds, then fit 64 bits.
constexpr int64_t kMaxCount = int64_t{1} << 24;

void require_count(const char* name, int64_t value) {
  if (value < 1 || value > kMaxCount)
    throw InvalidArgument("{} is {}; expected {} to {}", name, value, 1, kMaxCount);
}

// `length` is a max_cache_len, where 0 stands for the model's context.
int64_t longest_of(int64_t length, int64_t context) {
  if (length < 0) throw InvalidArgument("max_cache_len is {}; expected at least 1", length);
  if (length > context) throw InvalidArgument("max_cache_len is {}; the model's context is {} tokens", length, context);
  return length == 0 ? context : length;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A window group before its size is known.
struct Demand {
  int64_t window, blocks, token_bytes;
};

// Bytes of a cache with `num_blocks` blocks in group 0. A double is exact up to 2^53 and never overflows.
double cache_bytes(int64_t num_blocks, int64_t block_size, int64_t token_bytes, const std::vector<Demand>& windows) {
  double bytes = static_cast<double>(num_blocks) * static_cast<double>(token_bytes);
  for (const Demand& each : windows)
    bytes += static_cast<double>(std::min(num_blocks, each.blocks) + 1) * static_cast<double>(each.token_bytes);
  return bytes * static_cast<double>(block_size);
}

// The most blocks of group 0, up to `most`, with which the cache takes at most `bytes`; 0: not even one fits.
int64_t blocks_in(double bytes, int64_t most, int64_t block_size, int64_t token_bytes,
                  const std::vector<Demand>& windows) {
  int64_t fits = 0;
  for (int64_t too_many = most + 1; too_many - fits > 1;) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (cache_bytes(middle, block_size, token_bytes, windows) <= bytes ? fits : too_many) = middle;
  }
  return fits;
}

CachePlan plan_static(const StaticKVCacheConfig& config, const CachePlanRequest& request) {
  require_count("max_batch_size", config.max_batch_size);
  const int64_t length = longest_of(config.max_cache_len, request.context);
  CachePlan plan{{CacheLayout::contiguous, config.max_batch_size, length}, config.max_batch_size, length};
  if (request.bytes.per_sequence > 0) plan.spec.num_slots = plan.max_batch;
  return plan;
}

CachePlan plan_paged(const PagedKVCacheConfig& config, const CachePlanRequest& request) {
  const int64_t block_size = config.block_size == 0 ? request.block_size : config.block_size;
  const int64_t batch = config.max_batch_size;
  require_count("block_size", block_size);
  require_count("max_batch_size", batch);
  const int64_t longest = longest_of(config.max_cache_len, request.context);
  const int64_t all_sequences = batch * ceil_div(longest, block_size);

  std::vector<Demand> windows;
  int64_t token_bytes = request.bytes.per_token;
  for (const auto& [window, bytes] : request.bytes.windows)
    if (window >= longest)
      token_bytes += bytes;
    else
      windows.push_back({window,
                         std::min(all_sequences, window_blocks(window, block_size, batch,
                                                               std::max(request.max_step_tokens, batch))),
                         bytes});

  int64_t num_blocks = all_sequences;
  if (config.max_kv_memory_bytes != 0 || config.max_cache_len == 0) {
    // Without a state that keeps every token, more blocks than all sequences have are of no use.
    const bool only_tokens = token_bytes == 0;
    if (only_tokens) token_bytes = sizeof(int32_t);
    const double slots = static_cast<double>(batch) * static_cast<double>(request.bytes.per_sequence);
    const int64_t most = config.max_kv_memory_bytes / block_size / token_bytes;
    num_blocks = blocks_in(static_cast<double>(config.max_kv_memory_bytes) - slots,
                           only_tokens ? std::min(most, all_sequences) : most, block_size, token_bytes, windows);
    if (num_blocks < 1)
      throw InvalidArgument("max_kv_memory_bytes is {}; one block of {} tokens takes {}", config.max_kv_memory_bytes,
                            block_size,
                            static_cast<int64_t>(cache_bytes(1, block_size, token_bytes, windows) + slots));
  }
  CachePlan plan{{CacheLayout::paged, num_blocks, block_size}, batch, std::min(longest, num_blocks * block_size)};
  for (const Demand& each : windows) plan.spec.windows.push_back({each.window, std::min(num_blocks, each.blocks)});
  if (request.bytes.per_sequence > 0) plan.spec.num_slots = batch;
  return plan;
}

}  // namespace

StateBytes StateBytes::of(std::span<const StateSpec> states) {
  StateBytes bytes;
  for (const StateSpec& state : states) {
    const int64_t row = state.row.size_bytes({});
    if (state.kind == StateSpec::Kind::per_sequence)
      bytes.per_sequence += row;
    else
      (state.window > 0 ? bytes.windows[state.window] : bytes.per_token) += row;
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

int64_t window_blocks(int64_t window, int64_t block_size, int64_t sequences, int64_t step_tokens) {
  return sequences * (ceil_div(window - 1, block_size) + 2) + step_tokens / block_size;
}

}  // namespace eadem::engine
