// SPDX-License-Identifier: Apache-2.0
//
// Models with windows, or chunks, in a paged cache: two cache groups, blocks that go back to the pool while a sequence
// runs, and the bits of a cache that keeps everything.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/engine/engine_helpers.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace {

using Ids = std::vector<int32_t>;
using test::refusal;

constexpr int64_t kBlock = 4, kStep = 12;

EngineSetup paged(const std::string& model, int64_t max_batch = 1, int64_t memory = 0) {
  EngineSetup setup{.model = golden(model)};
  setup.options.max_num_batched_tokens = kStep;
  setup.options.cache = PagedKVCacheConfig{
      .max_kv_memory_bytes = memory, .block_size = kBlock, .max_batch_size = max_batch, .max_cache_len = 128};
  return setup;
}

EngineSetup contiguous(const std::string& model, int64_t max_batch = 1) {
  EngineSetup setup{.model = golden(model)};
  setup.options.max_num_batched_tokens = kStep;
  setup.options.cache = StaticKVCacheConfig{.max_batch_size = max_batch, .max_cache_len = 128};
  return setup;
}

StepLoop::Request request(const InferEngine& engine, int64_t length, int seed, int64_t max_tokens) {
  return {.prompt = tokens_of(length, engine.model().info().vocab, seed),
          .sampling = {.temperature = seed % 2 == 0 ? 0.0f : 0.9f, .seed = seed, .repetition_penalty = 1.1f},
          .max_tokens = max_tokens};
}

class WindowedModel : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Goldens, WindowedModel,
                         testing::Values("gemma3", "gemma3_mixed", "gemma4", "gemma4_equal", "mistral", "llama4"),
                         [](const auto& info) { return std::string(info.param); });

// A prompt much longer than the window and than the pool of its group, read in chunks, and a long answer.
TEST_P(WindowedModel, APromptLongerThanThePoolGetsTheTokensOfAContiguousCache) {
  const auto engine = make_engine(paged(GetParam())), whole = make_engine(contiguous(GetParam()));
  ASSERT_EQ(engine->cache_spec().windows.size(), 1u);
  const modules::WindowGroup& group = engine->cache_spec().windows[0];
  EXPECT_EQ(group.num_blocks, window_blocks(group.window, kBlock, 1, kStep));
  EXPECT_LT(group.num_blocks * kBlock, 60);
  for (const int64_t length : {1, 7, 8, 9, 60, 100}) {
    const auto asked = request(*engine, length, static_cast<int>(length), 28);
    EXPECT_EQ(schedule(*engine, {asked}), schedule(*whole, {asked})) << length;
    expect_same_bits(values(engine->logits()), values(whole->logits()), fmt::format("after {} tokens", length));
  }
}

TEST_P(WindowedModel, BatchMatesShareThePool) {
  const auto engine = make_engine(paged(GetParam(), 3)), whole = make_engine(contiguous(GetParam(), 3));
  std::vector<StepLoop::Request> requests;
  for (int i = 0; i < 9; ++i) requests.push_back(request(*engine, 1 + 37 * i % 90, i, 5 + 7 * i % 30));
  EXPECT_EQ(schedule(*engine, requests), schedule(*whole, requests));
}

// Between steps fewer than window + block tokens are kept, and the pool is whole again in the end.
TEST_P(WindowedModel, BlocksGoBackWhileASequenceRuns) {
  const auto engine = make_engine(paged(GetParam()));
  const modules::WindowGroup& group = engine->cache_spec().windows[0];
  Scheduler scheduler(engine->limits());
  scheduler.add(request(*engine, 90, 2, 30));
  int64_t most = 0, steps = 0;
  while (!scheduler.is_idle()) {
    const auto& output = engine->forward(scheduler.plan(engine->cache_contents()));
    scheduler.commit(output.output_ids, output.logprobs);
    most = std::max(most, group.num_blocks - scheduler.cache().num_free(0));
    ++steps;
  }
  EXPECT_GT(steps, 30);
  EXPECT_GT(most, 0);
  EXPECT_LE(most * kBlock, (group.window + kBlock - 1) / kBlock * kBlock + kBlock);
  EXPECT_EQ(scheduler.cache().num_free(0), group.num_blocks);
}

TEST(Windows, TakeTheMemoryOfTheirGroup) {
  const auto engine = make_engine(paged("gemma3"));  // six layers with a window of 8, one without
  const models::ModelInfo& info = engine->model().info();
  const int64_t row = 2 * 4 * info.kv_heads * info.head_dim;
  const int64_t blocks = window_blocks(8, kBlock, 1, kStep) + 1;  // with the null block
  EXPECT_EQ(engine->cache_bytes(), row * kBlock * (6 * blocks + 32));
  // As much memory as a cache of whole sequences takes for 40 tokens holds the context.
  engine->reset_cache(
      PagedKVCacheConfig{.max_kv_memory_bytes = 7 * row * 48, .block_size = kBlock, .max_batch_size = 1});
  EXPECT_GT(engine->max_sequence_length(), 48);
  EXPECT_LE(engine->cache_bytes(), 7 * row * 48);
}

TEST(Windows, AContiguousCacheHasOneGroup) {
  EXPECT_TRUE(make_engine(contiguous("gemma3"))->cache_spec().windows.empty());
  EngineSetup short_cache = paged("gemma3");
  std::get<PagedKVCacheConfig>(short_cache.options.cache).max_cache_len = 8;
  EXPECT_TRUE(make_engine(short_cache)->cache_spec().windows.empty()) << "no sequence is longer than the window";
}

