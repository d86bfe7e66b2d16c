// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/cache_config.h"

#include "eadem/core/error.h"

namespace eadem::engine {

BlockAllocator::BlockAllocator(int64_t num_blocks) : taken_(static_cast<size_t>(num_blocks), false) {
  free_.reserve(taken_.size());
  for (int64_t block = num_blocks; block-- > 0;) free_.push_back(static_cast<int32_t>(block));
}

std::optional<int32_t> BlockAllocator::take() {
  if (free_.empty()) return std::nullopt;
  const int32_t block = free_.back();
  free_.pop_back();
  taken_[static_cast<size_t>(block)] = true;
  return block;
}

void BlockAllocator::give_back(std::span<const int32_t> blocks) {
  for (int32_t block : blocks) {
    EADEM_CHECK(block >= 0 && block < num_blocks() && taken_[static_cast<size_t>(block)], "block {} of {} is not taken",
                block, num_blocks());
    taken_[static_cast<size_t>(block)] = false;
    free_.push_back(block);
  }
}

}  // namespace eadem::engine
