// SPDX-License-Identifier: Apache-2.0
//
// BlockPool: block or slot numbers with reference counts. Not thread-safe. Nothing allocates after construction.
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
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int32_t references(int32_t block) const { return references_[static_cast<size_t>(block)]; }

  // Returns a free block with one reference, or nothing when none is free.
  std::optional<int32_t> take();
  // Adds a reference to a block that is taken.
  void share(int32_t block);
  // Drops a reference; a block without one is free. Dropping more than there are is a bug of the caller.
  void release(int32_t block);

 private:
  void require_taken(int32_t block) const;

  std::vector<int32_t> free_;  // a stack
  std::vector<int32_t> references_;
};

}  // namespace eadem::engine
