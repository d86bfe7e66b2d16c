// SPDX-License-Identifier: Apache-2.0
//
// Ranks that are forked: they compute, end with the group, with an exception and with their parent, and are not forked
// from a process with threads.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <thread>

#include "eadem/core/device/cpu_device.h"
#include "eadem/distributed/forked_ranks.h"
#include "tests/support/refusal.h"

namespace eadem::distributed {
namespace {

// The sum of rank + 1 over all ranks.
float sum_of(Communicator& ranks) {
  CpuDevice device({.num_threads = 1});
  auto value = static_cast<float>(ranks.rank() + 1);
  ranks.all_reduce_sum(device, TensorView(&value, DType::f32, Shape{1}));
  return value;
}

void add_for_ever(const std::shared_ptr<Communicator>& ranks) {
  for (;;) sum_of(*ranks);
}

bool lives(pid_t process) { return kill(process, 0) == 0; }

TEST(ForkedRanks, ComputeAndEndWithTheGroup) {
  for (const int size : {1, 2, 4}) {
    std::vector<pid_t> processes;
    {
      const ForkedRanks ranks(size, add_for_ever);
      processes = ranks.processes();
      EXPECT_EQ(std::ssize(processes), size - 1);
      for (int i = 0; i < 3; ++i) EXPECT_EQ(sum_of(*ranks.communicator()), static_cast<float>(size * (size + 1) / 2));
      for (const pid_t process : processes) EXPECT_TRUE(lives(process));
    }
    for (const pid_t process : processes) EXPECT_FALSE(lives(process));
  }
}

TEST(ForkedRanks, AnExceptionOfARankReachesTheOthers) {
  const ForkedRanks ranks(3, [](const std::shared_ptr<Communicator>& own) {
    if (own->rank() == 2) throw OutOfMemory("7 bytes are too many");
    add_for_ever(own);
  });
  EXPECT_HAS(test::refusal([&] { add_for_ever(ranks.communicator()); }),
             fmt::format("RankFailed: rank 2 (process {}): 7 bytes are too many", ranks.processes()[1]));
}

TEST(ForkedRanks, ARankThatComputesIsEndedToo) {
  const ForkedRanks ranks(2, [](const std::shared_ptr<Communicator>&) {
    for (;;) usleep(1000);
  });
}

TEST(ForkedRanks, RefusesAProcessWithThreads) {
  std::atomic<bool> ends{false};
  std::thread thread([&] { ends.wait(false); });
  EXPECT_HAS(test::refusal([] { ForkedRanks ranks(2, add_for_ever); }),
             "InvalidArgument: 2 ranks are to be forked from a process with 2 threads; expected 1");
  EXPECT_EQ(sum_of(*ForkedRanks(1, add_for_ever).communicator()), 1.0f) << "one rank needs no fork";
  ends = true;
  ends.notify_one();
  thread.join();
  const ForkedRanks ranks(2, add_for_ever);
  EXPECT_EQ(sum_of(*ranks.communicator()), 3.0f);
}

// Ctrl-C and the end of a service go to all processes of a group.
TEST(ForkedRanks, LeaveSignalsToTheirParentAndStandardOutputAlone) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int before = dup(STDOUT_FILENO);
  fflush(stdout);
  dup2(ends[1], STDOUT_FILENO);
  {
    const ForkedRanks ranks(2, [](const std::shared_ptr<Communicator>& own) {
      raise(SIGINT);
      raise(SIGTERM);
      puts("a rank writes");
      fflush(stdout);
      sum_of(*own);
    });
    EXPECT_EQ(sum_of(*ranks.communicator()), 3.0f);
  }
  dup2(before, STDOUT_FILENO);
  close(before);
  close(ends[1]);
  char byte;
  EXPECT_EQ(read(ends[0], &byte, 1), 0) << "end of file, and nothing before";
  close(ends[0]);
}

TEST(ForkedRanks, DieWithAParentThatIsKilled) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // orphans become children of this process, which can wait for them
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t parent = fork();
  if (parent == 0) {
    const ForkedRanks ranks(3, add_for_ever);
    const auto& processes = ranks.processes();
    if (write(ends[1], processes.data(), 2 * sizeof(pid_t)) < 0) _exit(1);
    add_for_ever(ranks.communicator());
  }
  close(ends[1]);
  pid_t processes[2] = {};
  ASSERT_EQ(read(ends[0], processes, sizeof processes), static_cast<ssize_t>(sizeof processes));
  close(ends[0]);
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  for (const pid_t process : processes) {
    int status = 0;
    EXPECT_EQ(waitpid(process, &status, 0), process);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  }
  prctl(PR_SET_CHILD_SUBREAPER, 0);
}

}  // namespace
}  // namespace eadem::distributed
