// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/block_pool.h"

#include "eadem/core/error.h"

namespace eadem::engine {

BlockPool::BlockPool(int64_t num_blocks) : references_(static_cast<size_t>(num_blocks)) {
  free_.reserve(references_.size());
  for (int64_t block = num_blocks; block-- > 0;) free_.push_back(static_cast<int32_t>(block));
}

std::optional<int32_t> BlockPool::take() {
  if (free_.empty()) return std::nullopt;
  const int32_t block = free_.back();
  free_.pop_back();
  references_[static_cast<size_t>(block)] = 1;
  return block;
}

void BlockPool::share(int32_t block) {
  require_taken(block);
  ++references_[static_cast<size_t>(block)];
}

void BlockPool::release(int32_t block) {
  require_taken(block);
  if (--references_[static_cast<size_t>(block)] == 0) free_.push_back(block);
}

void BlockPool::require_taken(int32_t block) const {
  EADEM_CHECK(block >= 0 && block < num_blocks() && references(block) > 0, "block {} of {} is not taken", block,
              num_blocks());
}

}  // namespace eadem::engine
