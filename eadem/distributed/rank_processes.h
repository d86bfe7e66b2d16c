// SPDX-License-Identifier: Apache-2.0
//
// RankProcesses: a ProcessGroup whose rank 0 is this process. The other ranks are its children (ForkedRanks and
// SpawnedRanks, which differ in how they are started), or have the same parent (LaunchedRanks).
//
// Ranks end with their parent, also when it is killed. They leave Ctrl-C and SIGTERM to it, read no standard input and
// write nothing to standard output. A child that dies fails the group at once.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "eadem/distributed/process_communicator.h"

namespace eadem::distributed {

// What ranks 1, 2, … do. A rank that returns, or throws RankFailed, ends; any other exception fails the group with its
// message.
using RankBody = std::function<void(const std::shared_ptr<Communicator>& ranks)>;

class RankProcesses {
 public:
  // Ends all ranks, those that compute after a second. Whatever uses the communicator must be gone.
  virtual ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  // The communicator of rank 0, which is this process.
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  // The children: the processes of ranks 1, 2, …
  const std::vector<pid_t>& processes() const { return processes_; }

 protected:
  // `others`: groups that outlive this object and fail when a child dies or this object ends.
  RankProcesses(int size, const ProcessGroupOptions& options, std::vector<ProcessGroup*> others = {});

  // Adds the process that `start` makes of each rank, on a thread that lives as long as they do: the system ends a
  // child with the thread that started it. Then joins. Throws what `start` throws, RankFailed when a rank does not
  // come.
  void start_on_thread(const std::function<pid_t(int rank)>& start);
  // Likewise with processes that the calling thread has started.
  void join(std::vector<pid_t> processes);
  // Joins a group without children.
  void join_group();
  ProcessGroup& group() { return group_; }

 private:
  struct Child {
    int rank;
    pid_t process;
    bool ended = false;
  };
  // How the keeper is told to end. It shares this, so that a forked process, which has no keeper, does not destroy what
  // somebody waits for.
  struct End {
    std::mutex mutex;
    std::condition_variable changed;
    bool has_come = false;  // guarded by mutex
  };

  void fail(const std::string& reason);
  void keep(std::vector<Child> children, const std::shared_ptr<End>& end);
  void end();

  int size_;
  pid_t owner_;  // a process that is forked from it has no part in this
  ProcessGroup group_;
  std::vector<ProcessGroup*> others_;
  std::vector<pid_t> processes_;
  std::shared_ptr<Communicator> communicator_;

  std::shared_ptr<End> end_ = std::make_shared<End>();
  std::thread keeper_;
};

// The life of a rank in its own process, a child of `parent`. Returns when the process is to end.
void live_as_rank(ProcessGroup& group, int rank, pid_t parent, const RankBody& body);

}  // namespace eadem::distributed
