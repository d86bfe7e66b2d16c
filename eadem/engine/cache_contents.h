// SPDX-License-Identifier: Apache-2.0
//
// CacheContents: which token every slot of a KV cache holds, as far as the engine wrote it. It tells a cached length
// that somebody wrote from one that nobody did, and one owner of a block from two, and it remembers the tokens that
// sampling penalties look at. Four bytes a slot on the host. Not thread-safe; nothing allocates after construction.
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

  // Nothing is written any more.
  void clear();

  // A step begins: no block has a user yet.
  void begin_step() { ++step_; }
  // `sequence` of the step writes positions [cached, cached + length) and reads those before; `blocks` is its table,
  // long enough, with numbers of blocks that exist. Throws InvalidArgument, naming both values, when a cached position
  // was never written, and when two places of the step use one block. Two sequences may read one block at the same
  // place (a shared prefix) when neither writes to it. Entries behind the last position are not looked at.
  void check(int64_t sequence, std::span<const int32_t> blocks, int64_t cached, int64_t length);

  // The blocks hold of the sequence no more than its first `cached` tokens: what follows is about to be written over.
  void truncate(std::span<const int32_t> blocks, int64_t cached);
  // Positions from `cached` on hold `tokens`.
  void write(std::span<const int32_t> blocks, int64_t cached, std::span<const int32_t> tokens);

  // The token at a position that was written.
  int32_t token(std::span<const int32_t> blocks, int64_t position) const {
    return tokens_[static_cast<size_t>(blocks[static_cast<size_t>(position / block_size_)] * block_size_ +
                                       position % block_size_)];
  }

 private:
  struct Use {
    int64_t step = 0;  // of the last use; the rest is about that one
    int64_t sequence = 0, place = 0;
    bool writes = false;
  };

  int64_t block_size_ = 1;
  int64_t step_ = 0;
  std::vector<int32_t> tokens_;   // [num_blocks * block_size]
  std::vector<int64_t> written_;  // [num_blocks] slots of each block, the first ones
  std::vector<Use> uses_;         // [num_blocks]
};

}  // namespace eadem::engine
