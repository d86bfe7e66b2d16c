// SPDX-License-Identifier: Apache-2.0
//
// The engine's checks of its cache: it refuses lengths that nobody wrote and blocks that two places use, and a refused
// step changes nothing.
#include <gtest/gtest.h>

#include <limits>

#include "eadem/engine/llm.h"
#include "tests/engine/engine_helpers.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace {

using test::refusal;
using Input = InferEngine::Input;

std::unique_ptr<InferEngine> paged_engine() {
  EngineSetup setup;
  setup.options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 16, .max_batch_size = 3};
  return make_engine(setup);
}

Input step(std::vector<int32_t> lengths, std::vector<int32_t> cached, std::vector<std::vector<int32_t>> tables) {
  Input input{.input_lengths = lengths, .cache_lengths = std::move(cached), .block_tables = std::move(tables)};
  for (int32_t length : lengths)
    for (int32_t i = 0; i < length; ++i) input.input_ids.push_back(3 + i);
  return input;
}

TEST(Cache, BlocksAreUsedOnceInAStep) {
  const auto engine = paged_engine();
  const auto refused = [&](const Input& input) { return refusal([&] { engine->forward(input); }); };
  EXPECT_HAS(refused(step({20}, {0}, {{0, 0}})),
             "InvalidArgument: sequence 0 names block 0 twice, for its positions 0 and 16");
  EXPECT_HAS(refused(step({2, 3}, {0, 0}, {{0}, {0}})),
             "sequences 0 and 1 both use block 0, for their positions 0 and 0");
  EXPECT_HAS(refused(step({20, 3}, {0, 0}, {{0, 4}, {4}})),
             "sequences 0 and 1 both use block 4, for their positions 16 and 0");
  EXPECT_HAS(refused(step({20}, {0}, {{0}})), "sequence 0 has 1 blocks; 20 tokens need 2");
  EXPECT_HAS(refused(step({20}, {0}, {{0, 1 << 20}})), "sequence 0 names block 1048576; there are");
  EXPECT_HAS(refused(step({20}, {0}, {{0, -1}})), "sequence 0 names block -1");
  EXPECT_HAS(refused(step({1, 1}, {0, 0}, {{0}})), "block_tables has 1 entries; expected 2");
  // Entries after the last token's block are ignored.
  EXPECT_EQ(refused(step({4, 4}, {0, 0}, {{1, 0, 0}, {0, 0, 0}})), "");
}

TEST(Cache, SequencesShareABlockThatBothHaveCached) {
  const auto engine = paged_engine();
  engine->forward(step({16}, {0}, {{7}}));
  EXPECT_EQ(refusal([&] { engine->forward(step({2, 2}, {16, 16}, {{7, 1}, {7, 2}})); }), "");
  const std::string both = refusal([&] { engine->forward(step({2, 2}, {15, 16}, {{7, 1}, {7, 2}})); });
  EXPECT_HAS(both, "sequences 0 and 1 both use block 7");
  engine->forward(step({16}, {0}, {{3}}));
  const std::string elsewhere = refusal([&] { engine->forward(step({2, 2}, {16, 32}, {{7, 1}, {3, 7, 2}})); });
  EXPECT_HAS(elsewhere, "sequences 0 and 1 both use block 7, for their positions 0 and 16");
}

