// SPDX-License-Identifier: Apache-2.0
//
// Attention of one token: each multiprocessor computes a pair of heads over a split of the keys, which the ring brings;
// then each merges, of its pair, 32 of 256 outputs from all splits.
#pragma once

#include "benchmarks/cuda/persistent/codes.cuh"
#include "benchmarks/cuda/persistent/exchange.cuh"
#include "benchmarks/cuda/persistent/ring.cuh"

namespace eadem::persistent {

__device__ inline void sync_product_warps() { kernels::cuda::named_barrier_sync(1, kProductWarps * 32); }

// A lane's columns 2 l and 2 l + 1, and those 64 further, of a head, turned to the token's position.
struct Turned {
  float low[2], high[2];

  __device__ Turned(const uint32_t (&d)[2], const float2* rope, int lane) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float2 turn = rope[2 * lane + e];
      const float a = e == 0 ? low_bf16(d[0]) : high_bf16(d[0]), b = e == 0 ? low_bf16(d[1]) : high_bf16(d[1]);
      low[e] = a * turn.x - b * turn.y;
      high[e] = b * turn.x + a * turn.y;
    }
  }
};

// By the warps that multiply.
class SplitAttention {
 public:
  __device__ explicit SplitAttention(const Place& at)
      : at_(at), ring_(at.s), pair_(at.sm / kSplits), split_(at.sm % kSplits), head_(pair_ / 2) {}

  // `slot`: of the split's keys; the values follow.
  __device__ void run(int layer, uint32_t slot, uint32_t epoch) {
    // 1. The two queries, and in the last split the newest key and value.
    if (at_.warp < 2)
      take_query(layer, epoch);
    else if (at_.warp < 4 && split_ == kSplits - 1)
      take_newest(layer, at_.warp == 2, slot, epoch);
    sync_product_warps();
    // 2. Scores.
    score(ring_.wait(slot, at_.warp * kSlotParts / kProductWarps));
    sync_product_warps();
    // 3. Sums of values, by groups of 16 keys.
    sum_values(ring_.wait(slot + 1, at_.warp % 4 * kSlotParts / 4), epoch);
    sync_product_warps();
    if (at_.lane == 0) ring_.free(slot), ring_.free(slot + 1);
    // 4. An output of the split for each thread.
    const int i = at_.warp * 32 + at_.lane;
    const auto& groups = at_.s.attended;
    const float y = groups[0][i] + groups[1][i] + groups[2][i] + groups[3][i];
    put(at_.p.parts + (pair_ * kSplits + split_) * 2 * kHeadDim + i, __float_as_uint(y), epoch);
    __syncwarp();
    if (at_.lane == 0) count_one(at_.p, kCountParts + pair_);
  }

 private:
  __device__ void take_query(int layer, uint32_t epoch) {
    const int lane = at_.lane;
    wait_for_count(at_.p, kCountQ + pair_, 2 * kTilesOfHead * static_cast<uint32_t>(layer + 1));
    uint32_t d[2];
    fetch_head(d, at_, at_.p.qkv, pair_ * kHeadDim + at_.warp * (kHeadDim / 2), epoch);
    // 1 / sqrt(kHeadDim), and log2(e) so that exp2 does for exp.
    constexpr float kFactor = 0.08838834764831845f * 1.4426950408889634f;
    const Turned turned(d, at_.s.rope, lane);
    float* q = at_.s.q[at_.warp];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      q[2 * lane + e] = round_bf16(turned.low[e]) * kFactor;
      q[kHeadDim / 2 + 2 * lane + e] = round_bf16(turned.high[e]) * kFactor;
    }
  }

  // Replaces the last row of the split's keys or values in the ring, and one multiprocessor of a key head stores it.
  __device__ void take_newest(int layer, bool key, uint32_t slot, uint32_t epoch) {
    const int lane = at_.lane;
    wait_for_count(at_.p, (key ? kCountK : kCountV) + head_, kTilesOfHead * static_cast<uint32_t>(layer + 1));
    uint32_t d[2];
    fetch_head(d, at_, at_.p.qkv, (kHeads + (key ? 0 : kKvHeads) + head_) * (kHeadDim / 2), epoch);
    if (key) {
      const Turned turned(d, at_.s.rope, lane);
      d[0] = pack_bf16(turned.low[0], turned.low[1]), d[1] = pack_bf16(turned.high[0], turned.high[1]);
    }
    const uint8_t* rows = ring_.wait(key ? slot : slot + 1, kSlotParts - 1);
    uint32_t* row = reinterpret_cast<uint32_t*>(const_cast<uint8_t*>(rows) + (kSplitKeys - 1) * kHeadDim * 2);
    row[lane] = d[0], row[lane + 32] = d[1];
    // The slot's next copy comes behind these stores.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (pair_ % 2 == 0) {
      const int64_t cache_row = int64_t{(key ? 0 : kKvHeads) + head_} * kKeys + kKeys - 1;
      uint32_t* to = reinterpret_cast<uint32_t*>(at_.p.cache + layer * kCacheOfLayer + cache_row * kHeadDim);
      to[lane] = d[0], to[lane + 32] = d[1];
    }
  }

  // Eight keys a warp: a lane has 16 columns of two keys.
  __device__ void score(const uint8_t* keys) {
    const int key = at_.warp * 8 + at_.lane / 8, j = at_.lane % 8;
    float scores[2][2] = {};  // [key][head]
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float q[2][8];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 q0 = *reinterpret_cast<const float4*>(&at_.s.q[h][r * 64 + j * 8]);
        const float4 q1 = *reinterpret_cast<const float4*>(&at_.s.q[h][r * 64 + j * 8 + 4]);
        q[h][0] = q0.x, q[h][1] = q0.y, q[h][2] = q0.z, q[h][3] = q0.w;
        q[h][4] = q1.x, q[h][5] = q1.y, q[h][6] = q1.z, q[h][7] = q1.w;
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint4 row = *reinterpret_cast<const uint4*>(keys + ((key + 4 * k) * kHeadDim + r * 64 + j * 8) * 2);
        const uint32_t pairs[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            scores[k][h] = fmaf(low_bf16(pairs[n]), q[h][2 * n], scores[k][h]);
            scores[k][h] = fmaf(high_bf16(pairs[n]), q[h][2 * n + 1], scores[k][h]);
          }
      }
    }
