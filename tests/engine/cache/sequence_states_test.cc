// SPDX-License-Identifier: Apache-2.0
//
// States per sequence: a model whose only mixer is a recurrence, on the device `reference`, which runs any op by its
// definition. A sequence has the same bits however it is served, and slots are reset, copied, saved and restored.
#include <gtest/gtest.h>

#include "eadem/models/graphs.h"
#include "tests/engine/engine_helpers.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace sequence_states_test {

using Ids = std::vector<int32_t>;
using models::BuildContext;
using models::ValueId;
using test::refusal;

constexpr int64_t kVocab = 50, kHidden = 8, kContext = 64, kBlock = 4;

// y[t] = state = 0.75 * state + x[t], over the tokens of each sequence in order.
//   inputs   x [tokens, hidden], query_start [sequences + 1], state_slots [sequences], state [slots, hidden]
//   outputs  y [tokens, hidden], state
class DecayedSum final : public ops::Op {
 public:
  std::string_view name() const override { return "decayed_sum"; }
  std::vector<ops::Port> inputs() const override {
    using Role = ops::Port::Role;
    return {{"x"}, {"query_start", Role::index}, {"state_slots", Role::index}, {"state", Role::state}};
  }
  std::vector<ops::Port> outputs() const override { return {{"y"}, {"state", ops::Port::Role::state}}; }
  kernels::AttrsRef attrs() const override {
    static constexpr kernels::NoAttrs kNone;
    return kernels::AttrsRef(kNone);
  }
  std::vector<TensorType> infer_types(std::span<const TensorType> in) const override { return {in[0], in[3]}; }
  ops::Cost cost(ops::Pass, std::span<const TensorType>, std::span<const TensorType>,
                 const SymbolValues&) const override {
    return {};
  }
  void reference(ops::Pass, std::span<const ops::RefTensor> in, std::span<ops::RefTensor> out) const override {
    const auto hidden = static_cast<size_t>(in[0].shape[1]);
    for (size_t s = 0; s < in[2].data.size(); ++s) {
      const auto slot = static_cast<size_t>(in[2].data[s]);
      std::vector<double> state(in[3].data.begin() + static_cast<std::ptrdiff_t>(slot * hidden),
                                in[3].data.begin() + static_cast<std::ptrdiff_t>((slot + 1) * hidden));
      for (auto t = static_cast<size_t>(in[1].data[s]); t < static_cast<size_t>(in[1].data[s + 1]); ++t)
        for (size_t i = 0; i < hidden; ++i)
          // A state is stored in f32, so that every step begins with what is stored.
          out[0].data[t * hidden + i] = state[i] = static_cast<float>(0.75 * state[i] + in[0].data[t * hidden + i]);
      std::copy(state.begin(), state.end(), out[1].data.begin() + static_cast<std::ptrdiff_t>(slot * hidden));
    }
  }
};

class RecurrentModel final : public models::Model {
 public:
  const models::ModelInfo& info() const override { return info_; }
  modules::ModelSpec spec() const override { return {.hidden = kHidden, .layers = 2, .vocab = kVocab}; }
  ValueId embed(BuildContext& context) const override {
    const pipeline::Graph::Scope scope(context.graph, "embed");
    return modules::Embedding(kVocab, kHidden).build(context, context.step.token_ids);
  }
  ValueId layer(BuildContext& context, int index, ValueId x) const override {
    const pipeline::Graph::Scope scope(context.graph, "layers." + std::to_string(index), index);
    const ValueId state = context.add_state({.name = context.graph.scoped_name("state"),
                                             .kind = modules::StateSpec::Kind::per_sequence,
                                             .row = TensorType(DType::f32, {kHidden})});
    return context.graph.add(std::make_shared<DecayedSum>(),
                             {x, context.step.query_start, context.step.state_slots, state})[0];
  }
  ValueId finish(BuildContext& context, ValueId x) const override {
    const pipeline::Graph::Scope scope(context.graph, "norm");
    return modules::RmsNorm(kHidden, 1e-5).build(context, x);
  }
  ValueId head(BuildContext& context, ValueId hidden) const override {
    return modules::LmHead(kVocab, kHidden, "lm_head.weight", false).build(context, hidden);
  }
  bool may_ignore(const std::string&) const override { return false; }
  io::JsonValue config_json() const override { return io::JsonValue::object(); }

