// SPDX-License-Identifier: Apache-2.0
//
// DepthController: how many tokens are proposed for each sequence of a step. It is told what steps took and what became
// of proposed tokens, and reads no clock itself: equal reports give equal depths.
//
//   a    share of a request's proposed tokens that were accepted, of late; a new request has that of all
//   T    seconds of a step by its rows (StepCosts)
//   P    seconds of proposing a token for every sequence: proposers go on from token to token
//
// B sequences with depths d bring B + sum over them of (a + a^2 + … + a^d) tokens, to be expected, in
// T(B + sum of d) + P max d seconds. Rows are added one by one, the likeliest first, and those depths win that bring
// the most tokens a second.
//
// The account keeps this from costing anything. It holds the seconds that may still be lost: a fiftieth (2 %) of the
// time that steps without it would have taken so far, and what was gained. Two plain steps of the fiftieth are there at
// the beginning, so that a text may begin with it; it grows when the time has earned them, after 100 plain steps or the
// prompts that take as long. No depth is chosen that could overdraw it if nothing was accepted. So
//
//   time spent <= T + max(0.02 T, 2 plain steps),   T: time of steps without it for the same tokens
//
// at every moment, in times as StepCosts sees them. What was gained is kept up to 64 plain steps, so that losses after
// a change stay as small.
//
// Models with states per sequence lead them back when a proposed token was wrong, and the sequence's next step computes
// again what it had: it has p > 1 pending tokens, which are rows of any step. A step of depth d, of which k < d tokens
// were accepted, leaves p + k + 1 pending. So the time of such a step also has what the next one takes longer,
//   T(B + what is to be computed again, to be expected) - T(B),
// and it may lose twice what its rows cost more than a plain step, since the next one has at most as many. The account
// holds two and a half plain steps at the beginning then, which 125 steps earn.
//
// Where depth 0 is best, one token is tried again after 16 tokens, then after 32, 64, … 1,024, if the account allows.
// Every 64th step is a plain one, because its time changes with the length of texts.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "eadem/engine/request.h"
#include "eadem/engine/speculation/step_costs.h"

namespace eadem::engine {

class DepthController {
 public:
  // `assumed_cost`: of proposing a token, in plain steps, until it was measured. `recomputes`: wrong tokens make the
  // next step compute again what this one did.
  DepthController(int64_t most_depth, double assumed_cost, bool recomputes = false)
      : most_depth_(most_depth), assumed_cost_(assumed_cost), recomputes_(recomputes) {}

  struct Sequence {
    RequestId id = 0;
    int64_t most = 0;     // the cache or the step has room for so many proposed tokens
    int64_t left = 0;     // tokens that the answer may still have
    int64_t backlog = 0;  // tokens that the proposer computes first; one is usual
    int64_t pending = 1;  // tokens that the step computes in any case
  };
  // Returns the depth of each sequence of the next step, at most `most_drafts` in all, of which tokens that are
  // computed again take their part; 0: nothing is proposed. The result is valid until the next call.
  std::span<const int64_t> choose(std::span<const Sequence> sequences, int64_t most_drafts);
  // Proposing what was chosen last took so long.
  void observe_proposal(double seconds);

  // What became of a sequence in a step.
  struct Outcome {
    RequestId id = 0;
    int64_t proposed = 0, accepted = 0;
    int64_t recomputed = 0;  // tokens that an earlier step had computed
  };
  // A step of these sequences took so long.
  void observe_step(std::span<const Outcome> outcomes, double seconds);
  // A step that reads prompts, which has no proposed tokens, took so long; this share of its tokens was computed again
  // because of wrong ones.
  void observe_prompt(double seconds, double recomputed_share = 0);
  void end(RequestId id) { histories_.erase(id); }

  // Seconds that may be lost.
  double balance() const { return balance_; }
  const StepCosts& costs() const { return costs_; }

 private:
  static constexpr int64_t kFirstWait = 16, kLongestWait = 1024;
  // Of a request.
  struct History {
    double tested = 0, accepted = 0;  // proposed tokens, the earlier ones count less
    int64_t idle = 0;                 // tokens since the last proposed one
    int64_t wait = kFirstWait;        // tokens after which one is tried again
  };
  double acceptance(RequestId id) const;
  double proposal_seconds(int64_t sequences) const;
  void drop_unaffordable(std::span<const Sequence> sequences);
  void choose_depths(std::span<const Sequence> sequences, int64_t most_drafts);
  void retry(std::span<const Sequence> sequences, int64_t most_drafts);
  double loss(int64_t sequences, int64_t drafts, int64_t deepest) const;
  void grant();
  void account(int64_t sequences, int64_t rows, int64_t tokens, double seconds);

  int64_t most_depth_;
  double assumed_cost_;
  bool recomputes_;
  StepCosts costs_;
  std::unordered_map<RequestId, History> histories_;
  double all_tested_ = 0, all_accepted_ = 0;
  double balance_ = 0;
  double earned_ = 0, first_ = 0, granted_ = 0;  // seconds: the fiftieth, what the first steps have, and what was given
  int64_t since_plain_ = 0;                      // steps with more rows than sequences since the last plain one
  double proposal_seconds_ = 0;                  // P; 0: not measured
  // Of the step that is planned, by sequence.
  std::vector<int64_t> depths_, most_, tried_;
  int64_t pending_ = 0;  // of all sequences
  std::vector<double> acceptances_, reached_;
  std::vector<double> backlogs_;  // in proposals that take as long
  double backlog_ = 0;            // of all that may have proposals
};

}  // namespace eadem::engine
