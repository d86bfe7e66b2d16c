// SPDX-License-Identifier: Apache-2.0
//
// Ranks that run a program, which is this one with other arguments: they compute beside threads of their parent, end
// with the group, with what fails in them and with their parent, and inherit nothing else.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <thread>

#include "eadem/core/device/cpu_device.h"
#include "eadem/distributed/spawned_mesh.h"
#include "tests/distributed/mesh_sums.h"
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

// What a rank does: `what` is the first argument of this program, which has the others behind it.
void rank_program(const std::string& what, const std::shared_ptr<Communicator>& ranks) {
  if (what == "throw" && ranks->rank() == 2) throw OutOfMemory("7 bytes are too many");
  if (what == "return") return;
  if (what.starts_with("lacks ") && fcntl(std::stoi(what.substr(6)), F_GETFD) >= 0)
    throw InvalidArgument("descriptor {} is open here", what.substr(6));
  if (what == "signals") raise(SIGINT), raise(SIGTERM);
  for (;;) sum_of(*ranks);
}

std::vector<std::string> program(const std::string& what) {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  return {std::string(path, static_cast<size_t>(length)), "rank", what};
}

using test::sum_over_mesh;

constexpr MeshShape kMesh{.dp = 2, .tp = 2, .ep = 2};  // twelve groups besides that of all

// What a rank of kMesh does.
void mesh_program(const std::string& what, const Mesh& mesh, Communicator& all) {
  if (sum_over_mesh(mesh, all.rank()) != 28) throw InvalidArgument("rank {} sums up something else", all.rank());
  if (what == "mesh throw" && all.rank() == 7) throw OutOfMemory("7 bytes are too many");
  for (;;) sum_over_mesh(mesh, all.rank());
}

bool lives(pid_t process) { return kill(process, 0) == 0; }

TEST(SpawnedRanks, ComputeBesideThreadsAndEndWithTheGroup) {
  std::atomic<bool> ends{false};
  std::thread thread([&] { ends.wait(false); });
  for (const int size : {1, 2, 4}) {
    std::vector<pid_t> processes;
    {
      const SpawnedRanks ranks(size, program("add"));
      processes = ranks.processes();
      EXPECT_EQ(std::ssize(processes), size - 1);
      for (int i = 0; i < 3; ++i) EXPECT_EQ(sum_of(*ranks.communicator()), static_cast<float>(size * (size + 1) / 2));
      for (const pid_t process : processes) EXPECT_TRUE(lives(process));
    }
    for (const pid_t process : processes) EXPECT_FALSE(lives(process));
  }
  ends = true;
  ends.notify_one();
  thread.join();
}

TEST(SpawnedRanks, GroupsStandBesideEachOther) {
  const SpawnedRanks two(2, program("add")), three(3, program("signals"));
  EXPECT_EQ(sum_of(*two.communicator()), 3.0f);
  EXPECT_EQ(sum_of(*three.communicator()), 6.0f) << "a rank leaves Ctrl-C to its parent";
  EXPECT_EQ(sum_of(*two.communicator()), 3.0f);
}

// The system ends a child with the thread that started it, which need not be the one that made the object.
TEST(SpawnedRanks, OutliveTheThreadThatMadeThem) {
  std::unique_ptr<SpawnedRanks> ranks;
  std::thread([&] { ranks = std::make_unique<SpawnedRanks>(2, program("add")); }).join();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(sum_of(*ranks->communicator()), 3.0f);
}

TEST(SpawnedRanks, WhatFailsInARankReachesTheOthers) {
  const auto run = [](int size, const std::vector<std::string>& command) {
    return test::refusal([&] {
      const SpawnedRanks ranks(size, command);
      for (;;) sum_of(*ranks.communicator());
    });
  };
  EXPECT_HAS(run(3, program("throw")), "RankFailed: rank 2 (process ");
  EXPECT_HAS(run(3, program("throw")), "): 7 bytes are too many");
  EXPECT_HAS(run(2, program("return")), "RankFailed: rank 1 has left the group");
  // Programs that end before they join are not waited for.
  EXPECT_HAS(run(2, {"/bin/false"}), ") died: exit status 1");
  EXPECT_HAS(run(2, {"/no/such/program"}),
             "IoError: /no/such/program: the process of rank 1 of 2 cannot be made: No such");
  EXPECT_HAS(run(2, {}), "InvalidArgument");
  EXPECT_EQ(sum_of(*SpawnedRanks(2, program("add")).communicator()), 3.0f) << "a new group works";
}

