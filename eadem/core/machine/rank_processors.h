// SPDX-License-Identifier: Apache-2.0
//
// How ranks that are processes of one machine divide its threads and processors.
#pragma once

#include "eadem/core/machine/topology.h"

namespace eadem {

struct RankThreads {
  int decode = 0, prefill = 0;  // as in DeviceOptions; at least one each
  std::vector<int> processors;  // of this rank alone, one for each thread; none: there are more threads than those
};

// The part of rank `rank` of `num_ranks` of the threads of all, which are given as in DeviceOptions. Ranks get
// processors in the order of Topology::seats, so that one rank's lie in one memory node if they can.
RankThreads rank_threads(const Topology& topology, int threads, int prefill_threads, int num_ranks, int rank);

// Binds the calling thread, and those that it starts from now on, to processors. It does nothing where there are none,
// or the system refuses: that costs speed alone.
void bind_to_processors(const std::vector<int>& processors);

}  // namespace eadem