// The states that modules declare are those that the program has, with the declared types.
TEST(Windows, GroupsAreThoseOfTheDeclaredStates) {
  const auto engine = make_engine(paged("gemma3"));
  const auto states = models::states_of(engine->model(), *engine->device(), engine->hardware());
  ASSERT_EQ(states.size(), 14u);
  const pipeline::Program& program = engine->decode_program();
  EXPECT_EQ(program.states().size(), 14u);
  for (const modules::StateSpec& state : states) {
    const bool global = state.name.find("layers.5.") != std::string::npos;
    EXPECT_EQ(state.window, global ? 0 : 8) << state.name;
    for (const auto& [name, id] : program.states())
      if (name == state.name) {
        EXPECT_EQ(program.graph().value(id).type, modules::storage_type(state, engine->cache_spec())) << name;
        EXPECT_EQ(program.graph().value(id).type.fixed(0),
                  global ? engine->cache_spec().num_blocks : engine->cache_spec().windows[0].num_blocks + 1);
      }
  }
}

// --- Conversations.

TEST(Windows, AConversationGoesOnWhereItEnded) {
  const auto engine = make_engine(paged("gemma3")), whole = make_engine(contiguous("gemma3"));
  StepLoop loop(*engine);
  Ids conversation = tokens_of(40, engine->model().info().vocab, 1);
  int64_t reused = 0;
  for (int turn = 0; turn < 4; ++turn) {
    StepLoop::Request asked{.prompt = conversation, .max_tokens = 6, .keep = true};
    Ids answer;
    loop.add(asked);
    while (loop.step([&](const StepEvent& event) {
      answer.push_back(event.token);
      return true;
    })) {
    }
    asked.keep = false;
    EXPECT_EQ(answer, schedule(*whole, {asked})[0]) << "turn " << turn;
    EXPECT_EQ(loop.reused_tokens() - reused, turn == 0 ? 0 : std::ssize(conversation) - 4);
    reused = loop.reused_tokens();
    conversation.insert(conversation.end(), answer.begin(), answer.end());
    for (int32_t i = 0; i < 3; ++i) conversation.push_back(5 + turn + i);
  }
}

// What an edited conversation would read has left the window, so that it is computed again from its start.
TEST(Windows, AnEditBehindTheWindowStartsAgain) {
  const auto engine = make_engine(paged("gemma3")), whole = make_engine(contiguous("gemma3"));
  StepLoop loop(*engine);
  const Ids first = tokens_of(60, engine->model().info().vocab, 1);
  for (const int64_t same : {60, 30, 59, 3, 5}) {
    Ids prompt(first.begin(), first.begin() + same);
    prompt.push_back(9);
    StepLoop::Request asked{.prompt = prompt, .max_tokens = 5, .keep = true};
    Ids answer;
    loop.add(asked);
    while (loop.step([&](const StepEvent& event) {
      answer.push_back(event.token);
      return true;
    })) {
    }
    asked.keep = false;
    EXPECT_EQ(answer, schedule(*whole, {asked})[0]) << same;
  }
  EXPECT_EQ(loop.reused_tokens(), 3) << "what begins the short one has not left its window";
}

// --- Steps with tables of the caller's own.

TEST(Windows, RingsKeepTheWindowsOfInputs) {
  const auto engine = make_engine(paged("gemma3", 2)), whole = make_engine(contiguous("gemma3", 2));
  const int64_t vocab = engine->model().info().vocab;
  const std::vector<Ids> sequences = {tokens_of(90, vocab, 1), tokens_of(90, vocab, 2)};
  for (const int64_t chunk : {1, 5, 6}) {
    const auto expected = logits_of(*whole, sequences, chunk), actual = logits_of(*engine, sequences, chunk);
    for (size_t s = 0; s < 2; ++s) expect_same_bits(expected[s], actual[s], fmt::format("in chunks of {}", chunk));
  }
}

TEST(Windows, TablesThatDoNotHoldTheTokensAreRefused) {
  const auto engine = make_engine(paged("gemma3", 2));
  Ids all(32);
  for (int32_t i = 0; i < 32; ++i) all[static_cast<size_t>(i)] = i;
  const Ids other = {32, 33, 34, 35, 36, 37, 38, 39};
  const auto step = [&](std::vector<Ids> tables, std::vector<int32_t> cached, std::vector<int32_t> rows) {
    InferEngine::Input input{.cache_lengths = std::move(cached), .block_tables = std::move(tables)};
    input.rows = std::move(rows);
    for (size_t s = 0; s < input.cache_lengths.size(); ++s) {
      input.input_lengths.push_back(6);
      for (int32_t i = 0; i < 6; ++i) input.input_ids.push_back(3 + i);
    }
    return refusal([&] { engine->forward(input); });
  };
  EXPECT_EQ(step({all, other}, {0, 0}, {}), "");
  EXPECT_HAS(step({other, all}, {6, 6}, {}), "for the window of 8 does not hold its tokens from 0 on");
  EXPECT_EQ(step({other, all}, {6, 6}, {1, 0}), "");
  EXPECT_EQ(step({all, other}, {12, 12}, {}), "") << "a refused step has changed nothing";
  EXPECT_HAS(step({all, other}, {0, 0}, {0, 0}), "is used twice");
  EXPECT_EQ(step({all}, {18}, {}), "");
  EXPECT_EQ(step({all}, {24}, {}), "");
  EXPECT_HAS(step({all}, {18}, {2}), "the row of sequence 0 is 2; expected 0 to 1");
  EXPECT_HAS(step({all}, {18}, {0, 1}), "rows has 2 entries; expected 1");
  EXPECT_HAS(step({all}, {6}, {}), "does not hold its tokens") << "what a sequence goes back to has left the window";
  engine->reset_cache();
  EXPECT_HAS(step({all}, {6}, {}), "6 cached tokens; block 0 holds 0");
}

}  // namespace
}  // namespace eadem::engine