 private:
  models::ModelInfo info_{
      .architecture = "recurrent", .vocab = kVocab, .hidden = kHidden, .layers = 2, .max_positions = kContext};
};

std::unique_ptr<InferEngine> make_recurrent(int64_t batch, bool paged, int64_t step_tokens = 16,
                                            int64_t draft_tokens = 0) {
  const auto model = std::make_shared<RecurrentModel>();
  EngineOptions options;
  options.max_num_batched_tokens = step_tokens;
  options.max_logit_rows = 128;
  options.draft_tokens = draft_tokens;
  if (paged)
    options.cache = PagedKVCacheConfig{.block_size = kBlock, .max_batch_size = batch, .max_cache_len = kContext};
  else
    options.cache = StaticKVCacheConfig{.max_batch_size = batch, .max_cache_len = kContext};
  auto engine = std::make_unique<InferEngine>(model, open_device("reference"), options, model->spec());
  engine->load_random(7, 0.5);
  return engine;
}

class SequenceState : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Caches, SequenceState, testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Paged" : "Static"; });

TEST_P(SequenceState, IsDeclaredAndHasASlotForEverySequence) {
  const auto engine = make_recurrent(3, GetParam());
  const int64_t snapshots = GetParam() ? 2 * 3 : 0;  // only blocks have borders that others begin behind
  EXPECT_EQ(engine->reuses_prefixes(), GetParam());
  EXPECT_EQ(engine->limits().num_snapshots, snapshots);
  EXPECT_EQ(engine->limits().num_slots, 3);
  EXPECT_EQ(engine->cache_spec().num_slots, 3 + snapshots);
  EXPECT_EQ(engine->cache_bytes(), 2 * (3 + snapshots) * kHidden * 4);
  EXPECT_EQ(engine->sequence_states().bytes_per_slot(), 2 * kHidden * 4);
  const auto twice = make_recurrent(3, GetParam(), 16, 2);
  EXPECT_EQ(twice->limits().num_slots, 3);
  EXPECT_EQ(twice->cache_bytes(), 2 * (2 * 3 + snapshots) * kHidden * 4);
  EXPECT_EQ(twice->sequence_states().bytes_per_slot(), 2 * kHidden * 4);
}

TEST_P(SequenceState, ChunksAndBatchMatesDoNotChangeBits) {
  const auto engine = make_recurrent(3, GetParam(), 64);
  const std::vector<Ids> all = {tokens_of(20, kVocab, 1), tokens_of(20, kVocab, 2), tokens_of(20, kVocab, 3)};
  for (size_t s = 0; s < all.size(); ++s) {
    const std::vector<float> whole = logits_of(*engine, {all[s]}, 20)[0];
    expect_same_bits(whole, logits_of(*engine, {all[s]}, 7)[0], "in chunks");
    expect_same_bits(whole, logits_of(*engine, {all[s]}, 1)[0], "token by token");
    expect_same_bits(whole, logits_of(*engine, all, 9)[s], "in a batch");
  }
}

// More requests than slots: each begins with zeros, whoever had its slot before.
TEST_P(SequenceState, ASlotIsResetForItsNextSequence) {
  const auto engine = make_recurrent(2, GetParam());
  std::vector<StepLoop::Request> requests;
  for (int i = 0; i < 7; ++i)
    requests.push_back({.prompt = tokens_of(1 + 11 * i % 30, kVocab, i), .max_tokens = 3 + i});
  const auto together = schedule(*engine, requests);
  for (size_t i = 0; i < requests.size(); ++i)
    EXPECT_EQ(together[i], schedule(*make_recurrent(1, GetParam()), {requests[i]})[0]) << i;
}