TEST(Cache, LengthsThatNobodyWroteAreRefused) {
  const auto paged = paged_engine();
  EngineSetup setup;
  setup.options.cache = StaticKVCacheConfig{.max_batch_size = 2};
  const auto fixed = make_engine(setup);
  const auto refused = [&](InferEngine& engine, const Input& input) { return refusal([&] { engine.forward(input); }); };
  EXPECT_HAS(refused(*fixed, step({1}, {100}, {})),
             "InvalidArgument: sequence 0 has 100 cached tokens; block 0 holds 0 of the 100");
  EXPECT_HAS(refused(*paged, step({1}, {20}, {{5, 6}})), "sequence 0 has 20 cached tokens; block 5 holds 0 of the 16");
  fixed->forward(step({10, 5}, {0, 0}, {}));
  EXPECT_HAS(refused(*fixed, step({1, 1}, {10, 6}, {})), "sequence 1 has 6 cached tokens; block 1 holds 5 of the 6");
  EXPECT_EQ(refused(*fixed, step({1, 1}, {10, 5}, {})), "");
  EXPECT_EQ(refused(*fixed, step({1}, {4}, {})), "") << "going back";
  EXPECT_HAS(refused(*fixed, step({1}, {11}, {})),
             "block 0 holds 5 of the 11");  // the rest was of another continuation
  EXPECT_EQ(refused(*fixed, step({1}, {6}, {{1}})), "") << "another row's";
  fixed->reset_cache();
  EXPECT_HAS(refused(*fixed, step({1}, {1}, {})), "block 0 holds 0 of the 1");
  paged->forward(step({20}, {0}, {{5, 6}}));
  EXPECT_HAS(refused(*paged, step({1}, {20}, {{6, 5}})), "block 6 holds 4 of the 16");
  EXPECT_EQ(refused(*paged, step({1}, {20}, {{5, 6}})), "");
  paged->reset_cache(StaticKVCacheConfig{});
  EXPECT_HAS(refused(*paged, step({1}, {20}, {})), "block 0 holds 0 of the 20");
}

TEST(Cache, ARefusedStepChangesNothing) {
  const auto engine = paged_engine();
  const std::vector<int32_t> tokens = tokens_of(24, engine->model().info().vocab, 3);
  const std::vector<float> expected = logits_in_chunks(*engine, tokens, {12, 12});
  engine->reset_cache();
  const auto half = [&](int32_t begin) {
    return Input{.input_ids = {tokens.begin() + begin, tokens.begin() + begin + 12},
                 .input_lengths = {12},
                 .cache_lengths = {begin},
                 .block_tables = {{2, 1}},
                 .all_logits = true};
  };
  engine->forward(half(0));
  std::vector<float> logits = values(engine->logits());
  EXPECT_NE(refusal([&] { engine->forward(step({4, 20}, {12, 0}, {{2}, {5, 5}})); }), "");
  engine->forward(half(12));
  for (float value : values(engine->logits())) logits.push_back(value);
  expect_same_bits(expected, logits, "after a refused step");
}

// A step that ended early has overwritten what it was to write, and nothing before.
TEST(Cache, ACancelledStepKeepsWhatWasThereBefore) {
  const auto engine = paged_engine();
  engine->forward(step({20}, {0}, {{5, 6}}));
  const std::atomic<bool> cancel = true;
  EXPECT_THROW(engine->forward(step({3}, {10}, {{5, 6}}), &cancel), Cancelled);
  EXPECT_HAS(refusal([&] { engine->forward(step({1}, {20}, {{5, 6}})); }), "block 5 holds 10 of the 16");
  EXPECT_EQ(refusal([&] { engine->forward(step({1}, {10}, {{5, 6}})); }), "");
}

// A model whose tokens take 1000 bytes each.
CachePlanRequest fit_request(CacheConfig config, int64_t context = 4096) {
  return {.config = config,
          .bytes = {.per_token = 1000},
          .context = context,
          .block_size = 16,
          .max_num_batched_tokens = 512};
}

TEST(FitCache, WhatIsSetStays) {
  const Logger silent(LogLevel::off);
  const auto fixed = std::get<StaticKVCacheConfig>(
      fit_cache(fit_request(StaticKVCacheConfig{.max_batch_size = 3, .max_cache_len = 77}), 10, silent));
  EXPECT_EQ(fixed.max_cache_len, 77);
  const auto paged = std::get<PagedKVCacheConfig>(
      fit_cache(fit_request(PagedKVCacheConfig{.max_kv_memory_bytes = 12345}), 10, silent));
  EXPECT_EQ(paged.max_kv_memory_bytes, 12345);
}

