// SPDX-License-Identifier: Apache-2.0
#include "eadem/distributed/forked_ranks.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>

namespace eadem::distributed {

namespace {

void require_one_thread(int ranks) {
  namespace fs = std::filesystem;
  // The system removes a thread a little after it was joined.
  const auto limit = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
  for (;;) {
    std::error_code error;
    const fs::directory_iterator tasks("/proc/self/task", error);
    if (error) throw IoError("/proc/self/task, which lists the threads of a process: {}", error.message());
    const auto threads = std::distance(fs::begin(tasks), fs::end(tasks));
    if (threads == 1) return;
    if (std::chrono::steady_clock::now() > limit)
      throw InvalidArgument("{} ranks are to be forked from a process with {} threads; expected 1 thread", ranks,
                            threads);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

ForkedRanks::ForkedRanks(int size, const Body& body, ProcessGroupOptions options, std::vector<ProcessGroup*> others)
    : RankProcesses(size, options, std::move(others)) {
  if (size > 1) require_one_thread(size);
  const pid_t parent = getpid();
  std::vector<pid_t> processes;
  for (int rank = 1; rank < size; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      live_as_rank(group(), rank, parent, body);
      _exit(0);
    }
    if (child < 0) {
      const std::string reason = std::strerror(errno);
      group().fail("a rank could not be started");
      join(std::move(processes));
      throw IoError("the process of rank {} of {} cannot be made: {}", rank, size, reason);
    }
    processes.push_back(child);
  }
  join(std::move(processes));
}

}  // namespace eadem::distributed
