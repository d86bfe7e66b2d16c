// SPDX-License-Identifier: Apache-2.0
//
// How blocks of threads give each other results without a fence. A word of 64 bits holds 32 bits of data and the epoch,
// a number that no earlier layer or launch had: who reads a word with the epoch that it waits for has the data, since
// 64 bits are stored and loaded as one. Counters, which are added to and read in no order with the words, only say when
// it is worth looking, so that who waits does not load whole rows again and again.
//
// A buffer of words is written once a layer, and needs no second copy: what writes it again depends on x of all
// multiprocessors, and so on all that read it in the layer before. Counters have a second copy, which a launch clears
// for the next one.
#pragma once

#include "eadem/kernels/cuda/decoder/place.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"

namespace eadem::kernels::cuda::decoder {
namespace {

// Places of counters, and what a layer adds to one.
enum Counter : int {
  kCountX = 0,                              // a chunk of x: 16 stores of a tile each
  kCountMiddle = kCountX + kChunks,         // likewise x_middle
  kCountAttended = kCountMiddle + kChunks,  // a chunk of attention's outputs: 8 stores of 32 values each
  kCountParts = kCountAttended + kChunks,   // a head of keys: 8 warps of each split
  kCountQ = kCountParts + kKvHeads,         // a pair of heads: 16 tiles
  kCountK = kCountQ + kHeads / 2,           // a head: 8 tiles
  kCountV = kCountK + kKvHeads,             // a head: 8 tiles
  kCountH = kCountV + kKvHeads,             // a chunk of h: 16 tiles
};
static_assert(kCountH + kFfnChunks == kCounters);
inline constexpr uint32_t kTilesOfChunk = kColumns / kTileRows, kTilesOfHead = kHeadDim / kTileRows;
inline constexpr uint32_t kMergesOfChunk = kColumns / kMergeOutputs;

// A guard of loops that poll: what never comes ends the kernel with an error.
class Spin {
 public:
  __device__ void turn() {
    if (++turns_ > 4'000'000) __trap();
  }

 private:
  int turns_ = 0;
};

__device__ inline uint64_t load_word(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Two words that need not be of one store.
__device__ inline ulonglong2 load_words(const uint64_t* p) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ inline uint32_t data_of(uint64_t word) { return static_cast<uint32_t>(word); }
__device__ inline uint32_t epoch_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }

__device__ inline void put(uint64_t* to, uint32_t data, uint32_t epoch) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(uint64_t{epoch} << 32 | data) : "memory");
}
// Two words, of which who reads them may see one before the other.
__device__ inline void put_two(uint64_t* to, uint32_t data0, uint32_t data1, uint32_t epoch) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(uint64_t{epoch} << 32 | data0),
               "l"(uint64_t{epoch} << 32 | data1)
               : "memory");
}

__device__ inline uint32_t* counter_at(const Place& at, int counter) { return at.counters + counter * kCounterStride; }
__device__ inline void count_one(const Place& at, int counter) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter_at(at, counter)) : "memory");
}
__device__ inline uint32_t load_count(const uint32_t* counter) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}
// The count from which on a layer's words are worth looking at, where a layer adds `added`: when half of them are
// there, the others come about as soon as a look takes.
__device__ inline uint32_t worth_looking(uint32_t added, int layer) {
  return added * static_cast<uint32_t>(layer) + (added + 1) / 2;
}
__device__ inline void wait_for_count(const Place& at, int counter, uint32_t target) {
  Spin spin;
  while (load_count(counter_at(at, counter)) < target) spin.turn();
  __syncwarp();
}

// By a warp: the rows y of lanes 0 to 15, two neighbours a word, from `first_word` of the lane on. Counts one.
__device__ inline void publish_tile(const Place& at, uint64_t* base, int first_word, int counter, float y,
                                    uint32_t epoch) {
  const float next = __shfl_down_sync(kAllLanes, y, 1);
  if (at.lane < 16 && at.lane % 2 == 0) put(base + first_word, pack_bf16(y, next), epoch);
  __syncwarp();
  if (at.lane == 0) count_one(at, counter);
}

// The word of a head that a lane has: of two columns, which are rotated with those of the word kHeadLanes further. If
// there are more lanes than such words, several have the same.
inline constexpr int kHeadLanes = kHeadDim / 4;
__device__ inline int head_word(const Place& at) { return at.lane % kHeadLanes; }

// By a warp: two words of a head that begins at `first`.
__device__ inline void fetch_head(uint32_t (&data)[2], const Place& at, const uint64_t* base, int first,
                                  uint32_t epoch) {
  const uint64_t* from = base + first + head_word(at);
  Spin spin;
  for (;;) {
    const uint64_t w0 = load_word(from), w1 = load_word(from + kHeadLanes);
    data[0] = data_of(w0), data[1] = data_of(w1);
    if (epoch_of(w0) == epoch && epoch_of(w1) == epoch) break;
    spin.turn();
  }
  __syncwarp();
}

// By a warp: kNum chunks of a row, `next` apart from `first` on, of which lane l gets columns 8 l to 8 l + 7 as pairs
// of bf16. `count`: the stores that the counters of these chunks, from `counter` on, will have seen.
template <int kNum>
__device__ inline void fetch_chunks(uint32_t (&data)[kNum][4], const Place& at, const uint64_t* base, int counter,
                                    uint32_t count, int first, int next, uint32_t epoch) {
  const uint32_t* counts = counter_at(at, counter + first);
  Spin spin;
  for (;;) {
    uint32_t least = ~0u;
#pragma unroll
    for (int n = 0; n < kNum; ++n) least = min(least, load_count(counts + n * next * kCounterStride));
    if (least >= count) break;
    spin.turn();
  }
  __syncwarp();
  const uint64_t* from = base + first * (kColumns / 2) + at.lane * 4;
  for (;;) {
    ulonglong2 words[kNum][2];
#pragma unroll
    for (int n = 0; n < kNum; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) words[n][i] = load_words(from + n * next * (kColumns / 2) + 2 * i);
    bool there = true;
#pragma unroll
    for (int n = 0; n < kNum; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        data[n][2 * i] = data_of(words[n][i].x), data[n][2 * i + 1] = data_of(words[n][i].y);
        there = there && epoch_of(words[n][i].x) == epoch && epoch_of(words[n][i].y) == epoch;
      }
    if (there) break;
    spin.turn();
  }
  __syncwarp();
}

}  // namespace
}  // namespace eadem::kernels::cuda::decoder