TEST_P(SequenceState, AConversationGoesOnOnlyFromItsEnd) {
  const auto engine = make_recurrent(1, GetParam());
  StepLoop loop(*engine);
  const auto answer = [&](const Ids& prompt) {
    Ids result;
    loop.add({.prompt = prompt, .max_tokens = 4, .keep = true});
    while (loop.step([&](const StepEvent& event) {
      result.push_back(event.token);
      return true;
    })) {
    }
    EXPECT_EQ(result, schedule(*make_recurrent(1, GetParam()), {{.prompt = prompt, .max_tokens = 4}})[0]);
    return result;
  };
  Ids conversation = tokens_of(10, kVocab, 1);
  for (int32_t token : answer(conversation)) conversation.push_back(token);
  conversation.push_back(3);
  answer(conversation);
  EXPECT_EQ(loop.reused_tokens(), 13) << "the last token of an answer was not computed";
  conversation[5] += 1;  // an edit
  answer(conversation);
  EXPECT_EQ(loop.reused_tokens(), 13);
}

TEST_P(SequenceState, ARequestWhoseStepWasGivenUpBeginsAgain) {
  const auto engine = make_recurrent(1, GetParam());
  const StepLoop::Request request{.prompt = tokens_of(30, kVocab, 5), .max_tokens = 5};
  const Ids expected = schedule(*engine, {request})[0];
  for (const int steps : {0, 1, 3}) {
    StepLoop loop(*engine);
    loop.add(request);
    Ids drawn;
    const auto on_token = [&](const StepEvent& event) {
      drawn.push_back(event.token);
      return true;
    };
    for (int i = 0; i < steps; ++i) loop.step(on_token);
    const std::atomic<bool> cancel = true;
    EXPECT_THROW(loop.step(on_token, &cancel), Cancelled);
    while (loop.step(on_token)) {
    }
    EXPECT_EQ(drawn, expected) << steps << " steps";
  }
}

// --- Copies and snapshots.

// One step of sequence `row`, whose tokens lie in `blocks`; returns its logits.
std::vector<float> step(InferEngine& engine, const Ids& tokens, int32_t cached, Ids blocks, int32_t row) {
  InferEngine::Input input{.input_ids = tokens,
                           .input_lengths = {static_cast<int32_t>(tokens.size())},
                           .cache_lengths = {cached},
                           .block_tables = {std::move(blocks)}};
  input.rows = {row};
  engine.forward(input);
  return values(engine.logits());
}

TEST(SequenceStates, AForkGoesOnFromTheStateOfAnother) {
  const auto engine = make_recurrent(2, true);
  const Ids prompt = tokens_of(8, kVocab, 1);
  step(*engine, prompt, 0, {0, 1}, 0);
  engine->sequence_states().copy(1, 0);
  const std::vector<float> first = step(*engine, {5}, 8, {0, 1, 2}, 0);
  const std::vector<float> other = step(*engine, {6}, 8, {0, 1, 3}, 1), same = step(*engine, {9}, 9, {0, 1, 2}, 0);
  EXPECT_NE(first, other);
  engine->reset_cache();
  Ids whole = prompt;
  whole.push_back(6);
  expect_same_bits(other, step(*engine, whole, 0, {4, 5, 6}, 0), "the fork alone");
  whole.back() = 5;
  whole.push_back(9);
  expect_same_bits(same, step(*engine, whole, 0, {4, 5, 6}, 1), "the first one alone");
}

