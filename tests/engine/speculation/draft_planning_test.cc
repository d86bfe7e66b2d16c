// SPDX-License-Identifier: Apache-2.0
//
// What a scheduler plans of proposed tokens, and what becomes of them.
#include "tests/engine/scheduling/simulation.h"

namespace eadem::engine::scheduling_test {
namespace draft_planning_test {

SchedulerLimits drafting_limits() {
  SchedulerLimits limits = small_limits();
  limits.max_draft_tokens = 5;
  return limits;
}

// A request that decodes and has one token.
RequestId decoding(Simulation& simulation, int64_t prompt = 3, int64_t max_tokens = 12, int32_t first = 0) {
  const RequestId id = simulation.scheduler.add({.prompt = ids(prompt, first), .max_tokens = max_tokens});
  while (simulation.scheduler.state(id) != RequestState::decoding) simulation.step();
  return id;
}

// The next tokens of a request that decodes.
Ids right(Scheduler& scheduler, RequestId id, int64_t count) {
  for (const Draftable& each : scheduler.draftable())
    if (each.id == id) return tokens_alone({each.tokens.begin(), each.tokens.end()}, count);
  ADD_FAILURE() << "request " << id << " is not draftable";
  return {};
}

TEST(DraftPlanning, RightTokensAreTakenTogether) {
  Simulation simulation(drafting_limits());
  Scheduler& scheduler = simulation.scheduler;
  const RequestId id = decoding(simulation);
  const Ids expected = tokens_alone(ids(3), 5);
  scheduler.propose(id, right(scheduler, id, 3));
  const auto plan = scheduler.plan(simulation.cache);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(Ids(plan[0].tokens.begin(), plan[0].tokens.end()), Ids(expected.begin(), expected.begin() + 4));
  EXPECT_EQ(plan[0].cached, 3);
  EXPECT_EQ(plan[0].drafts, 3);
  EXPECT_EQ(plan[0].num_rows(), 4);
  const auto events = simulation.step();
  ASSERT_EQ(events.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(events[i].id, id);
    EXPECT_EQ(events[i].token, expected[i + 1]);
    EXPECT_EQ(events[i].computed, 1);
    EXPECT_TRUE(events[i].decoded);
    EXPECT_EQ(events[i].proposed, i == 0 ? 3 : 0);
    EXPECT_EQ(events[i].accepted, i == 0 ? 0 : 1);
  }
  EXPECT_EQ(scheduler.decode_tokens(), 4);
  EXPECT_EQ(scheduler.proposed_tokens(), 3);
  EXPECT_EQ(scheduler.accepted_tokens(), 3);
  EXPECT_EQ(scheduler.plan(simulation.cache)[0].drafts, 0) << "proposed once, planned once";
}

TEST(DraftPlanning, TokensBehindAWrongOneAreForgottenWithTheirBlocks) {
  Simulation simulation(drafting_limits());
  Scheduler& scheduler = simulation.scheduler;
  const RequestId id = decoding(simulation);
  Ids drafts = right(scheduler, id, 5);
  drafts[1] = kVocab - 1;
  scheduler.propose(id, drafts);
  scheduler.plan(simulation.cache);
  EXPECT_EQ(scheduler.num_free_blocks(), 16 - 3);  // 9 tokens in blocks of 4
  const auto events = simulation.step();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].token, tokens_alone(ids(3), 3)[2]);
  EXPECT_EQ(scheduler.num_free_blocks(), 16 - 2);  // 5 tokens
  EXPECT_EQ(scheduler.accepted_tokens(), 1);
  EXPECT_EQ(scheduler.plan(simulation.cache)[0].cached, 5);
}

