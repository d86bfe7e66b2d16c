// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/window_contents.h"

#include <algorithm>

#include "eadem/core/error.h"

namespace eadem::engine {

WindowContents::WindowContents(const modules::WindowGroup& group, int64_t num_blocks, int64_t block_size)
    : group_(group),
      block_size_(block_size),
      owner_(static_cast<size_t>(group.num_blocks), -1),
      block_of_(static_cast<size_t>(num_blocks), -1),
      written_in_(owner_.size()),
      read_in_(owner_.size()) {}

void WindowContents::clear() {
  std::fill(owner_.begin(), owner_.end(), -1);
  std::fill(block_of_.begin(), block_of_.end(), -1);
}

int64_t WindowContents::first_place(int64_t cached) const {
  return std::max<int64_t>(0, cached - group_.window + 1) / block_size_;
}

void WindowContents::check(int64_t sequence, std::span<const int32_t> blocks, std::span<const int32_t> table,
                           int64_t cached, int64_t length) {
  const int64_t end = blocks_for(cached + length);
  if (std::ssize(table) < end)
    throw InvalidArgument("sequence {} has {} blocks for the window of {}; {} tokens need {}", sequence, table.size(),
                          group_.window, cached + length, end);
  for (int64_t place = first_place(cached); place < end; ++place) {
    const int32_t block = table[static_cast<size_t>(place)], of_all = blocks[static_cast<size_t>(place)];
    if (block < 0 || block >= group_.num_blocks)
      throw InvalidArgument("sequence {} names block {} for the window of {} at position {}; there are {}", sequence,
                            block, group_.window, place * block_size_, group_.num_blocks);
    const auto at = static_cast<size_t>(block);
    const bool reads = std::max(place * block_size_, cached - group_.window + 1) < cached;
    if (reads && (owner_[at] != of_all || block_of_[static_cast<size_t>(of_all)] != block))
      throw InvalidArgument("sequence {}: block {} for the window of {} does not hold its tokens from {} on", sequence,
                            block, group_.window, place * block_size_);
    const bool writes = (place + 1) * block_size_ > cached;
    if (written_in_[at] == step_ || (writes && read_in_[at] == step_))
      throw InvalidArgument("block {} for the window of {} is used twice, by sequence {} for its positions {} and on",
                            block, group_.window, sequence, place * block_size_);
    (writes ? written_in_ : read_in_)[at] = step_;
  }
}

void WindowContents::truncate(std::span<const int32_t> table, int64_t cached, int64_t end) {
  for (int64_t place = blocks_for(cached); place < blocks_for(end); ++place)
    owner_[static_cast<size_t>(table[static_cast<size_t>(place)])] = -1;
}

void WindowContents::write(std::span<const int32_t> blocks, std::span<const int32_t> table, int64_t cached,
                           int64_t end) {
  for (int64_t place = cached / block_size_; place < blocks_for(end); ++place) {
    const int32_t block = table[static_cast<size_t>(place)], of_all = blocks[static_cast<size_t>(place)];
    owner_[static_cast<size_t>(block)] = of_all;
    block_of_[static_cast<size_t>(of_all)] = block;
  }
}

}  // namespace eadem::engine
