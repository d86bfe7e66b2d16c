// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/sequence_states.h"

#include <utility>

#include "eadem/core/error.h"

namespace eadem::engine {

SequenceStates::SequenceStates(std::shared_ptr<Device> device, int64_t num_slots, std::vector<TensorView> states)
    : device_(std::move(device)), states_(std::move(states)), slots_(static_cast<size_t>(num_slots)) {
  for (const TensorView& state : states_)
    EADEM_CHECK(state.is_contiguous() && state.encoding == nullptr && state.shape[0] == num_slots,
                "state {} for {} slots", to_string(state), num_slots);
}

template <typename F>
void SequenceStates::for_each_row(int32_t slot, F&& function) const {
  for (const TensorView& state : states_) {
    const int64_t bytes = state.size_bytes() / num_slots();
    function(static_cast<std::byte*>(state.data) + slot * bytes, bytes);
  }
}

SequenceStates::Slot& SequenceStates::at(int32_t slot) {
  if (slot < 0 || slot >= num_slots())
    throw InvalidArgument("slot {} of states per sequence; there are {}", slot, num_slots());
  return slots_[static_cast<size_t>(slot)];
}

int64_t SequenceStates::bytes_per_slot() const {
  int64_t total = 0;
  for (const TensorView& state : states_) total += state.size_bytes() / num_slots();
  return total;
}

void SequenceStates::reset(int32_t slot) {
  at(slot) = {.used_in = at(slot).used_in};
  for_each_row(slot, [&](std::byte* row, int64_t bytes) { device_->fill_zero(row, bytes); });
}

void SequenceStates::reset_all() {
  for (int64_t slot = 0; slot < num_slots(); ++slot) reset(static_cast<int32_t>(slot));
}

void SequenceStates::copy(int32_t to, int32_t from) {
  const Slot source = at(from);
  at(to) = {source.tokens, source.first_block, at(to).used_in};
  for (const TensorView& state : states_) {
    const int64_t bytes = state.size_bytes() / num_slots();
    auto* const rows = static_cast<std::byte*>(state.data);
    if (to != from) device_->copy(rows + to * bytes, rows + from * bytes, bytes);
  }
}

SequenceStates::Snapshot SequenceStates::save(int32_t slot) const {
  const Slot& source = const_cast<SequenceStates*>(this)->at(slot);
  if (source.tokens == kUnknown) throw InvalidArgument("slot {} holds what a step left that did not end", slot);
  Snapshot snapshot{source.tokens, std::vector<std::byte>(static_cast<size_t>(bytes_per_slot())), source.first_block};
  std::byte* host = snapshot.rows.data();
  for_each_row(slot, [&](std::byte* row, int64_t bytes) {
    device_->copy_to_host(std::exchange(host, host + bytes), row, bytes);
  });
  return snapshot;
}

void SequenceStates::restore(int32_t slot, const Snapshot& snapshot) {
  Slot& target = at(slot);
  if (std::ssize(snapshot.rows) != bytes_per_slot())
    throw InvalidArgument("a snapshot of {} bytes for states of {}", snapshot.rows.size(), bytes_per_slot());
  const std::byte* host = snapshot.rows.data();
  for_each_row(slot, [&](std::byte* row, int64_t bytes) {
    device_->copy_from_host(row, std::exchange(host, host + bytes), bytes);
  });
  target = {snapshot.tokens, snapshot.first_block, target.used_in};
}

void SequenceStates::check(int64_t sequence, int32_t slot, int32_t first_block, int64_t cached) {
  Slot& used = at(slot);
  if (used.used_in == step_) throw InvalidArgument("slot {} is used twice, by sequence {}", slot, sequence);
  used.used_in = step_;
  if (cached == 0) return;
  if (used.tokens == kUnknown)
    throw InvalidArgument("sequence {}: slot {} holds what a step left that did not end; begin at its first token",
                          sequence, slot);
  if (used.tokens != cached || used.first_block != first_block)
    throw InvalidArgument("sequence {} has {} cached tokens; slot {} holds the state after {} tokens{}", sequence,
                          cached, slot, used.tokens, used.first_block == first_block ? "" : " of another one");
}

void SequenceStates::begin(int32_t slot, int64_t cached) {
  if (cached == 0) reset(slot);
  at(slot).tokens = kUnknown;
}

void SequenceStates::end(int32_t slot, int32_t first_block, int64_t tokens) {
  at(slot).tokens = tokens;
  at(slot).first_block = first_block;
}

}  // namespace eadem::engine
