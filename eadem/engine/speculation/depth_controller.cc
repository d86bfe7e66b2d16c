// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/speculation/depth_controller.h"

#include <algorithm>
#include <cmath>

namespace eadem::engine {

namespace {

constexpr double kAllowed = 0.02;     // share of the time that may be lost
constexpr double kFirstSteps = 2;     // of it, plain steps that may be lost at the beginning,
constexpr double kFirstAgain = 0.5;   // and more where what is wrong costs twice
constexpr double kMostSaved = 64;     // plain steps
constexpr double kWorthwhile = 1.02;  // tokens a second, against a plain step's; less is noise
constexpr double kRemembers = 0.9;    // of a request's history with each step
constexpr double kAllRemember = 0.99;
constexpr double kPriorWeight = 2;   // proposed tokens that the acceptance of all stands for
constexpr double kBacklogRows = 8;   // tokens that a proposer reads in the time of proposing one
constexpr int64_t kPlainEvery = 64;  // steps

}  // namespace

double DepthController::acceptance(RequestId id) const {
  const double prior = (all_accepted_ + 1) / (all_tested_ + 2);
  const auto found = histories_.find(id);
  if (found == histories_.end()) return prior;
  return (found->second.accepted + kPriorWeight * prior) / (found->second.tested + kPriorWeight);
}

double DepthController::proposal_seconds(int64_t sequences) const {
  return proposal_seconds_ > 0 ? proposal_seconds_ : assumed_cost_ * costs_.plain(sequences);
}

// The most that a step can lose: nothing is accepted, and rows that were never measured take as long as plain ones. The
// next step may have to compute as many again.
double DepthController::loss(int64_t sequences, int64_t drafts, int64_t deepest) const {
  const double rows = costs_.worst(sequences, pending_ + drafts) - costs_.plain(sequences);
  return (recomputes_ ? 2 * rows : rows) + proposal_seconds(sequences) * (static_cast<double>(deepest) + backlog_);
}

std::span<const int64_t> DepthController::choose(std::span<const Sequence> sequences, int64_t most_drafts) {
  depths_.assign(sequences.size(), 0);
  const auto count = std::ssize(sequences);
  if (!costs_.knows_plain(count) || since_plain_ >= kPlainEvery) return depths_;
  pending_ = 0;
  for (const Sequence& each : sequences) pending_ += each.pending;
  most_drafts -= pending_ - count;
  drop_unaffordable(sequences);
  choose_depths(sequences, most_drafts);
  for (size_t i = 0; i < sequences.size(); ++i)
    if (depths_[i] > 0) histories_[sequences[i].id].wait = kFirstWait;
  retry(sequences, most_drafts);
  return depths_;
}

// Finds the most tokens that may be proposed for each sequence: none where the proposer's backlog costs more than the
// account holds, or than half of what the rest of the answer takes.
void DepthController::drop_unaffordable(std::span<const Sequence> sequences) {
  const auto count = std::ssize(sequences);
  const double token_seconds = costs_.plain(count) / static_cast<double>(count);
  most_.clear();
  backlogs_.clear();
  backlog_ = 0;
  for (const Sequence& each : sequences) {
    const double backlog = static_cast<double>(std::max<int64_t>(0, each.backlog - 1)) / kBacklogRows;
    const double seconds = proposal_seconds(count) * backlog;
    const bool pays = seconds <= token_seconds * static_cast<double>(each.left) / 2;
    const bool may = pays && proposal_seconds(count) * backlog_ + seconds <= balance_;
    most_.push_back(may ? std::min(each.most, most_depth_) : 0);
    backlogs_.push_back(may ? backlog : 0);
    backlog_ += backlogs_.back();
  }
}

void DepthController::choose_depths(std::span<const Sequence> sequences, int64_t most_drafts) {
  const auto count = std::ssize(sequences);
  acceptances_.clear();
  for (const Sequence& each : sequences) acceptances_.push_back(acceptance(each.id));
  reached_.assign(sequences.size(), 1);  // the chance that all proposed tokens of each are accepted
  tried_.assign(sequences.size(), 0);
  double tokens = static_cast<double>(count), best = kWorthwhile * tokens / costs_.expected(count, pending_);
  double again = 0;  // tokens that the next step computes again, to be expected
  int64_t deepest = 0;
  for (int64_t drafts = 1; drafts <= most_drafts; ++drafts) {
    size_t chosen = sequences.size();
    const auto next = [&](size_t i) { return reached_[i] * acceptances_[i]; };
    for (size_t i = 0; i < sequences.size(); ++i)
      if (tried_[i] < most_[i] && (chosen == sequences.size() || next(i) > next(chosen))) chosen = i;
    if (chosen == sequences.size()) return;
    tokens += next(chosen);
    // Those before it are computed again if it is the first wrong one.
    again += (reached_[chosen] - next(chosen)) * static_cast<double>(sequences[chosen].pending + tried_[chosen]);
    reached_[chosen] = next(chosen);
    deepest = std::max(deepest, ++tried_[chosen]);
    if (loss(count, drafts, deepest) > balance_) return;
    double seconds = costs_.expected(count, pending_ + drafts) + proposal_seconds(count) * static_cast<double>(deepest);
    if (recomputes_)
      seconds += costs_.expected(count, count + static_cast<int64_t>(std::ceil(again))) - costs_.plain(count);
    if (tokens / seconds <= best) continue;
    best = tokens / seconds;
    depths_ = tried_;
  }
}

// Proposes one token for a sequence that had none for long.
void DepthController::retry(std::span<const Sequence> sequences, int64_t most_drafts) {
  int64_t drafts = 1, deepest = 1;
  for (const int64_t depth : depths_) {
    drafts += depth;
    deepest = std::max(deepest, depth);
  }
  if (drafts > most_drafts || loss(std::ssize(sequences), drafts, deepest) > balance_) return;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto found = histories_.find(sequences[i].id);
    if (depths_[i] > 0 || most_[i] == 0 || found == histories_.end()) continue;
    History& history = found->second;
    if (history.idle < history.wait) continue;
    history.wait = std::min(2 * history.wait, kLongestWait);
    depths_[i] = 1;
    return;
  }
}

