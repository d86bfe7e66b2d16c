// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/speculation/mtp_head.h"

#include <algorithm>
#include <utility>

namespace eadem::engine {

MtpHead::MtpHead(std::unique_ptr<InferEngine> engine, const InferEngine& model, double assumed_cost)
    : engine_(std::move(engine)), assumed_cost_(assumed_cost) {
  EADEM_CHECK(engine_->cache_spec().layout == modules::CacheLayout::contiguous, "an MTP head with a paged cache");
  row_bytes_ = engine_->programs().prefill().layout.hidden_row_bytes();
  EADEM_CHECK(row_bytes_ > 0, "{} reads no hidden states", engine_->model().info().architecture);
  const auto dtype_of = [](const InferEngine& each) {
    const StepProgram& program = each.programs().prefill();
    return program.program->graph().value(program.mtp_hidden).type.dtype;
  };
  if (dtype_of(*engine_) != dtype_of(model))
    throw Unsupported("the MTP head reads hidden states in {}; those of the model are in {}",
                      dtype_name(dtype_of(*engine_)), dtype_name(dtype_of(model)));
}

// --- Hidden states of the model.

void MtpHead::see(std::span<const RequestId> ids, std::span<const StepSequence> plan, const InferEngine& engine) {
  const Tensor hidden = engine.mtp_hidden();
  const auto* data = static_cast<const std::byte*>(hidden.view.data);
  for (size_t i = 0; i < plan.size(); ++i) {
    const size_t size = plan[i].tokens.size() * static_cast<size_t>(row_bytes_);
    see(sequences_[ids[i]], plan[i].cached, {data, size});
    data += size;
  }
}

// Keeps the hidden states of the positions from `begin` on; states that were kept for these positions are replaced. The
// states of proposed tokens that were not accepted stay at the end until the next step replaces them.
void MtpHead::see(Sequence& sequence, int64_t begin, std::span<const std::byte> states) {
  const int64_t count = std::ssize(states) / row_bytes_;
  if (begin + count <= sequence.next) return;           // read already, and computed once more after a preemption
  if (begin > sequence.next + num_waiting(sequence)) {  // found in the cache
    sequence.states.clear();
    sequence.next = begin;
    sequence.begin_again();
  }
  const int64_t from = std::max(begin, sequence.next);
  sequence.states.resize(static_cast<size_t>((from - sequence.next) * row_bytes_));
  sequence.states.insert(sequence.states.end(), states.begin() + (from - begin) * row_bytes_, states.end());
  // Twice as many are kept, lest every step move all of them.
  if (const int64_t waiting = num_waiting(sequence); waiting > 2 * kMostWaiting)
    forget_first(sequence, waiting - kMostWaiting, row_bytes_);
}

void MtpHead::forget_first(Sequence& sequence, int64_t count, int64_t row_bytes) {
  sequence.states.erase(sequence.states.begin(), sequence.states.begin() + count * row_bytes);
  sequence.next += count;
  sequence.begin_again();
}

int64_t MtpHead::backlog(RequestId id, std::span<const int32_t> tokens) const {
  const auto found = sequences_.find(id);
  return found == sequences_.end() ? 0 : std::max<int64_t>(0, std::ssize(tokens) - 1 - found->second.next);
}

// --- Proposals.

void MtpHead::propose(std::span<Proposal> proposals) {
  ++calls_;
  active_.clear();
  for (Proposal& each : proposals) prepare(each);
  while (!active_.empty()) step();
}

// Proposes nothing where the hidden state of the token before the last one is not there, or no row is left.
void MtpHead::prepare(Proposal& proposal) {
  const auto found = sequences_.find(proposal.id);
  const int64_t end = std::ssize(proposal.tokens) - 1;  // of the pairs that are complete
  if (found == sequences_.end() || found->second.next >= end) return;
  Sequence& s = found->second;
  if (num_waiting(s) < end - s.next || !take_row(s)) return;
  s.states.resize(static_cast<size_t>((end - s.next) * row_bytes_));
  const int64_t places = engine_->max_sequence_length();
  if (end - s.first > places) s.begin_again();
  if (end - s.first > places) forget_first(s, end - s.first - places / 2, row_bytes_);
  // The last proposed token makes no pair.
  const int64_t depth =
      std::min({proposal.depth, places - (end - s.first) + 1, engine_->model().info().max_positions - end + 1});
  if (depth < 1) return;
  s.tokens.assign(proposal.tokens.begin(), proposal.tokens.end());
  active_.push_back({&s, &proposal, depth, s.next});
}

// Gives the sequence a row of the cache, that of the sequence that was proposed for longest ago if none is free.
bool MtpHead::take_row(Sequence& sequence) {
  sequence.used = calls_;
  if (sequence.row >= 0) return true;
  std::vector<Sequence*> owners(static_cast<size_t>(engine_->max_batch_size()), nullptr);
  for (auto& [id, each] : sequences_)
    if (each.row >= 0) owners[static_cast<size_t>(each.row)] = &each;
  const auto used = [](const Sequence* owner) { return owner == nullptr ? -1 : owner->used; };
  const auto oldest = std::min_element(owners.begin(), owners.end(),
                                       [&](const Sequence* a, const Sequence* b) { return used(a) < used(b); });
  if (used(*oldest) == calls_) return false;
  if (*oldest != nullptr) {
    (*oldest)->row = -1;
    (*oldest)->begin_again();
  }
  sequence.row = static_cast<int32_t>(oldest - owners.begin());
  sequence.begin_again();
  return true;
}

// Reads pairs that wait, of as many sequences as a step has room for.
void MtpHead::step() {
  plan_.clear();
  int64_t budget = engine_->limits().max_num_batched_tokens;
  for (const Active& each : active_) {
    Sequence& s = *each.sequence;
    const int64_t pending = s.next + num_waiting(s) - each.read, count = std::min(budget, pending);
    if (count == 0) break;
    budget -= count;
    s.positions.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) s.positions[static_cast<size_t>(i)] = static_cast<int32_t>(each.read + i);
    const auto part = [](auto& list, int64_t begin, int64_t size) {
      return std::span(list).subspan(static_cast<size_t>(begin), static_cast<size_t>(size));
    };
    plan_.push_back({.tokens = part(s.tokens, each.read + 1, count),
                     .cached = each.read - s.first,
                     .blocks = {&s.row, 1},
                     .sampling = each.proposal->request->sampling,
                     .biases = each.proposal->request->biases,
                     .samples = count == pending,
                     .positions = s.positions,
                     .hidden = part(s.states, (each.read - s.next) * row_bytes_, count * row_bytes_),
                     .ahead = s.first + 1});
  }
  const InferEngine::Output& output = engine_->forward(plan_);
  const bool goes_on = std::any_of(active_.begin(), active_.end(), [](const Active& each) {
    return std::ssize(each.proposal->drafts) + 1 < each.depth;
  });
  const Tensor hidden = goes_on ? engine_->mtp_hidden() : Tensor();
  int64_t token = 0;  // of the step
  size_t row = 0, left = 0;
  for (size_t i = 0; i < active_.size(); ++i) {
    Active each = active_[i];
    if (i < plan_.size()) {
      const int64_t count = std::ssize(plan_[i].tokens);
      each.read += count;
      token += count;
      if (plan_[i].samples) {
        if (!take(each, output.output_ids[row++])) continue;
        const auto* const state = static_cast<const std::byte*>(hidden.view.rows(token - 1, 1).data);
        each.sequence->states.insert(each.sequence->states.end(), state, state + row_bytes_);
      }
    }
    active_[left++] = each;
  }
  active_.resize(left);
}

// Returns whether the next token is wanted, too: that of a pair of this one and the head's own hidden state. Else the
// pairs of the request's tokens have been read.
bool MtpHead::take(Active& active, int32_t token) {
  Sequence& s = *active.sequence;
  std::vector<int32_t>& drafts = active.proposal->drafts;
  if (token >= 0) {
    drafts.push_back(token);
    s.tokens.push_back(token);
    if (std::ssize(drafts) < active.depth) return true;
  }
  s.states.clear();
  s.next = std::ssize(active.proposal->tokens) - 1;
  return false;
}

}  // namespace eadem::engine
