// SPDX-License-Identifier: Apache-2.0
//
// The configuration of the KV cache.
#pragma once

#include <cstdint>
#include <variant>

namespace eadem::engine {

// Contiguous memory for `max_batch_size` sequences of up to `max_cache_len` tokens. 0: the model's context length.
// Layers with a window keep every token, too.
struct StaticKVCacheConfig {
  int64_t max_batch_size = 1;
  int64_t max_cache_len = 0;
};

// Blocks of `block_size` tokens that sequences share. Layers with a window keep no more blocks of a sequence than it
// reaches.
struct PagedKVCacheConfig {
  int64_t max_kv_memory_bytes = 0;  // 0: room for max_batch_size sequences of max_cache_len
  // 0: the hardware configuration's (memory.kv_block_size of the attention), or where rows stand for several tokens the
  // next multiple of these.
  int64_t block_size = 0;
  int64_t max_batch_size = 8;  // most sequences of a step
  int64_t max_cache_len = 0;   // most tokens of a sequence; 0: the model's context, as far as the memory goes
  // A request begins with the blocks that hold its first tokens, whichever requests computed them. Models with windows
  // compute every prompt whole.
  bool prefix_caching = true;
  // With prefix_caching, of a model with states per sequence: how many copies of these the cache keeps at borders of
  // blocks (StateSnapshots). 0: two for each of max_batch_size sequences, as far as they take no more memory than the
  // blocks of tokens.
  int64_t state_snapshots = 0;
};

using CacheConfig = std::variant<StaticKVCacheConfig, PagedKVCacheConfig>;

}  // namespace eadem::engine