void DepthController::observe_proposal(double seconds) {
  balance_ -= seconds;
  int64_t deepest = 0;
  double proposals = 0;
  for (size_t i = 0; i < depths_.size(); ++i) {
    deepest = std::max(deepest, depths_[i]);
    if (depths_[i] > 0) proposals += backlogs_[i];
  }
  if (deepest == 0) return;
  const double measured = seconds / (static_cast<double>(deepest) + proposals);
  const double before = proposal_seconds_ > 0 ? proposal_seconds_ : measured;
  proposal_seconds_ = before + (std::clamp(measured, before / 2, before * 2) - before) / 8;
}

void DepthController::observe_step(std::span<const Outcome> outcomes, double seconds) {
  const auto sequences = std::ssize(outcomes);
  int64_t rows = sequences, tokens = sequences;
  for (const Outcome& each : outcomes) {
    rows += each.proposed + each.recomputed;
    tokens += each.accepted;
    History& history = histories_[each.id];
    if (each.proposed == 0) {
      ++history.idle;
      continue;
    }
    // Of the proposed tokens behind a wrong one nothing is known.
    const auto tested = static_cast<double>(std::min(each.proposed, each.accepted + 1));
    const auto accepted = static_cast<double>(each.accepted);
    history.tested = kRemembers * history.tested + tested;
    history.accepted = kRemembers * history.accepted + accepted;
    all_tested_ = kAllRemember * all_tested_ + tested;
    all_accepted_ = kAllRemember * all_accepted_ + accepted;
    history.idle = 0;
  }
  costs_.observe(sequences, rows, seconds);
  since_plain_ = rows > sequences ? since_plain_ + 1 : 0;
  account(sequences, rows, tokens, seconds);
}

void DepthController::observe_prompt(double seconds, double recomputed_share) {
  earned_ += kAllowed * seconds;
  balance_ -= recomputed_share * seconds;
  grant();
}

// Gives what may be lost, as far as it was not given.
void DepthController::grant() {
  const double all = std::max(earned_, first_);
  balance_ += all - granted_;
  granted_ = all;
}

// Counts a step: what plain steps take for its tokens, against what it took.
void DepthController::account(int64_t sequences, int64_t rows, int64_t tokens, double seconds) {
  if (!costs_.knows_plain(sequences)) {
    // Computed again, before a plain step of so many was seen: rows take equal parts of it at most.
    balance_ -= seconds * static_cast<double>(rows - sequences) / static_cast<double>(rows);
    return;
  }
  const double plain = costs_.plain(sequences);
  if (first_ == 0) first_ = (recomputes_ ? kFirstSteps + kFirstAgain : kFirstSteps) * plain;
  const double saved = plain * static_cast<double>(tokens) / static_cast<double>(sequences);
  earned_ += kAllowed * saved;
  balance_ += saved - costs_.expected(sequences, rows);
  grant();
  balance_ = std::min(balance_, kMostSaved * plain);
}

}  // namespace eadem::engine
