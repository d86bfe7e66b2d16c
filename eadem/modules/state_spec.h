// SPDX-License-Identifier: Apache-2.0
//
// States: what layers keep of a sequence between steps. A module declares a StateSpec; the engine decides where it is
// stored, as a CacheSpec says.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "eadem/core/tensor_type.h"

namespace eadem::modules {

struct StateSpec {
  enum class Kind : uint8_t {
    per_token,     // a row for every token: keys, values, latents
    per_sequence,  // one row that steps overwrite: recurrent and convolution states
  };
  std::string name;  // of the graph's state: "model.layers.3.self_attn.k_cache"
  Kind kind = Kind::per_token;
  // What one token or one sequence takes on this rank, of fixed extents. per_token: [heads, width].
  TensorType row;
  // per_token: a token reads its own row and those before it, `window` in all at most; 0: of every earlier token.
  int64_t window = 0;
  // per_token: there is one row for so many tokens in a row, made when the last of them is there. A paged cache has
  // blocks of a multiple of them.
  int64_t stride = 1;
};

// The place of the keys and values of earlier tokens.
enum class CacheLayout : uint8_t {
  none,        // nowhere: every sequence is whole in its step (training, scoring)
  contiguous,  // one block per sequence
  paged,       // blocks found through a table
};

// The blocks of states that are read through one window. Behind the blocks that sequences use lies one more, of zeros
// that nobody writes: tables name it for positions that have left the window.
struct WindowGroup {
  int64_t window = 0;
  int64_t num_blocks = 0;

  int64_t null_block() const { return num_blocks; }
  friend bool operator==(const WindowGroup&, const WindowGroup&) = default;
};

// Where states are stored. The states of a group share block numbers, and so a block table.
//
//   group 0        keeps every token of a sequence, and is there even if no state lies in it: its blocks identify
//                  tokens
//   groups 1, 2 …  keep the tokens of a window: `windows`. States of other windows lie in group 0.
//
// States per sequence lie in `num_slots` slots, which steps find through state_slots. The last `num_snapshots` of them
// keep what sequences left at borders of blocks.
struct CacheSpec {
  CacheLayout layout = CacheLayout::none;
  int64_t num_blocks = 0;  // of group 0
  int64_t block_size = 0;  // tokens of a block, in every group
  std::vector<WindowGroup> windows = {};
  int64_t num_slots = 0;
  int64_t num_snapshots = 0;

  size_t num_groups() const { return 1 + windows.size(); }
  // The group of states with this window.
  size_t group_of(int64_t window) const;
};

// The type of a state's storage: [blocks, heads, ceil(block_size / stride), width] or [num_slots, …].
TensorType storage_type(const StateSpec& state, const CacheSpec& cache);

// The names of a group's inputs of a step: "block_table", or "block_table_window_512".
std::string group_input(const CacheSpec& cache, size_t group, const char* name);

}  // namespace eadem::modules
