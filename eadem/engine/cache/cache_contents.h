// SPDX-License-Identifier: Apache-2.0
//
// CacheContents: the token in every slot of a KV cache, as far as the engine wrote it. With it the engine refuses a
// cached length that nobody wrote and a block that two places of a step use, and finds the tokens that sampling
// penalties count. It takes four bytes a slot on the host. Not thread-safe; nothing allocates after construction.
//
// A sequence's position p lies in slot p % block_size of block table[p / block_size].
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace eadem::engine {

class CacheContents {
 public:
  CacheContents() = default;
  CacheContents(int64_t num_blocks, int64_t block_size);

  // Marks every slot as never written.
  void clear();
  // Changes when blocks were written that no scheduler planned, or parameters changed: what it knows of the contents of
  // blocks ends then.
  int64_t epoch() const { return epoch_; }
  void begin_epoch() { ++epoch_; }

  // Begins a step: no block is in use yet.
  void begin_step() { ++step_; }
  // Checks sequence `sequence` of the step: it writes positions [cached, cached + length) and reads those before.
  // `blocks` is its block table, long enough and with existing block numbers. Throws InvalidArgument, naming both
  // values, when a cached position was never written or when two places of the step use one block. Two sequences may
  // read one block at equal positions (a shared prefix) if neither writes to it. Entries after the last position are
  // ignored.
  void check(int64_t sequence, std::span<const int32_t> blocks, int64_t cached, int64_t length);

  // Declares that only the first `cached` tokens of the sequence remain in the blocks: the others will be overwritten.
  void truncate(std::span<const int32_t> blocks, int64_t cached);
  // Records `tokens` at positions from `cached` on.
  void write(std::span<const int32_t> blocks, int64_t cached, std::span<const int32_t> tokens);

  // Replaces the token in a slot that was written, block * block_size + offset.
  void set_token(int64_t slot, int32_t token) { tokens_[static_cast<size_t>(slot)] = token; }

  // Returns how many tokens at the start of `tokens` the blocks hold, each at its position.
  int64_t common_prefix(std::span<const int32_t> blocks, std::span<const int32_t> tokens) const;

  // Returns the token at a position that was written.
  int32_t token(std::span<const int32_t> blocks, int64_t position) const {
    return tokens_[static_cast<size_t>(blocks[static_cast<size_t>(position / block_size_)] * block_size_ +
                                       position % block_size_)];
  }

 private:
  struct Use {
    int64_t step = 0;  // the last step that used the block; the other members describe that use
    int64_t sequence = 0, place = 0;
    bool writes = false;
  };

  int64_t block_size_ = 1;
  int64_t step_ = 0;
  int64_t epoch_ = 0;
  std::vector<int32_t> tokens_;   // [num_blocks * block_size]
  std::vector<int64_t> written_;  // [num_blocks]: how many slots of each block were written, from the first on
  std::vector<Use> uses_;         // [num_blocks]
};

}  // namespace eadem::engine
