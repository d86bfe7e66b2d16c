// SPDX-License-Identifier: Apache-2.0
//
// Which multiprocessor, warp and lane a thread is, and which tiles are theirs.
#pragma once

#include "benchmarks/cuda/persistent/layout.h"

namespace eadem::persistent {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

// Tile t is of multiprocessor t % kSms, but those with fewest tiles of the other products have most of gate and up.
__device__ inline int tiles_of(int tiles, int sm) { return (tiles - sm + kSms - 1) / kSms; }
__device__ inline int gate_up_sm(int sm) { return kSms - 1 - sm; }

// What a warp sees of its place.
struct Place {
  const Params& p;
  Shared& s;
  int sm, warp, lane;

  __device__ Place(const Params& params, Shared& shared)
      : p(params),
        s(shared),
        sm(static_cast<int>(blockIdx.x)),
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {}
};

}  // namespace eadem::persistent