TEST(SequenceStates, ASnapshotLeadsBack) {
  const auto engine = make_recurrent(2, true);
  const Ids prompt = tokens_of(8, kVocab, 1), blocks = {3, 2, 1, 0};
  step(*engine, prompt, 0, blocks, 0);
  const SequenceStates::Snapshot snapshot = engine->sequence_states().save(0);
  EXPECT_EQ(snapshot.tokens, 8);
  const std::vector<float> once = step(*engine, {5, 6, 7}, 8, blocks, 0);
  EXPECT_HAS(refusal([&] {
               step(*engine, {5, 6, 7}, 8, blocks, 0);
             }),
             "sequence 0 has 8 cached tokens; slot 0 holds the state after 11 tokens");
  engine->sequence_states().restore(0, snapshot);
  expect_same_bits(once, step(*engine, {5, 6, 7}, 8, blocks, 0), "after going back");
  engine->sequence_states().restore(1, snapshot);  // into another slot, too
  expect_same_bits(once, step(*engine, {5, 6, 7}, 8, blocks, 1), "in another slot");
}

// --- Second copies.

// As step(), with a step that may be taken back.
std::vector<float> returnable(InferEngine& engine, const Ids& tokens, int64_t cached, const Ids& blocks, int32_t slot,
                              bool may_return = true) {
  const std::vector<StepSequence> plan = {
      {.tokens = tokens, .cached = cached, .blocks = blocks, .state_slot = slot, .may_return = may_return}};
  engine.forward(plan);
  return values(engine.logits());
}

TEST(SequenceStates, AStepBeginsAgainWhereAnEarlierOneDid) {
  const auto engine = make_recurrent(2, true, 16, 4);
  const Ids blocks = {3, 2, 1, 0}, others = {7, 6, 5, 4};
  returnable(*engine, tokens_of(8, kVocab, 1), 0, blocks, 0, false);
  returnable(*engine, tokens_of(5, kVocab, 2), 0, others, 1, false);
  const std::vector<float> once = returnable(*engine, {5}, 8, blocks, 0),
                           other = returnable(*engine, {9}, 5, others, 1);
  // A step may begin behind the 8 tokens any number of times: after one that may return, after one that may not, and
  // after one that was given up.
  expect_same_bits(once, returnable(*engine, {5}, 8, blocks, 0), "again");
  expect_same_bits(returnable(*engine, {5, 6, 7}, 8, blocks, 0, false), returnable(*engine, {5, 6, 7}, 8, blocks, 0),
                   "three tokens");
  const std::atomic<bool> cancel = true;
  const Ids token = {5};
  const std::vector<StepSequence> given_up = {{.tokens = token, .cached = 11, .blocks = blocks}};
  EXPECT_THROW(engine->forward(given_up, &cancel), Cancelled);
  expect_same_bits(once, returnable(*engine, {5}, 8, blocks, 0), "after a step that was given up");
  expect_same_bits(other, returnable(*engine, {9}, 5, others, 1), "the other sequence");
  // It goes on from the end as well, and keeps that then.
  const std::vector<float> next = returnable(*engine, {6}, 9, blocks, 0);
  expect_same_bits(next, returnable(*engine, {6}, 9, blocks, 0), "further on");
  Ids whole = tokens_of(8, kVocab, 1);
  whole.insert(whole.end(), {5, 6});
  expect_same_bits(next, returnable(*make_recurrent(1, true), whole, 0, {0, 1, 2}, 0, false), "in one step");
  EXPECT_HAS(refusal([&] { returnable(*engine, {5}, 8, blocks, 0); }),
             "sequence 0 has 8 cached tokens; slot 0 holds the state after 10 tokens");
}

