// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "benchmarks/microbenchmarks/ceilings.h"
#include "eadem/core/device/cpu_probe.h"

namespace eadem::ceilings {

std::vector<Row> memory_rows(ThreadPool& pool, double seconds) {
  struct Level {
    const char* name;
    int64_t bytes_per_thread;
    bool huge_pages;
  };
  const int threads = pool.num_threads();
  const int64_t memory_bytes = probe_buffer_bytes() / threads;
  std::vector<Level> levels = {{"L1", cache_bytes(1) / 2, true}, {"L2", cache_bytes(2) / 2, true}};
  // The L3 is everybody's: what of it one thread may hope for, well above its own L2.
  if (cache_bytes(3) > 0)
    levels.push_back({"L3", std::max(4 * cache_bytes(2), cache_bytes(3) / 2 / std::max(threads, 4)), true});
  levels.push_back({"memory", memory_bytes, true});
  levels.push_back({"memory, 4 KiB pages", memory_bytes, false});

  std::vector<Row> rows;
  for (const Level& level : levels) {
    if (level.bytes_per_thread <= 0) continue;
    for (MemoryPass pass : {MemoryPass::read, MemoryPass::read_streams, MemoryPass::copy, MemoryPass::triad}) {
      const int64_t bytes = level.bytes_per_thread * threads;
      rows.push_back({std::string(memory_pass_name(pass)), level.name, threads, bytes,
                      measured_memory_rate(pool, pass, bytes, seconds, level.huge_pages), "B/s"});
    }
  }
  return rows;
}

std::vector<Row> bandwidth_rows(ThreadPool& pool, double seconds) {
  std::vector<Row> rows;
  for (MemoryPass pass : {MemoryPass::read, MemoryPass::read_streams})
    rows.push_back({std::string(memory_pass_name(pass)), "memory", pool.num_threads(), probe_buffer_bytes(),
                    measured_memory_rate(pool, pass, probe_buffer_bytes(), seconds), "B/s"});
  return rows;
}

}  // namespace eadem::ceilings
