// SPDX-License-Identifier: Apache-2.0
//
// The record of a run, and what got slower between two of them.
//
//   {"schema": "eadem_op_bench/1", "cpu", "device", "threads",
//    "rows": [{"row", "kernel", "pass", "median_seconds", "low_seconds", "high_seconds", "samples", "bytes", "flops",
//              "share", "limit", "cold", "copies", "error"}]}
#pragma once

#include <string>
#include <vector>

#include "benchmarks/ops/op_timing.h"

namespace eadem::op_bench {

struct Record {
  std::string cpu, device;
  int threads = 0;
  std::vector<Timing> rows;
};

std::string to_json(const Record& record);
// Throws NotFound, IoError, or DataCorrupted for a file that is no record.
Record read_record(const std::string& path);

// A row of both records whose median grew by more than both spreads (from the median to the far percentile, half of
// it) and a tenth. Noise of a whole run, which a busy neighbour makes, is no regression of a row: where the median of
// all ratios is above one, rows are judged against it.
struct Slower {
  std::string row, kernel, pass;
  double before_seconds, after_seconds, allowed_ratio;
};
std::vector<Slower> slower_rows(const Record& before, const Record& after);

}  // namespace eadem::op_bench
