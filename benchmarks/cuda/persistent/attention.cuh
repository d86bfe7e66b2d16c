// SPDX-License-Identifier: Apache-2.0
//
// Attention of one token, with the functions and the order of sums of the kernels that serve
// (eadem/kernels/cuda/attention/attention_tiles.cuh, attention_decode.cu). A few multiprocessors compute the state of a
// key head and a split of the keys each, which the ring brings; then all merge the splits, 32 outputs each.
#pragma once

#include "benchmarks/cuda/persistent/codes.cuh"
#include "benchmarks/cuda/persistent/exchange.cuh"
#include "benchmarks/cuda/persistent/ring.cuh"
#include "eadem/kernels/cuda/attention/attention_panels.cuh"
#include "eadem/kernels/cuda/attention/attention_splits.cuh"

namespace eadem::persistent {

__device__ inline void sync_product_warps() { kernels::cuda::named_barrier_sync(1, kProductWarps * 32); }

// What scores are multiplied by, so that 2 to that power is a probability.
inline constexpr float kScoreFactor = 0.08838834764831845f * kernels::cuda::kLog2E;  // kHeadDim to the power -1/2

// By the warps that multiply. Fragments have the four query heads in rows 0 to 3, again in rows 4 to 7, and zeros in
// the others.
class SplitAttention {
 public:
  __device__ explicit SplitAttention(const Place& at)
      : at_(at),
        s_(at.s),
        ring_(at.s),
        item_(item_of(at.sm)),
        kv_head_(item_ / kSplits),
        head_(at.lane / 4 % kGroup),
        is_first_(at.lane / 4 < kGroup) {}

  // `slot`: the first of the split's keys; those of its values follow.
  __device__ void run(int layer, uint32_t slot, uint32_t epoch) {
    // 1. The queries, and in the last split the newest key and value.
    if (at_.warp < kGroup)
      take_query(layer, epoch);
    else if (at_.warp < kGroup + 2 && item_ % kSplits == kSplits - 1)
      take_newest(layer, at_.warp == kGroup, slot, epoch);
    sync_product_warps();
    // 2. Scores of 32 keys a warp.
    float scores[kTiles][4];
    score(scores, slot);
    free_slots(slot);
    sync_product_warps();
    // 3. Probabilities. The first warp of a chunk begins the sums of its rows, the second one goes on.
    float m, corrections[kSplitChunks];
    weigh(scores, m, corrections);
    float& sum = s_.chunk_sums[at_.warp / 2][head_][at_.lane % 4];
    if (at_.warp % 2 == 0 && is_first_) sum = add_probabilities(0.0f, scores);
    sync_product_warps();
    if (at_.warp % 2 == 1) {
      if (is_first_) sum = add_probabilities(sum, scores);
      if (at_.warp != 1) kernels::cuda::named_barrier_arrive(kSumsBarrier, kSplitChunks * 32);
    }
    // 4. Values times probabilities, 16 columns a warp.
    float values[kValueTiles][4] = {};
    sum_values(values, corrections, slot + kSplitSlots);
    const int tile = is_first_ ? 0 : 1;
    put_two(at_.p.parts + (item_ * kGroup + head_) * kHeadDim + (at_.warp * kValueTiles + tile) * 8 + at_.lane % 4 * 2,
            __float_as_uint(is_first_ ? values[0][0] : values[1][0]),
            __float_as_uint(is_first_ ? values[0][1] : values[1][1]), epoch);
    if (at_.warp == 1) put_sums(m, corrections, epoch);
    free_slots(slot + kSplitSlots);
    if (at_.lane == 0) count_one(at_.p, kCountParts + kv_head_);
  }

 private:
  using Panels = kernels::cuda::RowPanels<kHeadDim, kernels::cuda::PlainRows, kPartKeys>;
  static constexpr int kTiles = kPartKeys / 8, kValueTiles = kHeadDim / 8 / kProductWarps;
  static constexpr int kSplitChunks = kSplitKeys / kernels::cuda::kChunk;
  static constexpr int kSumsBarrier = 2;
  static_assert(kSplitKeys == kernels::cuda::kSplit && 2 * kPartKeys == kernels::cuda::kChunk && kValueTiles == 2 &&
                kGroup == 4);

  // Columns 2 l and 2 l + 1 of a head, and those 64 further, turned to the token's position.
  __device__ void turn(uint32_t (&d)[2]) const {
    float2 turned[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float2 by = s_.rope[2 * at_.lane + e];
      turned[e] = kernels::cuda::rotated(e == 0 ? low_bf16(d[0]) : high_bf16(d[0]),
                                         e == 0 ? low_bf16(d[1]) : high_bf16(d[1]), by.x, by.y);
    }
    d[0] = pack_bf16(turned[0].x, turned[1].x), d[1] = pack_bf16(turned[0].y, turned[1].y);
  }

