// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/speculation/draft_model.h"

#include <algorithm>
#include <utility>

namespace eadem::engine {

DraftModel::DraftModel(std::unique_ptr<InferEngine> engine, int64_t vocab, double assumed_cost)
    : engine_(std::move(engine)),
      vocab_(vocab),
      assumed_cost_(assumed_cost),
      has_states_(engine_->limits().num_slots > 0) {
  EADEM_CHECK(engine_->cache_spec().layout == modules::CacheLayout::contiguous, "a draft model with a paged cache");
  if (const std::string reason = engine_->why_no_return(); !reason.empty())
    throw Unsupported("the draft model: {}", reason);
}

void DraftModel::propose(std::span<Proposal> proposals) {
  ++calls_;
  active_.clear();
  for (Proposal& each : proposals) prepare(each);
  while (!active_.empty()) step();
}

int64_t DraftModel::backlog(RequestId id, std::span<const int32_t> tokens) const {
  const auto found = sequences_.find(id);
  return std::ssize(tokens) - (found == sequences_.end() ? 0 : usable(found->second, tokens));
}

// How many of these tokens the cache holds, without the last one, which is computed in any case.
int64_t DraftModel::usable(const Sequence& sequence, std::span<const int32_t> tokens) const {
  const auto same = std::mismatch(sequence.tokens.begin(), sequence.tokens.end(), tokens.begin(), tokens.end()).first;
  const int64_t most = std::min<int64_t>(same - sequence.tokens.begin(), std::ssize(tokens) - 1);
  if (sequence.cached <= most) return sequence.cached;
  if (!has_states_) return most;
  // States per sequence go back to the one place that was kept, or begin.
  return sequence.returns_to <= most ? sequence.returns_to : 0;
}

// Returns false where this model has nothing to propose: its context ends, a token is none of its own, or it has no row
// left.
bool DraftModel::prepare(Proposal& proposal) {
  const int64_t length = std::ssize(proposal.tokens);
  // The last proposed token is not fed back.
  const int64_t depth = std::min(proposal.depth, engine_->max_sequence_length() - length + 1);
  if (depth < 1) return false;
  Sequence* const s = sequence_of(proposal);
  if (s == nullptr) return false;
  const int64_t vocab = engine_->model().info().vocab, known = usable(*s, proposal.tokens);
  if (std::any_of(proposal.tokens.begin() + known, proposal.tokens.end(), [&](int32_t t) { return t >= vocab; }))
    return false;
  if (known < s->cached) s->returns_to = known;
  s->cached = known;
  s->tokens.assign(proposal.tokens.begin(), proposal.tokens.end());
  active_.push_back({s, &proposal, depth});
  return true;
}

DraftModel::Sequence* DraftModel::sequence_of(const Proposal& proposal) {
  if (const auto found = sequences_.find(proposal.id); found != sequences_.end()) {
    found->second.used = calls_;
    return &found->second;
  }
  Sequence added{.used = calls_};
  for (const TokenBias& each : proposal.request->biases)
    if (each.token < engine_->model().info().vocab) added.biases.push_back(each);
  if (std::ssize(sequences_) == engine_->max_batch_size()) {
    const auto oldest = std::min_element(sequences_.begin(), sequences_.end(),
                                         [](const auto& a, const auto& b) { return a.second.used < b.second.used; });
    if (oldest->second.used == calls_) return nullptr;
    added.row = oldest->second.row;
    sequences_.erase(oldest);
  } else {
    const auto is_taken = [&](const auto& each) { return each.second.row == added.row; };
    while (std::any_of(sequences_.begin(), sequences_.end(), is_taken)) ++added.row;
  }
  return &sequences_.emplace(proposal.id, std::move(added)).first->second;
}

// Computes tokens that are not in the cache, of as many sequences as a step has room for.
void DraftModel::step() {
  plan_.clear();
  int64_t budget = engine_->limits().max_num_batched_tokens;
  for (const Active& each : active_) {
    const Sequence& s = *each.sequence;
    const int64_t pending = std::ssize(s.tokens) - s.cached, count = std::min(budget, pending);
    if (count == 0) break;
    budget -= count;
    plan_.push_back({.tokens = std::span(s.tokens).subspan(static_cast<size_t>(s.cached), static_cast<size_t>(count)),
                     .cached = s.cached,
                     .blocks = {&s.row, 1},
                     .state_slot = s.row,
                     .may_return = has_states_ && s.cached == std::ssize(each.proposal->tokens),
                     .sampling = each.proposal->request->sampling,
                     .biases = s.biases,
                     .samples = count == pending});
    plan_.back().sampling.top_logprobs = 0;
  }
  const InferEngine::Output& output = engine_->forward(plan_);
  size_t row = 0, left = 0;
  for (size_t i = 0; i < active_.size(); ++i) {
    Active each = active_[i];
    const bool samples = i < plan_.size() && plan_[i].samples;
    if (i < plan_.size() && plan_[i].may_return) each.sequence->returns_to = plan_[i].cached;
    if (i < plan_.size()) each.sequence->cached += std::ssize(plan_[i].tokens);
    if (!samples || take(each, output.output_ids[row++])) active_[left++] = each;
  }
  active_.resize(left);
}

// Returns whether the next token is wanted, too.
bool DraftModel::take(Active& active, int32_t token) const {
  if (token < 0 || token >= vocab_) return false;
  active.proposal->drafts.push_back(token);
  active.sequence->tokens.push_back(token);
  return std::ssize(active.proposal->drafts) < active.depth;
}

}  // namespace eadem::engine
