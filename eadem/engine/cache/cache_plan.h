// SPDX-License-Identifier: Apache-2.0
//
// CachePlan: how many blocks and slots each group of a cache gets. Pure arithmetic: it knows neither a model nor a
// device.
#pragma once

#include <map>
#include <span>
#include <string_view>

#include "eadem/engine/cache/cache_config.h"
#include "eadem/modules/state_spec.h"

namespace eadem::engine {

// Throws InvalidArgument unless `value`, which counts tokens or sequences, is `min` to 2^24: products of two such
// numbers and of a model's sizes, which its config bounds, then fit 64 bits.
void require_count(const char* name, int64_t value, int64_t min);

// Bytes of the states of all layers.
struct StateBytes {
  int64_t per_token = 0;               // of states that keep every token
  std::map<int64_t, int64_t> windows;  // likewise per token, by window
  int64_t per_sequence = 0;
  int64_t stride = 1;  // the least number of tokens that all rows for several tokens divide

  static StateBytes of(std::span<const modules::StateSpec> states);
  // Per token, windows or not.
  int64_t all_per_token() const;
  // Bytes that a sequence of so many tokens keeps.
  int64_t of_sequence(int64_t tokens) const;
};

struct CachePlan {
  modules::CacheSpec spec;
  int64_t max_batch = 0;
  int64_t max_length = 0;  // tokens of a sequence

  // The width of block tables, the same in every group.
  int64_t blocks_per_sequence() const;
};

struct CachePlanRequest {
  CacheConfig config;
  StateBytes bytes;
  int64_t context = 0;          // tokens; of the model
  int64_t default_context = 0;  // tokens of a cache that states none; 0: context
  int64_t block_size = 0;       // of a paged cache that states none: then the next multiple of the rows' stride
  int64_t max_num_batched_tokens = 0;
  int64_t slots_per_sequence = 1;  // of states per sequence; 2: each has a second copy (SequenceStates)
};

// Snapshots of states per sequence that a cache has by default, for each of max_batch_size sequences. Of a sequence the
// ends of its prompt and of its answer are worth one each.
inline constexpr int64_t kSnapshotsPerSequence = 2;

// A window group gets window_blocks() blocks, or as many as group 0 if that is less; group 0 gets the rest of
// max_kv_memory_bytes. Windows as long as the longest sequence are none. A model in which every layer has a window
// keeps the tokens themselves in group 0, at four bytes each. Throws InvalidArgument naming both values, also for a
// paged cache in whose blocks some row for several tokens does not end.
CachePlan plan_cache(const CachePlanRequest& request);

// Why requests do not begin with blocks that others have computed, for people; empty: they do. `cache` is what
// plan_cache made of the configuration.
std::string_view why_no_prefix_caching(const CacheConfig& config, const modules::CacheSpec& cache);

// The max_kv_memory_bytes with which a paged cache has room for `tokens` tokens of all sequences together.
int64_t paged_cache_bytes(const CachePlanRequest& request, int64_t tokens);

// The most blocks that `sequences` hold in a group with this window in a step of `step_tokens` tokens. Between steps a
// sequence holds its last window - 1 tokens, and a step adds its own:
//   ceil((window - 1) / block_size) + 1 blocks of a sequence, at most one for what it adds, and step_tokens /
//   block_size
// of all together.
int64_t window_blocks(int64_t window, int64_t block_size, int64_t sequences, int64_t step_tokens);

}  // namespace eadem::engine
