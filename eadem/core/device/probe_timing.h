// SPDX-License-Identifier: Apache-2.0
//
// For the sources of cpu_probe.h.
#pragma once

#include <algorithm>
#include <chrono>

namespace eadem::probe {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The pass of least time within about `seconds`; three at least, so that one is warm.
template <typename Pass>
double best_seconds(double seconds, const Pass& pass) {
  const Clock::time_point start = Clock::now();
  double best = 1e30;
  for (int i = 0; i < 3 || seconds_since(start) < seconds; ++i) {
    const Clock::time_point pass_start = Clock::now();
    pass();
    best = std::min(best, seconds_since(pass_start));
  }
  return best;
}

}  // namespace eadem::probe
