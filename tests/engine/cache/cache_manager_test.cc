// SPDX-License-Identifier: Apache-2.0
//
// Blocks and slots without a model: reference counts, how many blocks a window keeps, and how memory is divided into
// groups.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "eadem/engine/cache/cache_manager.h"
#include "eadem/engine/cache/cache_plan.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace {

using modules::StateSpec;
using modules::WindowGroup;
using test::refusal;

TEST(BlockPool, ABlockIsFreeWhenItsLastReferenceIsDropped) {
  BlockPool pool(2);
  EXPECT_EQ(pool.take(), 0);
  EXPECT_EQ(pool.take(), 1);
  EXPECT_EQ(pool.take(), std::nullopt);
  pool.share(0);
  EXPECT_EQ(pool.references(0), 2);
  pool.release(0);
  EXPECT_EQ(pool.num_free(), 0);
  pool.release(0);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(pool.take(), 0);
}

TEST(BlockPoolDeath, ReferencesAreCounted) {
  BlockPool pool(1);
  EXPECT_DEATH(pool.release(0), "block 0 of 1 is not taken");
  EXPECT_DEATH(pool.share(1), "block 1 of 1");
  pool.take();
  pool.release(0);
  EXPECT_DEATH(pool.release(0), "block 0 of 1 is not taken");
}

// What CacheManager promises of one sequence, whatever its steps are: every position that a token reads has a block,
// no two places share one, and fewer than window + block_size tokens are kept between steps.
TEST(CacheManager, AWindowKeepsFewerTokensThanItselfAndABlock) {
  for (const int64_t window : {1, 2, 3, 4, 5, 8, 13})
    for (const int64_t block_size : {1, 2, 4, 5, 16}) {
      SCOPED_TRACE(fmt::format("window {}, blocks of {}", window, block_size));
      constexpr int64_t kLength = 200;
      const WindowGroup group{window, window_blocks(window, block_size, 1, 9)};
      EXPECT_LT(group.num_blocks * block_size, kLength);
      CacheManager manager((kLength + block_size - 1) / block_size, block_size, {&group, 1});
      SequenceBlocks sequence;
      manager.reserve(sequence, kLength);
      manager.extend(sequence, kLength);
      std::mt19937 random(static_cast<uint32_t>(window * 100 + block_size));
      int64_t step = 0;
      for (int64_t cached = 0; cached < kLength; cached += step) {
        step = std::min<int64_t>(kLength - cached, cached < 100 ? 1 + random() % 9 : 1);
        manager.extend_windows(sequence, cached + step);
        const std::vector<int32_t>& table = sequence.windows[0];
        std::set<int32_t> named;
        for (int64_t place = 0; place < std::ssize(table); ++place) {
          const int32_t block = table[static_cast<size_t>(place)];
          const int64_t begin = place * block_size, oldest = std::max<int64_t>(0, cached - window + 1);
          if (begin + block_size > oldest && begin < cached + step) {
            EXPECT_NE(block, kNoBlock) << place;
          }
          if (block != kNoBlock) {
            EXPECT_TRUE(named.insert(block).second) << place;
            EXPECT_LT(block, group.num_blocks);
          }
        }
        EXPECT_LT((std::ssize(named) - 2) * block_size, window + step);
        manager.retire_windows(sequence, cached + step);
        // Tokens from the first one that is held to the last one.
        const int64_t kept = cached + step - sequence.held[0].begin * block_size;
        EXPECT_LT(kept, window + block_size);
        EXPECT_LE(group.num_blocks - manager.num_free(0), (window - 1 + block_size - 1) / block_size + 1);
      }
      manager.release(sequence);
      EXPECT_EQ(manager.num_free(0), group.num_blocks);
      EXPECT_EQ(manager.num_free(), manager.blocks_for(kLength));
    }
}

// Sequences that advance by any division of the step's tokens find their blocks in window_blocks().
TEST(CacheManager, WindowBlocksSufficeForEveryStep) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int64_t count) { return static_cast<int64_t>(random() % static_cast<uint64_t>(count)); };
    const int64_t sequences = 1 + below(4), block_size = 1 + below(6), window = 1 + below(12),
                  step_tokens = sequences + below(20);
    const WindowGroup group{window, window_blocks(window, block_size, sequences, step_tokens)};
    constexpr int64_t kLength = 120;
    CacheManager manager(sequences * kLength, block_size, {&group, 1});
    std::vector<SequenceBlocks> blocks(static_cast<size_t>(sequences));
    std::vector<int64_t> cached(blocks.size());
    for (SequenceBlocks& each : blocks) {
      manager.reserve(each, kLength);
      manager.extend(each, kLength);
    }
    for (int step = 0; step < 30; ++step) {
      std::vector<int64_t> ends = cached;
      int64_t budget = step_tokens;
      for (size_t s = 0; s < blocks.size(); ++s) {
        const int64_t count = std::min({budget, kLength - cached[s], 1 + below(step_tokens)});
        budget -= count;
        ends[s] += count;
        if (count > 0) manager.extend_windows(blocks[s], ends[s]);  // aborts when no block is free
      }
      const bool abandoned = below(4) == 0;
      if (!abandoned) cached = ends;
      for (size_t s = 0; s < blocks.size(); ++s) manager.retire_windows(blocks[s], cached[s]);
    }
  }
}

