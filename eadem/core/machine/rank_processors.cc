// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/machine/rank_processors.h"

#include <sched.h>

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/core/mesh/mesh_axis.h"

namespace eadem {

RankThreads rank_threads(const Topology& topology, int threads, int prefill_threads, int num_ranks, int rank) {
  EADEM_CHECK(rank >= 0 && rank < num_ranks, "rank {} of {}", rank, num_ranks);
  const int all = threads > 0 ? threads : topology.default_threads();
  const auto of = [&](int r) {
    const auto part = [&](int whole) { return std::max(1, static_cast<int>(part_of(whole, num_ranks, r).size)); };
    RankThreads own{.decode = part(all), .prefill = part(prefill_threads > 0 ? prefill_threads : all)};
    return own;
  };
  RankThreads own = of(rank);
  // Decode uses the first seats, and other steps may use more.
  int decode = 0, others = 0, first = 0, first_other = 0;
  for (int r = 0; r < num_ranks; ++r) {
    if (r == rank) first = decode, first_other = others;
    decode += of(r).decode;
    others += std::max(0, of(r).prefill - of(r).decode);
  }
  const std::vector<Seat> seats = topology.seats(decode, decode + others);
  for (int i = 0; i < std::max(own.decode, own.prefill); ++i) {
    const int seat = i < own.decode ? first + i : decode + first_other + i - own.decode;
    if (const int processor = seats[static_cast<size_t>(seat)].processor; processor >= 0)
      own.processors.push_back(processor);
  }
  return own;
}

void bind_to_processors(const std::vector<int>& processors) {
  if (processors.empty()) return;
  const auto size = static_cast<size_t>(*std::max_element(processors.begin(), processors.end())) + 1;
  cpu_set_t* set = CPU_ALLOC(size);
  CPU_ZERO_S(CPU_ALLOC_SIZE(size), set);
  for (const int processor : processors) CPU_SET_S(static_cast<size_t>(processor), CPU_ALLOC_SIZE(size), set);
  sched_setaffinity(0, CPU_ALLOC_SIZE(size), set);
  CPU_FREE(set);
}

}  // namespace eadem
