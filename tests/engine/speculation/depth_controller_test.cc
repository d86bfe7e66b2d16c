// SPDX-License-Identifier: Apache-2.0
//
// How many tokens are proposed, for models and texts that are made up: what steps cost and which tokens are accepted is
// known, and so is what plain steps would have taken.
#include "eadem/engine/speculation/depth_controller.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>

namespace eadem::engine {
namespace depth_controller_test {

constexpr int64_t kMostDrafts = 15;

// Texts that are written with a controller. Times are exact: what it is told is what it costs.
struct Trial {
  std::function<double(int64_t sequences, int64_t rows)> seconds;
  std::function<bool(RequestId id)> accepts;  // whether the next proposed token of a request is right
  double proposal_seconds = 0;                // of a proposed token
  std::function<int64_t(RequestId id)> backlog = [](RequestId) { return 0; };
  double backlog_seconds = 0;  // of one of its tokens
  bool recomputes = false;     // what a step with a wrong token computed, the next one computes again

  DepthController controller;
  double spent = 0, plain = 0;  // seconds, and those of plain steps for the same tokens
  int64_t tokens = 0, proposed = 0, steps = 0, recomputed = 0;
  std::map<RequestId, int64_t> pending = {};  // 1, unless told otherwise

  int64_t pending_of(RequestId id) const {
    const auto found = pending.find(id);
    return found == pending.end() ? 1 : found->second;
  }
  void step(const std::vector<RequestId>& ids, int64_t left = 1000) {
    std::vector<DepthController::Sequence> sequences;
    int64_t rows = 0;
    for (const RequestId id : ids) {
      sequences.push_back({id, 8, left, backlog(id), pending_of(id)});
      rows += pending_of(id);
    }
    const auto depths = controller.choose(sequences, kMostDrafts);
    int64_t drafts = 0, deepest = 0;
    double proposing = 0;
    std::vector<DepthController::Outcome> outcomes;
    int64_t taken = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      int64_t accepted = 0;
      while (accepted < depths[i] && accepts(ids[i])) ++accepted;
      const int64_t had = pending_of(ids[i]);
      outcomes.push_back({ids[i], depths[i], accepted, had - 1});
      recomputed += had - 1;
      if (recomputes) pending[ids[i]] = accepted < depths[i] ? had + accepted + 1 : 1;
      drafts += depths[i];
      deepest = std::max(deepest, depths[i]);
      if (depths[i] > 0) proposing += static_cast<double>(std::max<int64_t>(0, backlog(ids[i]) - 1)) * backlog_seconds;
      taken += 1 + accepted;
    }
    const auto batch = std::ssize(ids);
    rows += drafts;
    EXPECT_LE(rows, kMostDrafts + batch);
    proposing += static_cast<double>(deepest) * proposal_seconds;
    if (deepest > 0) controller.observe_proposal(proposing);
    const double took = seconds(batch, rows);
    controller.observe_step(outcomes, took);
    spent += took + proposing;
    plain += seconds(batch, batch) * static_cast<double>(taken) / static_cast<double>(batch);
    tokens += taken;
    proposed += drafts;
    ++steps;
  }
  void run(const std::vector<RequestId>& ids, int64_t steps) {
    for (int64_t step = 0; step < steps; ++step) this->step(ids);
  }
};

// A row costs `share` of a step of one.
std::function<double(int64_t, int64_t)> rows_at(double share) {
  return [share](int64_t /*sequences*/, int64_t rows) { return 1 + share * static_cast<double>(rows - 1); };
}

const auto kAlways = [](RequestId) { return true; };
const auto kNever = [](RequestId) { return false; };

TEST(DepthController, ProposesMuchOfWhatIsAccepted) {
  Trial trial{.seconds = rows_at(0.05), .accepts = kAlways, .controller = {8, 0}};
  trial.run({1}, 200);
  EXPECT_GT(static_cast<double>(trial.tokens) / static_cast<double>(trial.steps), 7);  // of 9
  EXPECT_LT(trial.spent, 0.25 * trial.plain);                                          // 1.4 / 9 at best
}

TEST(DepthController, ProposesLittleOfWhatIsNot) {
  Trial trial{.seconds = rows_at(0.05), .accepts = kNever, .controller = {8, 0}};
  trial.run({1}, 200);
  const int64_t begun = trial.proposed;
  trial.run({1}, 20000);
  // One after 1,024 tokens each, when the waits have grown: 16 + 32 + … + 1,024 are 2,032 tokens.
  EXPECT_LT(trial.proposed - begun, 30);
  EXPECT_GT(trial.proposed - begun, 10) << "it is tried again";
}

TEST(DepthController, ProposesNothingWhereRowsCostAsMuchAsSteps) {
  Trial trial{.seconds = rows_at(1), .accepts = [](RequestId) { return true; }, .controller = {8, 0}};
  trial.run({1}, 3000);
  EXPECT_LE(trial.spent, 1.02 * trial.plain);
  EXPECT_LT(trial.proposed, 100);
}

TEST(DepthController, ProposesNothingWhereProposingCostsAsMuchAsAStep) {
  Trial trial{.seconds = rows_at(0.02), .accepts = kAlways, .proposal_seconds = 1, .controller = {8, 1}};
  trial.run({1}, 3000);
  EXPECT_LE(trial.spent, 1.02 * trial.plain);
  EXPECT_LT(trial.proposed, 100);
}

TEST(DepthController, ADraftModelOfATenthIsWorthIt) {
  Trial trial{.seconds = rows_at(0.05), .accepts = kAlways, .proposal_seconds = 0.1, .controller = {8, 0.1}};
  trial.run({1}, 500);
  EXPECT_LT(trial.spent, 0.4 * trial.plain);  // (1.4 + 0.8) / 9 at best
}

TEST(DepthController, GrowsAndShrinksWithAcceptance) {
  std::mt19937 random(1);
  double chance = 0;
  Trial trial{.seconds = rows_at(0.1),
              .accepts = [&](RequestId) { return std::uniform_real_distribution<>()(random) < chance; },
              .controller = {8, 0}};
  double last = 0;
  for (const double next : {0.1, 0.5, 0.8, 0.95}) {
    chance = next;
    trial.run({1}, 3000);
    const int64_t before = trial.proposed;
    trial.run({1}, 2000);
    const double depth = static_cast<double>(trial.proposed - before) / 2000;
    EXPECT_GT(depth, last) << "acceptance " << next;
    last = depth;
  }
  EXPECT_GT(last, 4);
  chance = 0;
  trial.run({1}, 100);
  const int64_t before = trial.proposed;
  trial.run({1}, 1000);
  EXPECT_LT(trial.proposed - before, 20);
}

// Models with states per sequence: what wrong tokens cost is seen.
TEST(DepthController, WhatIsComputedAgainMustPay) {
  const auto spent_with = [](double chance, double row, bool recomputes) {
    std::mt19937 random(1);
    Trial trial{.seconds = rows_at(row),
                .accepts = [&](RequestId) { return std::uniform_real_distribution<>()(random) < chance; },
                .recomputes = recomputes,
                .controller = {8, 0, recomputes}};
    trial.run({1}, 5000);
    EXPECT_LE(trial.spent, 1.02 * trial.plain);
    EXPECT_EQ(trial.recomputed > 0, recomputes);
    return trial.spent / trial.plain;
  };
  for (const double chance : {0.5, 0.8, 0.95}) {
    const double with = spent_with(chance, 0.05, true), without = spent_with(chance, 0.05, false);
    EXPECT_GT(with, without) << chance;
    EXPECT_LT(with, 0.8) << chance;
  }
  EXPECT_LT(spent_with(0.95, 0.05, true), 0.4);
  // One of two is right, and a row takes a third of a step: 1.33 / 1.5 without what is computed again, and 1.5 / 1.5 or
  // more with it.
  EXPECT_LT(spent_with(0.5, 0.33, false), 0.99);
  EXPECT_GT(spent_with(0.5, 0.33, true), 0.99);
}

// What waits for the proposer grows with each plain step, and yet the first answer has proposed tokens soon.
TEST(DepthController, TheFirstAnswerBeginsAtOnceWhereStatesGoBack) {
  int64_t waiting = 10;
  Trial trial{.seconds = rows_at(0.05),
              .accepts = kAlways,
              .proposal_seconds = 0.15,
              .backlog = [&](RequestId) { return waiting; },
              .backlog_seconds = 0.15 / 8,
              .recomputes = true,
              .controller = {8, 0.15, true}};
  while (trial.proposed == 0 && trial.steps < 20) {
    trial.run({1}, 1);
    ++waiting;
  }
  EXPECT_LT(trial.steps, 5);
  waiting = 1;
  trial.run({1}, 50);
  EXPECT_LT(trial.spent, 0.7 * trial.plain);
}

// Each request has the depth that its own tokens earn.
TEST(DepthController, RequestsHaveTheirOwnDepths) {
  Trial trial{.seconds = rows_at(0.02), .accepts = [](RequestId id) { return id == 1; }, .controller = {8, 0}};
  trial.run({1, 2}, 300);
  const auto depths = trial.controller.choose(std::vector<DepthController::Sequence>{{1, 8, 100}, {2, 8, 100}}, 15);
  EXPECT_GE(depths[0], 6);
  EXPECT_LE(depths[1], 1);
}

TEST(DepthController, RoomIsKept) {
  Trial trial{.seconds = rows_at(0.02), .accepts = kAlways, .controller = {8, 0}};
  trial.run({1, 2, 3}, 50);
  const std::vector<DepthController::Sequence> sequences = {{1, 2, 100}, {2, 0, 1}, {3, 8, 100}};
  const auto depths = trial.controller.choose(sequences, 6);
  EXPECT_LE(depths[0], 2);
  EXPECT_EQ(depths[1], 0);
  EXPECT_EQ(depths[0] + depths[2], 6);
}

TEST(DepthController, WhatAProposerHasToReadFirstMustPay) {
  Trial trial{.seconds = rows_at(0.05), .accepts = kAlways, .proposal_seconds = 0.1, .controller = {8, 0.1}};
  trial.run({1}, 100);
  // 1,000 tokens take as long as 125 proposals, 12.5 plain steps.
  const auto depth = [&](int64_t left, int64_t backlog) {
    return trial.controller.choose(std::vector<DepthController::Sequence>{{2, 8, left, backlog}}, 15)[0];
  };
  EXPECT_GT(depth(100, 1000), 0);
  EXPECT_EQ(depth(20, 1000), 0) << "more than half of what is left";
  EXPECT_EQ(depth(100000, 100000), 0) << "more than the account holds";
  EXPECT_GT(depth(20, 10), 0);
}

// A first answer of 128 tokens, of which none that was proposed is right, and rows that cost as much as steps.
TEST(DepthController, AFirstAnswerOf128TokensCostsTwoPercentAtMost) {
  for (const bool recomputes : {false, true})
    for (const double row : {0.05, 0.3, 1.0}) {
      SCOPED_TRACE(row);
      Trial trial{
          .seconds = rows_at(row), .accepts = kNever, .recomputes = recomputes, .controller = {8, 0, recomputes}};
      while (trial.tokens < 128) trial.step({1}, 128 - trial.tokens);
      EXPECT_GT(trial.proposed, 0);
      EXPECT_LE(trial.spent, 1.02 * trial.plain);
    }
}

// The promise, for costs and texts of every kind: sequences come and go, rows cost nothing or as much as steps, and
// acceptance changes to what hurts.
TEST(DepthController, NeverCostsMoreThanTwoPercentOrTheFirstSteps) {
  int64_t losing = 0, winning = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int64_t count) { return static_cast<int64_t>(random() % static_cast<uint64_t>(count)); };
    const auto uniform = [&] { return std::uniform_real_distribution<>()(random); };
    // Each further row costs a share of its own, of the least step.
    std::vector<double> cost = {0, 1};
    const double most = uniform();
    for (int64_t rows = 2; rows < 32; ++rows) cost.push_back(cost.back() + most * uniform());
    const double proposal = below(2) == 0 ? 0 : 0.3 * uniform(), of_token = proposal / 8;
    double chance = uniform();
    int64_t prompt = 0;
    const bool recomputes = seed % 2 == 1;
    Trial trial{.seconds = [&](int64_t, int64_t rows) { return cost[static_cast<size_t>(rows)]; },
                .accepts = [&](RequestId) { return uniform() < chance; },
                .proposal_seconds = proposal,
                .backlog = [&](RequestId) { return prompt; },
                .backlog_seconds = of_token,
                .recomputes = recomputes,
                .controller = {8, proposal, recomputes}};
    double most_plain = 0;
    RequestId next = 1;
    for (int text = 0; text < 6; ++text) {
      std::vector<RequestId> ids(static_cast<size_t>(1 + below(4)));
      for (RequestId& id : ids) id = next++;
      most_plain = std::max(most_plain, cost[ids.size()]);
      chance = below(3) == 0 ? 0 : uniform();
      const double reading = 30 * uniform();  // the prompts
      trial.controller.observe_prompt(reading);
      trial.spent += reading;
      trial.plain += reading;
      for (int64_t step = 0, steps = 20 + below(400); step < steps; ++step) {
        prompt = proposal > 0 && step == 0 ? below(300) : 0;
        if (below(100) == 0) chance = uniform();
        trial.step(ids);
        // 2,500 steps of at most 20 seconds make sums of rounding errors below 2,500 * 50,000 * 2^-53 = 1.4e-8.
        const double lost = std::max(0.02 * trial.plain, (recomputes ? 2.5 : 2) * most_plain);
        ASSERT_LE(trial.spent, trial.plain + lost + 1.4e-8);
      }
      for (const RequestId id : ids) trial.controller.end(id);
    }
    (trial.spent > trial.plain ? losing : winning) += 1;
  }
  EXPECT_GT(losing, 10);
  EXPECT_GT(winning, 100);
}

TEST(DepthController, AStepThatTheMachineInterruptedCountsForLittle) {
  Trial trial{.seconds = rows_at(0.05), .accepts = kAlways, .controller = {8, 0}};
  trial.run({1}, 100);
  const double before = trial.controller.costs().plain(1);
  trial.controller.observe_step(std::vector<DepthController::Outcome>{{1, 0, 0}}, 1000);
  EXPECT_LE(trial.controller.costs().plain(1), before * 1.5);
}

TEST(DepthController, CostsChangeWithTheLengthOfTexts) {
  double share = 0.05;
  Trial trial{.seconds = [&](int64_t, int64_t rows) { return 1 + share * static_cast<double>(rows - 1); },
              .accepts = kAlways,
              .controller = {8, 0}};
  trial.run({1}, 300);
  share = 1;
  trial.run({1}, 1000);
  const int64_t before = trial.proposed;
  trial.run({1}, 1000);
  EXPECT_LT(trial.proposed - before, 100);
}

}  // namespace depth_controller_test
}  // namespace eadem::engine
