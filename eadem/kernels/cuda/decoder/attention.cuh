// SPDX-License-Identifier: Apache-2.0
//
// Attention of one token, as attention_tiles.cuh defines it. Some multiprocessors compute the states of items, a key
// head and a split of the keys each, which the ring brings; then all merge the splits, 32 outputs each.
#pragma once

#include "eadem/kernels/cuda/attention/attention_panels.cuh"
#include "eadem/kernels/cuda/attention/attention_splits.cuh"
#include "eadem/kernels/cuda/decoder/codes.cuh"
#include "eadem/kernels/cuda/decoder/exchange.cuh"
#include "eadem/kernels/cuda/decoder/ring.cuh"

namespace eadem::kernels::cuda::decoder {
namespace {

__device__ inline void sync_product_warps() { named_barrier_sync(1, kProductWarps * kWarp); }

// By the warps that multiply. Fragments have the four query heads in rows 0 to 3, again in rows 4 to 7, and zeros in
// the others. W: the weights.
template <typename W>
class SplitAttention {
 public:
  __device__ SplitAttention(const Place& at, const Item& item)
      : at_(at),
        s_(shared_of<W>(at)),
        ring_(at),
        item_(item),
        newest_(at.position() - item.first_key),
        head_(at.lane / 4 % kGroup),
        is_first_(at.lane / 4 < kGroup) {}

  // `slot`: the first of the split's keys; those of its values follow.
  __device__ void run(int layer, uint32_t slot, uint32_t epoch) {
    // 1. The queries, and in the last split the newest key and value.
    if (at_.warp < kGroup)
      take_query(layer, epoch);
    else if (at_.warp < kGroup + 2 && newest_ >= 0 && newest_ < kSplitKeys)
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
      if (at_.warp != 1) named_barrier_arrive(kSumsBarrier, kSplitChunks * 32);
    }
    // 4. Values times probabilities, in tiles of 8 columns, one or two a warp. Lanes of rows 4 to 7 store the second.
    float values[kValueTiles][4] = {};
    sum_values(values, corrections, slot + kSplitSlots);
    constexpr int kLastTile = kValueTiles - 1;
    const int tile = is_first_ ? 0 : kLastTile;
    if (is_first_ || (kLastTile > 0 && at_.lane / 4 < 2 * kGroup))
      put_two(at_.p.parts + int64_t{item_.index * kGroup + head_} * kHeadDim + (at_.warp * kValueTiles + tile) * 8 +
                  at_.lane % 4 * 2,
              __float_as_uint(is_first_ ? values[0][0] : values[kLastTile][0]),
              __float_as_uint(is_first_ ? values[0][1] : values[kLastTile][1]), epoch);
    if (at_.warp == 1) put_sums(m, corrections, epoch);
    free_slots(slot + kSplitSlots);
    if (at_.lane == 0) count_one(at_, kCountParts + item_.kv_head);
  }

 private:
  // A part in the ring: boxes one after another.
  struct Panels {
    using Box = RowPanels<kHeadDim, PlainRows, kBoxKeys>;
    static constexpr int kRows = kPartKeys, kBoxTiles = kBoxKeys / 8;

    __device__ static uint32_t offset(int row, int piece) {
      return static_cast<uint32_t>(row / kBoxKeys) * Box::kBytes + Box::offset(row % kBoxKeys, piece);
    }
    __device__ static constexpr uint32_t tile_offset(int tile) {
      return static_cast<uint32_t>(tile / kBoxTiles) * Box::kBytes + Box::tile_offset(tile % kBoxTiles);
    }
  };
  static constexpr int kTiles = kPartKeys / 8, kValueTiles = kHeadDim / 8 / kProductWarps;
  static constexpr int kSplitChunks = kSplitKeys / kChunk;
  static constexpr int kSumsBarrier = 2;
  static_assert(2 * kPartKeys == kChunk && (kValueTiles == 1 || kValueTiles == 2) && kGroup == 4);

