// SPDX-License-Identifier: Apache-2.0
//
// LaunchedRanks: ranks that a launcher has started, as `mpirun -np 2 PROGRAM` does. The launcher starts them and ends
// them, and is used for nothing else: they exchange data as the processes of any group do, through the shared memory of
// one host. Rank 0 passes that on to the others over a socket whose name is made of the process that launched them all.
//
// Open MPI is known, by OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_SIZE.
#pragma once

#include <optional>

#include "eadem/distributed/rank_processes.h"

namespace eadem::distributed {

struct Launch {
  int rank = 0;
  int size = 1;
};

// What the launcher of this process says of it; nothing where there is none. Throws Unsupported for ranks on several
// hosts, InvalidArgument for values that say nothing.
std::optional<Launch> launch_of_this_process();

class LaunchedRanks : public RankProcesses {
 public:
  // Rank 0: returns when all ranks have joined. The others do not return: they run `body`, and their process ends. A
  // program makes one such object. Throws RankFailed when a rank does not come.
  LaunchedRanks(const Launch& launch, const RankBody& body, ProcessGroupOptions options = {});
};

}  // namespace eadem::distributed
