// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/cache_manager.h"

#include <algorithm>
#include <utility>

#include "eadem/core/error.h"

namespace eadem::engine {

CacheManager::CacheManager(int64_t num_blocks, int64_t block_size, std::span<const modules::WindowGroup> windows,
                           int64_t num_slots, int64_t num_snapshots)
    : block_size_(block_size), all_(num_blocks), names_(num_blocks), slots_(num_slots), snapshots_(num_snapshots) {
  for (const modules::WindowGroup& group : windows) windows_.push_back({group.window, BlockPool(group.num_blocks)});
}

void CacheManager::reserve(SequenceBlocks& sequence, int64_t tokens) const {
  const auto places = static_cast<size_t>(blocks_for(tokens));
  sequence.all.reserve(places);
  sequence.windows.assign(windows_.size(), std::vector<int32_t>(places, kNoBlock));
  sequence.held.assign(windows_.size(), {});
}

void CacheManager::extend(SequenceBlocks& sequence, int64_t tokens) {
  const auto take = [](BlockPool& pool) {
    const auto block = pool.take();
    EADEM_CHECK(block, "all of {} blocks are taken", pool.num_blocks());
    return *block;
  };
  while (std::ssize(sequence.all) < blocks_for(tokens)) {
    const int32_t block = take(all_);
    sequence.all.push_back(block);
    if (!names_.has(block)) continue;
    erase_name(block);
    ++num_evicted_;
  }
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
  for (; std::ssize(sequence.all) > blocks_for(tokens); sequence.all.pop_back())
    all_.release(sequence.all.back(), names_.has(sequence.all.back()));
}

void CacheManager::release(SequenceBlocks& sequence) {
  shrink(sequence, 0);
  for (size_t g = 0; g < windows_.size() && !sequence.held.empty(); ++g)
    hold(windows_[g], sequence.windows[g], sequence.held[g], {});
  if (sequence.slot != kNoBlock) slots_.release(std::exchange(sequence.slot, kNoBlock));
}

// --- Names.

int64_t CacheManager::count_shared(std::span<const BlockHash> names) const {
  const auto missing = std::find_if(names.begin(), names.end(), [&](const BlockHash& n) { return !names_.find(n); });
  return missing - names.begin();
}

int64_t CacheManager::count_free(std::span<const BlockHash> names, int64_t count) const {
  const auto first = names.first(static_cast<size_t>(count));
  return std::count_if(first.begin(), first.end(),
                       [&](const BlockHash& n) { return all_.references(*names_.find(n)) == 0; });
}

void CacheManager::share(SequenceBlocks& sequence, std::span<const BlockHash> names, int64_t count) {
  EADEM_CHECK(sequence.all.empty(), "a sequence has {} blocks before it shares any", sequence.all.size());
  for (const BlockHash& name : names.first(static_cast<size_t>(count))) {
    const auto block = names_.find(name);
    EADEM_CHECK(block, "block {} to share is not there", sequence.all.size());
    all_.share(*block);
    sequence.all.push_back(*block);
  }
}

void CacheManager::name(const SequenceBlocks& sequence, int64_t place, const BlockHash& name) {
  const int32_t block = sequence.all[static_cast<size_t>(place)];
  if (!names_.has(block)) names_.insert(block, name);
}

int64_t CacheManager::writable_tokens(const SequenceBlocks& sequence, int64_t tokens) const {
  const int64_t rest = tokens % block_size_;
  return rest > 0 && all_.references(sequence.all[static_cast<size_t>(tokens / block_size_)]) > 1 ? tokens - rest
                                                                                                  : tokens;
}

void CacheManager::make_writable(SequenceBlocks& sequence, int64_t tokens) {
  shrink(sequence, tokens);
  if (tokens % block_size_ > 0 && names_.has(sequence.all.back())) erase_name(sequence.all.back());
}

void CacheManager::erase_name(int32_t block) {
  snapshots_.forget(names_.name(block));
  names_.erase(block);
}

int64_t CacheManager::count_owned(const SequenceBlocks& sequence, int64_t begin) const {
  return std::count_if(sequence.all.begin() + begin, sequence.all.end(),
                       [&](int32_t block) { return all_.references(block) == 1; });
}

void CacheManager::forget_names() {
  for (int32_t block = 0; block < all_.num_blocks(); ++block)
    if (names_.has(block) && all_.references(block) == 0) all_.discard(block);
  names_.clear();
  snapshots_.forget_all();
}

}  // namespace eadem::engine
