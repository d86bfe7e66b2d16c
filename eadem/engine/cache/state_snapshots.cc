// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/state_snapshots.h"

#include <algorithm>
#include <tuple>

#include "eadem/core/error.h"

namespace eadem::engine {

int64_t StateSnapshots::num_held() const {
  return std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.blocks > 0; });
}

const StateSnapshots::Slot* StateSnapshots::find(std::span<const BlockHash> names) const {
  const auto found = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& slot) { return slot.is(names); });
  return found == slots_.end() ? nullptr : &*found;
}

StateSnapshots::Slot& StateSnapshots::at(int32_t slot) {
  EADEM_CHECK(slot >= 0 && slot < num_slots(), "snapshot {} of {}", slot, num_slots());
  return slots_[static_cast<size_t>(slot)];
}

StateSnapshots::Found StateSnapshots::find_last(std::span<const BlockHash> names) const {
  Found last;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    const int64_t blocks = slots_[slot].blocks;
    if (blocks > last.blocks && blocks <= std::ssize(names) &&
        slots_[slot].is(names.first(static_cast<size_t>(blocks))))
      last = {static_cast<int32_t>(slot), blocks};
  }
  return last;
}

std::optional<int32_t> StateSnapshots::take(std::span<const BlockHash> names, bool wanted) {
  EADEM_CHECK(!names.empty() && !has(names), "a second snapshot behind {} blocks", names.size());
  const auto order = [](const Slot& slot) {
    return std::tuple(slot.references > 0, slot.blocks > 0, slot.wanted, slot.used);
  };
  const auto first =
      std::min_element(slots_.begin(), slots_.end(), [&](const Slot& a, const Slot& b) { return order(a) < order(b); });
  if (first == slots_.end() || first->references > 0) return std::nullopt;
  if (first->blocks > 0) ++num_evicted_;
  *first = {.name = names.back(), .blocks = std::ssize(names), .references = 1, .wanted = wanted, .used = ++uses_};
  return static_cast<int32_t>(first - slots_.begin());
}

void StateSnapshots::share(int32_t slot) {
  Slot& shared = at(slot);
  EADEM_CHECK(shared.blocks > 0, "snapshot {} to share holds nothing", slot);
  ++shared.references;
  shared.wanted = shared.was_shared = true;
  shared.used = ++uses_;
}

void StateSnapshots::release(int32_t slot) {
  EADEM_CHECK(references(slot) > 0, "snapshot {} is not taken", slot);
  --at(slot).references;
}

void StateSnapshots::make_spare(std::span<const BlockHash> names) {
  const auto found = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& slot) { return slot.is(names); });
  if (found != slots_.end() && !found->was_shared) found->wanted = false;
}

void StateSnapshots::forget(const BlockHash& name) {
  for (Slot& slot : slots_)
    if (slot.blocks > 0 && slot.name == name) slot.blocks = 0;
}

void StateSnapshots::forget_all() {
  for (Slot& slot : slots_) slot.blocks = 0;
}

}  // namespace eadem::engine
