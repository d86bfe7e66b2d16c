// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/machine/thread_pool.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <numeric>
#include <set>
#include <string>
#include <thread>

#include "eadem/core/device/cpu_device.h"

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

// Decode and prefill take turns, with pauses in which workers park.
TEST_P(ThreadPoolTest, StressCountsOfActiveWorkersChange) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 600; ++round) {
    if (round % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    pool.set_active_threads(1 + round * 7 % GetParam());
    EXPECT_EQ(pool.active_threads(), 1 + round * 7 % GetParam());
    std::vector<std::atomic<int>> runs(static_cast<size_t>(1 + round % 150));
    pool.parallel_for(static_cast<int64_t>(runs.size()),
                      [&](int64_t index, int) { runs[static_cast<size_t>(index)].fetch_add(1); });
    for (const auto& count : runs) ASSERT_EQ(count.load(), 1) << "round " << round;
  }
}

// After regions of all workers have had time to pass, those that are not active run nothing.
TEST_P(ThreadPoolTest, TheRestSleeps) {
  ThreadPool pool(GetParam());
  pool.set_active_threads(0);
  EXPECT_EQ(pool.active_threads(), 1) << "one works at least";
  pool.set_active_threads(GetParam() + 1);
  EXPECT_EQ(pool.active_threads(), GetParam()) << "and no more than there are";
  const int active = (GetParam() + 1) / 2;
  pool.set_active_threads(active);
  std::atomic<int> beyond{0};
  for (int round = 0; round < 300; ++round)
    pool.parallel_for(100, [&](int64_t, int worker) { beyond.fetch_add(worker >= active ? 1 : 0); });
  EXPECT_EQ(beyond.load(), 0);
}

// Seats in three nodes of a machine that is not there.
std::vector<Seat> seats_in_nodes(int count) {
  std::vector<Seat> seats;
  for (int w = 0; w < count; ++w) seats.push_back({-1, w * 3 / count});
  return seats;
}

