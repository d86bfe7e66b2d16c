// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/block_names.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "eadem/core/error.h"

namespace eadem::engine {

BlockNames::BlockNames(int64_t num_blocks)
    : first_(std::bit_ceil(static_cast<size_t>(std::max<int64_t>(1, num_blocks))), kNone),
      next_(static_cast<size_t>(num_blocks), kNone),
      named_(next_.size()),
      names_(next_.size()) {}

std::optional<int32_t> BlockNames::find(const BlockHash& name) const {
  for (int32_t block = first_[bucket(name)]; block != kNone; block = next_[static_cast<size_t>(block)])
    if (names_[static_cast<size_t>(block)] == name) return block;
  return std::nullopt;
}

bool BlockNames::insert(int32_t block, const BlockHash& name) {
  EADEM_CHECK(!has(block), "block {} has a name", block);
  if (find(name)) return false;
  const auto at = static_cast<size_t>(block);
  names_[at] = name;
  named_[at] = 1;
  next_[at] = std::exchange(first_[bucket(name)], block);
  ++size_;
  return true;
}

void BlockNames::erase(int32_t block) {
  EADEM_CHECK(has(block), "block {} has no name", block);
  const auto at = static_cast<size_t>(block);
  int32_t* link = &first_[bucket(names_[at])];
  while (*link != block) link = &next_[static_cast<size_t>(*link)];
  *link = next_[at];
  named_[at] = 0;
  --size_;
}

void BlockNames::clear() {
  std::fill(first_.begin(), first_.end(), kNone);
  std::fill(named_.begin(), named_.end(), uint8_t{0});
  size_ = 0;
}

}  // namespace eadem::engine
