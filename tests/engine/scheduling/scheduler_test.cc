// SPDX-License-Identifier: Apache-2.0
//
// Requests that are refused, cancelled or divided into chunks do not affect the others: a scheduler with an engine.
#include <gtest/gtest.h>

#include <map>

#include "tests/engine/engine_helpers.h"

namespace eadem::engine {
namespace {

std::unique_ptr<InferEngine> batched_engine(bool paged) {
  EngineSetup setup;
  setup.options.max_num_batched_tokens = 16;
  if (paged)
    setup.options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 4, .max_batch_size = 3};
  else
    setup.options.cache = StaticKVCacheConfig{.max_batch_size = 3};
  return make_engine(setup);
}

std::vector<StepLoop::Request> some_requests(const InferEngine& engine) {
  std::vector<StepLoop::Request> requests;
  for (int i = 0; i < 6; ++i)
    requests.push_back({.prompt = tokens_of(3 + 9 * i % 40, engine.model().info().vocab, i),
                        .sampling = {.temperature = i % 2 == 0 ? 0.0f : 0.8f, .seed = 11 + i},
                        .max_tokens = 4 + i});
  return requests;
}

TEST(Scheduler, ATooLongPromptIsRefusedAlone) {
  const auto engine = make_engine();
  StepLoop scheduler(*engine);
  scheduler.add({.prompt = {1, 2, 3}, .max_tokens = 2});
  try {
    scheduler.add({.prompt = tokens_of(engine->max_sequence_length() + 1, engine->model().info().vocab, 1)});
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(engine->max_sequence_length() + 1)), std::string::npos)
        << error.what();
  }
  int drawn = 0;
  while (scheduler.step([&](const StepLoop::Drawn&) { return ++drawn > 0; })) {
  }
  EXPECT_EQ(drawn, 2);
}

TEST(Scheduler, ACancelledStepChangesNoRequest) {
  const auto engine = make_engine();
  const StepLoop::Request request{.prompt = tokens_of(7, engine->model().info().vocab, 3), .max_tokens = 6};
  const std::vector<int32_t> alone = schedule(*engine, {request})[0];
  StepLoop scheduler(*engine);
  scheduler.add(request);
  std::vector<int32_t> drawn;
  const StepLoop::OnToken on_token = [&](const StepLoop::Drawn& d) {
    drawn.push_back(d.token);
    return true;
  };
  const std::atomic<bool> cancel = true;
  for (bool more = true; more;) {
    EXPECT_THROW(scheduler.step(on_token, &cancel), Cancelled);
    more = scheduler.step(on_token);
  }
  EXPECT_EQ(drawn, alone);
}

TEST(Scheduler, ACancelledRequestGivesItsPlaceBackAndTheOthersGoOn) {
  for (const bool paged : {false, true}) {
    const auto engine = batched_engine(paged);
    const std::vector<StepLoop::Request> requests = some_requests(*engine);
    const std::vector<std::vector<int32_t>> expected = schedule(*engine, requests);
    // The victim waits, reads its prompt, or decodes when it is cancelled.
    for (int steps_before = 0; steps_before < 6; ++steps_before)
      for (size_t victim = 0; victim < requests.size(); ++victim) {
        engine->reset_cache();
        StepLoop scheduler(*engine);
        std::map<StepLoop::RequestId, size_t> index;
        std::vector<StepLoop::RequestId> ids;
        for (const StepLoop::Request& request : requests) {
          ids.push_back(scheduler.add(request));
          index[ids.back()] = ids.size() - 1;
        }
        std::vector<std::vector<int32_t>> drawn(requests.size());
        const StepLoop::OnToken on_token = [&](const StepLoop::Drawn& d) {
          drawn[index.at(d.id)].push_back(d.token);
          return true;
        };
        for (int step = 0; step < steps_before; ++step) scheduler.step(on_token);
        const size_t before = drawn[victim].size();
        scheduler.cancel(ids[victim]);
        scheduler.cancel(ids[victim]);  // no harm
        scheduler.cancel(12345);
        while (scheduler.step(on_token)) {
        }
        EXPECT_EQ(drawn[victim].size(), before) << "drew after it was cancelled";
        for (size_t i = 0; i < requests.size(); ++i) {
          if (i == victim) continue;
          EXPECT_EQ(drawn[i], expected[i]) << "request " << i << " beside the cancelled " << victim;
        }
        EXPECT_EQ(scheduler.num_waiting() + scheduler.num_running(), 0);
        // Nothing is left behind: the same scheduler runs all of them again.
        std::vector<std::vector<int32_t>> again(requests.size());
        for (size_t i = 0; i < requests.size(); ++i) index[scheduler.add(requests[i])] = i;
        while (scheduler.step([&](const StepLoop::Drawn& d) {
          again[index.at(d.id)].push_back(d.token);
          return true;
        })) {
        }
        EXPECT_EQ(again, expected);
      }
  }
}

