// SPDX-License-Identifier: Apache-2.0
//
// BlockNames: which block has which name. A block has one name at most, and a name one block. Not thread-safe. Nothing
// allocates after construction.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "eadem/engine/cache/block_hash.h"

namespace eadem::engine {

class BlockNames {
 public:
  BlockNames() = default;
  // For blocks [0, num_blocks), which have no names.
  explicit BlockNames(int64_t num_blocks);

  bool has(int32_t block) const { return named_[static_cast<size_t>(block)] != 0; }
  // The name of a block that has one.
  const BlockHash& name(int32_t block) const { return names_[static_cast<size_t>(block)]; }
  int64_t size() const { return size_; }
  std::optional<int32_t> find(const BlockHash& name) const;
  // Gives a block without a name this one. Returns false, and changes nothing, when another block has it.
  bool insert(int32_t block, const BlockHash& name);
  // Takes the name from a block that has one.
  void erase(int32_t block);
  void clear();

 private:
  static constexpr int32_t kNone = -1;
  size_t bucket(const BlockHash& name) const { return name[0] & (first_.size() - 1); }

  std::vector<int32_t> first_;  // per bucket, of which there are a power of two: the first block of its list
  std::vector<int32_t> next_;   // per block: the next one of the list
  std::vector<uint8_t> named_;  // per block
  std::vector<BlockHash> names_;
  int64_t size_ = 0;
};

}  // namespace eadem::engine
