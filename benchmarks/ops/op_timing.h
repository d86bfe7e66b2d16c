// SPDX-License-Identifier: Apache-2.0
//
// Times one kernel on one row.
#pragma once

#include <string>
#include <vector>

#include "benchmarks/ops/op_rows.h"
#include "eadem/core/device/cpu_device.h"

namespace eadem::op_bench {

// The limits of the machine just before a row was timed.
struct Ceilings {
  double read_bytes_per_second = 0, f32_ops_per_second = 0;
  // 8-bit dot products, tiles of bf16, tiles of 8 bits; 0 where there are none.
  double int8_ops_per_second = 0, bf16_ops_per_second = 0, int8_tile_ops_per_second = 0;
};
Ceilings measured_ceilings(CpuDevice& device, double seconds);

struct Timing {
  std::string row, kernel, pass;
  double median_seconds = 0, low_seconds = 0, high_seconds = 0;  // low and high: the 10th and 90th percentile
  int64_t samples = 0;
  double bytes = 0, flops = 0;  // least traffic, operations
  double share = 0;             // of the ceiling: the least time at the measured rates over the median
  std::string limit;            // "memory", "f32", "int8": what that least time is made of
  int copies = 1;               // of the inputs, used in turn
  bool cold = false;            // the copies exceed the last-level cache
  double error = 0;             // of the small row: |y - reference| / |reference|, in the 2-norm
};

// Every kernel that takes the row, each checked against the reference on the small row first. Throws DataCorrupted for
// a result that is wrong. `passes`: those to time, each for about `seconds`.
std::vector<Timing> time_row(CpuDevice& device, const BenchRow& row, const std::vector<kernels::Pass>& passes,
                             const Ceilings& ceilings, double seconds);

}  // namespace eadem::op_bench
