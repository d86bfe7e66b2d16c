// SPDX-License-Identifier: Apache-2.0
#include "eadem/distributed/rank_processes.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <future>

namespace eadem::distributed {

namespace {

constexpr auto kLookInterval = std::chrono::milliseconds(50);  // at the children
constexpr auto kEndInterval = std::chrono::milliseconds(2);    // likewise, while they end
constexpr auto kEndLimit = std::chrono::seconds(1);            // then they are killed

// Signals are for the threads that the program knows.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_{};
};

// How a process ended that waitpid gave `status` of.
std::string ending(int status) {
  if (WIFSIGNALED(status)) return fmt::format("signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
  return fmt::format("exit status {}", WEXITSTATUS(status));
}

// Prepares the process of a rank. False: the parent is gone.
bool settle(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) return false;  // it died before the call
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGTERM, SIG_IGN);
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, nullptr);
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  if (nothing < 0) return false;
  dup2(nothing, STDIN_FILENO);
  dup2(nothing, STDOUT_FILENO);
  close(nothing);
  return true;
}

}  // namespace

RankProcesses::RankProcesses(int size, const ProcessGroupOptions& options, std::vector<ProcessGroup*> others)
    : size_(size), owner_(getpid()), group_(size, options), others_(std::move(others)) {}

RankProcesses::~RankProcesses() { end(); }

void RankProcesses::fail(const std::string& reason) {
  group_.fail(reason);
  for (ProcessGroup* group : others_) group->fail(reason);
}

void RankProcesses::join(std::vector<pid_t> processes) {
  std::vector<Child> children;
  for (const pid_t process : processes) children.push_back({static_cast<int>(children.size()) + 1, process});
  processes_ = std::move(processes);
  const NoSignals none;
  if (!children.empty()) keeper_ = std::thread([this, children, end = end_] { keep(children, end); });
  if (std::ssize(processes_) == size_ - 1) join_group();
}

void RankProcesses::start_on_thread(const std::function<pid_t(int)>& start) {
  std::promise<void> started;
  std::future<void> result = started.get_future();
  {
    const NoSignals none;
    keeper_ = std::thread([this, start, started = std::move(started), end = end_]() mutable {
      std::vector<Child> children;
      try {
        for (int rank = 1; rank < size_; ++rank) {
          children.push_back({rank, start(rank)});
          processes_.push_back(children.back().process);
        }
        started.set_value();
      } catch (...) {
        group_.fail("a rank could not be started");
        started.set_exception(std::current_exception());
      }
      keep(children, end);
    });
  }
  try {
    result.get();
  } catch (...) {
    end();
    throw;
  }
  join_group();
}

void RankProcesses::join_group() {
  try {
    communicator_ = group_.join(0);
  } catch (...) {
    end();
    throw;
  }
}

// Waits for the children, so that one that dies is known to have died, until all have ended at the end of this object.
void RankProcesses::keep(std::vector<Child> children, const std::shared_ptr<End>& end) {
  const auto look = [&](Child& child) {
    int status = 0;
    const pid_t found = waitpid(child.process, &status, WNOHANG);
    if (found == 0) return;
    child.ended = true;
    // Not this thread's to know when somebody else has waited for it. A rank that returns leaves the group by itself.
    if (found < 0 || status != 0)
      fail(fmt::format("rank {} (process {}) died: {}", child.rank, child.process,
                       found < 0 ? "its end was taken by another wait" : ending(status)));
  };
  const auto look_at_all = [&] {
    for (Child& child : children)
      if (!child.ended) look(child);
  };
  std::unique_lock lock(end->mutex);
  while (!end->changed.wait_for(lock, kLookInterval, [&] { return end->has_come; })) look_at_all();
  const auto limit = std::chrono::steady_clock::now() + kEndLimit;
  const auto has_ended = [](const Child& child) { return child.ended; };
  for (;;) {
    look_at_all();
    if (std::all_of(children.begin(), children.end(), has_ended)) return;
    if (std::chrono::steady_clock::now() > limit)
      for (const Child& child : children)
        if (!child.ended) kill(child.process, SIGKILL);
    std::this_thread::sleep_for(kEndInterval);
  }
}

void RankProcesses::end() {
  communicator_.reset();
  if (getpid() != owner_) {
    if (keeper_.joinable()) keeper_.detach();  // there is no such thread here
    return;
  }
  fail("rank 0 has ended the group");
  {
    const std::lock_guard lock(end_->mutex);
    end_->has_come = true;
  }
  end_->changed.notify_one();
  if (keeper_.joinable()) keeper_.join();
  processes_.clear();
}

void live_as_rank(ProcessGroup& group, int rank, pid_t parent, const RankBody& body) {
  if (!settle(parent)) return;
  // It outlives the handlers below: a rank says why it ends before it leaves the group. Else the others could only say
  // that it has left.
  std::shared_ptr<Communicator> own;
  try {
    own = group.join(rank);
    body(own);
  } catch (const RankFailed&) {
    // The others know: rank 0 has left, or some rank has failed.
  } catch (const std::exception& error) {
    group.fail(fmt::format("rank {} (process {}): {}", rank, getpid(), error.what()));
  } catch (...) {
    group.fail(fmt::format("rank {} (process {}) ended with an unknown exception", rank, getpid()));
  }
}

}  // namespace eadem::distributed