TEST_P(ThreadPoolTest, OwnersAloneRunTheirShares) {
  ThreadPool pool(seats_in_nodes(GetParam()));
  for (int round = 0; round < 100; ++round) {
    if (round % 25 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    const int owners = 1 + round * 3 % GetParam();
    pool.set_active_threads(1 + round % GetParam());  // it does not matter who is active
    for (int64_t tasks : {0, 1, 2, 17, 200}) {
      std::vector<int> ran_by(static_cast<size_t>(tasks), -1);
      pool.parallel_own(tasks, owners,
                        [&](int64_t index, int worker) { ran_by[static_cast<size_t>(index)] += 1 + worker; });
      for (int w = 0; w < owners; ++w)
        for (int64_t i = ThreadPool::share_begin(tasks, owners, w); i < ThreadPool::share_begin(tasks, owners, w + 1);
             ++i)
          ASSERT_EQ(ran_by[static_cast<size_t>(i)], w) << i << " of " << tasks << " among " << owners;
    }
  }
}

TEST_P(ThreadPoolTest, StressKindsOfRegionsMix) {
  ThreadPool pool(seats_in_nodes(GetParam()));
  for (int64_t round = 0; round < 1000; ++round) {
    if (round % 250 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    std::vector<int64_t> products(static_cast<size_t>(1 + round % 97), -1);
    const auto task = [&](int64_t i, int) { products[static_cast<size_t>(i)] = i * round; };
    const auto size = static_cast<int64_t>(products.size());
    if (round % 3 == 0)
      pool.parallel_for(size, task);
    else if (round % 3 == 1)
      pool.parallel_shares(size, task);
    else
      pool.parallel_own(size, 1 + static_cast<int>(round) % GetParam(), task);
    for (int64_t i = 0; i < size; ++i) ASSERT_EQ(products[static_cast<size_t>(i)], i * round);
  }
}

// Every worker waits in its first task until all have one: so each has begun, and with its own share.
TEST(ThreadPool, WorkersBeginWithTheirOwnShares) {
  constexpr int kWorkers = 8;
  constexpr int64_t kTasks = 43;
  for (int round = 0; round < 20; ++round) {
    ThreadPool pool(seats_in_nodes(kWorkers));  // a new one: nobody lingers in an earlier region
    std::vector<std::vector<int64_t>> ran(kWorkers);
    std::atomic<int> begun{0};
    pool.parallel_shares(kTasks, [&](int64_t index, int worker) {
      auto& mine = ran[static_cast<size_t>(worker)];
      mine.push_back(index);
      if (mine.size() > 1) return;
      begun.fetch_add(1);
      while (begun.load() < kWorkers) std::this_thread::yield();
    });
    std::set<int64_t> all;
    for (int w = 0; w < kWorkers; ++w) {
      const auto& mine = ran[static_cast<size_t>(w)];
      ASSERT_FALSE(mine.empty());
      EXPECT_EQ(mine.front(), ThreadPool::share_begin(kTasks, kWorkers, w));
      // In order through its share, of which others may take some in between, before any other.
      const int64_t end = ThreadPool::share_begin(kTasks, kWorkers, w + 1);
      bool left = false;
      for (size_t i = 1; i < mine.size(); ++i) {
        left = left || mine[i] >= end || mine[i] < mine.front();
        EXPECT_TRUE(left || mine[i] > mine[i - 1]) << mine[i] << " after " << mine[i - 1];
      }
      all.insert(mine.begin(), mine.end());
    }
    EXPECT_EQ(all.size(), static_cast<size_t>(kTasks));
  }
}

// One worker holds its first task until all others are done: the caller does what is left of the others' shares, first
// in its own node.
TEST(ThreadPool, SharesLeftOverAreTakenInTheOwnNodeFirst) {
  // Workers 1 and 3 share a node with the caller.
  constexpr int64_t kTasks = 40;
  for (int round = 0; round < 20; ++round) {
    ThreadPool pool(std::vector<Seat>{{-1, 0}, {-1, 0}, {-1, 1}, {-1, 0}});
    std::atomic<int> begun{0}, done{0};
    std::vector<int64_t> by_caller;
    pool.parallel_shares(kTasks, [&](int64_t index, int worker) {
      if (worker == 0) by_caller.push_back(index);
      if (index % 10 == 0) {  // the first of a share: all four begin, then the other three wait for the caller
        begun.fetch_add(1);
        while (begun.load() < 4) std::this_thread::yield();
        if (worker != 0)
          while (done.load() < kTasks - 4) std::this_thread::yield();
      } else {
        done.fetch_add(1);
      }
    });
    std::vector<int64_t> expected(10);
    std::iota(expected.begin(), expected.end(), 0);
    for (int owner : {1, 3, 2})
      for (int64_t i = 1; i < 10; ++i) expected.push_back(owner * 10 + i);
    EXPECT_EQ(by_caller, expected);
  }
}

TEST(ThreadPool, CountsTheNodesOfItsFirstWorkers) {
  const ThreadPool pool(std::vector<Seat>{{-1, 0}, {-1, 0}, {-1, 2}, {-1, 0}, {-1, 1}});
  EXPECT_EQ(pool.num_nodes(1), 1);
  EXPECT_EQ(pool.num_nodes(2), 1);
  EXPECT_EQ(pool.num_nodes(3), 2);
  EXPECT_EQ(pool.num_nodes(5), 3);
  EXPECT_EQ(pool.node_of(2), 2);
}

TEST(ThreadPool, ZeroMeansOnePerCore) {
  EXPECT_EQ(ThreadPool(0).num_threads(), Topology::of_this_process().default_threads());
  EXPECT_EQ(ThreadPool(0, /*pin=*/false).num_threads(), Topology::of_this_process().default_threads());
}

// A processor that is not there is as none.
TEST(ThreadPool, SeatsThatAreNotThereDoNoHarm) {
  ThreadPool pool(std::vector<Seat>{{-1, 0}, {60000, 0}, {5000, 1}});
  std::atomic<int> count{0};
  pool.parallel_own(3, 3, [&](int64_t, int) { count.fetch_add(1); });
  EXPECT_EQ(count.load(), 3);
}

// QEMU, which runs the tests for other processors, takes memory of its own for every address that a program asks for:
// the stacks below would fill the machine.
#if defined(__x86_64__)
// Threads with stacks that no machine has room for cannot be created.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, size_t{1} << 46);
    EXPECT_EQ(pthread_setattr_default_np(&huge), 0);
    pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

TEST(ThreadPool, WithoutThreadsTheCallerWorksAlone) {
  std::vector<std::string> messages;
  const Logger log(LogLevel::warning, [&](LogLevel, std::string_view message) { messages.emplace_back(message); });
  const NoThreads none;
  ThreadPool pool(8, /*pin=*/true, log);
  EXPECT_EQ(pool.num_threads(), 1);
  EXPECT_EQ(pool.active_threads(), 1);
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_NE(messages[0].find("only 1 of 8 threads: the system refuses"), std::string::npos) << messages[0];
  int64_t sum = 0;
  pool.parallel_for(100, [&](int64_t index, int worker) { sum += index + worker; });
  EXPECT_EQ(sum, 4950);
  std::vector<int> own(1);
  pool.parallel_own(3, 1, [&](int64_t, int worker) { ++own[static_cast<size_t>(worker)]; });
  EXPECT_EQ(own[0], 3);
}

TEST(CpuDevice, CountsTheThreadsThatThereAre) {
  int warnings = 0;
  const NoThreads none;
  const CpuDevice device(
      {.num_threads = 6, .prefill_threads = 9, .log = Logger(LogLevel::warning, [&](LogLevel, auto) { ++warnings; })});
  EXPECT_EQ(device.decode_threads(), 1);
  EXPECT_EQ(device.prefill_threads(), 1);
  EXPECT_NE(device.description().find("1 thread"), std::string::npos);
  EXPECT_EQ(warnings, 1);
}
#endif

// Sanitizers need more address space than the limit, and QEMU, which runs the tests for other processors, has no such
// limit.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// A limit that some of the threads reach: the pool keeps half of those that could be created, and works.
TEST(ThreadPool, FewerThreadsWhereMemoryIsLimited) {
  const auto try_it = [] {
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t limit = static_cast<rlim_t>(pages) * 4096 + (rlim_t{200} << 20);  // 25 stacks of 8 MB
    const rlimit room{limit, limit};
    setrlimit(RLIMIT_AS, &room);
    std::string message;
    ThreadPool pool(64, /*pin=*/false,
                    Logger(LogLevel::warning, [&](LogLevel, std::string_view text) { message += text; }));
    std::atomic<int64_t> sum{0};
    pool.parallel_for(1000, [&](int64_t index, int) { sum += index; });
    const bool fewer = pool.num_threads() > 1 && pool.num_threads() < 32;
    const bool said = message.find(fmt::format("only {} of 64 threads", pool.num_threads())) == 0;
    _exit(fewer && said && sum == 499500 ? 0 : 1);
  };
  EXPECT_EXIT(try_it(), testing::ExitedWithCode(0), "");
}
#endif

}  // namespace
}  // namespace eadem