  __device__ void take_query(int layer, uint32_t epoch) {
    const int head = kv_head_ * kGroup + at_.warp;
    wait_for_count(at_.p, kCountQ + head / 2, 2 * kTilesOfHead * static_cast<uint32_t>(layer + 1));
    uint32_t d[2];
    fetch_head(d, at_, at_.p.qkv, head * (kHeadDim / 2), epoch);
    turn(d);
    uint32_t* q = reinterpret_cast<uint32_t*>(s_.q[at_.warp]);
    q[at_.lane] = d[0], q[at_.lane + 32] = d[1];
  }

  // Replaces the last row of the split's keys or values in the ring, and stores it.
  __device__ void take_newest(int layer, bool key, uint32_t slot, uint32_t epoch) {
    const int lane = at_.lane;
    wait_for_count(at_.p, (key ? kCountK : kCountV) + kv_head_, kTilesOfHead * static_cast<uint32_t>(layer + 1));
    uint32_t d[2];
    fetch_head(d, at_, at_.p.qkv, (kHeads + (key ? 0 : kKvHeads) + kv_head_) * (kHeadDim / 2), epoch);
    if (key) turn(d);
    const uint32_t rows = ring_.wait_rows(key ? slot : slot + kSplitSlots, kProductWarps - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 2 * (lane + 32 * i);
      kernels::cuda::store_u32(rows + Panels::offset(kPartKeys - 1, column / 8) + static_cast<uint32_t>(column % 8) * 2,
                               d[i]);
    }
    // The slot's next copy comes behind these stores.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const int64_t cache_row = int64_t{(key ? 0 : kKvHeads) + kv_head_} * kKeys + kKeys - 1;
    uint32_t* to = reinterpret_cast<uint32_t*>(at_.p.cache + layer * kCacheOfLayer + cache_row * kHeadDim);
    to[lane] = d[0], to[lane + 32] = d[1];
  }

  // Four matrices of a row for each head, from `rows` on, and of the heads once more: lane l addresses row l % 8 of
  // matrix l / 8.
  template <int kPitch>
  __device__ void load_rows(uint32_t (&r)[4], const __nv_bfloat16 (*rows)[kPitch], int column) const {
    kernels::cuda::load_matrices(r, shared_address(&rows[at_.lane % kGroup][column + at_.lane / 8 * 8]));
  }