TEST(SequenceStates, ASecondCopyIsOfItsSequence) {
  const auto engine = make_recurrent(2, true, 16, 4);
  const auto stands_at = [&](const Ids& blocks) {
    returnable(*engine, tokens_of(8, kVocab, 1), 0, blocks, 0, false);
    returnable(*engine, {5, 6}, 8, blocks, 0);
  };
  const Ids blocks = {0, 1, 2}, others = {5, 6, 7};
  stands_at(blocks);
  returnable(*engine, tokens_of(9, kVocab, 2), 0, others, 1, false);
  EXPECT_HAS(refusal([&] { returnable(*engine, {5}, 8, others, 0); }), "after 10 tokens of another one");
  // Another sequence begins in the slot, a state is copied to it, a snapshot goes there.
  returnable(*engine, tokens_of(9, kVocab, 2), 0, blocks, 0, false);
  EXPECT_HAS(refusal([&] { returnable(*engine, {5}, 8, blocks, 0); }), "the state after 9 tokens");
  stands_at(blocks);
  const SequenceStates::Snapshot snapshot = engine->sequence_states().save(1);
  engine->sequence_states().copy(0, 1);
  EXPECT_HAS(refusal([&] { returnable(*engine, {5}, 8, blocks, 0); }), "the state after 9 tokens of another one");
  stands_at(blocks);
  engine->sequence_states().restore(0, snapshot);
  EXPECT_HAS(refusal([&] { returnable(*engine, {5}, 8, blocks, 0); }), "the state after 9 tokens of another one");
  EXPECT_HAS(refusal([&] { returnable(*make_recurrent(1, true), {5}, 0, blocks, 0); }),
             "Unsupported: sequence 0 wants to begin behind 0 tokens again: recurrent has states per sequence, which a "
             "step overwrites, and of which the engine has no second copy; its draft_tokens are 0");
}

// --- Kept snapshots.

TEST(SequenceStates, ASequenceGoesOnFromAKeptSnapshot) {
  for (const int64_t drafts : {0, 4}) {
    const auto engine = make_recurrent(3, true, 16, drafts);
    const Ids prompt = tokens_of(8, kVocab, 1), blocks = {3, 2, 1, 0}, others = {3, 2, 6, 7};
    const Ids next = {5}, other = {6, 9};
    returnable(*engine, prompt, 0, blocks, 0, false);
    // A sequence of the same step loads what another one saves.
    engine->forward(std::vector<StepSequence>{
        {.tokens = next, .cached = 8, .blocks = blocks, .state_slot = 0, .save_snapshot = 4},
        {.tokens = other, .cached = 8, .blocks = others, .state_slot = 2, .load_snapshot = 4}});
    const std::vector<float> both = values(engine->logits());
    // Another one does later, in a slot that has held something else, and saves what it has computed.
    engine->forward(std::vector<StepSequence>{
        {.tokens = other, .cached = 8, .blocks = others, .state_slot = 0, .load_snapshot = 4}});
    const std::vector<float> again = values(engine->logits());
    Ids whole = prompt;
    whole.push_back(5);
    std::vector<float> expected = step(*make_recurrent(1, true), whole, 0, {0, 1, 2}, 0);
    whole.back() = 6;
    whole.push_back(9);
    const std::vector<float> of_other = step(*make_recurrent(1, true), whole, 0, {0, 1, 2}, 0);
    expect_same_bits(again, of_other, "in a later step");
    expected.insert(expected.end(), of_other.begin(), of_other.end());
    expect_same_bits(both, expected, "in the step that saves it");
  }
}

