// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/sequence_states.h"

#include <algorithm>
#include <utility>

#include "eadem/core/error.h"

namespace eadem::engine {

SequenceStates::SequenceStates(std::shared_ptr<Device> device, int64_t num_slots, int64_t num_snapshots,
                               std::vector<TensorView> states)
    : device_(std::move(device)),
      states_(std::move(states)),
      slots_(static_cast<size_t>(num_slots)),
      kept_(static_cast<size_t>(num_snapshots)) {
  for (const TensorView& state : states_) {
    const int64_t rows = states_.front().shape[0];
    EADEM_CHECK(state.is_contiguous() && state.encoding == nullptr && state.shape[0] == rows &&
                    (rows == num_slots + num_snapshots || rows == 2 * num_slots + num_snapshots),
                "state {} for {} slots and {} snapshots", to_string(state), num_slots, num_snapshots);
  }
}

template <typename F>
void SequenceStates::for_each_row(int32_t slot, F&& function) const {
  for (const TensorView& state : states_) {
    const int64_t bytes = state.size_bytes() / state.shape[0];
    function(static_cast<std::byte*>(state.data) + slot * bytes, bytes);
  }
}

void SequenceStates::copy_rows(int64_t to, int64_t from) {
  if (to == from) return;
  for (const TensorView& state : states_) {
    const int64_t bytes = state.size_bytes() / state.shape[0];
    auto* const rows = static_cast<std::byte*>(state.data);
    device_->copy(rows + to * bytes, rows + from * bytes, bytes);
  }
}

SequenceStates::Slot& SequenceStates::at(int32_t slot) {
  if (slot < 0 || slot >= num_slots())
    throw InvalidArgument("slot {} of states per sequence; there are {}", slot, num_slots());
  return slots_[static_cast<size_t>(slot)];
}

int64_t SequenceStates::bytes_per_slot() const {
  int64_t total = 0;
  for (const TensorView& state : states_) total += state.size_bytes() / state.shape[0];
  return total;
}

void SequenceStates::reset(int32_t slot) {
  at(slot) = {.used_in = at(slot).used_in};
  for_each_row(slot, [&](std::byte* row, int64_t bytes) { device_->fill_zero(row, bytes); });
}

void SequenceStates::reset_all() {
  for (int64_t slot = 0; slot < num_slots(); ++slot) reset(static_cast<int32_t>(slot));
  std::fill(kept_.begin(), kept_.end(), KeptSnapshot{});
}

void SequenceStates::copy(int32_t to, int32_t from) {
  const Place source = at(from).place;
  at(to) = {.place = source, .used_in = at(to).used_in};
  copy_rows(to, from);
}

SequenceStates::Snapshot SequenceStates::save(int32_t slot) const {
  const Place& source = const_cast<SequenceStates*>(this)->at(slot).place;
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
  target = {.place = {snapshot.tokens, snapshot.first_block}, .used_in = target.used_in};
}

void SequenceStates::check_kept(int64_t sequence, int64_t cached, const Kept& kept) {
  const auto at = [&](int32_t snapshot) -> KeptSnapshot& {
    if (snapshot >= num_kept())
      throw InvalidArgument("sequence {} names snapshot {} of states; there are {}", sequence, snapshot, num_kept());
    return kept_[static_cast<size_t>(snapshot)];
  };
  if (kept.load >= 0) {
    const KeptSnapshot& loaded = at(kept.load);
    const int64_t tokens = loaded.saved_in == step_ ? loaded.saved_tokens : loaded.tokens;
    if (tokens != cached)
      throw InvalidArgument("sequence {} has {} cached tokens; snapshot {} {}", sequence, cached, kept.load,
                            tokens == kUnknown ? "holds nothing" : fmt::format("holds the state after {}", tokens));
  }
  if (kept.save >= 0) {
    KeptSnapshot& saved = at(kept.save);
    if (saved.saved_in == step_)
      throw InvalidArgument("snapshot {} is saved twice, by sequence {}", kept.save, sequence);
    if (cached == 0) throw InvalidArgument("sequence {} saves the state after 0 tokens, which needs none", sequence);
    saved.saved_in = step_;
    saved.saved_tokens = cached;
  }
}

void SequenceStates::check(int64_t sequence, int32_t slot, int32_t first_block, int64_t cached, const Kept& kept) {
  Slot& used = at(slot);
  if (used.used_in == step_) throw InvalidArgument("slot {} is used twice, by sequence {}", slot, sequence);
  used.used_in = step_;
  check_kept(sequence, cached, kept);
  if (kept.load >= 0 || cached == 0 || used.kept.is(first_block, cached)) return;
  if (used.place.tokens == kUnknown)
    throw InvalidArgument("sequence {}: slot {} holds what a step left that did not end; begin at its first token",
                          sequence, slot);
  if (!used.place.is(first_block, cached))
    throw InvalidArgument("sequence {} has {} cached tokens; slot {} holds the state after {} tokens{}", sequence,
                          cached, slot, used.place.tokens,
                          used.place.first_block == first_block ? "" : " of another one");
}

SequenceStates::Preparation SequenceStates::preparation(int32_t slot, int32_t first_block, int64_t cached, bool keeps,
                                                        const Kept& kept) const {
  const Slot& used = slots_[static_cast<size_t>(slot)];
  if (cached == 0) return {.slot = slot, .resets = true};  // where any step may begin
  if (kept.load >= 0) return {.slot = slot, .keeps = keeps, .kept = kept};
  return {.slot = slot,
          .returns = !used.place.is(first_block, cached),
          .keeps = keeps && !used.kept.is(first_block, cached),
          .kept = kept};
}

void SequenceStates::prepare(const Preparation& preparation) {
  const auto& [slot, resets, returns, keeps, kept] = preparation;
  EADEM_CHECK(!(returns || keeps) || has_second_copies(), "slot {} has no second copy", slot);
  if (resets) reset(slot);
  if (kept.load >= 0) copy_rows(slot, row_of_kept(kept.load));
  if (returns) copy_rows(slot, num_slots() + slot);
  if (keeps) copy_rows(num_slots() + slot, slot);
  if (kept.save >= 0) copy_rows(row_of_kept(kept.save), slot);
}

void SequenceStates::begin(const Preparation& preparation, int32_t first_block, int64_t cached) {
  prepare(preparation);
  Slot& used = at(preparation.slot);
  // The second copy still holds a state of the sequence that had the slot before, which may have had the same blocks.
  if (preparation.kept.load >= 0) used.kept = {kUnknown, -1};
  if (preparation.kept.save >= 0) kept_[static_cast<size_t>(preparation.kept.save)].tokens = cached;
  if (preparation.keeps) used.kept = {cached, first_block};
  used.place.tokens = kUnknown;
}

void SequenceStates::end(int32_t slot, int32_t first_block, int64_t tokens) { at(slot).place = {tokens, first_block}; }

}  // namespace eadem::engine
