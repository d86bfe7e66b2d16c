// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/speculation/speculator.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace eadem::engine {

Speculator::Speculator(std::unique_ptr<Proposer> proposer, int64_t most_depth, int64_t most_drafts, bool recomputes)
    : proposer_(std::move(proposer)),
      controller_(most_depth, proposer_->assumed_cost(), recomputes),
      most_drafts_(most_drafts) {}

std::span<const Proposal> Speculator::propose(std::span<const Draftable> requests) {
  using Clock = std::chrono::steady_clock;
  sequences_.clear();
  for (const Draftable& each : requests)
    sequences_.push_back({.id = each.id,
                          .most = each.most,
                          .left = each.left,
                          .backlog = proposer_->backlog(each.id, each.tokens),
                          .pending = each.pending});
  const std::span<const int64_t> depths = controller_.choose(sequences_, most_drafts_);
  size_t count = 0;
  if (proposals_.size() < requests.size()) proposals_.resize(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    if (depths[i] == 0) continue;
    Proposal& added = proposals_[count++];
    added.id = requests[i].id;
    added.tokens = requests[i].tokens;
    added.request = requests[i].request;
    added.depth = depths[i];
    added.drafts.clear();
  }
  const std::span<Proposal> wanted = std::span(proposals_).first(count);
  if (wanted.empty()) return wanted;
  const Clock::time_point start = Clock::now();
  proposer_->propose(wanted);
  controller_.observe_proposal(std::chrono::duration<double>(Clock::now() - start).count());
  return wanted;
}

void Speculator::observe(std::span<const StepEvent> events, double seconds) {
  if (!std::all_of(events.begin(), events.end(), [](const StepEvent& e) { return e.decoded && e.sampled; })) {
    int64_t recomputed = 0, computed = 0;
    for (const StepEvent& event : events) {
      recomputed += event.recomputed;
      computed += event.computed;
    }
    const int64_t all = std::max<int64_t>(1, recomputed + computed);
    return controller_.observe_prompt(seconds, static_cast<double>(recomputed) / static_cast<double>(all));
  }
  outcomes_.clear();
  for (const StepEvent& event : events) {
    if (event.accepted == 0)
      outcomes_.push_back({.id = event.id, .proposed = event.proposed, .recomputed = event.recomputed});
    outcomes_.back().accepted += event.accepted;
  }
  if (!outcomes_.empty()) controller_.observe_step(outcomes_, seconds);
}

void Speculator::end(RequestId id) {
  proposer_->end(id);
  controller_.end(id);
}

}  // namespace eadem::engine
