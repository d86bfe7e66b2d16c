// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/speculation/draft_model.h"

#include <algorithm>
#include <utility>

namespace eadem::engine {

DraftModel::DraftModel(std::unique_ptr<InferEngine> engine, int64_t vocab, double assumed_cost)
    : engine_(std::move(engine)), vocab_(vocab), assumed_cost_(assumed_cost) {
  EADEM_CHECK(engine_->cache_spec().layout == modules::CacheLayout::contiguous, "a draft model with a paged cache");
  if (const std::string reason = engine_->why_no_speculation(); !reason.empty())
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
  const int64_t cached = found == sequences_.end() ? 0 : found->second.cached;
  return std::max<int64_t>(0, std::ssize(tokens) - cached);
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
  const auto [end, unused] =
      std::mismatch(s->tokens.begin(), s->tokens.end(), proposal.tokens.begin(), proposal.tokens.end());
  const auto same = end - s->tokens.begin();
  const int64_t vocab = engine_->model().info().vocab;
  if (std::any_of(proposal.tokens.begin() + same, proposal.tokens.end(), [&](int32_t t) { return t >= vocab; }))
    return false;
  s->cached = std::min({s->cached, static_cast<int64_t>(same), length - 1});
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
