// SPDX-License-Identifier: Apache-2.0
//
// How a scheduler plans a step: the order of requests, who starts, who is preempted, and who computes how much.
#include <algorithm>
#include <utility>

#include "eadem/core/error.h"
#include "eadem/engine/scheduler.h"

namespace eadem::engine {

// --- The order.

bool Scheduler::has_aged(const Sequence& sequence) const { return steps_ - sequence.arrival >= limits_.ageing_steps; }

bool Scheduler::ByPriority::operator()(const Sequence* a, const Sequence* b) const {
  if (a->request.priority != b->request.priority) return a->request.priority > b->request.priority;
  return a->id < b->id;
}

bool Scheduler::precedes(const Sequence& a, const Sequence& b) const {
  const bool a_aged = has_aged(a);
  if (a_aged != has_aged(b)) return a_aged;
  return a_aged ? a.id < b.id : ByPriority()(&a, &b);
}

// Whether a waiting request takes the room of a running one to start.
bool Scheduler::may_preempt(const Sequence& sequence, const Sequence& victim) const {
  if (!precedes(sequence, victim)) return false;
  return has_aged(sequence) || sequence.request.priority > victim.request.priority;
}

Scheduler::Sequence& Scheduler::next_waiting() {
  Sequence& oldest = **arrived_.begin();
  return has_aged(oldest) ? oldest : **waiting_.begin();
}

void Scheduler::wait(Sequence& sequence) {
  waiting_.insert(&sequence);
  arrived_.insert(&sequence);
}

// --- Who starts.

Scheduler::Start Scheduler::find_start(Sequence& sequence, const CacheContents& cache) {
  // The logits after the last token are needed, so that token is always computed.
  const std::span<const int32_t> tokens = std::span(sequence.tokens).first(sequence.tokens.size() - 1);
  Start start;
  if (sequence.wants_scores()) return start;  // each of its places needs a row of logits
  if (limits_.prefix_caching) {
    const auto names = names_of(sequence, std::ssize(tokens) / limits_.block_size);
    start.shared_blocks = start.blocks_there = cache_.count_shared(names);
    if (limits_.num_slots > 0) {
      const auto found = cache_.snapshots().find_last(names.first(static_cast<size_t>(start.blocks_there)));
      start.shared_blocks = found.blocks;
      start.snapshot = found.slot;
    }
  }
  if (!sequence.request.keep || kept_.all.empty()) return start;
  // The blocks may hold tokens that were proposed and not taken.
  const int64_t common = std::min(kept_tokens_, cache.common_prefix(kept_.all, tokens));
  int64_t known = cache_.writable_tokens(kept_, common);
  // States per sequence lead nowhere but to where they stand, and to where the last proposed tokens began: an answer
  // may have ended before the last of these.
  if (limits_.num_slots > 0 && known < kept_tokens_) {
    known = kept_returns_to_ <= known ? kept_returns_to_ : 0;
    if (cache_.writable_tokens(kept_, known) < known) known = 0;
  }
  if (cache_.holds_windows(kept_, known) && known > start.shared_blocks * limits_.block_size)
    return {.kept_tokens = known, .blocks_there = start.blocks_there};
  return start;
}

// Whether a request may start now, with room for the tokens that it has.
bool Scheduler::has_room(const Sequence& sequence, const Start& start) const {
  if (std::ssize(running_) >= limits_.max_batch_size) return false;
  const int64_t needed = cache_.blocks_for(std::ssize(sequence.tokens));
  if (start.kept_tokens > 0)
    return needed - cache_.blocks_for(start.kept_tokens) <=
           cache_.num_free() + cache_.count_owned(kept_, cache_.blocks_for(start.kept_tokens));
  if (!kept_.all.empty() && cache_.bounds_sequences() && std::ssize(running_) + 1 >= limits_.max_batch_size)
    return false;
  const int64_t shared = start.shared_blocks;
  return needed - shared + cache_.count_free(sequence.names, shared) <= cache_.num_free();
}

// Starts a waiting request if there is room, which may be that of the kept sequence.
bool Scheduler::try_start(Sequence& sequence, const CacheContents& cache) {
  for (;;) {
    const Start found = find_start(sequence, cache);
    if (has_room(sequence, found)) {
      start(sequence, found);
      return true;
    }
    // Who goes on from the kept sequence waits for those that run, if there are any.
    const bool waits = found.kept_tokens > 0 && !running_.empty();
    if (kept_.all.empty() || waits || std::ssize(running_) >= limits_.max_batch_size) return false;
    release_kept();
  }
}

// Whether a running request that goes before this one is computing the first block that this one would compute.
bool Scheduler::can_share_later(Sequence& sequence) {
  if (!limits_.prefix_caching || sequence.wants_scores()) return false;
  if (limits_.num_slots > 0) return waits_for_snapshot(sequence);
  const auto names = names_of(sequence, (std::ssize(sequence.tokens) - 1) / limits_.block_size);
  const auto missing = static_cast<size_t>(cache_.count_shared(names));
  return missing < names.size() && std::any_of(running_.begin(), running_.end(), [&](const Sequence* each) {
           return each->state == RequestState::prefilling && each->names.size() > missing &&
                  each->names[missing] == names[missing] && precedes(*each, sequence);
         });
}

void Scheduler::start(Sequence& sequence, const Start& start) {
  const int64_t tokens = std::ssize(sequence.tokens);
  if (start.kept_tokens > 0) {
    cache_.make_writable(kept_, start.kept_tokens);
    cache_.move(sequence.blocks, kept_, start.kept_tokens);
    sequence.cached = start.kept_tokens;
    sequence.returns_to = kept_returns_to_;
    kept_tokens_ = 0;
    cache_.retire_windows(sequence.blocks, sequence.cached);
  } else {
    cache_.share(sequence.blocks, sequence.names, start.shared_blocks);
    sequence.cached = start.shared_blocks * limits_.block_size;
    sequence.loads = start.snapshot;
    if (sequence.loads != kNoBlock) cache_.snapshots().share(sequence.loads);
  }
  if (takes_snapshots()) choose_borders(sequence, start);
  if (limits_.prefix_caching) {
    const int64_t found = sequence.cached / limits_.block_size;
    counters_.hits += found;
    counters_.misses += (tokens - 1) / limits_.block_size - found;
  }
  if (!std::exchange(sequence.has_started, true)) {
    sequence.reused = sequence.cached;
    reused_tokens_ += sequence.reused;
  }
  sequence.num_named = start.shared_blocks;
  cache_.extend(sequence.blocks, tokens);
  waiting_.erase(&sequence);
  arrived_.erase(&sequence);
  running_.push_back(&sequence);
  move_to(sequence, RequestState::prefilling);
}

// --- Who is preempted.

void Scheduler::preempt(Sequence& sequence) {
  put_back(sequence);
  ++counters_.preemptions;
}

// Has a running request wait, without anything in the cache.
void Scheduler::put_back(Sequence& sequence) {
  std::erase(running_, &sequence);
  drop_load(sequence);
  cache_.release(sequence.blocks);
  sequence.cached = sequence.returns_to = 0;
  move_to(sequence, RequestState::preempted);
  wait(sequence);
}

// Starts the waiting requests that may preempt a running one.
void Scheduler::make_way(const CacheContents& cache) {
  while (!waiting_.empty() && !running_.empty()) {
    Sequence& next = next_waiting();
    Sequence& last = **std::max_element(running_.begin(), running_.end(),
                                        [&](const Sequence* a, const Sequence* b) { return precedes(*a, *b); });
    if (!may_preempt(next, last)) return;
    if (try_start(next, cache)) continue;
    if (!could_start(next)) return;
    preempt(last);
  }
}

// Whether a request may have room if all that it may preempt are. Blocks that these share are counted more than once.
bool Scheduler::could_start(const Sequence& sequence) const {
  int64_t blocks = cache_.num_free() + std::ssize(kept_.all);
  for (const Sequence* each : running_)
    if (may_preempt(sequence, *each)) blocks += std::ssize(each->blocks.all);
  return cache_.blocks_for(std::ssize(sequence.tokens)) <= blocks + std::ssize(sequence.names);
}

// Takes the block for the next token of a running sequence, if need be that of those behind it. Returns false when it
// is the last one itself, and was preempted.
bool Scheduler::grow(Sequence& sequence) {
  const int64_t tokens = std::ssize(sequence.tokens);
  while (cache_.blocks_for(tokens) - std::ssize(sequence.blocks.all) > cache_.num_free()) {
    if (!kept_.all.empty()) {
      release_kept();
      continue;
    }
    Sequence& last = *running_.back();
    preempt(last);
    if (&last == &sequence) return false;
  }
  cache_.extend(sequence.blocks, tokens);
  return true;
}

// --- Plans.

// Window blocks go back that no running request reads any more, or that the plan took and did not come to write. So do
// blocks for proposed tokens that were not taken.
void Scheduler::forget_plan(bool committed) {
  if (!committed) forget_snapshots();
  for (size_t i = 0; i < now_.places.size(); ++i) {
    Sequence* const s = now_.places[i];
    if (s == nullptr || s->state >= RequestState::finished) continue;
    // A step that was given up may have overwritten the state of its sequence, which begins again then: in other
    // blocks, where some of its own are those of others, too.
    if (!committed && takes_snapshots()) {
      if (s->state != RequestState::preempted) put_back(*s);
      continue;
    }
    // The last token gets its place with the next plan, unless it begins again.
    if (now_.plan[i].drafts > 0) cache_.shrink(s->blocks, std::ssize(s->tokens) - (committed ? 1 : 0));
    if (!committed && limits_.num_slots > 0) {
      s->cached = s->returns_to = 0;
      move_to(*s, RequestState::prefilling);
    }
    // A step that is under way has written one token more.
    cache_.retire_windows(s->blocks, s->cached + (has_ahead() ? 1 : 0));
  }
  now_.clear();
}

std::span<const StepSequence> Scheduler::plan(const CacheContents& cache) {
  EADEM_CHECK(!has_ahead(), "{} sequences are planned ahead", ahead_.plan.size());
  forget_plan();
  if (std::exchange(epoch_, cache.epoch()) != cache.epoch()) {
    cache_.forget_names();
    release_kept();
  }
  make_way(cache);
  std::sort(running_.begin(), running_.end(), [&](const Sequence* a, const Sequence* b) { return precedes(*a, *b); });
  const int64_t preemptions = counters_.preemptions;
  int64_t budget = limits_.max_num_batched_tokens;
  // The first in order has its share of what penalties may look at, so that it always takes part.
  first_ = running_.empty() ? nullptr : running_.front();
  penalized_left_ = limits_.max_penalized_tokens - (first_ == nullptr ? 0 : penalized_tokens(*first_));
  // Every sequence of the step may need a row of logits; scores take the others.
  const int64_t rows = waiting_.empty() ? std::ssize(running_) : limits_.max_batch_size;
  scored_left_ = std::max<int64_t>(0, limits_.max_logit_rows - rows);
  // Decoding sequences go first, so that a long prompt beside them does not make them wait.
  for (size_t place = 0; place < running_.size(); ++place) {
    Sequence& s = *running_[place];
    if (s.state == RequestState::decoding && grow(s) && budget > 0) budget -= plan_sequence(s, budget);
  }
  if (takes_snapshots())
    for (Sequence* s : running_) note_branches(*s);
  for (size_t place = 0; place < running_.size() && budget > 0; ++place)
    if (running_[place]->state == RequestState::prefilling) budget -= plan_sequence(*running_[place], budget);
  // Who starts has a share of the step. What was preempted for others does not start in the step that they go on in.
  while (budget > 0 && !waiting_.empty() && counters_.preemptions == preemptions) {
    Sequence& next = next_waiting();
    if (can_share_later(next) || !try_start(next, cache)) break;
    if (takes_snapshots()) note_branches(next);
    budget -= plan_sequence(next, budget);
  }
  plan_drafts(budget);
  return now_.plan;
}

// Adds proposed tokens to a step of decoding sequences alone. One that reads prompts has no use for them: it waits for
// arithmetic, of which every token takes as much.
void Scheduler::plan_drafts(int64_t budget) {
  const auto decodes = [](const Sequence* s) { return s->state == RequestState::decoding; };
  if (!std::all_of(now_.places.begin(), now_.places.end(), decodes)) return;
  int64_t left = std::min(budget, limits_.max_draft_tokens);
  // Wrong ones make the next step compute again what this one did. It must have room for that, and for whom this one
  // left out; and tokens that are computed again take the room of proposed ones, so that they do not grow without end.
  if (limits_.num_slots > 0) {
    int64_t pending = 0, again = 0;
    for (const Sequence* s : running_) pending += s->pending();
    for (const Sequence* s : now_.places) again += s->pending() - 1;
    left = std::min(limits_.max_num_batched_tokens - pending, limits_.max_draft_tokens - again);
  }
  for (size_t i = 0; i < now_.places.size(); ++i) {
    Sequence& s = *now_.places[i];
    const int64_t tokens = std::ssize(s.tokens);
    const int64_t blocks = std::ssize(s.blocks.all) + cache_.num_free();
    int64_t count = std::min({left, std::ssize(s.drafts), room_for_drafts(s), blocks * limits_.block_size - tokens});
    if (s.request.sampling.has_penalties()) {
      const int64_t of_row = std::min(tokens + limits_.max_draft_tokens, limits_.vocab);
      count = std::min(count, std::max<int64_t>(0, penalized_left_) / of_row);
      penalized_left_ -= std::max<int64_t>(0, count) * of_row;
    }
    if (count <= 0) continue;
    left -= count;
    s.fed.assign(s.tokens.begin() + s.cached, s.tokens.end());
    s.fed.insert(s.fed.end(), s.drafts.begin(), s.drafts.begin() + count);
    cache_.extend(s.blocks, tokens + count);
    cache_.extend_windows(s.blocks, tokens + count);
    now_.plan[i].tokens = s.fed;
    now_.plan[i].blocks = s.blocks.all;
    now_.plan[i].drafts = count;
    now_.plan[i].may_return = limits_.num_slots > 0;
  }
}

// --- Steps before the results of the one before.

void Scheduler::Planned::reserve(size_t most) {
  plan.reserve(most);
  ids.reserve(most);
  places.reserve(most);
}

void Scheduler::Planned::clear() {
  plan.clear();
  ids.clear();
  places.clear();
}

// Whether the step behind the planned one is of the same sequences whatever that one samples, unless a token ends one,
// and there is room for it.
bool Scheduler::goes_on() {
  if (now_.plan.empty() || limits_.num_slots > 0 || limits_.max_draft_tokens > 0 || num_masked_ > 0) return false;
  if (now_.places.size() != running_.size()) return false;
  if (!waiting_.empty()) {
    if (std::ssize(running_) < limits_.max_batch_size) return false;
    const Sequence& next = next_waiting();
    if (std::any_of(running_.begin(), running_.end(), [&](const Sequence* s) { return may_preempt(next, *s); }))
      return false;
  }
  int64_t missing = 0;
  for (size_t i = 0; i < now_.plan.size(); ++i) {
    const Sequence* const s = now_.places[i];
    if (s == nullptr || !now_.plan[i].samples) return false;
    const GenerationRequest& request = s->request;
    if (request.processor || !request.bad_words.empty() || request.sampling.has_penalties()) return false;
    const int64_t tokens = std::ssize(s->tokens);
    if (tokens >= limits_.max_sequence_length || s->num_sampled() + 1 >= request.max_tokens) return false;
    missing += cache_.blocks_for(tokens + 1) - std::ssize(s->blocks.all);
  }
  for (size_t group = 0; group < limits_.windows.size(); ++group)
    if (cache_.num_free(group) < std::ssize(running_)) return false;
  return missing <= cache_.num_free();
}

std::span<const StepSequence> Scheduler::plan_ahead() {
  static constexpr int32_t kUnseen[] = {0};
  EADEM_CHECK(!has_ahead(), "{} sequences are planned ahead", ahead_.plan.size());
  if (!goes_on()) return {};
  int32_t row = 0;
  for (size_t i = 0; i < now_.plan.size(); ++i) {
    Sequence& s = *now_.places[i];
    row += static_cast<int32_t>(now_.plan[i].num_rows());
    const int64_t tokens = std::ssize(s.tokens);
    cache_.extend(s.blocks, tokens + 1);
    cache_.extend_windows(s.blocks, tokens + 1);
    ahead_.plan.push_back({.tokens = kUnseen,
                           .cached = tokens,
                           .blocks = s.blocks.all,
                           .windows = s.blocks.windows,
                           .state_slot = s.blocks.slot,
                           .sampling = s.request.sampling,
                           .biases = s.request.biases,
                           .row = row - 1,
                           .allowed = s.allowed});
  }
  ahead_.ids = now_.ids;
  ahead_.places = now_.places;
  return ahead_.plan;
}

bool Scheduler::follow_ahead() {
  if (!has_ahead()) return false;
  EADEM_CHECK(now_.plan.empty(), "{} sequences are planned and not committed", now_.plan.size());
  std::swap(now_, ahead_);
  return true;
}

// The tokens that penalties look at when the next one is sampled.
int64_t Scheduler::penalized_tokens(const Sequence& s) const {
  return s.request.sampling.has_penalties() ? std::min(std::ssize(s.tokens), limits_.vocab) : 0;
}

// How many of the next `count` tokens of a sequence that wants scores a step has rows of logits for: at least one.
int64_t Scheduler::most_with_scores(const Sequence& s, int64_t count) const {
  const int64_t rows = 1 + scored_left_, begin = std::max(s.cached, s.scored);
  count = std::min(count, begin - s.cached + rows);
  // The step that ends the prompt has a row to sample from, too.
  const int64_t scored = std::min(s.cached + count, s.scored_end()) - begin;
  return count == s.pending() && scored + 1 > rows ? count - 1 : count;
}

// Plans at most `budget` tokens of a running sequence and returns how many.
int64_t Scheduler::plan_sequence(Sequence& s, int64_t budget) {
  int64_t count = up_to_border(s, std::min(budget, s.pending()));
  if (s.wants_scores()) count = most_with_scores(s, count);
  const bool samples = count == s.pending();
  if (samples && &s != first_) {
    if (&s != running_.front() && penalized_tokens(s) > penalized_left_) return 0;
    penalized_left_ -= penalized_tokens(s);
  }
  cache_.extend_windows(s.blocks, s.cached + count);
  const int64_t scored_begin = std::max(s.cached, s.scored);
  const int64_t scored = std::max<int64_t>(0, std::min(s.cached + count, s.scored_end()) - scored_begin);
  scored_left_ -= std::max<int64_t>(0, scored + (samples ? 1 : 0) - 1);
  const auto* const processor = s.request.processor ? &s.request.processor : nullptr;
  now_.plan.push_back({.tokens = std::span(s.tokens).subspan(static_cast<size_t>(s.cached), static_cast<size_t>(count)),
                       .cached = s.cached,
                       .blocks = s.blocks.all,
                       .windows = s.blocks.windows,
                       .state_slot = s.blocks.slot,
                       .load_snapshot = s.loads,
                       .save_snapshot = plan_snapshot(s),
                       .sampling = s.request.sampling,
                       .biases = s.request.biases,
                       .samples = samples,
                       .bad_words = s.request.bad_words,
                       .allowed = s.allowed,
                       .scored = std::span(s.tokens).subspan(static_cast<size_t>(scored > 0 ? scored_begin + 1 : 0),
                                                             static_cast<size_t>(scored)),
                       .scored_begin = scored_begin - s.cached,
                       .scored_top_logprobs = s.request.prompt_logprobs.value_or(0),
                       .processor = processor,
                       .history = s.tokens});
  now_.ids.push_back(s.id);
  now_.places.push_back(&s);
  return count;
}

}  // namespace eadem::engine
