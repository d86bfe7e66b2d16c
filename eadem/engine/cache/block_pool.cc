// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/block_pool.h"

#include "eadem/core/error.h"

namespace eadem::engine {

BlockPool::BlockPool(int64_t num_blocks)
    : links_(static_cast<size_t>(num_blocks) + 1), references_(static_cast<size_t>(num_blocks)) {
  links(head()) = {head(), head()};
  for (int32_t block = 0; block < head(); ++block) insert(block, links(head()).before);
}

// Puts a block behind another one, or behind the head.
void BlockPool::insert(int32_t block, int32_t behind) {
  const int32_t next = links(behind).behind;
  links(block) = {behind, next};
  links(behind).behind = links(next).before = block;
  ++num_free_;
}

void BlockPool::unlink(int32_t block) {
  const auto [before, behind] = links(block);
  links(before).behind = behind;
  links(behind).before = before;
  --num_free_;
}

std::optional<int32_t> BlockPool::take() {
  if (num_free_ == 0) return std::nullopt;
  const int32_t block = links(head()).behind;
  unlink(block);
  references_[static_cast<size_t>(block)] = 1;
  return block;
}

void BlockPool::share(int32_t block) {
  EADEM_CHECK(block >= 0 && block < num_blocks(), "block {} of {}", block, num_blocks());
  if (references(block) == 0) unlink(block);
  ++references_[static_cast<size_t>(block)];
}

void BlockPool::release(int32_t block, bool wanted) {
  require_taken(block);
  if (--references_[static_cast<size_t>(block)] == 0) insert(block, wanted ? links(head()).before : head());
}

void BlockPool::discard(int32_t block) {
  EADEM_CHECK(references(block) == 0, "block {} has {} references", block, references(block));
  unlink(block);
  insert(block, head());
}

void BlockPool::require_taken(int32_t block) const {
  EADEM_CHECK(block >= 0 && block < num_blocks() && references(block) > 0, "block {} of {} is not taken", block,
              num_blocks());
}

}  // namespace eadem::engine