// States per sequence go back to where the step began, and what was taken is computed again.
TEST(DraftPlanning, StatesGoBackBehindAWrongToken) {
  SchedulerLimits limits = drafting_limits();
  limits.num_slots = limits.max_batch_size;
  Simulation simulation(limits);
  Scheduler& scheduler = simulation.scheduler;
  const RequestId id = decoding(simulation, 3, 20);
  const Ids expected = tokens_alone(ids(3), 12);
  const auto behind = [&](int64_t done, int64_t count) {
    return Ids(expected.begin() + done, expected.begin() + done + count);
  };
  Ids drafts = behind(1, 4);
  drafts[2] = kVocab - 1;
  EXPECT_EQ(scheduler.draftable()[0].pending, 1);
  EXPECT_EQ(scheduler.draftable()[0].most, 5);
  scheduler.propose(id, drafts);
  auto events = simulation.step();
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[2].token, expected[3]);
  EXPECT_EQ(scheduler.decode_tokens(), 3);
  EXPECT_EQ(scheduler.num_free_blocks(), 16 - 2);  // 6 tokens
  // The token before the proposed ones, two that were right, and one that is new.
  EXPECT_EQ(scheduler.draftable()[0].pending, 4);
  EXPECT_EQ(scheduler.draftable()[0].most, 2) << "six tokens in a step";
  scheduler.propose(id, behind(4, 4));
  events = simulation.step();
  const StepSequence& again = simulation.last[0];
  EXPECT_EQ(again.cached, 3);
  EXPECT_EQ(again.drafts, 2);
  EXPECT_EQ(again.num_rows(), 3);
  EXPECT_EQ(Ids(again.tokens.begin(), again.tokens.end()), behind(0, 6));
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].recomputed, 3);
  EXPECT_EQ(events[0].computed, 1);
  EXPECT_EQ(events[0].proposed, 2);
  EXPECT_EQ(events[1].recomputed, 0);
  EXPECT_EQ(scheduler.decode_tokens(), 6);
  // All were right: the state stands where they end.
  EXPECT_EQ(scheduler.draftable()[0].pending, 1);
  scheduler.propose(id, Ids{kVocab - 1});
  simulation.step();
  EXPECT_EQ(simulation.last[0].cached, 9);
  EXPECT_EQ(simulation.step()[0].token, expected[8]);
  EXPECT_EQ(simulation.last[0].cached, 9);
  EXPECT_EQ(simulation.last[0].drafts, 0);
  EXPECT_EQ(simulation.last[0].tokens.size(), 2u);
  EXPECT_EQ(simulation.step()[0].recomputed, 0);
  EXPECT_EQ(simulation.last[0].cached, 11);
  EXPECT_EQ(simulation.num_returns, 2);
}

// A conversation goes on from where the state stands, or from where the last proposed tokens began.
TEST(DraftPlanning, AConversationGoesOnFromAStateThatGoesBack) {
  SchedulerLimits limits = drafting_limits();
  limits.num_slots = limits.max_batch_size;
  const Ids answer = tokens_alone(ids(5), 4);
  struct Row {
    Ids drafts;
    int64_t read;    // tokens of the answer that the conversation has
    int64_t reused;  // of the next prompt
  };
  // A wrong token; the answer ends before the last right one, or before all of them.
  for (const Row& row :
       {Row{{answer[1], kVocab - 1}, 2, 5}, {{answer[1], answer[2]}, 3, 8}, {{answer[1], answer[2]}, 1, 5}}) {
    Simulation simulation(limits);
    Scheduler& scheduler = simulation.scheduler;
    const RequestId id = scheduler.add({.prompt = ids(5), .max_tokens = 10, .keep = true});
    simulation.step();
    scheduler.propose(id, row.drafts);
    simulation.step();
    scheduler.end(id, RequestState::finished);
    Ids next = ids(5);
    next.insert(next.end(), answer.begin(), answer.begin() + row.read);
    next.push_back(7);
    scheduler.add({.prompt = next, .max_tokens = 2, .keep = true});
    const auto events = simulation.step();
    EXPECT_EQ(events[0].reused, row.reused);
    EXPECT_EQ(events[0].token, tokens_alone(next, 1)[0]);
    EXPECT_EQ(simulation.num_returns, row.reused == 5 ? 1 : 0);
  }
}