#pragma unroll
    for (int m = 1; m < 8; m *= 2)
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int h = 0; h < 2; ++h) scores[k][h] += __shfl_xor_sync(kAllLanes, scores[k][h], m);
    if (j < 4)
      at_.s.scores[j % 2][key + j / 2 * 4] = j == 0   ? scores[0][0]
                                             : j == 1 ? scores[0][1]
                                             : j == 2 ? scores[1][0]
                                                      : scores[1][1];
  }

  // A head and 16 keys a warp, 4 columns a lane.
  __device__ void sum_values(const uint8_t* values, uint32_t epoch) {
    const int lane = at_.lane, h = at_.warp / 4, group = at_.warp % 4;
    const float s0 = at_.s.scores[h][lane], s1 = at_.s.scores[h][lane + 32];
    float most = fmaxf(s0, s1);
#pragma unroll
    for (int i = 16; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, i));
    const float p0 = exp2f(s0 - most), p1 = exp2f(s1 - most);
    if (group == 0) {
      float sum = p0 + p1;
#pragma unroll
      for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(kAllLanes, sum, i);
      uint64_t* to = at_.p.maxima + ((pair_ * kSplits + split_) * 2 + h) * 2;
      if (lane < 2) put(to + lane, __float_as_uint(lane == 0 ? most : sum), epoch);
    }
    const float mine = group < 2 ? p0 : p1;
    float4 sums = {};
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const float probability = __shfl_sync(kAllLanes, mine, group % 2 * 16 + k);
      const uint2 v = *reinterpret_cast<const uint2*>(values + (group * 16 + k) * kHeadDim * 2 + lane * 8);
      sums.x = fmaf(probability, low_bf16(v.x), sums.x), sums.y = fmaf(probability, high_bf16(v.x), sums.y);
      sums.z = fmaf(probability, low_bf16(v.y), sums.z), sums.w = fmaf(probability, high_bf16(v.y), sums.w);
    }
    *reinterpret_cast<float4*>(&at_.s.attended[group][h * kHeadDim + lane * 4]) = sums;
  }

  const Place& at_;
  Ring ring_;
  int pair_, split_, head_;  // head_: of keys
};

// By a warp: an output for each lane, of a multiprocessor that has a split.
__device__ inline void merge_splits(const Place& at, int layer, uint32_t epoch) {
  const Params& p = at.p;
  const int pair = at.sm / kSplits, lane = at.lane;
  const int output = at.sm % kSplits * 32 + lane, h = output / kHeadDim;  // h is the same in all lanes
  wait_for_count(p, kCountParts + pair, kSplits * kProductWarps * static_cast<uint32_t>(layer + 1));
  // 1. The part of each split, and from lane % kSplits the maximum and the sum of that split.
  const uint64_t* parts_at = p.parts + pair * kSplits * 2 * kHeadDim + output;
  const uint64_t* maxima_at = p.maxima + ((pair * kSplits + lane % kSplits) * 2 + h) * 2;
  float parts[kSplits], max_of_split, sum_of_split;
  Spin spin;
  for (;;) {
    const ulonglong2 maximum = load_words(maxima_at);
    uint64_t words[kSplits];
#pragma unroll
    for (int n = 0; n < kSplits; ++n) words[n] = load_word(parts_at + n * 2 * kHeadDim);
    bool there = epoch_of(maximum.x) == epoch && epoch_of(maximum.y) == epoch;
    max_of_split = __uint_as_float(data_of(maximum.x)), sum_of_split = __uint_as_float(data_of(maximum.y));
#pragma unroll
    for (int n = 0; n < kSplits; ++n) {
      there &= epoch_of(words[n]) == epoch;
      parts[n] = __uint_as_float(data_of(words[n]));
    }
    if (there) break;
    spin.turn();
  }
  __syncwarp();
  // 2. Their sum, weighted by the distance to the largest maximum.
  float most = max_of_split;
#pragma unroll
  for (int i = 1; i < kSplits; i *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, i));
  const float weight = exp2f(max_of_split - most), weighted_sum = weight * sum_of_split;
  float above = 0.0f, below = 0.0f;
#pragma unroll
  for (int n = 0; n < kSplits; ++n) {
    above = fmaf(__shfl_sync(kAllLanes, weight, n), parts[n], above);
    below += __shfl_sync(kAllLanes, weighted_sum, n);
  }
  const float y = above / below, next = __shfl_down_sync(kAllLanes, y, 1);
  if (lane % 2 == 0) put(p.attended + pair * kHeadDim + output / 2, pack_bf16(y, next), epoch);
  __syncwarp();
  if (lane == 0) count_one(p, kCountAttended + pair);
}

}  // namespace eadem::persistent
