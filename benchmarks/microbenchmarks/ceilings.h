// SPDX-License-Identifier: Apache-2.0
//
// The ceilings of a machine: what every other report divides by. The loops themselves are core/device/cpu_probe.h,
// which `eadem bench` uses as well; here they are swept and written down.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "eadem/core/machine/thread_pool.h"

namespace eadem::ceilings {

struct Row {
  std::string name;     // "read", "int8"
  std::string variant;  // "L2", "4 KiB pages", "avx2"
  int threads = 1;
  int64_t working_set_bytes = 0;  // of all threads; 0: none
  double value = 0;
  std::string unit;  // "B/s", "op/s", "s"
};

// Read, copy and triad in each level of the cache and in memory.
std::vector<Row> memory_rows(ThreadPool& pool, double seconds);
// Only reads of memory: what decoding is measured against.
std::vector<Row> bandwidth_rows(ThreadPool& pool, double seconds);
// f32, int8 and bf16 in vectors, on every instruction set of the machine.
std::vector<Row> vector_rows(ThreadPool& pool, double seconds);
// AMX tiles, where there are any.
std::vector<Row> tile_rows(ThreadPool& pool, double seconds);
// The cost of a parallel region.
std::vector<Row> region_rows(ThreadPool& pool, double seconds);

}  // namespace eadem::ceilings
