// SPDX-License-Identifier: Apache-2.0
//
// Ranks that a launcher has started: here this test is the launcher, which sets what Open MPI sets.
// tests/cli/ranks_test.py runs mpirun itself.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "eadem/core/device/cpu_device.h"
#include "eadem/distributed/launched_ranks.h"
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

void set_launch(const char* rank, const char* size, const char* local_size) {
  setenv("OMPI_COMM_WORLD_RANK", rank, 1);
  setenv("OMPI_COMM_WORLD_SIZE", size, 1);
  setenv("OMPI_COMM_WORLD_LOCAL_SIZE", local_size, 1);
}

// What a program does: 20 + the sum as rank 0 sees it, or 40 when another rank does not come.
int run_program() {
  const auto add_for_ever = [](const std::shared_ptr<Communicator>& ranks) {
    for (;;) sum_of(*ranks);
  };
  try {
    const LaunchedRanks ranks(launch_of_this_process().value(), add_for_ever, {.join_limit_s = 2});
    return 20 + static_cast<int>(sum_of(*ranks.communicator()));
  } catch (const RankFailed&) {
    return 40;
  }
}

// The exit codes of so many processes, of which rank `absent` is not started.
std::vector<int> launch(int size, int absent = -1) {
  std::vector<pid_t> processes;
  for (int rank = size - 1; rank >= 0; --rank) {  // rank 0 comes last, and is waited for
    if (rank == absent) continue;
    const pid_t child = fork();
    if (child == 0) {
      const std::string count = std::to_string(size);
      set_launch(std::to_string(rank).c_str(), count.c_str(), count.c_str());
      _exit(run_program());
    }
    processes.push_back(child);
  }
  std::vector<int> codes;
  for (const pid_t process : processes) {
    int status = 0;
    waitpid(process, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return codes;
}

TEST(LaunchedRanks, FindEachOtherAndEndWithRank0) {
  EXPECT_EQ(launch(1), std::vector{21});
  EXPECT_EQ(launch(2), (std::vector{0, 23}));
  EXPECT_EQ(launch(4), (std::vector{0, 0, 0, 30}));
}

TEST(LaunchedRanks, ARankThatDoesNotComeIsMissed) {
  EXPECT_EQ(launch(3, 1), (std::vector{0, 40}));
  EXPECT_EQ(launch(2, 0), std::vector{1}) << "without rank 0 there is nothing to do";
}

TEST(LaunchedRanks, WhatALauncherSaysIsChecked) {
  const auto says = [](const char* rank, const char* size, const char* local_size) {
    set_launch(rank, size, local_size);
    return test::refusal([] { launch_of_this_process(); });
  };
  EXPECT_EQ(says("1", "2", "2"), "");
  EXPECT_EQ(launch_of_this_process()->rank, 1);
  EXPECT_EQ(launch_of_this_process()->size, 2);
  EXPECT_HAS(says("0", "4", "2"), "Unsupported: the launcher started 4 ranks, 2 of them on this host");
  EXPECT_HAS(says("2", "2", "2"), "InvalidArgument: the launcher says that this is rank 2 of 2");
  EXPECT_HAS(says("one", "2", "2"), "InvalidArgument: the launcher set OMPI_COMM_WORLD_RANK to 'one'");
  EXPECT_HAS(says("-1", "2", "2"), "InvalidArgument");
  unsetenv("OMPI_COMM_WORLD_RANK");
  EXPECT_FALSE(launch_of_this_process().has_value());
  unsetenv("OMPI_COMM_WORLD_SIZE");
  unsetenv("OMPI_COMM_WORLD_LOCAL_SIZE");
}

}  // namespace
}  // namespace eadem::distributed