TEST(SequenceStates, ASnapshotThatDoesNotFitIsRefused) {
  const auto engine = make_recurrent(2, true, 16, 4);
  const Ids prompt = tokens_of(8, kVocab, 1), blocks = {3, 2, 1, 0}, others = {7, 6, 5, 4}, next = {5};
  returnable(*engine, prompt, 0, blocks, 0, false);
  returnable(*engine, prompt, 0, others, 1, false);
  const auto refused = [&](const std::vector<StepSequence>& plan) { return refusal([&] { engine->forward(plan); }); };
  EXPECT_HAS(refused({{.tokens = next, .cached = 8, .blocks = blocks, .load_snapshot = 1}}),
             "sequence 0 has 8 cached tokens; snapshot 1 holds nothing");
  EXPECT_HAS(refused({{.tokens = next, .cached = 8, .blocks = blocks, .save_snapshot = 4}}),
             "sequence 0 names snapshot 4 of states; there are 4");
  EXPECT_HAS(refused({{.tokens = next, .cached = 8, .blocks = blocks, .save_snapshot = 1},
                      {.tokens = next, .cached = 8, .blocks = others, .state_slot = 1, .save_snapshot = 1}}),
             "snapshot 1 is saved twice, by sequence 1");
  EXPECT_HAS(refused({{.tokens = prompt, .cached = 0, .blocks = blocks, .save_snapshot = 1}}),
             "saves the state after 0 tokens");
  EXPECT_EQ(refused({{.tokens = next, .cached = 8, .blocks = blocks, .save_snapshot = 1}}), "");
  EXPECT_HAS(refused({{.tokens = next, .cached = 9, .blocks = blocks, .load_snapshot = 1}}),
             "sequence 0 has 9 cached tokens; snapshot 1 holds the state after 8");
  // The second copy of the slot, of another sequence in the same first block, is not that of who loaded a snapshot.
  returnable(*engine, {5, 6}, 9, blocks, 0);
  EXPECT_EQ(refused({{.tokens = next, .cached = 8, .blocks = blocks, .load_snapshot = 1}}), "");
  returnable(*engine, {7, 8}, 9, blocks, 0, false);
  EXPECT_HAS(refused({{.tokens = next, .cached = 9, .blocks = blocks}}), "slot 0 holds the state after 11 tokens");
  engine->reset_cache();
  returnable(*engine, prompt, 0, blocks, 0, false);
  EXPECT_HAS(refused({{.tokens = next, .cached = 8, .blocks = blocks, .load_snapshot = 1}}),
             "snapshot 1 holds nothing");
}

TEST(SequenceStates, WhatASlotDoesNotHoldIsRefused) {
  const auto engine = make_recurrent(2, true);
  step(*engine, tokens_of(4, kVocab, 1), 0, {0}, 0);
  step(*engine, tokens_of(4, kVocab, 2), 0, {1}, 1);
  const auto refused = [&](auto&& call) { return refusal(call); };
  EXPECT_HAS(refused([&] { step(*engine, {1}, 4, {1, 2}, 0); }), "after 4 tokens of another one");
  EXPECT_HAS(refused([&] { step(*engine, {1}, 4, {0, 2}, 2); }), "the row of sequence 0 is 2; expected 0 to 1");
  EXPECT_EQ(refused([&] { step(*engine, {1}, 4, {0, 2}, 0); }), "") << "refused steps have changed nothing";
  InferEngine::Input twice{
      .input_ids = {1, 2}, .input_lengths = {1, 1}, .cache_lengths = {0, 0}, .block_tables = {{5}, {6}}};
  twice.rows = {1, 1};
  EXPECT_HAS(refused([&] { engine->forward(twice); }), "slot 1 is used twice, by sequence 1");
  EXPECT_HAS(refused([&] { engine->sequence_states().restore(0, {}); }), "a snapshot of 0 bytes for states of 64");
  EXPECT_HAS(refused([&] { engine->sequence_states().reset(2); }), "slot 2 of states per sequence; there are 2");
  const std::atomic<bool> cancel = true;
  InferEngine::Input next{.input_ids = {1}, .input_lengths = {1}, .cache_lengths = {5}, .block_tables = {{0, 2}}};
  EXPECT_THROW(engine->forward(next, &cancel), Cancelled);
  EXPECT_HAS(refused([&] { engine->forward(next); }), "what a step left that did not end; begin at its first token");
  EXPECT_HAS(refused([&] { engine->sequence_states().save(0); }), "what a step left that did not end");
}

}  // namespace sequence_states_test
}  // namespace eadem::engine
