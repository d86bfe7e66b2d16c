// SPDX-License-Identifier: Apache-2.0
//
// Which multiprocessor, warp and lane a thread is, and which tiles are theirs.
#pragma once

#include "eadem/kernels/cuda/decoder/layout.h"
#include "eadem/kernels/cuda/device_math.cuh"

namespace eadem::kernels::cuda::decoder {
namespace {

// Tile t is of multiprocessor t % kSms.
__device__ inline int tiles_of(int tiles, int sm) { return (tiles - sm + kSms - 1) / kSms; }

// Items of attention go round, those of one split after another. The first kFewItems are of the multiprocessors with
// fewest tiles, the last kFewItems / 2, and of the first kFewItems / 2.
inline constexpr int kFewItems = 2 * kKvHeads, kFirstItems = kFewItems / 2;
__device__ inline int first_item(int sm) { return (sm + kFirstItems) % kSms; }

// Pairs of tiles of gate and up go round from the last multiprocessor to the first. The last kFirstItems are left out
// of the last round, and the first kFirstItems of it and, if there are pairs few enough, of the round before: with two
// splits, their keys and values are as many bytes as two pairs.
inline constexpr int kLastRound = kMostPairs - 1;
inline constexpr int kShortRound = kPairs + 3 * kFirstItems <= kMostPairs * kSms ? kLastRound - 1 : kLastRound;
static_assert(kPairs + (kLastRound - kShortRound + 2) * kFirstItems <= kMostPairs * kSms);
__device__ inline int pair_at(int sm, int t) {
  return t * kSms + kSms - 1 - sm - (t == kLastRound ? (kLastRound - kShortRound + 1) * kFirstItems : 0);
}
__device__ inline int pairs_of(int sm) {
  if (sm < kFirstItems) return kShortRound;
  return sm < kSms - kFirstItems && pair_at(sm, kLastRound) < kPairs ? kLastRound + 1 : kLastRound;
}

// The weight that has tile `tile` of q, k and v, which becomes its tile.
__device__ inline const DecoderWeight& qkv_weight(const DecoderLayerParams& layer, int& tile) {
  if (tile < kQTiles) return layer.q;
  tile -= kQTiles;
  if (tile < kKvTiles) return layer.k;
  tile -= kKvTiles;
  return layer.v;
}
__device__ inline bool is_six(const DecoderWeight& weight) { return weight.codes == IntegerCodes::six; }

// The place of a thread's warp, and the numbers of the step that its roles need.
struct Place {
  const Params& p;
  Shared& s;
  uint8_t* ring;
  int sm, warp, lane;
  // Words of the step's x have this epoch, those of layer l this + l + 1. No other launch has them.
  uint32_t epoch;
  uint32_t* counters;  // [kCounters][kCounterStride]

  __device__ Place(const Params& params, Shared& shared, uint8_t* ring_)
      : p(params),
        s(shared),
        ring(ring_),
        sm(static_cast<int>(blockIdx.x)),
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0)),
        lane(static_cast<int>(threadIdx.x) % kWarp) {
    const uint32_t launches = *params.launches;
    epoch = launches * (static_cast<uint32_t>(params.num_layers) + 1) + 1;
    counters = params.counters + launches % 2 * (kCounters * kCounterStride);
  }
  // Of the token; of its keys.
  __device__ int position() const { return s.position; }
  __device__ int splits() const { return max(s.position, 0) / kSplitKeys + 1; }
  __device__ int items() const { return kKvHeads * splits(); }
};

// An item: the keys from `first_key` on, a head's.
struct Item {
  int index, kv_head, first_key;

  __device__ explicit Item(int index_)
      : index(index_), kv_head(index_ % kKvHeads), first_key(index_ / kKvHeads * kSplitKeys) {}
};

// The shared memory of a kernel for weights W.
template <typename W>
__device__ inline SharedOf<W>& shared_of(const Place& at) {
  return static_cast<SharedOf<W>&>(at.s);
}

// The row of a key in a layer's caches.
__device__ inline int cache_row(const Place& at, int kv_head, int key) {
  const int block = key / at.p.block_size;
  return (__ldg(at.p.block_table + block) * kKvHeads + kv_head) * at.p.block_size + key - block * at.p.block_size;
}

}  // namespace
}  // namespace eadem::kernels::cuda::decoder
