// SPDX-License-Identifier: Apache-2.0
//
// Ranks that are processes of one host and compute in host memory. They exchange data through shared memory, with the
// bits of thread_communicator.h.
//
// One process makes the group; each rank, that process or one that it starts, joins with its own number. A forked
// process has the group already; one that runs another program opens it from a descriptor that it inherits. Joining
// waits for the others and names those that do not come. A rank that dies, leaves while another waits for it, or stops
// running (every process shows a sign of life ten times a second) makes all calls of the others throw RankFailed
// within `silence_limit_s` and a second. A rank that lives and computes is waited for without a limit. A failed group
// stays failed; the process can make a new one. A process that is forked later than its parent has joined is no rank:
// calls there throw RankFailed.
#pragma once

#include <memory>
#include <string>

#include "eadem/core/mesh/mesh.h"

namespace eadem::distributed {

struct ProcessGroupOptions {
  double join_limit_s = 30;    // how long a rank waits for the others to join
  double silence_limit_s = 3;  // a process without a sign of life for so long has failed
};

class ProcessGroup {
 public:
  // Throws InvalidArgument for a size that is not 1 to 64, OutOfMemory where the system has no memory to share.
  explicit ProcessGroup(int size, ProcessGroupOptions options = {});
  // The group of another process whose descriptor() this one has inherited. Throws InvalidArgument for anything else.
  static ProcessGroup open(int descriptor);
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  // Returns when all ranks have joined. Throws InvalidArgument where the rank is taken or does not exist, RankFailed
  // where another has not come in time. The communicator outlives the group.
  std::shared_ptr<Communicator> join(int rank) const;
  // Makes waiting and later calls of every rank throw RankFailed with `reason`.
  void fail(const std::string& reason);
  // Of the shared memory; a program that this process starts does not inherit it unless it is passed on.
  int descriptor() const;

 private:
  struct Shared;
  friend class ProcessCommunicator;
  explicit ProcessGroup(std::shared_ptr<Shared> shared);
  std::shared_ptr<Shared> shared_;
};

}  // namespace eadem::distributed
