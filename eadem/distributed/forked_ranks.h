// SPDX-License-Identifier: Apache-2.0
//
// ForkedRanks: a ProcessGroup whose rank 0 is this process, and whose other ranks are forked from it.
//
// A child of a fork has one thread, and every lock that another thread held stays locked in it. So the constructor
// refuses to fork while the process has a second thread: ranks are forked before a device or a pool is opened.
//
// Ranks end with their parent, also when it is killed. They leave Ctrl-C and SIGTERM to it, read no standard input and
// write nothing to standard output.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <vector>

#include "eadem/distributed/process_communicator.h"

namespace eadem::distributed {

class ForkedRanks {
 public:
  // What ranks 1, 2, … do. A rank that returns, or throws RankFailed, ends; any other exception fails the group with
  // its message.
  using Body = std::function<void(const std::shared_ptr<Communicator>& ranks)>;

  // Returns when all ranks have joined. Throws InvalidArgument when the process has other threads, IoError when the
  // system refuses a process, RankFailed when a rank does not come.
  ForkedRanks(int size, const Body& body, ProcessGroupOptions options = {});
  // Ends all ranks, those that compute after a second. Whatever uses the communicator must be gone.
  ~ForkedRanks();
  ForkedRanks(const ForkedRanks&) = delete;
  ForkedRanks& operator=(const ForkedRanks&) = delete;

  // The communicator of rank 0, which is this process.
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  // The processes of ranks 1, 2, …
  const std::vector<pid_t>& processes() const { return processes_; }

 private:
  void end();

  ProcessGroup group_;
  std::vector<pid_t> processes_;
  std::shared_ptr<Communicator> communicator_;
};

}  // namespace eadem::distributed
