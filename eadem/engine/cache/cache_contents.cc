// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/cache_contents.h"

#include <algorithm>

#include "eadem/core/error.h"

namespace eadem::engine {

CacheContents::CacheContents(int64_t num_blocks, int64_t block_size)
    : block_size_(block_size),
      tokens_(static_cast<size_t>(num_blocks * block_size)),
      written_(static_cast<size_t>(num_blocks)),
      uses_(static_cast<size_t>(num_blocks)) {}

void CacheContents::clear() {
  std::fill(written_.begin(), written_.end(), 0);
  begin_epoch();
}

void CacheContents::check(int64_t sequence, std::span<const int32_t> blocks, int64_t cached, int64_t length) {
  const int64_t end = cached + length;
  for (int64_t place = 0, first = 0; first < end; ++place, first += block_size_) {
    const int32_t block = blocks[static_cast<size_t>(place)];
    const int64_t expected = std::clamp<int64_t>(cached - first, 0, block_size_);
    if (written_[static_cast<size_t>(block)] < expected)
      throw InvalidArgument("sequence {} has {} cached tokens; block {} holds {} of the {} that its table puts there",
                            sequence, cached, block, written_[static_cast<size_t>(block)], expected);
    const bool writes = first + block_size_ > cached;
    Use& use = uses_[static_cast<size_t>(block)];
    if (use.step == step_) {
      if (use.sequence == sequence)
        throw InvalidArgument("sequence {} names block {} twice, for its positions {} and {} on", sequence, block,
                              use.place * block_size_, first);
      if (use.writes || writes || use.place != place)
        throw InvalidArgument(
            "sequences {} and {} both use block {}, for their positions {} and {} on; only tokens that both have "
            "cached "
            "at the same positions can be shared",
            use.sequence, sequence, block, use.place * block_size_, first);
    }
    use = {step_, sequence, place, writes};
  }
}

void CacheContents::truncate(std::span<const int32_t> blocks, int64_t cached) {
  for (auto place = static_cast<size_t>(cached / block_size_); place < blocks.size(); ++place) {
    int64_t& written = written_[static_cast<size_t>(blocks[place])];
    written = std::min(written, std::max<int64_t>(0, cached - static_cast<int64_t>(place) * block_size_));
  }
}

int64_t CacheContents::common_prefix(std::span<const int32_t> blocks, std::span<const int32_t> tokens) const {
  const int64_t most = std::min(std::ssize(tokens), std::ssize(blocks) * block_size_);
  for (int64_t position = 0; position < most; ++position) {
    const int32_t block = blocks[static_cast<size_t>(position / block_size_)];
    if (written_[static_cast<size_t>(block)] <= position % block_size_ ||
        token(blocks, position) != tokens[static_cast<size_t>(position)])
      return position;
  }
  return most;
}

void CacheContents::write(std::span<const int32_t> blocks, int64_t cached, std::span<const int32_t> tokens) {
  for (int64_t position = cached; position < cached + std::ssize(tokens); ++position) {
    const int64_t block = blocks[static_cast<size_t>(position / block_size_)], slot = position % block_size_;
    tokens_[static_cast<size_t>(block * block_size_ + slot)] = tokens[static_cast<size_t>(position - cached)];
    written_[static_cast<size_t>(block)] = slot + 1;
  }
}

}  // namespace eadem::engine
