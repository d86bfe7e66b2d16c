// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/scheduler.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "eadem/core/error.h"

namespace eadem::engine {

namespace {

bool has_ended(RequestState state) { return state >= RequestState::finished; }

}  // namespace

std::vector<int32_t> all_tokens(int64_t vocab) {
  std::vector<int32_t> words(static_cast<size_t>((vocab + 31) / 32), -1);
  if (vocab % 32 != 0) words.back() = static_cast<int32_t>((uint32_t{1} << (vocab % 32)) - 1);
  return words;
}

std::vector<int32_t> only_tokens(std::span<const int64_t> tokens, int64_t vocab) {
  std::vector<int32_t> words(static_cast<size_t>((vocab + 31) / 32), 0);
  for (const int64_t token : tokens) {
    int32_t& word = words[static_cast<size_t>(token / 32)];
    word = static_cast<int32_t>(static_cast<uint32_t>(word) | uint32_t{1} << (token % 32));
  }
  return words;
}

int64_t num_allowed(std::span<const int32_t> words, int64_t vocab) {
  int64_t count = 0;
  for (int64_t first = 0; first < vocab; first += 32) {
    const uint32_t there = vocab - first >= 32 ? ~uint32_t{0} : (uint32_t{1} << (vocab - first)) - 1;
    count += std::popcount(static_cast<uint32_t>(words[static_cast<size_t>(first / 32)]) & there);
  }
  return count;
}

std::string_view request_state_name(RequestState state) {
  switch (state) {
    case RequestState::waiting: return "waiting";
    case RequestState::prefilling: return "prefilling";
    case RequestState::decoding: return "decoding";
    case RequestState::preempted: return "preempted";
    case RequestState::finished: return "finished";
    case RequestState::failed: return "failed";
    case RequestState::cancelled: return "cancelled";
  }
  return "?";
}

Scheduler::Scheduler(const SchedulerLimits& limits)
    : limits_(limits),
      cache_(limits.num_blocks, limits.block_size, limits.windows, limits.num_slots, limits.num_snapshots) {
  EADEM_CHECK(limits.max_sequence_length <= limits.num_blocks * limits.block_size, "{} tokens in {} blocks of {}",
              limits.max_sequence_length, limits.num_blocks, limits.block_size);
  EADEM_CHECK(limits.max_batch_size <= limits.max_num_batched_tokens, "{} sequences in a step of {} tokens",
              limits.max_batch_size, limits.max_num_batched_tokens);
  EADEM_CHECK(!limits.prefix_caching || (limits.windows.empty() && (limits.num_slots == 0 || limits.num_snapshots > 0)),
              "prefix_caching with {} windows, {} slots and {} snapshots", limits.windows.size(), limits.num_slots,
              limits.num_snapshots);
  const auto most = static_cast<size_t>(limits.max_batch_size);
  running_.reserve(most);
  now_.reserve(most);
  ahead_.reserve(most);
  events_.reserve(most + static_cast<size_t>(limits.max_draft_tokens));
  draftable_.reserve(most);
}

// The most tokens of a request that the cache will hold. The last sampled one is not fed back and needs no place.
int64_t Scheduler::tokens_for(const GenerationRequest& request) const {
  return std::min(limits_.max_sequence_length, std::ssize(request.prompt) + request.max_tokens - 1);
}

// --- Requests.

void Scheduler::check(const GenerationRequest& request) const {
  const auto length = std::ssize(request.prompt);
  if (length == 0) throw InvalidArgument("the prompt has no tokens; at least one is needed");
  if (length > limits_.max_sequence_length)
    throw InvalidArgument("the prompt has {} tokens; the context holds {} (model: {})", length,
                          limits_.max_sequence_length, limits_.model_context);
  for (size_t i = 0; i < request.prompt.size(); ++i)
    if (request.prompt[i] < 0 || request.prompt[i] >= limits_.vocab)
      throw InvalidArgument("token {} of the prompt is {}; the vocabulary has {}", i, request.prompt[i], limits_.vocab);
  if (const size_t biases = request.biases.size() + request.bad_words.size(); biases > size_t{kMaxBiases})
    throw InvalidArgument("the request has {} biases, of logit_bias, bad_words and for min_tokens; expected at most {}",
                          biases, kMaxBiases);
  for (const TokenBias& each : request.biases)
    if (each.token < 0 || each.token >= limits_.vocab)
      throw InvalidArgument("a bias or a bad word is for token {}; the vocabulary has {}", each.token, limits_.vocab);
  for (const std::vector<int32_t>& word : request.bad_words)
    for (const int32_t token : word)
      if (token < 0 || token >= limits_.vocab)
        throw InvalidArgument("a bad word has token {}; the vocabulary has {}", token, limits_.vocab);
  if (!request.allowed.empty() && std::ssize(request.allowed) != (limits_.vocab + 31) / 32)
    throw InvalidArgument("the mask of allowed tokens has {} words; {} tokens take {}", request.allowed.size(),
                          limits_.vocab, (limits_.vocab + 31) / 32);
  EADEM_CHECK(request.max_tokens >= 1, "max_tokens {}", request.max_tokens);
}

RequestId Scheduler::add(GenerationRequest request) {
  check(request);
  forget_plan();
  // No sequence can get more; it keeps the sums small.
  request.max_tokens = std::min(request.max_tokens, limits_.max_sequence_length);
  request.sampling.prompt_length = static_cast<int32_t>(request.prompt.size());
  const RequestId id = next_id_++;
  Sequence& sequence = *sequences_.emplace(id, std::make_unique<Sequence>()).first->second;
  sequence.id = id;
  sequence.arrival = steps_;
  sequence.tokens.reserve(static_cast<size_t>(tokens_for(request)) + 1);
  sequence.tokens = request.prompt;
  cache_.reserve(sequence.blocks, tokens_for(request));
  if (limits_.prefix_caching) {
    sequence.root = hasher_.root(fmt::format("{} {}", limits_.cache_salt, request.cache_salt));
    sequence.names.reserve(static_cast<size_t>(cache_.blocks_for(tokens_for(request))));
  }
  sequence.allowed = request.allowed;
  if (request.token_mask) ++num_masked_;
  sequence.request = std::move(request);
  ++counts_[static_cast<size_t>(RequestState::waiting)];
  wait(sequence);
  return id;
}

void Scheduler::end(RequestId id, RequestState how) {
  EADEM_CHECK(has_ended(how), "'{}' is no end", request_state_name(how));
  forget_plan();
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return;
  Sequence& sequence = *found->second;
  if (std::erase(running_, &sequence) > 0) release(sequence);
  move_to(sequence, how);
  forget(sequence);
}

std::optional<RequestState> Scheduler::state(RequestId id) const {
  const auto found = sequences_.find(id);
  return found == sequences_.end() ? std::nullopt : std::optional(found->second->state);
}

// Drops a request that has ended.
void Scheduler::forget(Sequence& sequence) {
  for (size_t i = 0; i < ahead_.places.size(); ++i)
    if (ahead_.places[i] == &sequence) ahead_.places[i] = nullptr, ahead_.ids[i] = 0;
  waiting_.erase(&sequence);
  arrived_.erase(&sequence);
  if (sequence.request.token_mask) --num_masked_;
  sequences_.erase(sequence.id);
}

CacheCounters Scheduler::counters() const {
  CacheCounters counters = counters_;
  counters.evictions = cache_.num_evicted();
  return counters;
}

void Scheduler::move_to(Sequence& sequence, RequestState state) {
  --counts_[static_cast<size_t>(sequence.state)];
  ++counts_[static_cast<size_t>(state)];
  sequence.state = state;
}

// Gives back the blocks of a sequence that has ended, or keeps them.
void Scheduler::release(Sequence& sequence) {
  if (sequence.loads != kNoBlock) sequence.cached = 0;  // its slot holds nothing of it yet
  drop_load(sequence);
  if (sequence.request.keep) {
    cache_.release(kept_);
    std::swap(kept_, sequence.blocks);
    // Nothing is cached in blocks that were taken for tokens that never came.
    cache_.shrink(kept_, sequence.cached);
    cache_.retire_windows(kept_, sequence.cached);
    kept_tokens_ = sequence.cached;
    kept_returns_to_ = sequence.returns_to;
    if (kept_tokens_ == 0) release_kept();
  } else {
    cache_.release(sequence.blocks);
  }
}

void Scheduler::release_kept() {
  cache_.release(kept_);
  kept_tokens_ = 0;
}

// The names of the first blocks, which are full of the sequence's tokens.
std::span<const BlockHash> Scheduler::names_of(Sequence& sequence, int64_t num_blocks) {
  const auto size = static_cast<size_t>(limits_.block_size);
  for (auto place = sequence.names.size(); std::ssize(sequence.names) < num_blocks; ++place)
    sequence.names.push_back(hasher_.next(place == 0 ? sequence.root : sequence.names.back(),
                                          std::span(sequence.tokens).subspan(place * size, size)));
  return std::span(sequence.names).first(static_cast<size_t>(num_blocks));
}

// Names the blocks that steps have filled.
void Scheduler::name_blocks(Sequence& sequence) {
  if (!limits_.prefix_caching) return;
  for (const int64_t full = sequence.cached / limits_.block_size; sequence.num_named < full; ++sequence.num_named)
    cache_.name(sequence.blocks, sequence.num_named, names_of(sequence, sequence.num_named + 1).back());
}

// --- Proposed tokens.

std::span<const Draftable> Scheduler::draftable() {
  draftable_.clear();
  // Who waits starts in the next step, or waits for a place in the batch. If it waits for memory, there is none to
  // spare.
  const bool decodes =
      count(RequestState::prefilling) == 0 && (waiting_.empty() || std::ssize(running_) >= limits_.max_batch_size);
  if (limits_.max_draft_tokens == 0 || !decodes) return draftable_;
  for (const Sequence* s : running_) {
    const int64_t room = room_for_drafts(*s);
    const int64_t most = std::min(limits_.max_draft_tokens - (s->pending() - 1), room);
    draftable_.push_back({s->id, s->tokens, &s->request, most, room + 1, s->pending()});
  }
  return draftable_;
}

void Scheduler::propose(RequestId id, std::span<const int32_t> tokens) {
  forget_plan();
  const auto found = sequences_.find(id);
  if (found == sequences_.end() || found->second->state != RequestState::decoding) return;
  found->second->drafts.assign(tokens.begin(), tokens.end());
}

// How many tokens could follow those of a sequence in the cache. The last one of an answer is not fed back. Masks and
// processors see each token before the next one.
int64_t Scheduler::room_for_drafts(const Sequence& sequence) const {
  if (sequence.request.token_mask || sequence.request.processor) return 0;
  return tokens_for(sequence.request) - std::ssize(sequence.tokens);
}

// --- Masks.

std::span<const Maskable> Scheduler::maskable() {
  maskable_.clear();
  if (num_masked_ == 0) return maskable_;
  for (const auto& [id, s] : sequences_)
    if (s->request.token_mask && s->masked_tokens != std::ssize(s->tokens))
      maskable_.push_back({id, s->tokens, &s->request});
  return maskable_;
}

void Scheduler::allow(RequestId id, std::span<const int32_t> words) {
  forget_plan();
  Sequence& sequence = *sequences_.at(id);
  sequence.allowed.assign(words.begin(), words.end());
  sequence.masked_tokens = std::ssize(sequence.tokens);
}

// --- Steps.

StepResults StepResults::rows(size_t begin, size_t count) const {
  const auto top = [&](const auto& of_all) {
    constexpr size_t kEach = kernels::kMostTopLogprobs;
    return of_all.empty() ? of_all : of_all.subspan(begin * kEach, count * kEach);
  };
  return {tokens.subspan(begin, count), logprobs.subspan(begin, count), top(top_tokens), top(top_logprobs)};
}

std::span<const StepEvent> Scheduler::commit(const StepResults& results) {
  const auto& [tokens, logprobs, top_tokens, top_logprobs] = results;
  events_.clear();
  size_t row = 0;
  for (size_t i = 0; i < now_.plan.size(); ++i) {
    const auto rows = static_cast<size_t>(now_.plan[i].num_rows());
    if (now_.places[i] == nullptr) {
      row += rows;
      continue;
    }
    Sequence& s = *now_.places[i];
    const StepEvent event = commit_sequence(s, now_.plan[i]);
    EADEM_CHECK(row + rows <= tokens.size() && row + rows <= logprobs.size(),
                "{} tokens and {} log-probabilities were sampled", tokens.size(), logprobs.size());
    const StepResults own = results.rows(row, rows);
    const size_t scored = commit_scores(s, now_.plan[i], own);
    commit_rows(s, now_.plan[i], event, own.rows(scored, rows - scored));
    row += rows;
  }
  EADEM_CHECK(row == tokens.size(), "{} tokens were sampled for {} rows of logits", tokens.size(), row);
  forget_plan(true);
  ++steps_;
  std::erase_if(running_, [&](Sequence* s) {
    const bool ended = has_ended(s->state);
    if (ended) forget(*s);
    return ended;
  });
  return events_;
}

StepEvent Scheduler::commit_sequence(Sequence& sequence, const StepSequence& planned) {
  const int64_t known = std::ssize(planned.tokens) - planned.drafts;
  const bool decoded = sequence.state == RequestState::decoding;
  // Decoding adds one token a step. The known tokens before it were computed by an earlier step, too.
  const int64_t recomputed = decoded ? std::min(known, sequence.pending() - 1) : 0;
  const StepEvent event{.id = sequence.id,
                        .computed = known - recomputed,
                        .proposed = planned.drafts,
                        .recomputed = recomputed,
                        .reused = std::exchange(sequence.reused, 0),
                        .decoded = decoded};
  (event.decoded ? decode_tokens_ : prompt_tokens_) += event.computed;
  sequence.cached += known;
  commit_snapshots(sequence, planned);
  // A step that may return has its blocks named when it does not: nobody writes to a block with a name.
  if (!planned.may_return) name_blocks(sequence);
  sequence.drafts.clear();
  proposed_tokens_ += planned.drafts;
  return event;
}

namespace {

void set_top(StepEvent& event, const StepResults& row, int64_t count) {
  if (count == 0) return;
  event.top_tokens = row.top_tokens;
  event.top_logprobs = row.top_logprobs;
}

}  // namespace

// Reports the log-probabilities of the prompt that the step computed, and returns how many rows of logits these were. A
// row that has none is not counted: it fails the request as the first row that is sampled.
size_t Scheduler::commit_scores(Sequence& sequence, const StepSequence& planned, const StepResults& results) {
  for (size_t row = 0; row < planned.scored.size(); ++row) {
    if (results.tokens[row] < 0) return row;
    StepEvent event{.id = sequence.id,
                    .state = sequence.state,
                    .token = results.tokens[row],
                    .logprob = results.logprobs[row],
                    .scored = true};
    set_top(event, results.rows(row, 1), planned.scored_top_logprobs);
    events_.push_back(event);
    ++sequence.scored;
  }
  return planned.scored.size();
}

// Takes what was sampled behind the tokens of the sequence, and behind the proposed ones that were sampled themselves.
void Scheduler::commit_rows(Sequence& sequence, const StepSequence& planned, StepEvent event,
                            const StepResults& results) {
  const auto& tokens = results.tokens;
  const auto drafts = planned.tokens.last(static_cast<size_t>(planned.drafts));
  size_t accepted = 0;
  while (accepted < drafts.size() && tokens[accepted] == drafts[accepted]) ++accepted;
  const bool returns = planned.may_return && accepted < drafts.size();
  if (returns) sequence.cached = planned.cached;
  if (planned.may_return) sequence.returns_to = planned.cached;
  for (size_t row = 0;; ++row) {
    if (!tokens.empty()) {
      event.logprob = results.logprobs[row];
      set_top(event, results.rows(row, 1), planned.sampling.top_logprobs);
      take_token(sequence, event, tokens[row]);
    }
    event.state = sequence.state;
    events_.push_back(event);
    if (has_ended(sequence.state) || row == accepted) return;
    event = {.id = sequence.id, .computed = 1, .accepted = 1, .decoded = event.decoded};
    ++accepted_tokens_;
    ++decode_tokens_;
    if (!returns) ++sequence.cached;
    name_blocks(sequence);
  }
}

void Scheduler::take_token(Sequence& sequence, StepEvent& event, int32_t token) {
  event.sampled = true;
  event.token = token;
  const bool full = std::ssize(sequence.tokens) >= limits_.max_sequence_length;
  if (token < 0)
    move_to(sequence, RequestState::failed);
  else if (full || sequence.num_sampled() + 1 >= sequence.request.max_tokens)
    move_to(sequence, RequestState::finished);
  else if (sequence.state == RequestState::prefilling)
    move_to(sequence, RequestState::decoding);
  if (has_ended(sequence.state))
    release(sequence);
  else
    sequence.tokens.push_back(token);
}

}  // namespace eadem::engine
