// SPDX-License-Identifier: Apache-2.0
//
// Scheduler: which borders of blocks get a snapshot of the states per sequence.
//
// 1. The last one of a prompt: the next turn of a conversation, or another answer, goes on there.
// 2. Where a request leaves a chain of blocks that others have computed, or is about to leave that of a running one:
//    what both begin with, such as a system prompt, is likely to come again.
// 3. Each one that an answer passes, until it passes the next one: the next turn goes on from the last.
// 4. Where a chunk of a prompt ends for want of room in the step: the first one, for a long beginning that another
//    request may have in common.
//
// Later ends of chunks, and what an answer has passed, are spare: they take the room that the others leave
// (StateSnapshots). A step ends at a border of the first two kinds, which costs a prompt a step, so that these are
// limits_.snapshot_distance apart. Pan et al. 2024 (Marconi) keep the last two of a request and those of branches.
#include <algorithm>
#include <utility>

#include "eadem/engine/scheduler.h"

namespace eadem::engine {

namespace {

constexpr int64_t kMostLookedAt = 16;  // waiting requests that a running one is compared with

// How many of the first blocks have the same names.
int64_t common_blocks(std::span<const BlockHash> a, std::span<const BlockHash> b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

}  // namespace

// Chooses the borders at which a sequence that starts leaves snapshots.
void Scheduler::choose_borders(Sequence& s, const Start& start) {
  s.borders.clear();
  s.answer_blocks = 0;
  s.chunk_end = s.cached + limits_.snapshot_distance;
  int64_t from = s.cached;
  const int64_t last = (std::ssize(s.tokens) - 1) / limits_.block_size;
  for (const int64_t border : {start.blocks_there * limits_.block_size, last * limits_.block_size}) {
    if (border - from < limits_.snapshot_distance) continue;
    s.borders.push_back(border);
    from = border;
  }
}

// Has a request that reads its prompt stop where waiting ones leave it.
void Scheduler::note_branches(Sequence& s) {
  if (s.state != RequestState::prefilling || s.names.empty()) return;
  int64_t left = kMostLookedAt;
  for (Sequence* other : waiting_) {
    if (left-- == 0) return;
    if (other->wants_scores()) continue;
    const auto names = names_of(*other, (std::ssize(other->tokens) - 1) / limits_.block_size);
    const int64_t common = common_blocks(names, s.names), border = common * limits_.block_size;
    const int64_t known = cache_.snapshots().find_last(names.first(static_cast<size_t>(common))).blocks;
    int64_t from = known * limits_.block_size;
    for (const int64_t each : s.borders)
      if (each >= s.cached && each <= border) from = std::max(from, each);
    if (border > s.cached && border - from >= limits_.snapshot_distance)
      s.borders.insert(std::upper_bound(s.borders.begin(), s.borders.end(), border), border);
  }
}

// Whether a request before this one is about to leave a snapshot that this one would begin with.
bool Scheduler::waits_for_snapshot(Sequence& s) {
  const auto names = names_of(s, (std::ssize(s.tokens) - 1) / limits_.block_size);
  const auto there = static_cast<size_t>(cache_.count_shared(names));
  const int64_t known = cache_.snapshots().find_last(names.first(there)).blocks * limits_.block_size;
  return std::any_of(running_.begin(), running_.end(), [&](const Sequence* each) {
    if (each->state != RequestState::prefilling || !precedes(*each, s)) return false;
    const int64_t common = common_blocks(names, each->names) * limits_.block_size;
    return std::any_of(each->borders.begin(), each->borders.end(), [&](int64_t border) {
      return border >= each->cached && border <= common && border - known >= limits_.snapshot_distance;
    });
  });
}

// How many of the next `count` tokens of a sequence a step computes that ends at a border where there is one to end at.
int64_t Scheduler::up_to_border(const Sequence& s, int64_t count) const {
  if (!takes_snapshots() || s.state != RequestState::prefilling) return count;
  const int64_t end = s.cached + count;
  const auto next = std::upper_bound(s.borders.begin(), s.borders.end(), s.cached);
  if (next != s.borders.end() && *next < end) return *next - s.cached;
  const int64_t whole = end / limits_.block_size * limits_.block_size;
  return count < s.pending() && whole > s.cached ? whole - s.cached : count;
}

// Takes a slot for the snapshot that the next step of a sequence begins with saving. Whoever starts in this plan may
// begin with it.
int32_t Scheduler::plan_snapshot(Sequence& s) {
  if (!takes_snapshots() || s.loads != kNoBlock || s.cached == 0 || s.cached % limits_.block_size != 0) return kNoBlock;
  const auto names = names_of(s, s.cached / limits_.block_size);
  if (cache_.snapshots().has(names)) return kNoBlock;
  const bool answers = s.state == RequestState::decoding;
  // An answer's last snapshot gives its slot to the next one, so that it takes no other's.
  if (answers && s.answer_blocks > 0) cache_.snapshots().make_spare(names.first(static_cast<size_t>(s.answer_blocks)));
  const bool ends_first_chunk = s.chunk_end >= 0 && s.cached >= s.chunk_end;
  const bool wanted = answers || ends_first_chunk || std::binary_search(s.borders.begin(), s.borders.end(), s.cached);
  return cache_.snapshots().take(names, wanted).value_or(kNoBlock);
}

// The step of a sequence has loaded and saved what it was planned to.
void Scheduler::commit_snapshots(Sequence& s, const StepSequence& planned) {
  drop_load(s);
  if (planned.save_snapshot < 0) return;
  cache_.snapshots().release(planned.save_snapshot);
  if (s.state == RequestState::decoding) s.answer_blocks = planned.cached / limits_.block_size;
  if (planned.cached >= s.chunk_end) s.chunk_end = -1;
}

// Gives back the snapshots that a plan was to save, and has those start again that would begin with them.
void Scheduler::forget_snapshots() {
  bool any = false;
  for (const StepSequence& planned : now_.plan) {
    if (planned.save_snapshot < 0) continue;
    cache_.snapshots().forget(planned.save_snapshot);
    cache_.snapshots().release(planned.save_snapshot);
    any = true;
  }
  if (!any) return;
  const std::vector<Sequence*> running = running_;
  for (Sequence* s : running)
    if (s->loads != kNoBlock && !cache_.snapshots().holds(s->loads)) put_back(*s);
}

void Scheduler::drop_load(Sequence& s) {
  if (s.loads != kNoBlock) cache_.snapshots().release(std::exchange(s.loads, kNoBlock));
}

}  // namespace eadem::engine