  // The cosines and sines by which the lane's columns of a head turn.
  struct Angles {
    float2 cosines, sines;
  };
  __device__ Angles angles() const {
    const auto* table = reinterpret_cast<const float2*>(at_.p.table) + head_word(at_);
    return {__ldg(table), __ldg(table + kHeadDim / 4)};
  }
  // Two words of a head, turned to the token's position.
  __device__ static void turn(uint32_t (&d)[2], const Angles& by) {
    const float2 turned[2] = {rotated(low_bf16(d[0]), low_bf16(d[1]), by.cosines.x, by.sines.x),
                              rotated(high_bf16(d[0]), high_bf16(d[1]), by.cosines.y, by.sines.y)};
    d[0] = pack_bf16(turned[0].x, turned[1].x), d[1] = pack_bf16(turned[0].y, turned[1].y);
  }

  __device__ void take_query(int layer, uint32_t epoch) {
    const int head = item_.kv_head * kGroup + at_.warp;
    const Angles by = angles();
    wait_for_count(at_, kCountQ + head / 2, worth_looking(2 * kTilesOfHead, layer));
    uint32_t d[2];
    fetch_head(d, at_, at_.p.qkv, head * (kHeadDim / 2), epoch);
    turn(d, by);
    uint32_t* q = reinterpret_cast<uint32_t*>(s_.q[at_.warp]);
    q[head_word(at_)] = d[0], q[head_word(at_) + kHeadLanes] = d[1];
  }

  // Puts the newest row into the keys or values in the ring, and into the cache, which has it already if it has no
  // slot. Rows behind it are zeros, because a cache may hold anything there, even NaN, and its product with 0 must be
  // 0.
  __device__ void take_newest(int layer, bool key, uint32_t slot, uint32_t epoch) {
    constexpr int kPieces = kRowBytes / 16;
    const int lane = at_.lane, row = newest_ % kPartKeys;
    const uint32_t rows = ring_.wait_rows(key ? slot : slot + kSplitSlots, newest_ / kPartKeys);
    if (!key)
      for (int r = row + 1 + lane / kPieces; r < kPartKeys; r += kWarp / kPieces)
        store_16(rows + Panels::offset(r, lane % kPieces), {0, 0, 0, 0});
    const DecoderLayerParams& of = at_.p.layers[layer].of;
    auto* cache = static_cast<uint32_t*>(key ? of.cache_k : of.cache_v) +
                  int64_t{cache_row(at_, item_.kv_head, at_.position())} * (kHeadDim / 2) + head_word(at_);
    const bool is_new = *at_.p.slot >= 0;
    const Angles by = angles();
    uint32_t d[2];
    if (is_new) {
      wait_for_count(at_, (key ? kCountK : kCountV) + item_.kv_head, worth_looking(kTilesOfHead, layer));
      fetch_head(d, at_, at_.p.qkv, (kHeads + (key ? 0 : kKvHeads) + item_.kv_head) * (kHeadDim / 2), epoch);
      if (key) turn(d, by);
    } else {
      d[0] = cache[0], d[1] = cache[kHeadLanes];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 2 * (head_word(at_) + kHeadLanes * i);
      store_u32(rows + Panels::offset(row, column / 8) + static_cast<uint32_t>(column % 8) * 2, d[i]);
    }
    // The slot's next copy comes behind these stores.
    fence_shared_for_async();
    if (is_new) cache[0] = d[0], cache[kHeadLanes] = d[1];
  }

  // Four matrices of a row for each head, from `rows` on, and of the heads once more: lane l addresses row l % 8 of
  // matrix l / 8.
  template <int kPitch>
  __device__ void load_rows(uint32_t (&r)[4], const __nv_bfloat16 (*rows)[kPitch], int column) const {
    load_matrices(r, shared_address(&rows[at_.lane % kGroup][column + at_.lane / 8 * 8]));
  }