TEST(FitCache, TakesTheContextOrHalfOfTheFreeMemory) {
  std::string warnings;
  const Logger log(LogLevel::warning, [&](LogLevel, std::string_view message) { warnings += message; });
  const auto length = [&](int64_t batch, int64_t free_bytes) {
    warnings.clear();
    return std::get<StaticKVCacheConfig>(
               fit_cache(fit_request(StaticKVCacheConfig{.max_batch_size = batch}), free_bytes, log))
        .max_cache_len;
  };
  EXPECT_EQ(length(1, 2 * 4096 * 1000), 4096);
  EXPECT_EQ(warnings, "");
  EXPECT_EQ(length(1, 2 * 3000 * 1000), 3000);
  EXPECT_EQ(warnings, "context limited to 3000 of 4096 tokens: 6000000 bytes of memory are free");
  EXPECT_EQ(length(3, 2 * 3000 * 1000), 1000) << "three sequences share the memory";
  EXPECT_EQ(length(1, 0), 256) << "the least that is of use";
}

TEST(FitCache, EightShortSequencesOrOneOfTheContext) {
  const Logger silent(LogLevel::off);
  const auto tokens = [&](int64_t context, int64_t free_bytes) {
    return std::get<PagedKVCacheConfig>(fit_cache(fit_request(PagedKVCacheConfig{}, context), free_bytes, silent))
               .max_kv_memory_bytes /
           1000;
  };
  constexpr int64_t kMuch = int64_t{1} << 40;
  EXPECT_EQ(tokens(512, kMuch), 8 * 512);
  EXPECT_EQ(tokens(4096, kMuch), 8 * kSharedContext);
  EXPECT_EQ(tokens(131072, kMuch), 131072);
  EXPECT_EQ(tokens(4096, 2 * 9000 * 1000), 9000);
  EXPECT_EQ(tokens(131072, 2 * 9000 * 1000), 9000);
}

// Windows take what they reach: the same memory holds more tokens, and the context takes less.
TEST(FitCache, WindowsAreSizedByWhatTheyReach) {
  const Logger silent(LogLevel::off);
  CachePlanRequest request = fit_request(PagedKVCacheConfig{}, 32768);
  request.bytes = {.per_token = 200, .windows = {{512, 800}}};
  for (const int64_t free_bytes : {int64_t{1} << 40, int64_t{24} << 20}) {
    request.config = fit_cache(request, free_bytes, silent);
    const auto& paged = std::get<PagedKVCacheConfig>(request.config);
    const CachePlan plan = plan_cache(request);
    if (free_bytes > int64_t{1} << 30) {
      EXPECT_EQ(plan.max_length, 32768);
      EXPECT_LT(paged.max_kv_memory_bytes, 32768 * 1000 / 2);
    } else {
      EXPECT_LE(paged.max_kv_memory_bytes, free_bytes / 2);
      EXPECT_GT(plan.max_length, free_bytes / 2 / 1000);
    }
    request.config = PagedKVCacheConfig{};
  }
}

// A row that stands for several tokens counts for each of them, and a block ends where a row does.
TEST(FitCache, RowsOfSeveralTokensEndWithABlock) {
  const TensorType row(DType::f32, {2, 8});
  const std::vector<modules::StateSpec> states = {{.name = "keys", .row = row},
                                                  {.name = "rows", .row = row, .stride = 4},
                                                  {.name = "others", .row = row, .stride = 6}};
  CachePlanRequest request = fit_request(PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 24}, 512);
  request.bytes = StateBytes::of(states);
  EXPECT_EQ(request.bytes.per_token, 64 + 16 + 11);
  EXPECT_EQ(request.bytes.stride, 12);
  const modules::CacheSpec cache = plan_cache(request).spec;
  EXPECT_EQ(modules::storage_type(states[1], cache), TensorType(DType::f32, {cache.num_blocks, 2, 6, 8}));
  request.config = PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 16};
  EXPECT_HAS(refusal([&] { plan_cache(request); }), "block_size is 16; this model keeps rows for 12 tokens each");
  request.block_size = 16;  // of a cache that states none
  request.config = PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20};
  EXPECT_EQ(plan_cache(request).spec.block_size, 24);
  request.config = StaticKVCacheConfig{.max_batch_size = 1, .max_cache_len = 50};
  EXPECT_EQ(modules::storage_type(states[1], plan_cache(request).spec), TensorType(DType::f32, {1, 2, 13, 8}));
}

}  // namespace
}  // namespace eadem::engine
