// SPDX-License-Identifier: Apache-2.0
//
// What the kernels for decode steps share: the splits of all sequences of a step, and the merging of their states.
#pragma once

#include "eadem/kernels/cuda/attention/attention_tiles.cuh"

namespace eadem::kernels::cuda {

constexpr int kMaxSequences = static_cast<int>(kAttentionMmaMaxSequences);

// The splits in which sequence s, which has one token in this step, sees keys.
struct SplitRange {
  int32_t begin, end;
};
__device__ inline SplitRange splits_of(const AttentionParams& p, const Sequence& sequence) {
  const int32_t position = sequence.length - 1;
  return {first_key(p, sequence, position) / kSplit, position / kSplit + 1};
}

// By all threads of a block: fills slot_start [sequences + 1]: where each sequence's slots begin in p.states [slot,
// head, kD + 2], one sequence after another.
__device__ inline void count_slots(int32_t* slot_start, const AttentionParams& p) {
  for (int s = threadIdx.x; s < p.sequences; s += blockDim.x) {
    const SplitRange splits = splits_of(p, sequence_of(p, s));
    slot_start[s + 1] = splits.end - splits.begin;
  }
  if (threadIdx.x == 0) slot_start[0] = 0;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    int32_t before = 0;
    for (int base = 1; base <= p.sequences; base += kWarp) {
      const int s = base + static_cast<int>(threadIdx.x);
      int32_t value = s <= p.sequences ? slot_start[s] : 0;
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) {
        const int32_t left = __shfl_up_sync(kAllLanes, value, distance);
        if (static_cast<int>(threadIdx.x) >= distance) value += left;
      }
      if (s <= p.sequences) slot_start[s] = before + value;
      before += __shfl_sync(kAllLanes, value, kWarp - 1);
    }
  }
  __syncthreads();
}

// A work item: some query rows of one key head over one split of a sequence.
struct SplitItem {
  Sequence sequence;
  int index;                       // of the sequence
  int slot, kv_head, first_row;    // the first of 16 query rows
  int32_t position, begin, split;  // the query's position, its first key, the split's first position
};

// The items of a step: those of a slot follow each other.
struct SplitItems {
  const int32_t* slot_start;
  int row_tiles, per_slot, slots, count;
  bool is_one;  // the step has one sequence: its slots begin at 0, and slot_start is not used

  // All threads of a block construct it together: where there are several sequences, they fill slot_start and meet at
  // barriers (count_slots).
  __device__ SplitItems(int32_t* slot_start_, const AttentionParams& p)
      : slot_start(slot_start_),
        row_tiles(static_cast<int>(ceil_div(p.heads / p.kv_heads, kFragmentRows))),
        per_slot(p.kv_heads * row_tiles),
        is_one(p.sequences == 1) {
    if (is_one) {
      const SplitRange splits = splits_of(p, sequence_of(p, 0));
      slots = splits.end - splits.begin;
    } else {
      count_slots(slot_start_, p);
      slots = slot_start[p.sequences];
    }
    count = slots * per_slot;
  }

  __device__ SplitItem at(const AttentionParams& p, int item) const {
    SplitItem i{
        .slot = item / per_slot, .kv_head = item % per_slot / row_tiles, .first_row = item % row_tiles * kFragmentRows};
    int s = 0;
    for (int high = static_cast<int>(p.sequences) - 1; s < high;) {  // the last sequence that begins at or before slot
      const int middle = (s + high + 1) / 2;
      if (slot_start[middle] <= i.slot)
        s = middle;
      else
        high = middle - 1;
    }
    i.sequence = sequence_of(p, s);
    i.index = s;
    i.position = i.sequence.length - 1;
    i.begin = first_key(p, i.sequence, i.position);
    i.split = (splits_of(p, i.sequence).begin + i.slot - first_slot(s)) * kSplit;
    return i;
  }
  // Where the slots of a sequence begin, and how many it has.
  __device__ int first_slot(int sequence) const { return is_one ? 0 : slot_start[sequence]; }
  __device__ int splits(const SplitItem& i) const {
    return is_one ? slots : slot_start[i.index + 1] - slot_start[i.index];
  }
  // Counts how many splits of the item's rows have a state.
  __device__ unsigned* arrivals(const AttentionParams& p, const SplitItem& i) const {
    return p.arrivals + (i.index * p.kv_heads + i.kv_head) * row_tiles + i.first_row / kFragmentRows;
  }
};

// Counts an arrival, and starts again at 0 after `last`; returns the count before. What the warp stored before is there
// for whoever sees the count.
__device__ inline unsigned arrive_counting(unsigned* count, unsigned last) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(count), "r"(last) : "memory");
  return before;
}

// kPairs pairs of elements of a row's sum over splits, which are merged one after another.
template <int kPairs>
struct MergedState {
  float m = -INFINITY, l = 0.0f;
  float2 acc[kPairs]{};

  // `head`: {m, l} of a split.
  __device__ void add(float2 head, const float2 (&values)[kPairs]) {
    const float next = next_maximum(m, head.x, 1.0f);
    const float old_factor = rescale(m, next), new_factor = rescale(head.x, next);
    l = fmaf(l, old_factor, head.y * new_factor);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      acc[i].x = fmaf(values[i].x, new_factor, acc[i].x * old_factor);
      acc[i].y = fmaf(values[i].y, new_factor, acc[i].y * old_factor);
    }
    m = next;
  }
  // With final_factor of the state.
  __device__ uint32_t result(int pair, float factor) const {
    return pack_bf16(acc[pair].x * factor, acc[pair].y * factor);
  }
};

__device__ inline float2 load_state_pair(const float* state) { return __ldcg(reinterpret_cast<const float2*>(state)); }

}  // namespace eadem::kernels::cuda