  __device__ void score(float (&scores)[kTiles][4], uint32_t slot) const {
    uint32_t q[kHeadDim / 32][4];  // two steps each
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) load_rows(q[i], s_.q, i * 32);
    const uint32_t keys = ring_.wait_rows(slot, at_.warp);
    multiply_keys<kHeadDim, Panels, PlainRows>(
        scores,
        [&](int step) {
          return Fragment{{q[step / 2][step % 2 * 2], 0, q[step / 2][step % 2 * 2 + 1], 0}};
        },
        keys, at_.lane);
    float largest = -INFINITY;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (at_.warp * kPartKeys + key_of(t, e, at_.lane) > newest_) scores[t][e] = -INFINITY;
        largest = fmaxf(largest, scores[t][e]);
      }
    largest = quad_max(largest);
    if (at_.lane % 4 == 0 && is_first_) s_.part_max[at_.warp][head_] = largest;
  }

  // Replaces scores by probabilities. `m`: what they are relative to at the end of the split.
  __device__ void weigh(float (&scores)[kTiles][4], float& m, float (&corrections)[kSplitChunks]) const {
    m = -INFINITY;
    float m_here = m;  // up to the end of the warp's chunk
#pragma unroll
    for (int chunk = 0; chunk < kSplitChunks; ++chunk) {
      const float largest = fmaxf(s_.part_max[2 * chunk][head_], s_.part_max[2 * chunk + 1][head_]);
      const float next = next_maximum(m, largest, at_.p.score_factor);
      corrections[chunk] = rescale(m, next);
      m = next;
      if (chunk == at_.warp / 2) m_here = next;
    }
    uint32_t* to = reinterpret_cast<uint32_t*>(&s_.probabilities[head_][at_.warp * kPartKeys]) + at_.lane % 4;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      scores[t][0] = probability(scores[t][0], at_.p.score_factor, m_here);
      scores[t][1] = probability(scores[t][1], at_.p.score_factor, m_here);
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
      // Waits for parts without keys too, since a slot may be freed only after it was filled.
      const uint32_t values = ring_.wait_rows(slot, part);
      if (part * kPartKeys > newest_) continue;
      if (part % 2 == 0)
#pragma unroll
        for (int t = 0; t < kValueTiles; ++t) sums[t][0] *= corrections[part / 2], sums[t][1] *= corrections[part / 2];
      uint32_t p[4];  // two steps of 16 keys
      load_rows(p, s_.probabilities, part * kPartKeys);
      const uint32_t a[2][4] = {{p[0], 0, p[1], 0}, {p[2], 0, p[3], 0}};
#pragma unroll
      for (int t = 0; t < kValueTiles; ++t) {
        uint32_t v[4];  // lane l addresses row l
        load_matrices_transposed(v, values + Panels::offset(at_.lane, at_.warp * kValueTiles + t));
        mma(sums[t], a[0], v[0], v[1]);
        mma(sums[t], a[1], v[2], v[3]);
      }
    }
  }

  // By one warp: what the probabilities are relative to, and their sum.
  __device__ void put_sums(float m, const float (&corrections)[kSplitChunks], uint32_t epoch) const {
    named_barrier_sync(kSumsBarrier, kSplitChunks * 32);
    float l = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < kSplitChunks; ++chunk)
      l = fmaf(l, corrections[chunk], s_.chunk_sums[chunk][head_][at_.lane % 4]);
    l = quad_sum(l);
    if (at_.lane % 4 == 0 && is_first_)
      put_two(at_.p.maxima + (item_.index * kGroup + head_) * 2, __float_as_uint(m), __float_as_uint(l), epoch);
  }

  __device__ void free_slots(uint32_t first) const {
    __syncwarp();
    if (at_.lane == 0)
      for (uint32_t i = 0; i < kSplitSlots; ++i) ring_.free(first + i);
  }

  const Place& at_;
  SharedOf<W>& s_;
  Ring<W> ring_;
  Item item_;
  int newest_;     // where the newest key stands behind the item's first one; perhaps beyond its last
  int head_;       // of the group: the lane's row of fragments
  bool is_first_;  // whether the lane's row is the head's first one
};

