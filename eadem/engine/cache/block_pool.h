// SPDX-License-Identifier: Apache-2.0
//
// BlockPool: block or slot numbers with reference counts. Blocks without a reference wait in a queue for their next
// owner: at its front those whose contents nobody wants, behind them the others, the least recently used first. Not
// thread-safe. Nothing allocates after construction.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace eadem::engine {

class BlockPool {
 public:
  BlockPool() = default;
  // Numbers [0, num_blocks), all free.
  explicit BlockPool(int64_t num_blocks);

  int64_t num_blocks() const { return static_cast<int64_t>(references_.size()); }
  int64_t num_free() const { return num_free_; }
  int32_t references(int32_t block) const { return references_[static_cast<size_t>(block)]; }

  // Returns the free block at the front of the queue with one reference, or nothing when none is free.
  std::optional<int32_t> take();
  // Adds a reference to a block that is taken, or free with contents that are wanted.
  void share(int32_t block);
  // Drops a reference; a block without one is free. Dropping more than there are is a bug of the caller. `wanted` puts
  // the block at the end of the queue.
  void release(int32_t block, bool wanted = false);
  // Moves a free block to the front: nobody wants its contents any more.
  void discard(int32_t block);

 private:
  struct Links {
    int32_t before, behind;
  };
  Links& links(int32_t block) { return links_[static_cast<size_t>(block)]; }
  void require_taken(int32_t block) const;
  void insert(int32_t block, int32_t behind);
  void unlink(int32_t block);
  // The head of the queue, which is a ring, has the number behind the last block.
  int32_t head() const { return static_cast<int32_t>(num_blocks()); }

  std::vector<Links> links_;
  std::vector<int32_t> references_;
  int64_t num_free_ = 0;
};

}  // namespace eadem::engine
