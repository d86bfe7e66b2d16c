// SPDX-License-Identifier: Apache-2.0
//
// StateSnapshots: which of the slots for copies of states per sequence holds what. A snapshot is the state of a
// sequence behind its first blocks, and is called as the last of these (BlockHash): whoever begins with the same tokens
// may go on from it. It is of use only as long as the blocks are there.
//
// A slot is taken in the order: those that hold nothing, those of spare snapshots, and those of wanted ones, each the
// least recently used first. Nobody takes a slot that has references.
//
// Not thread-safe. Nothing allocates after construction.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "eadem/engine/cache/block_hash.h"

namespace eadem::engine {

class StateSnapshots {
 public:
  StateSnapshots() = default;
  explicit StateSnapshots(int64_t num_slots) : slots_(static_cast<size_t>(num_slots)) {}

  int64_t num_slots() const { return static_cast<int64_t>(slots_.size()); }
  int32_t references(int32_t slot) const { return slots_[static_cast<size_t>(slot)].references; }
  bool holds(int32_t slot) const { return slots_[static_cast<size_t>(slot)].blocks > 0; }
  // How many slots hold something.
  int64_t num_held() const;
  // How often a slot that held something was taken for other tokens.
  int64_t num_evicted() const { return num_evicted_; }

  // A snapshot behind so many blocks.
  struct Found {
    int32_t slot = -1;
    int64_t blocks = 0;
  };
  // The one behind the most of the first blocks of a sequence, whose blocks have these names; slot -1: there is none.
  Found find_last(std::span<const BlockHash> names) const;
  // Whether there is one behind as many blocks as there are names.
  bool has(std::span<const BlockHash> names) const { return find(names) != nullptr; }

  // Takes a slot, with one reference, for the snapshot behind these blocks, of which there is none yet. Returns nothing
  // when every slot has references.
  std::optional<int32_t> take(std::span<const BlockHash> names, bool wanted);
  // Adds a reference to a snapshot, which somebody goes on from: it is wanted.
  void share(int32_t slot);
  void release(int32_t slot);
  // Says that nobody waits for the snapshot behind these blocks any more, unless somebody has gone on from it.
  void make_spare(std::span<const BlockHash> names);
  // The slot holds nothing any more.
  void forget(int32_t slot) { slots_[static_cast<size_t>(slot)].blocks = 0; }
  // A block with this name has gone, and what it led to.
  void forget(const BlockHash& name);
  void forget_all();

 private:
  struct Slot {
    BlockHash name = {};
    int64_t blocks = 0;  // 0: holds nothing
    int32_t references = 0;
    bool wanted = false;
    bool was_shared = false;
    int64_t used = 0;  // when, in the order of all uses

    bool is(std::span<const BlockHash> names) const {
      return blocks > 0 && blocks == static_cast<int64_t>(names.size()) && name == names.back();
    }
  };
  const Slot* find(std::span<const BlockHash> names) const;
  Slot& at(int32_t slot);

  std::vector<Slot> slots_;  // few: they are looked through one by one
  int64_t uses_ = 0;
  int64_t num_evicted_ = 0;
};

}  // namespace eadem::engine