// By the warps that round, of each of the first kMergeSms multiprocessors: two outputs for each lane of the lower half.
// Groups of eight splits go round these warps, which load them at once and merge them in order: each takes what is
// merged up to its group from the warp before. Each half of a warp loads every other four splits.
__device__ inline void merge_splits(const Place& at, int round_warp, int layer, uint32_t epoch) {
  constexpr int kAtOnce = 4, kHalf = kWarp / 2, kGroupSplits = 2 * kAtOnce;
  constexpr int kTurnBarrier = 3;  // the first of kRoundWarps barriers
  const Params& p = at.p;
  const int groups = (at.splits() + kGroupSplits - 1) / kGroupSplits;
  const int output = at.sm * kMergeOutputs + at.lane % kHalf * 2, head = output / kHeadDim;
  if (round_warp >= groups) return;
  wait_for_count(at, kCountParts + head / kGroup,
                 static_cast<uint32_t>(at.splits() * kProductWarps) * static_cast<uint32_t>(layer + 1));
  const auto pair_of_words = [](ulonglong2 words) {
    return float2{__uint_as_float(data_of(words.x)), __uint_as_float(data_of(words.y))};
  };
  const auto of_upper = [](float2 pair) {
    return float2{__shfl_down_sync(kAllLanes, pair.x, kHalf), __shfl_down_sync(kAllLanes, pair.y, kHalf)};
  };
#pragma unroll 1
  for (int group = round_warp; group < groups; group += kRoundWarps) {
    // 1. The group.
    const int first = group * kGroupSplits;
    float2 states[kAtOnce], parts[kAtOnce];
    Spin spin;
    for (;;) {
      ulonglong2 words[kAtOnce][2];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int split = first + at.lane / kHalf * kAtOnce + n;
        const int64_t row = int64_t{min(split, at.splits() - 1)} * kHeads + head;
        words[n][0] = load_words(p.maxima + row * 2);
        words[n][1] = load_words(p.parts + row * kHeadDim + output % kHeadDim);
      }
      bool there = true;
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) there &= epoch_of(words[n][i].x) == epoch && epoch_of(words[n][i].y) == epoch;
        states[n] = pair_of_words(words[n][0]), parts[n] = pair_of_words(words[n][1]);
      }
      if (there) break;
      spin.turn();
    }
    __syncwarp();
    // Without branches the adds overlap. What is beyond the last split adds -0 to sums, which changes no bit of them.
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
      if (first + at.lane / kHalf * kAtOnce + n >= at.splits())
        states[n] = {-INFINITY, 0.0f}, parts[n] = {-0.0f, -0.0f};
    // 2. Its turn.
    MergedState<1> merged;
    float4& before = at.s.merged[at.lane % kHalf];
    if (group > 0) {
      named_barrier_sync(kTurnBarrier + round_warp, 2 * kWarp);
      merged.m = before.x, merged.l = before.y, merged.acc[0] = {before.z, before.w};
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) merged.add(states[n], {parts[n]});
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) merged.add(of_upper(states[n]), {of_upper(parts[n])});
    if (group + 1 < groups) {
      if (at.lane < kHalf) before = {merged.m, merged.l, merged.acc[0].x, merged.acc[0].y};
      __syncwarp();
      named_barrier_arrive(kTurnBarrier + (round_warp + 1) % kRoundWarps, 2 * kWarp);
      continue;
    }
    const float factor = final_factor(merged.m, merged.l, nullptr, head);
    if (at.lane < kHalf) put(p.attended + output / 2, merged.result(0, factor), epoch);
    __syncwarp();
    if (at.lane == 0) count_one(at, kCountAttended + output / kColumns);
  }
}

}  // namespace
}  // namespace eadem::kernels::cuda::decoder