TEST(CacheManager, MovedBlocksAreThoseThatAreHeld) {
  const WindowGroup group{6, 20};
  CacheManager manager(20, 4, {&group, 1}, 2);
  SequenceBlocks from, to;
  manager.reserve(from, 40);
  manager.extend(from, 40);
  manager.extend_windows(from, 20);
  manager.retire_windows(from, 20);
  EXPECT_TRUE(manager.holds_windows(from, 20));
  EXPECT_FALSE(manager.holds_windows(from, 16)) << "positions 11 … 15 are gone in part";
  const SequenceBlocks before = from;
  EXPECT_EQ(before.held[0].begin, 3);
  manager.reserve(to, 28);
  manager.move(to, from, 28);
  EXPECT_TRUE(from.all.empty());
  EXPECT_EQ(std::ssize(to.all), 7);
  EXPECT_EQ(to.slot, before.slot);
  for (size_t place = 0; place < 7; ++place) EXPECT_EQ(to.windows[0][place], before.windows[0][place]);
  EXPECT_TRUE(manager.holds_windows(to, 20));
  manager.release(to);
  manager.release(from);
  EXPECT_EQ(manager.num_free(), 20);
  EXPECT_EQ(manager.num_free(0), 20);
}

// --- How memory is divided.

CachePlan plan(const PagedKVCacheConfig& config, const StateBytes& bytes, int64_t context = 1000) {
  return plan_cache(
      {.config = config, .bytes = bytes, .context = context, .block_size = 16, .max_num_batched_tokens = 64});
}

TEST(CachePlan, WithoutWindowsThereIsOneGroup) {
  const CachePlan p = plan({.max_kv_memory_bytes = 10 * 16 * 100 + 1}, {.per_token = 100});
  EXPECT_EQ(p.spec.num_blocks, 10);
  EXPECT_TRUE(p.spec.windows.empty());
  EXPECT_EQ(p.max_length, 160);
  EXPECT_HAS(refusal([] { plan({.max_kv_memory_bytes = 1599}, {.per_token = 100}); }),
             "max_kv_memory_bytes is 1599; one block of 16 tokens takes 1600");
}

TEST(CachePlan, AWindowGetsWhatSequencesHoldAndTheRestIsForTheOthers) {
  const StateBytes bytes{.per_token = 100, .windows = {{32, 500}}};
  // ceil(31 / 16) + 2 blocks of each of two sequences, four for the 64 tokens of a step, and the null block.
  const int64_t window = 13 * 16 * 500;
  const CachePlan p = plan({.max_kv_memory_bytes = window + 50 * 16 * 100, .max_batch_size = 2}, bytes);
  ASSERT_EQ(p.spec.windows, (std::vector<WindowGroup>{{32, 12}}));
  EXPECT_EQ(p.spec.num_blocks, 50);
  EXPECT_EQ(p.max_length, 800);
}

TEST(CachePlan, WithLittleMemoryAWindowHasAsManyBlocksAsTheOthers) {
  const StateBytes bytes{.per_token = 100, .windows = {{32, 500}}};
  const CachePlan p = plan({.max_kv_memory_bytes = 5 * 16 * 600 + 16 * 500, .max_batch_size = 8}, bytes);
  EXPECT_EQ(p.spec.num_blocks, 5);
  EXPECT_EQ(p.spec.windows[0].num_blocks, 5);
}

TEST(CachePlan, AWindowAsLongAsTheSequencesIsNone) {
  const StateBytes bytes{.per_token = 100, .windows = {{64, 500}, {512, 50}}};
  const CachePlan p = plan({.max_batch_size = 1, .max_cache_len = 512}, bytes);
  ASSERT_EQ(p.spec.windows.size(), 1u);
  EXPECT_EQ(p.spec.windows[0].window, 64);
  EXPECT_EQ(p.spec.group_of(64), 1u);
  EXPECT_EQ(p.spec.group_of(512), 0u);
  EXPECT_EQ(p.spec.num_blocks, 32);
}

TEST(CachePlan, AModelOfWindowsAloneHasRoomForTheContext) {
  const StateBytes bytes{.windows = {{32, 500}}};
  const CachePlan p = plan({.max_kv_memory_bytes = 13 * 16 * 500 + 1000 * 16 * 4, .max_batch_size = 2}, bytes);
  EXPECT_EQ(p.max_length, 1000);
  EXPECT_EQ(p.spec.num_blocks, 2 * 63);
  EXPECT_EQ(p.spec.windows[0].num_blocks, 12);
}

TEST(CachePlan, AContiguousCacheKeepsEverything) {
  const CachePlan p = plan_cache(
      {.config = StaticKVCacheConfig{.max_batch_size = 3}, .bytes = {.windows = {{32, 500}}}, .context = 100});
  EXPECT_TRUE(p.spec.windows.empty());
  EXPECT_EQ(p.spec.num_blocks, 3);
  EXPECT_EQ(p.spec.block_size, 100);
}

TEST(StateBytes, AddUpWhatLayersDeclare) {
  const std::vector<StateSpec> states = {
      {.name = "k", .row = TensorType(DType::f32, {2, 8})},
      {.name = "local_k", .row = TensorType(DType::bf16, {2, 8}), .window = 5},
      {.name = "latent", .row = TensorType(DType::bf16, {1, 576})},
      {.name = "conv", .kind = StateSpec::Kind::per_sequence, .row = TensorType(DType::f32, {3, 10})}};
  const StateBytes bytes = StateBytes::of(states);
  EXPECT_EQ(bytes.per_token, 64 + 1152);
  EXPECT_EQ(bytes.windows, (std::map<int64_t, int64_t>{{5, 32}}));
  EXPECT_EQ(bytes.per_sequence, 120);
  EXPECT_EQ(bytes.of_sequence(3), 3 * 1216 + 3 * 32 + 120);
  EXPECT_EQ(bytes.of_sequence(100), 100 * 1216 + 5 * 32 + 120);
}

}  // namespace
}  // namespace eadem::engine
