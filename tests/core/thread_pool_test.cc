// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/thread_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <numeric>

namespace eadem {
namespace {

class ThreadPoolTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, testing::Values(1, 2, 7, 64));

TEST_P(ThreadPoolTest, RunsEveryIndexOnce) {
  ThreadPool pool(GetParam());
  EXPECT_EQ(pool.num_threads(), GetParam());
  for (int64_t size : {0, 1, 2, 6, 7, 8, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<size_t>(size));
    pool.parallel_for(size, [&](int64_t index, int) { runs[static_cast<size_t>(index)].fetch_add(1); });
    for (size_t i = 0; i < runs.size(); ++i) EXPECT_EQ(runs[i].load(), 1) << i << " of " << size;
  }
}

TEST_P(ThreadPoolTest, WorkersAreExclusive) {
  ThreadPool pool(GetParam());
  std::vector<std::atomic<int>> inside(static_cast<size_t>(GetParam()));
  std::atomic<int> violations{0};
  pool.parallel_for(5000, [&](int64_t, int worker) {
    if (worker < 0 || worker >= GetParam()) {
      violations.fetch_add(1);
      return;
    }
    if (inside[static_cast<size_t>(worker)].fetch_add(1) != 0) violations.fetch_add(1);
    inside[static_cast<size_t>(worker)].fetch_sub(1);
  });
  EXPECT_EQ(violations.load(), 0);
}

TEST_P(ThreadPoolTest, RangesCoverWithoutOverlap) {
  ThreadPool pool(GetParam());
  for (int64_t size : {0, 1, 5, 63, 64, 65, 1001})
    for (int64_t grain : {1, 10, 5000}) {
      std::vector<std::atomic<int>> covered(static_cast<size_t>(size));
      std::atomic<int64_t> shortest{size};
      pool.parallel_ranges(size, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) covered[static_cast<size_t>(i)].fetch_add(1);
        if (end != size && end - begin < shortest.load()) shortest.store(end - begin);
      });
      for (const auto& count : covered) EXPECT_EQ(count.load(), 1);
      EXPECT_GE(shortest.load(), std::min(grain, size)) << "only the last range may be shorter than the grain";
    }
}

// Writes of one region are seen by the next, whoever runs it. Thousands of short regions, as in a decode step.
TEST_P(ThreadPoolTest, StressRegionsSeeEachOther) {
  ThreadPool pool(GetParam());
  constexpr int64_t kSize = 64;
  std::vector<int64_t> even(kSize, 0), odd(kSize, 0);
  for (int64_t round = 0; round < 1000; ++round) {
    const std::vector<int64_t>& from = round % 2 == 0 ? even : odd;
    std::vector<int64_t>& to = round % 2 == 0 ? odd : even;
    pool.parallel_for(
        kSize, [&](int64_t i, int) { to[static_cast<size_t>(i)] = from[static_cast<size_t>((i + 1) % kSize)] + 1; });
  }
  for (int64_t value : even) EXPECT_EQ(value, 1000);
}

// A worker that wakes after its region has ended must not touch the region's task, whose frame is gone.
TEST_P(ThreadPoolTest, StressTasksEndWithTheirRegion) {
  ThreadPool pool(GetParam());
  const auto region = [&](int64_t size, int64_t factor) {
    std::vector<int64_t> products(static_cast<size_t>(size), -1);
    pool.parallel_for(size, [&](int64_t i, int) { products[static_cast<size_t>(i)] = i * factor; });
    for (int64_t i = 0; i < size; ++i) ASSERT_EQ(products[static_cast<size_t>(i)], i * factor);
  };
  for (int64_t round = 0; round < 3000; ++round) {
    if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));  // workers park
    region(2 + round % 37, round + 1);
  }
}

TEST_P(ThreadPoolTest, WakesAfterParking) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(round % 3));  // longer than workers spin, or not
    std::atomic<int64_t> sum{0};
    pool.parallel_for(100, [&](int64_t index, int) { sum.fetch_add(index); });
    EXPECT_EQ(sum.load(), 4950);
  }
}

TEST_P(ThreadPoolTest, StartsAndStopsWithoutWork) {
  for (int i = 0; i < 100 / GetParam(); ++i) {
    ThreadPool idle(GetParam());
    ThreadPool once(GetParam(), /*pin=*/false);
    std::atomic<int> count{0};
    once.parallel_for(3, [&](int64_t, int) { count.fetch_add(1); });
    EXPECT_EQ(count.load(), 3);
  }
}

TEST(ThreadPool, ZeroMeansOnePerProcessor) { EXPECT_GE(ThreadPool(0).num_threads(), 1); }

}  // namespace
}  // namespace eadem
