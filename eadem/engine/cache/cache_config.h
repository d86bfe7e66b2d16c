// SPDX-License-Identifier: Apache-2.0
//
// The configuration of the KV cache, and the allocator of a paged cache.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

namespace eadem::engine {

// Contiguous memory for `max_batch_size` sequences of up to `max_cache_len` tokens. 0: the model's context length.
struct StaticKVCacheConfig {
  int64_t max_batch_size = 1;
  int64_t max_cache_len = 0;
};

// Blocks of `block_size` tokens that sequences share.
struct PagedKVCacheConfig {
  int64_t max_kv_memory_bytes = 0;  // 0: room for max_batch_size sequences of max_cache_len
  int64_t block_size = 0;           // 0: the hardware configuration's (memory.kv_block_size of the attention)
  int64_t max_batch_size = 8;       // most sequences of a step
  int64_t max_cache_len = 0;        // most tokens of a sequence; 0: the model's context, as far as the memory goes
};

using CacheConfig = std::variant<StaticKVCacheConfig, PagedKVCacheConfig>;

// Hands out block numbers [0, num_blocks). Not thread-safe. Never allocates after construction.
class BlockAllocator {
 public:
  explicit BlockAllocator(int64_t num_blocks);

  int64_t num_blocks() const { return static_cast<int64_t>(taken_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  // Returns a free block, or nothing when none is free.
  std::optional<int32_t> take();
  // Giving back a block twice, or one that was never taken, is a bug of the caller.
  void give_back(std::span<const int32_t> blocks);

 private:
  std::vector<int32_t> free_;  // a stack
  std::vector<bool> taken_;
};

}  // namespace eadem::engine
