// SPDX-License-Identifier: Apache-2.0
//
// Steps whose tokens the host has not seen: they are those of steps one by one, and the cache's record of its tokens
// is complete when all are collected.
#include <gtest/gtest.h>

#include "tests/engine/decode_steps.h"

namespace eadem::engine {
namespace feedback_test {

std::unique_ptr<InferEngine> paged_engine() {
  EngineSetup setup;
  setup.options.cache = PagedKVCacheConfig{.block_size = 4, .max_batch_size = 5, .max_cache_len = 60};
  return make_engine(setup);
}

TEST(Feedback, StepsWithoutTheHostHaveTheBitsOfStepsWithIt) {
  const auto engine = paged_engine();
  const int64_t vocab = engine->limits().vocab;
  for (const int64_t sequences : {1, 3}) {
    std::vector<std::vector<int32_t>> prompts;
    for (int64_t s = 0; s < sequences; ++s) prompts.push_back(tokens_of(3 + 4 * s, vocab, static_cast<int32_t>(s)));
    const Decoded expected = decode_greedily(*engine, prompts, 20, 0);
    for (const int ahead : {1, 2, InferEngine::kMostSubmitted - 1})
      expect_same(expected, decode_greedily(*engine, prompts, 20, ahead), fmt::format("{} ahead", ahead));
    const std::vector<int32_t> blocks = {0, 1, 2, 3, 4, 5};  // of the first sequence
    for (int64_t t = 0; t < 20; ++t)
      EXPECT_EQ(engine->cache_contents().token(blocks, 3 + t), expected.tokens[static_cast<size_t>(t)][0]) << t;
  }
}

TEST(Feedback, RefusesRowsThatTheStepBeforeDidNotHave) {
  const auto engine = paged_engine();
  const std::vector<int32_t> prompt = {1, 2, 3}, none = {0}, blocks = {0, 1}, other = {2};
  const StepSequence first{.tokens = prompt, .blocks = blocks};
  StepSequence next{.tokens = none, .cached = 3, .blocks = blocks, .row = 0};
  EXPECT_THROW(engine->submit(std::vector{next}), InvalidArgument);  // no step before
  engine->submit(std::vector{first});
  next.row = 1;
  EXPECT_THROW(engine->submit(std::vector{next}), InvalidArgument);
  next.row = 0;
  next.sampling.frequency_penalty = 1;  // counts tokens that the host has not seen
  EXPECT_THROW(engine->submit(std::vector{next}), InvalidArgument);
  next.sampling = {};
  next.tokens = prompt;
  EXPECT_THROW(engine->submit(std::vector{next}), InvalidArgument);
  EXPECT_THROW(engine->forward(std::vector{StepSequence{.tokens = prompt, .blocks = other}}), InvalidArgument);
  engine->collect();
  EXPECT_THROW(engine->collect(), InvalidArgument);
  next.tokens = none;
  EXPECT_EQ(engine->forward(std::vector{next}).output_ids.size(), 1u);  // after its step was collected, too
}

TEST(Feedback, RefusesMoreStepsThanMayWait) {
  const auto engine = paged_engine();
  const std::vector<int32_t> prompt = {1, 2, 3}, none = {0}, blocks = {0, 1, 2};
  engine->submit(std::vector{StepSequence{.tokens = prompt, .blocks = blocks}});
  for (int64_t i = 1; i < InferEngine::kMostSubmitted; ++i)
    engine->submit(std::vector{StepSequence{.tokens = none, .cached = 2 + i, .blocks = blocks, .row = 0}});
  const StepSequence last{.tokens = none, .cached = 2 + InferEngine::kMostSubmitted, .blocks = blocks, .row = 0};
  EXPECT_THROW(engine->submit(std::vector{last}), InvalidArgument);
  engine->collect();
  engine->submit(std::vector{last});
}

TEST(ProgramSet, BucketsGrowByPowersOfTwoThenByEights) {
  std::vector<int64_t> buckets;
  for (int64_t n : {1, 2, 3, 4, 5, 8, 9, 16, 17, 30, 33, 40}) buckets.push_back(ProgramSet::bucket_of(n, 37));
  EXPECT_EQ(buckets, (std::vector<int64_t>{1, 2, 4, 4, 8, 8, 16, 16, 24, 32, 37, 37}));
}

TEST(ProgramSet, ProgramsShareOneArena) {
  const auto engine = paged_engine();
  const pipeline::Program &prefill = engine->prefill_program(), &decode = engine->decode_program();
  const auto* begin = static_cast<const std::byte*>(prefill.view(prefill.output("logits")).data);
  const auto* other = static_cast<const std::byte*>(decode.view(decode.output("logits")).data);
  EXPECT_LT(std::abs(begin - other), prefill.memory_plan().arena_bytes);
}

// A step that fills up its program: sequences that nobody asked for write nothing.
TEST(StepDescriptor, FillsUpWithSequencesThatAreStoredNowhere) {
  const auto engine = paged_engine();
  StepLayout layout(engine->decode_program());
  StepDescriptor descriptor(engine->device(), layout.size_bytes(), engine->cache_spec(), engine->limits().vocab);
  const std::vector<int32_t> token = {7}, blocks = {3};
  CacheContents contents(75, 4);
  descriptor.fill(layout, std::vector{StepSequence{.tokens = token, .blocks = blocks}}, false, contents, true);
  EXPECT_EQ(descriptor.symbols()[Symbol::sequences], 5);
  EXPECT_EQ(descriptor.symbols()[Symbol::tokens], 5);
  EXPECT_EQ(descriptor.symbols()[Symbol::logit_rows], 5);
  const auto* slots = reinterpret_cast<const int64_t*>(static_cast<std::byte*>(descriptor.device_data()) +
                                                       layout.offset(StepLayout::slots));
  EXPECT_EQ(std::vector<int64_t>(slots, slots + 5), (std::vector<int64_t>{12, -1, -1, -1, -1}));
}

}  // namespace feedback_test
}  // namespace eadem::engine
