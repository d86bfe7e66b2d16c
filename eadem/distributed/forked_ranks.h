// SPDX-License-Identifier: Apache-2.0
//
// ForkedRanks: ranks that are forked from this process.
//
// A child of a fork has one thread, and every lock that another thread held stays locked in it. So the constructor
// refuses to fork while the process has a second thread: ranks are forked before a device or a pool is opened. A
// program with threads starts its ranks by SpawnedRanks.
#pragma once

#include "eadem/distributed/rank_processes.h"

namespace eadem::distributed {

class ForkedRanks : public RankProcesses {
 public:
  using Body = RankBody;

  // Returns when all ranks have joined. Throws InvalidArgument when the process has other threads, IoError when the
  // system refuses a process, RankFailed when a rank does not come. `others`: groups of these ranks that outlive this
  // object and fail when it does.
  ForkedRanks(int size, const Body& body, ProcessGroupOptions options = {}, std::vector<ProcessGroup*> others = {});
};

}  // namespace eadem::distributed