TEST(DraftPlanning, APlanThatIsGivenUpKeepsWhatWasProposedAndNoBlocks) {
  Simulation simulation(drafting_limits());
  Scheduler& scheduler = simulation.scheduler;
  const RequestId id = decoding(simulation);
  scheduler.propose(id, right(scheduler, id, 5));
  EXPECT_EQ(scheduler.plan(simulation.cache)[0].drafts, 5);
  scheduler.propose(id, {});
  EXPECT_EQ(scheduler.num_free_blocks(), 16 - 1);
  EXPECT_EQ(scheduler.plan(simulation.cache)[0].drafts, 0);
  scheduler.propose(id, right(scheduler, id, 2));
  EXPECT_EQ(scheduler.plan(simulation.cache)[0].drafts, 2);
  EXPECT_EQ(scheduler.plan(simulation.cache)[0].drafts, 2);
}

TEST(DraftPlanning, NoTokenIsProposedBehindTheLastOne) {
  Simulation simulation(drafting_limits());
  Scheduler& scheduler = simulation.scheduler;
  const RequestId id = decoding(simulation, 3, 4);  // three are left: two proposed ones, and what follows them
  ASSERT_EQ(scheduler.draftable().size(), 1u);
  EXPECT_EQ(scheduler.draftable()[0].most, 2);
  EXPECT_EQ(scheduler.draftable()[0].left, 3);
  scheduler.propose(id, right(scheduler, id, 5));
  EXPECT_EQ(scheduler.plan(simulation.cache)[0].drafts, 2);
  const auto events = simulation.step();
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[1].state, RequestState::decoding);
  EXPECT_EQ(events[2].state, RequestState::finished);
  EXPECT_TRUE(scheduler.is_idle());

  const RequestId full = decoding(simulation, 30, 100);  // the context ends at 32 tokens
  EXPECT_EQ(scheduler.draftable()[0].most, 1);
  scheduler.propose(full, right(scheduler, full, 5));
  EXPECT_EQ(scheduler.plan(simulation.cache)[0].drafts, 1);
  EXPECT_EQ(simulation.step().back().state, RequestState::finished);
}

TEST(DraftPlanning, StepsThatReadPromptsHaveNone) {
  Simulation simulation(drafting_limits());
  Scheduler& scheduler = simulation.scheduler;
  const RequestId id = decoding(simulation);
  const Ids drafts = right(scheduler, id, 3);
  scheduler.propose(id, drafts);
  scheduler.add({.prompt = ids(12, 100), .max_tokens = 2});
  EXPECT_TRUE(scheduler.draftable().empty());
  for (const StepSequence& each : scheduler.plan(simulation.cache)) EXPECT_EQ(each.drafts, 0);
  simulation.step();
  EXPECT_TRUE(scheduler.draftable().empty());
  simulation.step();
  EXPECT_EQ(scheduler.draftable().size(), 2u);
}

TEST(DraftPlanning, AFullBatchThatOthersWaitForHasThem) {
  Simulation simulation(drafting_limits());
  for (int i = 0; i < 4; ++i) simulation.scheduler.add({.prompt = ids(1, 100 * i), .max_tokens = 9});
  simulation.step();
  EXPECT_EQ(simulation.scheduler.count(RequestState::waiting), 1);
  EXPECT_EQ(simulation.scheduler.draftable().size(), 3u);
}

TEST(DraftPlanning, LimitsOfAStepAreShared) {
  Simulation simulation(drafting_limits());
  Scheduler& scheduler = simulation.scheduler;
  std::vector<RequestId> requests;
  for (int i = 0; i < 3; ++i) requests.push_back(scheduler.add({.prompt = ids(2, 100 * i), .max_tokens = 9}));
  simulation.step();
  for (const RequestId id : requests) scheduler.propose(id, right(scheduler, id, 4));
  const auto plan = scheduler.plan(simulation.cache);
  ASSERT_EQ(plan.size(), 3u);
  EXPECT_EQ(plan[0].drafts, 4);
  EXPECT_EQ(plan[1].drafts, 1);  // five in all, and eight tokens
  EXPECT_EQ(plan[2].drafts, 0);
  EXPECT_EQ(simulation.step().size(), 8u);
}

