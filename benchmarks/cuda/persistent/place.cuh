// SPDX-License-Identifier: Apache-2.0
//
// Which multiprocessor, warp and lane a thread is, and which tiles are theirs.
#pragma once

#include "benchmarks/cuda/persistent/layout.h"

namespace eadem::persistent {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

// Tile t is of multiprocessor t % kSms.
__device__ inline int tiles_of(int tiles, int sm) { return (tiles - sm + kSms - 1) / kSms; }

// Attention is of those with fewest tiles, the last kItems / 2, and of the first kItems / 2. Others have none, and an
// item past the last.
inline constexpr int kFirstItems = kItems / 2;
__device__ inline int item_of(int sm) { return (sm + kFirstItems) % kSms; }

// Pairs of tiles of gate and up go round from the last multiprocessor to the first. The first kFirstItems are left out
// of the sixth round, and the last too of the seventh, since their keys and values are as many bytes as two pairs.
inline constexpr int kShortRound = 5;
static_assert(kPairs + 2 * kFirstItems > (kShortRound + 1) * kSms &&
              kPairs + 2 * kFirstItems <= (kShortRound + 2) * kSms - kFirstItems);
__device__ inline int pair_at(int sm, int t) {
  return t * kSms + kSms - 1 - sm - (t > kShortRound ? 2 * kFirstItems : 0);
}
__device__ inline int pairs_of(int sm) {
  if (sm < kFirstItems) return kShortRound;
  return sm < kSms - kFirstItems && pair_at(sm, kShortRound + 1) < kPairs ? kShortRound + 2 : kShortRound + 1;
}

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
