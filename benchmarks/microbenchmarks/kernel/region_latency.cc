// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/microbenchmarks/ceilings.h"
#include "eadem/core/device/cpu_probe.h"

namespace eadem::ceilings {

std::vector<Row> region_rows(ThreadPool& pool, double seconds) {
  const int threads = pool.num_threads();
  std::vector<Row> rows;
  const auto add = [&](const char* variant, int64_t tasks, double gap_seconds) {
    rows.push_back(
        {"parallel region", variant, threads, 0, measured_region_latency(pool, tasks, gap_seconds, seconds), "s"});
  };
  add("one task a thread, back to back", threads, 0);
  add("16 tasks a thread, back to back", 16 * threads, 0);
  // As between the products of a decode step, while the workers spin; and after they went to sleep.
  add("one task a thread, 20 us apart", threads, 20e-6);
  add("one task a thread, 2 ms apart", threads, 2e-3);
  rows.push_back({"parallel region", "beyond one task of 5 us a thread", threads, 0,
                  measured_region_overhead(pool, 5e-6, seconds), "s"});
  return rows;
}

}  // namespace eadem::ceilings