// Prompt chunks compute no logits, except for the last one.
TEST(Scheduler, PromptChunksThatGoOnHaveNoLogits) {
  const auto engine = batched_engine(false);
  const int64_t vocab = engine->model().info().vocab;
  StepLoop scheduler(*engine);
  scheduler.add({.prompt = tokens_of(3, vocab, 1), .max_tokens = 20});
  scheduler.add({.prompt = tokens_of(50, vocab, 2), .max_tokens = 2});
  std::vector<int64_t> rows;
  engine->hooks().register_hook(
      "sample.token", [&](const std::string&, const TensorView& token, int) { rows.push_back(token.shape[0]); });
  while (scheduler.step([](const StepLoop::Drawn&) { return true; })) {
  }
  // Steps of 16 tokens: the short prompt with 13 tokens of the long one, 1 + 15, 1 + 15, and 1 + the last 7. Then one
  // decodes beside the other, and on alone.
  ASSERT_GE(rows.size(), 6u);
  EXPECT_EQ(std::vector<int64_t>(rows.begin(), rows.begin() + 6), (std::vector<int64_t>{1, 1, 1, 2, 2, 1}));
}

TEST(Scheduler, AStepMayHaveNoLogitsAtAll) {
  const auto engine = batched_engine(false);
  const std::vector<int32_t> prompt = tokens_of(20, engine->model().info().vocab, 2);
  const InferEngine::Output whole = engine->forward(
      {.input_ids = {prompt.begin(), prompt.begin() + 16}, .input_lengths = {16}, .cache_lengths = {0}});
  ASSERT_EQ(whole.output_ids.size(), 1u);
  const auto rest = [&] {
    return engine
        ->forward({.input_ids = {prompt.begin() + 16, prompt.end()}, .input_lengths = {4}, .cache_lengths = {16}})
        .logprobs;
  };
  const std::vector<float> expected = rest();
  engine->reset_cache();
  EXPECT_TRUE(engine
                  ->forward({.input_ids = {prompt.begin(), prompt.begin() + 16},
                             .input_lengths = {16},
                             .cache_lengths = {0},
                             .unfinished = {1}})
                  .output_ids.empty());
  expect_same_bits(rest(), expected, "after a step without logits");
}

TEST(Scheduler, CountsPromptAndDecodeTokens) {
  const auto engine = batched_engine(true);
  StepLoop scheduler(*engine);
  scheduler.add({.prompt = tokens_of(40, engine->model().info().vocab, 1), .max_tokens = 5});
  while (scheduler.step([](const StepLoop::Drawn&) { return true; })) {
  }
  EXPECT_EQ(scheduler.prompt_tokens(), 40);
  EXPECT_EQ(scheduler.decode_tokens(), 4);  // the last drawn one is not fed back
}

}  // namespace
}  // namespace eadem::engine
