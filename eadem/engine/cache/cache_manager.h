// SPDX-License-Identifier: Apache-2.0
//
// CacheManager: which blocks of each cache group and which slot every sequence has. It knows neither a model nor a
// device.
//
// Group 0 keeps every token: its blocks are taken as tokens need them. A window group keeps what its window reaches:
// blocks are taken for the tokens of a step, and go back to the pool when every later token has moved past them.
// Between steps a sequence holds the blocks of its last window - 1 tokens: fewer than window + block_size tokens. A
// step holds those of its own tokens in addition.
//
// Full blocks of group 0 may have names (BlockHash). A block with a name keeps it when its last owner gives it back,
// and any sequence that begins with the same tokens may share it, until the pool hands it out again: those without a
// name first, then the least recently used. Nobody writes to a block with a name. Snapshots of states per sequence go
// by the names of blocks, and go with them.
//
// Not thread-safe. Nothing allocates once the tables of a sequence have their size.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "eadem/engine/cache/block_names.h"
#include "eadem/engine/cache/block_pool.h"
#include "eadem/engine/cache/state_snapshots.h"
#include "eadem/modules/state_spec.h"

namespace eadem::engine {

inline constexpr int32_t kNoBlock = -1;

// The places of one sequence in the cache. Tables are indexed by place: place p holds positions [p * block_size, …).
struct SequenceBlocks {
  std::vector<int32_t> all;                   // group 0
  std::vector<std::vector<int32_t>> windows;  // groups 1, 2, …: kNoBlock outside of what is held
  int32_t slot = kNoBlock;                    // of its states per sequence, where there are any

  // The places of each window group that are held: one run.
  struct Run {
    int64_t begin = 0, end = 0;
  };
  std::vector<Run> held;
};

class CacheManager {
 public:
  // window_blocks() says for how many sequences and tokens of a step the blocks of a window suffice.
  CacheManager(int64_t num_blocks, int64_t block_size, std::span<const modules::WindowGroup> windows = {},
               int64_t num_slots = 0, int64_t num_snapshots = 0);

  int64_t block_size() const { return block_size_; }
  int64_t blocks_for(int64_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }
  int64_t num_free() const { return all_.num_free(); }  // of group 0, with or without a name
  int64_t num_free(size_t window_group) const { return windows_[window_group].pool.num_free(); }
  // Whether the number of sequences, not only that of their tokens, is bounded.
  bool bounds_sequences() const { return !windows_.empty() || slots_.num_blocks() > 0; }

  // Gives the tables of a sequence without blocks their size.
  void reserve(SequenceBlocks& sequence, int64_t tokens) const;
  // Takes what is missing for `tokens` tokens in group 0, and a slot. There must be as many.
  void extend(SequenceBlocks& sequence, int64_t tokens);
  // Takes window blocks for positions up to `end`, which follow those that are held.
  void extend_windows(SequenceBlocks& sequence, int64_t end);
  // Gives back the window blocks that no token from position `cached` on reads, and those of positions from there on.
  void retire_windows(SequenceBlocks& sequence, int64_t cached);
  // Whether everything is held that a token at position `cached` reads.
  bool holds_windows(const SequenceBlocks& sequence, int64_t cached) const;
  // Moves what `from` holds for its first `tokens` tokens to a sequence without blocks, and gives back the rest.
  void move(SequenceBlocks& to, SequenceBlocks& from, int64_t tokens);
  // Gives back the blocks of group 0 behind the first `tokens` tokens.
  void shrink(SequenceBlocks& sequence, int64_t tokens);
  // Gives back everything.
  void release(SequenceBlocks& sequence);

  // --- Names.
  // How many blocks from the first on are there for a sequence whose blocks have these names.
  int64_t count_shared(std::span<const BlockHash> names) const;
  // The blocks without an owner among the first `count` of these, which are there.
  int64_t count_free(std::span<const BlockHash> names, int64_t count) const;
  // Gives a sequence without blocks the first `count` blocks of these names, which are there.
  void share(SequenceBlocks& sequence, std::span<const BlockHash> names, int64_t count);
  // Names the block of a place, which is full, unless another block has that name.
  void name(const SequenceBlocks& sequence, int64_t place, const BlockHash& name);
  // How many of its first `tokens` tokens a sequence keeps that goes on behind them: fewer, if others read the block
  // that it would write to.
  int64_t writable_tokens(const SequenceBlocks& sequence, int64_t tokens) const;
  // Gives back the blocks behind the first `tokens` tokens, which writable_tokens() allows, and takes the name from the
  // last one if it has room.
  void make_writable(SequenceBlocks& sequence, int64_t tokens);
  // How many blocks from place `begin` on have no other owner.
  int64_t count_owned(const SequenceBlocks& sequence, int64_t begin) const;
  // Takes the names from all blocks, and forgets all snapshots.
  void forget_names();
  int64_t num_named() const { return names_.size(); }
  bool is_named(int32_t block) const { return names_.has(block); }
  // How often a block with a name was handed out for other tokens.
  int64_t num_evicted() const { return num_evicted_; }
  int32_t references(int32_t block) const { return all_.references(block); }
  StateSnapshots& snapshots() { return snapshots_; }
  const StateSnapshots& snapshots() const { return snapshots_; }

 private:
  struct Window {
    int64_t window;
    BlockPool pool;
  };
  void hold(Window& group, std::vector<int32_t>& table, SequenceBlocks::Run& held, SequenceBlocks::Run wanted);
  SequenceBlocks::Run reached(const Window& group, int64_t cached) const;
  void erase_name(int32_t block);

  int64_t block_size_;
  BlockPool all_;
  BlockNames names_;
  int64_t num_evicted_ = 0;
  std::vector<Window> windows_;
  BlockPool slots_;
  StateSnapshots snapshots_;
};

}  // namespace eadem::engine
