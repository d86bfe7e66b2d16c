// SPDX-License-Identifier: Apache-2.0
//
// The pace at which products of few rows copy weights while kernels before them still run.
#pragma once

#include <cstdint>

namespace eadem::kernels::cuda {

// Holds the first copies of all rings of a launch to less than the rate of the memory. While earlier kernels run, rings
// would fill at once, and what these kernels still have to read and write would wait behind the copies.
struct Pace {
  static constexpr uint32_t kBurst = 4'300'000;     // bytes that do not wait, so that the memory is busy at once
  static constexpr uint32_t kBytesPerClock = 1500;  // the memory of an H100 has 1700

  // For rings of `stages` stages of `stage_bytes`, of which the launch has `rings`.
  __device__ Pace(int stages, int stage_bytes, int rings) : left(stages), next(clock_ticks()) {
    const uint32_t bytes = static_cast<uint32_t>(stage_bytes) * static_cast<uint32_t>(rings);
    ticks = bytes / kBytesPerClock;
    next -= (max(kBurst / bytes, 1u) - 1) * ticks;
  }
  // Called before each copy.
  __device__ void wait() {
    if (left <= 0) return;
    --left;
    while (static_cast<int32_t>(clock_ticks() - next) < 0) {
    }
    next += ticks;
  }
  __device__ static uint32_t clock_ticks() { return static_cast<uint32_t>(clock()); }

  int left;              // copies that wait
  uint32_t ticks, next;  // clocks between copies, and the next one's; they wrap around
};

}  // namespace eadem::kernels::cuda