// Proposed tokens take free blocks, and nobody else's.
TEST(DraftPlanning, NobodyIsPreemptedForThem) {
  SchedulerLimits limits = drafting_limits();
  limits.num_blocks = 8;
  limits.max_sequence_length = 20;
  limits.max_num_batched_tokens = 64;
  Simulation simulation(limits);
  Scheduler& scheduler = simulation.scheduler;
  const RequestId a = scheduler.add({.prompt = ids(14), .max_tokens = 6});
  const RequestId b = scheduler.add({.prompt = ids(14, 100), .max_tokens = 6});
  simulation.step();  // both have four blocks, with room for two more tokens
  EXPECT_EQ(scheduler.num_free_blocks(), 0);
  for (const RequestId id : {a, b}) scheduler.propose(id, right(scheduler, id, 2));
  for (const StepSequence& each : scheduler.plan(simulation.cache)) EXPECT_EQ(each.drafts, 1);
  EXPECT_EQ(scheduler.counters().preemptions, 0);
}

// What penalties look at is bounded, row by row.
TEST(DraftPlanning, PenaltiesLookAtTheTokensOfEachRow) {
  SchedulerLimits limits = drafting_limits();
  limits.max_penalized_tokens = 30;
  Simulation simulation(limits);
  Scheduler& scheduler = simulation.scheduler;
  const RequestId id = scheduler.add({.prompt = ids(3), .sampling = {.repetition_penalty = 1.1f}, .max_tokens = 20});
  simulation.step();
  scheduler.propose(id, right(scheduler, id, 5));
  // The sequence's own row looks at 4 tokens, and a further one at 9 at most.
  EXPECT_EQ(scheduler.plan(simulation.cache)[0].drafts, 2);
}

TEST(DraftPlanning, LogitsThatAreNotFiniteFailARequestOnlyBehindAcceptedTokens) {
  Simulation simulation(drafting_limits());
  Scheduler& scheduler = simulation.scheduler;
  const RequestId id = decoding(simulation);
  const std::vector<float> logprobs(3, -1.0f);
  scheduler.propose(id, Ids{5, 6});
  scheduler.plan(simulation.cache);
  EXPECT_EQ(scheduler.commit(Ids{7, -1, -1}, logprobs).back().state, RequestState::decoding);
  scheduler.propose(id, Ids{5, 6});
  scheduler.plan(simulation.cache);
  const auto events = scheduler.commit(Ids{5, -1, 6}, logprobs);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].token, 5);
  EXPECT_EQ(events[1].token, -1);
  EXPECT_EQ(events[1].state, RequestState::failed);
  EXPECT_EQ(scheduler.num_free_blocks(), 16);
}

// Tokens that were not taken are not part of a prefix: neither of a shared one nor of a conversation.
TEST(DraftPlanning, PrefixesHoldNoRejectedTokens) {
  SchedulerLimits limits = drafting_limits();
  limits.prefix_caching = true;
  limits.max_num_batched_tokens = 32;
  for (const bool keep : {false, true}) {
    Simulation simulation(limits);
    Scheduler& scheduler = simulation.scheduler;
    const RequestId id = scheduler.add({.prompt = ids(10), .max_tokens = 8, .keep = keep});
    simulation.step();
    // Positions 10 to 15: a sampled token and five proposed ones, which are wrong.
    Ids wrong = ids(10);
    wrong.push_back(tokens_alone(ids(10), 1)[0]);
    const Ids drafts = {1, 2, 3, 4, 5};
    wrong.insert(wrong.end(), drafts.begin(), drafts.end());
    scheduler.propose(id, drafts);
    simulation.step();
    EXPECT_EQ(scheduler.accepted_tokens(), 0);
    EXPECT_EQ(scheduler.cache().num_named(), 2);
    scheduler.end(id, RequestState::finished);
    wrong.push_back(6);
    const RequestId next = scheduler.add({.prompt = wrong, .max_tokens = 3, .keep = keep});
    EXPECT_EQ(simulation.step()[0].reused, keep ? 11 : 8);
    Ids tokens;
    while (scheduler.state(next)) tokens.push_back(simulation.step()[0].token);
    const Ids expected = tokens_alone(wrong, 3);
    EXPECT_EQ(tokens, Ids(expected.begin() + 1, expected.end()));
  }
}

}  // namespace draft_planning_test
}  // namespace eadem::engine::scheduling_test
