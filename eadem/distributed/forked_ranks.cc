// SPDX-License-Identifier: Apache-2.0
#include "eadem/distributed/forked_ranks.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
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

// Prepares the process of a rank. False: the parent is gone.
bool settle(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) return false;  // it died before the call
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGTERM, SIG_IGN);
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  if (nothing < 0) return false;
  dup2(nothing, STDIN_FILENO);
  dup2(nothing, STDOUT_FILENO);
  close(nothing);
  return true;
}

// The life of a rank. Returns when its process is to end.
void live(ProcessGroup& group, int rank, const ForkedRanks::Body& body) {
  try {
    body(group.join(rank));
  } catch (const RankFailed&) {
    // The others know: rank 0 has left, or some rank has failed.
  } catch (const std::exception& error) {
    group.fail(fmt::format("rank {} (process {}): {}", rank, getpid(), error.what()));
  } catch (...) {
    group.fail(fmt::format("rank {} (process {}) ended with an unknown exception", rank, getpid()));
  }
}

}  // namespace

ForkedRanks::ForkedRanks(int size, const Body& body, ProcessGroupOptions options) : group_(size, options) {
  if (size > 1) require_one_thread(size);
  const pid_t parent = getpid();
  for (int rank = 1; rank < size; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      if (settle(parent)) live(group_, rank, body);
      _exit(0);
    }
    if (child < 0) {
      const std::string reason = std::strerror(errno);
      end();
      throw IoError("the process of rank {} of {} cannot be made: {}", rank, size, reason);
    }
    processes_.push_back(child);
  }
  try {
    communicator_ = group_.join(0);
  } catch (...) {
    end();
    throw;
  }
}

ForkedRanks::~ForkedRanks() { end(); }

void ForkedRanks::end() {
  communicator_.reset();
  group_.fail("rank 0 has ended the group");
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  for (const pid_t process : processes_) {
    while (waitpid(process, nullptr, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > limit) kill(process, SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  processes_.clear();
}

}  // namespace eadem::distributed
