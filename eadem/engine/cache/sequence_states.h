// SPDX-License-Identifier: Apache-2.0
//
// SequenceStates: the states per sequence of an engine, a slot for each sequence: recurrent and convolution states. A
// step overwrites a slot's rows, so that they are those of one position, and nothing leads back but a snapshot, or a
// second copy that keeps an earlier position: a step may begin there again, so that proposed tokens can be forgotten.
// Kept snapshots stay on the device, in rows of their own, for other sequences that begin with the same tokens.
//
// One thread at a time may use it. Work on the device is ordered with steps.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "eadem/core/device/device.h"

namespace eadem::engine {

class SequenceStates {
 public:
  // The rows of one slot on the host, and how many tokens of its sequence they stand for.
  struct Snapshot {
    int64_t tokens = 0;
    std::vector<std::byte> rows;
    int32_t first_block = -1;  // of the sequence, in group 0
  };

  SequenceStates() = default;
  // `states`: [num_slots + num_snapshots, …], or [2 * num_slots + num_snapshots, …] if each slot has a second copy;
  // contiguous and plain, of the device and outliving this object. All slots are empty.
  SequenceStates(std::shared_ptr<Device> device, int64_t num_slots, int64_t num_snapshots,
                 std::vector<TensorView> states);

  int64_t num_slots() const { return static_cast<int64_t>(slots_.size()); }
  int64_t bytes_per_slot() const;  // without a second copy
  bool has_second_copies() const { return num_slots() > 0 && states_.front().shape[0] >= 2 * num_slots() + num_kept(); }
  int64_t num_kept() const { return static_cast<int64_t>(kept_.size()); }  // room for kept snapshots

  // Zeros: the state of a sequence without tokens.
  void reset(int32_t slot);
  void reset_all();
  // Makes `to` a copy of `from`, for a sequence that goes on from the same tokens in blocks that it shares.
  void copy(int32_t to, int32_t from);
  // Throws InvalidArgument when a step that did not end has left nothing to save.
  Snapshot save(int32_t slot) const;
  // Throws InvalidArgument when the snapshot is of other states.
  void restore(int32_t slot, const Snapshot& snapshot);

  // --- Steps. `first_block` tells sequences apart.
  void begin_step() { ++step_; }
  // The kept snapshots that a sequence's step loads and saves; -1: none.
  struct Kept {
    int32_t load = -1;  // the state before the step is that one
    int32_t save = -1;  // it goes there
  };
  // Throws InvalidArgument unless the slot or its second copy holds what `cached` tokens of that sequence left, or the
  // snapshot to load what `cached` tokens of some sequence left, or cached is 0, and no other sequence of the step uses
  // the slot or saves to the same snapshot. A snapshot that an earlier sequence of the step saves may be loaded.
  void check(int64_t sequence, int32_t slot, int32_t first_block, int64_t cached, const Kept& kept);
  // The work on a slot before a step that passed check() overwrites it, in this order.
  struct Preparation {
    int32_t slot = -1;
    bool resets = false;   // the slot is zeroed, because its sequence begins
    bool returns = false;  // the second copy is copied to the slot
    bool keeps = false;    // the slot is copied to the second copy
    Kept kept;             // a snapshot is copied to the slot before, and the slot to a snapshot behind these
  };
  // Returns the work for a step behind `cached` tokens. With `keeps`, which needs second copies, a later step may begin
  // behind `cached` tokens again.
  Preparation preparation(int32_t slot, int32_t first_block, int64_t cached, bool keeps, const Kept& kept) const;
  void prepare(const Preparation& preparation);
  // From here to end() the slot holds nothing; its second copy stays.
  void begin(const Preparation& preparation, int32_t first_block, int64_t cached);
  void end(int32_t slot, int32_t first_block, int64_t tokens);

 private:
  static constexpr int64_t kUnknown = -1;
  // Tokens of a sequence that some rows stand for.
  struct Place {
    int64_t tokens = 0;
    int32_t first_block = -1;

    bool is(int32_t block, int64_t count) const { return tokens == count && first_block == block; }
  };
  struct Slot {
    Place place;
    Place kept = {kUnknown, -1};  // of the second copy
    int64_t used_in = 0;          // the last step
  };
  // Calls function(row of the slot, bytes) for every state.
  template <typename F>
  void for_each_row(int32_t slot, F&& function) const;
  Slot& at(int32_t slot);
  void copy_rows(int64_t to, int64_t from);
  int64_t row_of_kept(int32_t snapshot) const { return states_.front().shape[0] - num_kept() + snapshot; }
  void check_kept(int64_t sequence, int64_t cached, const Kept& kept);

  std::shared_ptr<Device> device_;
  std::vector<TensorView> states_;
  std::vector<Slot> slots_;
  // A kept snapshot: how many tokens it stands for, and what the last step that saves it makes of it.
  struct KeptSnapshot {
    int64_t tokens = kUnknown;
    int64_t saved_in = 0;
    int64_t saved_tokens = 0;
  };
  std::vector<KeptSnapshot> kept_;
  int64_t step_ = 0;
};

}  // namespace eadem::engine
