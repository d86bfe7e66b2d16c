// SPDX-License-Identifier: Apache-2.0
//
// SpawnedRanks: ranks that run a program of their own, for a process that may have threads and so cannot fork.
//
// The program gets three arguments behind those of its command: the descriptor of the group, its rank, and the process
// that started it. It passes them to live_as_spawned_rank(). All other descriptors but those of standard input, output
// and error are closed, but for those of further groups (spawned_mesh.h), which follow that of the group.
#pragma once

#include <string>
#include <vector>

#include "eadem/distributed/rank_processes.h"

namespace eadem::distributed {

class SpawnedRanks : public RankProcesses {
 public:
  // Returns when all ranks have joined. `command` is a program's path and its arguments. Throws IoError when the system
  // refuses a process, RankFailed when a rank ends before it joins, or does not come. `others` as RankProcesses has
  // them; ranks inherit them.
  SpawnedRanks(int size, const std::vector<std::string>& command, ProcessGroupOptions options = kSpawnOptions,
               std::vector<ProcessGroup*> others = {});

  // An interpreter takes a while until its ranks join.
  static constexpr ProcessGroupOptions kSpawnOptions = {.join_limit_s = 60};
};

// The life of a rank that SpawnedRanks has started, from the three arguments. Returns when the process is to end.
// Throws InvalidArgument for arguments that are not those of SpawnedRanks.
void live_as_spawned_rank(const std::string& descriptor, const std::string& rank, const std::string& parent,
                          const RankBody& body);

}  // namespace eadem::distributed
