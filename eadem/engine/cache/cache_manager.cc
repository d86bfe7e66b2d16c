// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/cache_manager.h"

#include <algorithm>
#include <utility>

#include "eadem/core/error.h"

namespace eadem::engine {

CacheManager::CacheManager(int64_t num_blocks, int64_t block_size, std::span<const modules::WindowGroup> windows,
                           int64_t num_slots)
    : block_size_(block_size), all_(num_blocks), slots_(num_slots) {
  for (const modules::WindowGroup& group : windows) windows_.push_back({group.window, BlockPool(group.num_blocks)});
}

void CacheManager::reserve(SequenceBlocks& sequence, int64_t tokens) const {
  const auto places = static_cast<size_t>(blocks_for(tokens));
  sequence.all.reserve(places);
  sequence.windows.assign(windows_.size(), std::vector<int32_t>(places, kNoBlock));
  sequence.held.assign(windows_.size(), {});
}

void CacheManager::start(SequenceBlocks& sequence, int64_t tokens) {
  const auto take = [](BlockPool& pool) {
    const auto block = pool.take();
    EADEM_CHECK(block, "all of {} blocks are taken", pool.num_blocks());
    return *block;
  };
  while (std::ssize(sequence.all) < blocks_for(tokens)) sequence.all.push_back(take(all_));
  if (slots_.num_blocks() > 0 && sequence.slot == kNoBlock) sequence.slot = take(slots_);
}

// The places that a token at position `cached` reads, without its own.
SequenceBlocks::Run CacheManager::reached(const Window& group, int64_t cached) const {
  return {std::max<int64_t>(0, cached - group.window + 1) / block_size_, blocks_for(cached)};
}

void CacheManager::extend_windows(SequenceBlocks& sequence, int64_t end) {
  for (size_t g = 0; g < windows_.size(); ++g) {
    SequenceBlocks::Run& held = sequence.held[g];
    for (; held.end < blocks_for(end); ++held.end) {
      const auto block = windows_[g].pool.take();
      EADEM_CHECK(block, "all of {} blocks of the window of {} are taken", windows_[g].pool.num_blocks(),
                  windows_[g].window);
      sequence.windows[g][static_cast<size_t>(held.end)] = *block;
    }
  }
}

// Gives back the held places outside of `wanted`.
void CacheManager::hold(Window& group, std::vector<int32_t>& table, SequenceBlocks::Run& held,
                        SequenceBlocks::Run wanted) {
  const auto give_back = [&](int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; ++place)
      group.pool.release(std::exchange(table[static_cast<size_t>(place)], kNoBlock));
  };
  give_back(held.begin, std::min(held.end, wanted.begin));
  give_back(std::max(held.begin, wanted.end), held.end);
  held = {std::max(held.begin, wanted.begin), std::min(held.end, wanted.end)};
  if (held.begin >= held.end) held = {wanted.begin, wanted.begin};
}

void CacheManager::retire_windows(SequenceBlocks& sequence, int64_t cached) {
  for (size_t g = 0; g < windows_.size(); ++g)
    hold(windows_[g], sequence.windows[g], sequence.held[g], reached(windows_[g], cached));
}

bool CacheManager::holds_windows(const SequenceBlocks& sequence, int64_t cached) const {
  for (size_t g = 0; g < windows_.size(); ++g) {
    const SequenceBlocks::Run wanted = reached(windows_[g], cached), held = sequence.held[g];
    if (wanted.begin < wanted.end && (held.begin > wanted.begin || held.end < wanted.end)) return false;
  }
  return true;
}

void CacheManager::move(SequenceBlocks& to, SequenceBlocks& from, int64_t tokens) {
  shrink(from, tokens);
  to.all.assign(from.all.begin(), from.all.end());
  from.all.clear();
  for (size_t g = 0; g < windows_.size() && !from.held.empty(); ++g) {
    hold(windows_[g], from.windows[g], from.held[g], {0, std::ssize(to.windows[g])});
    to.held[g] = std::exchange(from.held[g], {});
    for (int64_t place = to.held[g].begin; place < to.held[g].end; ++place)
      to.windows[g][static_cast<size_t>(place)] = std::exchange(from.windows[g][static_cast<size_t>(place)], kNoBlock);
  }
  to.slot = std::exchange(from.slot, kNoBlock);
}

void CacheManager::shrink(SequenceBlocks& sequence, int64_t tokens) {
  for (; std::ssize(sequence.all) > blocks_for(tokens); sequence.all.pop_back()) all_.release(sequence.all.back());
}

void CacheManager::release(SequenceBlocks& sequence) {
  shrink(sequence, 0);
  for (size_t g = 0; g < windows_.size() && !sequence.held.empty(); ++g)
    hold(windows_[g], sequence.windows[g], sequence.held[g], {});
  if (sequence.slot != kNoBlock) slots_.release(std::exchange(sequence.slot, kNoBlock));
}

}  // namespace eadem::engine