TEST(SpawnedRanks, ARankThatIsKilledIsMissedAtOnce) {
  const SpawnedRanks ranks(2, program("add"), {.join_limit_s = 60, .silence_limit_s = 1000});
  EXPECT_EQ(sum_of(*ranks.communicator()), 3.0f);
  kill(ranks.processes()[0], SIGKILL);
  EXPECT_HAS(test::refusal([&] {
               for (;;) sum_of(*ranks.communicator());
             }),
             fmt::format("RankFailed: rank 1 (process {}) died: signal 9 (Killed)", ranks.processes()[0]));
}

TEST(SpawnedRanks, InheritNoDescriptors) {
  const int inherited = fcntl(STDERR_FILENO, F_DUPFD, 100);  // without FD_CLOEXEC
  const SpawnedRanks ranks(2, program(fmt::format("lacks {}", inherited)));
  EXPECT_EQ(test::refusal([&] { sum_of(*ranks.communicator()); }), "");
  close(inherited);
}

TEST(SpawnedMesh, RanksMeetAlongEachAxis) {
  // A descriptor below those of the groups, and gaps, so that they are not where ranks get them.
  const int before = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  std::vector<pid_t> processes;
  {
    const SpawnedMesh mesh(kMesh, program("mesh"));
    close(before);
    processes = mesh.processes();
    EXPECT_EQ(std::ssize(processes), 7);
    EXPECT_EQ(mesh.mesh().num_ranks(), 8);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(sum_over_mesh(mesh.mesh(), 0), 28);
    const SpawnedMesh beside(kMesh, program("mesh"));
    EXPECT_EQ(sum_over_mesh(beside.mesh(), 0), 28);
  }
  for (const pid_t process : processes) EXPECT_FALSE(lives(process));
}

TEST(SpawnedMesh, WhatFailsReachesRanksAlongEveryAxis) {
  EXPECT_HAS(test::refusal([&] {
               // No axis of rank 0 has rank 7.
               const SpawnedMesh mesh(kMesh, program("mesh throw"));
               for (;;) sum_over_mesh(mesh.mesh(), 0);
             }),
             "): 7 bytes are too many");
  const SpawnedMesh mesh(kMesh, program("mesh"));
  EXPECT_EQ(sum_over_mesh(mesh.mesh(), 0), 28);
  kill(mesh.processes()[6], SIGKILL);
  EXPECT_HAS(test::refusal([&] {
               for (;;) sum_over_mesh(mesh.mesh(), 0);
             }),
             fmt::format("RankFailed: rank 7 (process {}) died: signal 9", mesh.processes()[6]));
}

TEST(SpawnedRanks, DieWithAParentThatIsKilled) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // orphans become children of this process, which can wait for them
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t parent = fork();
  if (parent == 0) {
    const SpawnedRanks ranks(3, program("add"));
    const auto& processes = ranks.processes();
    if (write(ends[1], processes.data(), 2 * sizeof(pid_t)) < 0) _exit(1);
    for (;;) sum_of(*ranks.communicator());
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

TEST(SpawnedRanks, AForkedProcessIsNoRank) {
  auto ranks = std::make_unique<SpawnedRanks>(2, program("add"));
  const pid_t child = fork();
  if (child == 0) {
    const std::string refused = test::refusal([&] { sum_of(*ranks->communicator()); });
    ranks.reset();  // ends nothing
    _exit(refused.find("was forked from it and is no rank") != std::string::npos ? 7 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  EXPECT_EQ(sum_of(*ranks->communicator()), 3.0f);
}

TEST(SpawnedRanks, AnotherDescriptorIsNoGroup) {
  const auto nothing = [](const std::shared_ptr<Communicator>&) {};
  const int file = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  const std::string parent = std::to_string(getppid());
  for (const std::string& descriptor : {std::to_string(file), std::string("9999"), std::string("-1"), std::string("x")})
    EXPECT_HAS(test::refusal([&] { live_as_spawned_rank(descriptor, "1", parent, nothing); }), "InvalidArgument");
  close(file);
}

}  // namespace

int run_rank(int count, char** arguments) {
  if (count != 6) return 2;
  const std::string what = arguments[2];
  if (what.starts_with("mesh"))
    live_on_spawned_mesh(
        kMesh, arguments[3], arguments[4], arguments[5],
        [&](const Mesh& mesh, const std::shared_ptr<Communicator>& all) { mesh_program(what, mesh, *all); });
  else
    live_as_spawned_rank(arguments[3], arguments[4], arguments[5],
                         [&](const std::shared_ptr<Communicator>& ranks) { rank_program(what, ranks); });
  return 0;
}

}  // namespace eadem::distributed

int main(int count, char** arguments) {
  if (count > 1 && std::string(arguments[1]) == "rank") return eadem::distributed::run_rank(count, arguments);
  ::testing::InitGoogleTest(&count, arguments);
  return RUN_ALL_TESTS();
}
