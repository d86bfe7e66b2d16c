// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/scheduler.h"

#include <algorithm>
#include <utility>

#include "eadem/core/error.h"

namespace eadem::engine {

namespace {

bool has_ended(RequestState state) { return state >= RequestState::finished; }

}  // namespace

std::string_view request_state_name(RequestState state) {
  switch (state) {
    case RequestState::waiting: return "waiting";
    case RequestState::prefilling: return "prefilling";
    case RequestState::decoding: return "decoding";
    case RequestState::finished: return "finished";
    case RequestState::failed: return "failed";
    case RequestState::cancelled: return "cancelled";
  }
  return "?";
}

Scheduler::Scheduler(const SchedulerLimits& limits)
    : limits_(limits), cache_(limits.num_blocks, limits.block_size, limits.windows, limits.num_slots) {
  const auto most = static_cast<size_t>(limits.max_batch_size);
  running_.reserve(most);
  plan_.reserve(most);
  planned_.reserve(most);
  places_.reserve(most);
  events_.reserve(most);
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
  if (std::ssize(request.biases) > kMaxBiases)
    throw InvalidArgument("the request has {} biases, of logit_bias and for min_tokens; expected at most {}",
                          request.biases.size(), kMaxBiases);
  for (const TokenBias& each : request.biases)
    if (each.token < 0 || each.token >= limits_.vocab)
      throw InvalidArgument("a bias is for token {}; the vocabulary has {}", each.token, limits_.vocab);
  EADEM_CHECK(request.max_tokens >= 1, "max_tokens {}", request.max_tokens);
}

RequestId Scheduler::add(GenerationRequest request) {
  check(request);
  forget_plan();
  // No sequence can get more; it keeps the sums small.
  request.max_tokens = std::min(request.max_tokens, limits_.max_sequence_length);
  request.sampling.prompt_length = static_cast<int32_t>(request.prompt.size());
  Sequence& sequence = waiting_.emplace_back();
  sequence.id = next_id_++;
  sequence.tokens.reserve(static_cast<size_t>(tokens_for(request)) + 1);
  sequence.tokens = request.prompt;
  cache_.reserve(sequence.blocks, tokens_for(request));
  sequence.request = std::move(request);
  ++counts_[static_cast<size_t>(RequestState::waiting)];
  return sequence.id;
}

void Scheduler::end(RequestId id, RequestState how) {
  EADEM_CHECK(has_ended(how), "'{}' is no end", request_state_name(how));
  forget_plan();
  const auto has_id = [&](const Sequence& s) { return s.id == id; };
  if (const auto found = std::find_if(running_.begin(), running_.end(), has_id); found != running_.end()) {
    move_to(*found, how);
    release(*found);
    running_.erase(found);
  } else if (const auto waits = std::find_if(waiting_.begin(), waiting_.end(), has_id); waits != waiting_.end()) {
    move_to(*waits, how);
    waiting_.erase(waits);
  }
}

std::optional<RequestState> Scheduler::state(RequestId id) const {
  for (const Sequence& s : running_)
    if (s.id == id) return s.state;
  for (const Sequence& s : waiting_)
    if (s.id == id) return s.state;
  return std::nullopt;
}

void Scheduler::move_to(Sequence& sequence, RequestState state) {
  --counts_[static_cast<size_t>(sequence.state)];
  ++counts_[static_cast<size_t>(state)];
  sequence.state = state;
}

// --- The cache.

// Gives back the blocks of a sequence that has ended, or keeps them.
void Scheduler::release(Sequence& sequence) {
  if (sequence.request.keep) {
    cache_.release(kept_);
    std::swap(kept_, sequence.blocks);
    // Nothing is cached in the blocks that were reserved for tokens that never came.
    cache_.shrink(kept_, sequence.cached);
    cache_.retire_windows(kept_, sequence.cached);
    kept_tokens_ = sequence.cached;
  } else {
    cache_.release(sequence.blocks);
  }
}

// Whether a request may start now. The kept sequence's blocks are those of a request with `keep`.
bool Scheduler::has_room(const GenerationRequest& request) const {
  const int64_t needed = cache_.blocks_for(tokens_for(request));
  if (request.keep) return needed - std::ssize(kept_.all) <= cache_.num_free();
  const int64_t holders = std::ssize(running_) + (kept_.all.empty() ? 0 : 1);
  return needed <= cache_.num_free() && !(cache_.bounds_sequences() && holders >= limits_.max_batch_size);
}

void Scheduler::admit(const CacheContents& cache) {
  while (!waiting_.empty() && std::ssize(running_) < limits_.max_batch_size) {
    Sequence& next = waiting_.front();
    if (!has_room(next.request)) {
      if (next.request.keep || kept_.all.empty()) return;  // first come, first served
      cache_.release(kept_);
      continue;
    }
    start(next, cache);
    running_.push_back(std::move(next));
    waiting_.pop_front();
  }
}

void Scheduler::start(Sequence& sequence, const CacheContents& cache) {
  const int64_t tokens = tokens_for(sequence.request);
  if (sequence.request.keep) {
    cache_.move(sequence.blocks, kept_, tokens);
    // The logits after the last token of the prompt are needed, so that token is always computed.
    const std::span prompt(sequence.request.prompt);
    const int64_t known = cache.common_prefix(sequence.blocks.all, prompt.first(prompt.size() - 1));
    const bool resumes = cache_.holds_windows(sequence.blocks, known) &&
                         (limits_.num_slots == 0 || known == kept_tokens_);  // states per sequence lead nowhere else
    sequence.cached = sequence.reused = resumes ? known : 0;
    cache_.retire_windows(sequence.blocks, sequence.cached);
    reused_tokens_ += sequence.reused;
  }
  cache_.start(sequence.blocks, tokens);
  move_to(sequence, RequestState::prefilling);
}

// --- Steps.

// Window blocks go back that no running request reads any more, or that the plan took and did not come to write.
void Scheduler::forget_plan(bool committed) {
  for (const size_t place : places_) {
    Sequence& s = running_[place];
    if (has_ended(s.state)) continue;
    // A step that was given up may have overwritten the state of its sequence, which begins again then.
    if (!committed && limits_.num_slots > 0) {
      s.cached = 0;
      move_to(s, RequestState::prefilling);
    }
    cache_.retire_windows(s.blocks, s.cached);
  }
  plan_.clear();
  planned_.clear();
  places_.clear();
}

std::span<const StepSequence> Scheduler::plan(const CacheContents& cache) {
  forget_plan();
  admit(cache);
  int64_t budget = limits_.max_num_batched_tokens;
  // Decoding sequences go first, so that a long prompt beside them does not make them wait.
  for (const RequestState state : {RequestState::decoding, RequestState::prefilling})
    for (size_t place = 0; place < running_.size() && budget > 0; ++place)
      if (running_[place].state == state) budget -= plan_sequence(place, budget);
  return plan_;
}

// Plans at most `budget` tokens of a running sequence and returns how many.
int64_t Scheduler::plan_sequence(size_t place, int64_t budget) {
  Sequence& s = running_[place];
  const int64_t count = std::min(budget, s.pending());
  cache_.extend_windows(s.blocks, s.cached + count);
  plan_.push_back({.tokens = std::span(s.tokens).subspan(static_cast<size_t>(s.cached), static_cast<size_t>(count)),
                   .cached = s.cached,
                   .blocks = s.blocks.all,
                   .windows = s.blocks.windows,
                   .state_slot = s.blocks.slot,
                   .sampling = s.request.sampling,
                   .biases = s.request.biases,
                   .samples = count == s.pending()});
  planned_.push_back(s.id);
  places_.push_back(place);
  return count;
}

std::span<const StepEvent> Scheduler::commit(std::span<const int32_t> tokens, std::span<const float> logprobs) {
  events_.clear();
  size_t row = 0;
  for (size_t i = 0; i < plan_.size(); ++i) {
    Sequence& s = running_[places_[i]];
    StepEvent event = commit_sequence(s, plan_[i]);
    if (plan_[i].samples) {
      EADEM_CHECK(row < tokens.size() && row < logprobs.size(), "{} tokens and {} log-probabilities were sampled",
                  tokens.size(), logprobs.size());
      take_token(s, event, tokens[row], logprobs[row]);
      ++row;
    }
    event.state = s.state;
    events_.push_back(event);
  }
  EADEM_CHECK(row == tokens.size(), "{} tokens were sampled for {} sequences", tokens.size(), row);
  forget_plan(true);
  std::erase_if(running_, [](const Sequence& s) { return has_ended(s.state); });
  return events_;
}

StepEvent Scheduler::commit_sequence(Sequence& sequence, const StepSequence& planned) {
  const StepEvent event{.id = sequence.id,
                        .computed = std::ssize(planned.tokens),
                        .reused = std::exchange(sequence.reused, 0),
                        .decoded = sequence.state == RequestState::decoding};
  (event.decoded ? decode_tokens_ : prompt_tokens_) += event.computed;
  sequence.cached += event.computed;
  return event;
}

void Scheduler::take_token(Sequence& sequence, StepEvent& event, int32_t token, float logprob) {
  event.sampled = true;
  event.token = token;
  event.logprob = logprob;
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