  __device__ void score(float (&scores)[kTiles][4], uint32_t slot) const {
    uint32_t q[kHeadDim / 32][4];  // two steps each
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) load_rows(q[i], s_.q, i * 32);
    const uint32_t keys = ring_.wait_rows(slot, at_.warp);
    kernels::cuda::multiply_keys<kHeadDim, Panels, kernels::cuda::PlainRows>(
        scores,
        [&](int step) {
          return kernels::cuda::Fragment{{q[step / 2][step % 2 * 2], 0, q[step / 2][step % 2 * 2 + 1], 0}};
        },
        keys, at_.lane);
    float largest = -INFINITY;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) largest = fmaxf(largest, fmaxf(scores[t][0], scores[t][1]));
    largest = kernels::cuda::quad_max(largest);
    if (at_.lane % 4 == 0 && is_first_) s_.part_max[at_.warp][head_] = largest;
  }

  // Replaces scores by probabilities. `m`: what they are relative to at the end of the split.
  __device__ void weigh(float (&scores)[kTiles][4], float& m, float (&corrections)[kSplitChunks]) const {
    m = -INFINITY;
    float m_here = m;  // up to the end of the warp's chunk
#pragma unroll
    for (int chunk = 0; chunk < kSplitChunks; ++chunk) {
      const float largest = fmaxf(s_.part_max[2 * chunk][head_], s_.part_max[2 * chunk + 1][head_]);
      const float next = kernels::cuda::next_maximum(m, largest, kScoreFactor);
      corrections[chunk] = kernels::cuda::rescale(m, next);
      m = next;
      if (chunk == at_.warp / 2) m_here = next;
    }
    uint32_t* to = reinterpret_cast<uint32_t*>(&s_.probabilities[head_][at_.warp * kPartKeys]) + at_.lane % 4;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      scores[t][0] = kernels::cuda::probability(scores[t][0], kScoreFactor, m_here);
      scores[t][1] = kernels::cuda::probability(scores[t][1], kScoreFactor, m_here);
      if (is_first_) to[t * 4] = pack_bf16(scores[t][0], scores[t][1]);
    }
  }
  __device__ static float add_probabilities(float sum, const float (&probabilities)[kTiles][4]) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      sum += probabilities[t][0];
      sum += probabilities[t][1];
    }
    return sum;
  }

  // One chain of products for each chunk, in order.
  __device__ void sum_values(float (&sums)[kValueTiles][4], const float (&corrections)[kSplitChunks],
                             uint32_t slot) const {
#pragma unroll
    for (int part = 0; part < kProductWarps; ++part) {
      if (part % 2 == 0)
#pragma unroll
        for (int t = 0; t < kValueTiles; ++t) sums[t][0] *= corrections[part / 2], sums[t][1] *= corrections[part / 2];
      uint32_t p[4];  // two steps of 16 keys
      load_rows(p, s_.probabilities, part * kPartKeys);
      const uint32_t a[2][4] = {{p[0], 0, p[1], 0}, {p[2], 0, p[3], 0}};
      const uint32_t values = ring_.wait_rows(slot, part);
#pragma unroll
      for (int t = 0; t < kValueTiles; ++t) {
        uint32_t v[4];  // lane l addresses row l
        kernels::cuda::load_matrices_transposed(v, values + Panels::offset(at_.lane, at_.warp * kValueTiles + t));
        kernels::cuda::mma(sums[t], a[0], v[0], v[1]);
        kernels::cuda::mma(sums[t], a[1], v[2], v[3]);
      }
    }
  }

  // By one warp: what the probabilities are relative to, and their sum.
  __device__ void put_sums(float m, const float (&corrections)[kSplitChunks], uint32_t epoch) const {
    kernels::cuda::named_barrier_sync(kSumsBarrier, kSplitChunks * 32);
    float l = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < kSplitChunks; ++chunk)
      l = fmaf(l, corrections[chunk], s_.chunk_sums[chunk][head_][at_.lane % 4]);
    l = kernels::cuda::quad_sum(l);
    if (at_.lane % 4 == 0 && is_first_)
      put_two(at_.p.maxima + (item_ * kGroup + head_) * 2, __float_as_uint(m), __float_as_uint(l), epoch);
  }

  __device__ void free_slots(uint32_t first) const {
    __syncwarp();
    if (at_.lane == 0)
      for (uint32_t i = 0; i < kSplitSlots; ++i) ring_.free(first + i);
  }

  const Place& at_;
  Shared& s_;
  Ring ring_;
  int item_, kv_head_;
  int head_;       // of the group: the lane's row of fragments
  bool is_first_;  // whether the lane's row is the head's first one
};

// By a warp of each of the first kMergeSms multiprocessors: two outputs for each lane, in the upper half again those of
// the lower.
__device__ inline void merge_splits(const Place& at, int layer, uint32_t epoch) {
  const Params& p = at.p;
  const int output = at.sm * kMergeOutputs + at.lane % 16 * 2, head = output / kHeadDim, kv_head = head / kGroup;
  wait_for_count(p, kCountParts + kv_head, kSplits * kProductWarps * static_cast<uint32_t>(layer + 1));
  const int row = kv_head * kSplits * kGroup + head % kGroup;  // of the first split
  const uint64_t* maxima_at = p.maxima + row * 2;
  const uint64_t* parts_at = p.parts + row * kHeadDim + output % kHeadDim;
  const auto pair_of = [](ulonglong2 words) {
    return float2{__uint_as_float(data_of(words.x)), __uint_as_float(data_of(words.y))};
  };
  float2 states[kSplits], parts[kSplits][1];
  Spin spin;
  for (;;) {
    ulonglong2 words[kSplits][2];
#pragma unroll
    for (int n = 0; n < kSplits; ++n) {
      words[n][0] = load_words(maxima_at + n * kGroup * 2);
      words[n][1] = load_words(parts_at + n * kGroup * kHeadDim);
    }
    bool there = true;
#pragma unroll
    for (int n = 0; n < kSplits; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) there &= epoch_of(words[n][i].x) == epoch && epoch_of(words[n][i].y) == epoch;
      states[n] = pair_of(words[n][0]), parts[n][0] = pair_of(words[n][1]);
    }
    if (there) break;
    spin.turn();
  }
  __syncwarp();
  kernels::cuda::MergedState<1> merged;
#pragma unroll
  for (int n = 0; n < kSplits; ++n) merged.add(states[n], parts[n]);
  const float factor = kernels::cuda::final_factor(merged.m, merged.l, nullptr, head);
  if (at.lane < 16) put(p.attended + output / 2, merged.result(0, factor), epoch);
  __syncwarp();
  if (at.lane == 0) count_one(p, kCountAttended + output / kChunk);
}

}  // namespace eadem::persistent
