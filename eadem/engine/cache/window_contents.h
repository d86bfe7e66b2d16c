// SPDX-License-Identifier: Apache-2.0
//
// WindowContents: whose tokens a window group's blocks hold. A block of it belongs to the block of group 0 with which
// it was written; CacheContents knows how many tokens that one has. With it the engine refuses a table that does not
// hold what the step reads. Not thread-safe; nothing allocates after construction.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "eadem/modules/state_spec.h"

namespace eadem::engine {

class WindowContents {
 public:
  // `num_blocks` of group 0.
  WindowContents(const modules::WindowGroup& group, int64_t num_blocks, int64_t block_size);

  // Marks every block as never written.
  void clear();
  // Begins a step: no block is in use yet.
  void begin_step() { ++step_; }
  // Checks sequence `sequence` of the step, which writes positions [cached, cached + length): its table names a block
  // wherever the step looks, and those that hold earlier tokens are this sequence's. `blocks` is its checked table of
  // group 0. Throws InvalidArgument; sequences may share blocks as in CacheContents::check.
  void check(int64_t sequence, std::span<const int32_t> blocks, std::span<const int32_t> table, int64_t cached,
             int64_t length);
  // Declares that the blocks behind the first `cached` tokens will be overwritten, up to position `end`.
  void truncate(std::span<const int32_t> table, int64_t cached, int64_t end);
  // Records that positions [cached, end) were written.
  void write(std::span<const int32_t> blocks, std::span<const int32_t> table, int64_t cached, int64_t end);

  // How many places of a table a step looks at that writes positions [cached, end).
  int64_t num_places(int64_t cached, int64_t end) const { return blocks_for(end) - first_place(cached); }

 private:
  int64_t first_place(int64_t cached) const;
  int64_t blocks_for(int64_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }

  modules::WindowGroup group_;
  int64_t block_size_;
  std::vector<int32_t> owner_;     // [num_blocks of the group]: a block of group 0, or -1
  std::vector<int32_t> block_of_;  // [num_blocks of group 0]: the block that was written with it last, or -1
  std::vector<int64_t> written_in_, read_in_;  // [num_blocks of the group]: the last step that does so
  int64_t step_ = 0;
};

}  // namespace eadem::engine
