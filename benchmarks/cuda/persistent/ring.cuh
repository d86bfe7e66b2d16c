// SPDX-License-Identifier: Apache-2.0
//
// The ring of weights in shared memory, and the warp that fills it. It copies ahead of everything else, in the order in
// which the warps that multiply read, and waits for two things: a free slot, and that what is on its way has come down
// to the window, since small loads of other warps wait behind all that was asked for before them.
#pragma once

#include "benchmarks/cuda/persistent/place.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/instructions/tensor_map.cuh"

namespace eadem::persistent {

using kernels::cuda::barrier_arrive;
using kernels::cuda::kBarrierBytes;
using kernels::cuda::shared_address;

// Returns whether the phase with this parity ended; `nanoseconds`: for how long the thread may sleep until it does.
__device__ inline bool barrier_test(uint32_t barrier, uint32_t parity, uint32_t nanoseconds) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2, %3;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity), "r"(nanoseconds)
      : "memory");
  return done != 0;
}
__device__ inline bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// Waits for the end of a phase, guarded by the clock. The code of a long wait is not repeated at each use.
__device__ __noinline__ void barrier_wait_long(uint32_t barrier, uint32_t parity) {
  const long long start = clock64();
  while (!barrier_test(barrier, parity, 1'000'000))
    if (clock64() - start > 1'000'000'000) __trap();
}
__device__ inline void guarded_wait(uint32_t barrier, uint32_t parity) {
  if (!barrier_test(barrier, parity)) barrier_wait_long(barrier, parity);
}

__device__ inline void init_barriers(Shared& s) {
  using kernels::cuda::barrier_init;
  const auto init = [](uint64_t* barriers, int count, int arrivals) {
    for (int i = 0; i < count; ++i) barrier_init(shared_address(barriers + i), arrivals);
  };
  init(&s.full[0][0], kSlots * kSlotParts, 1);
  init(s.empty, kSlots, kProductWarps);
  init(s.qkv_ready, kMostQkvTiles, kProductWarps);
  init(s.out_ready, kMostTiles, kProductWarps);
  init(s.gate_up_ready, kMostPairs, kProductWarps);
  init(&s.down_ready, 1, kProductWarps);
  init(s.h_ready, kDownSteps, kRoundWarps);
  kernels::cuda::fence_barriers();
}

// Where keys or values begin in a slot.
__device__ inline uint32_t rows_of_slot(uint32_t slot_address) { return (slot_address + 1023) / 1024 * 1024; }

// Slots are numbered through all layers; slot i stands at i % kSlots.
struct Ring {
  Shared& s;
  uint32_t full, empty;  // addresses of the barriers

  __device__ explicit Ring(Shared& shared)
      : s(shared), full(shared_address(shared.full)), empty(shared_address(shared.empty)) {}

  __device__ uint32_t full_at(uint32_t slot, uint32_t part) const {
    return full + (slot % kSlots * kSlotParts + part) * kBarrierBytes;
  }
  __device__ uint32_t empty_at(uint32_t slot) const { return empty + slot % kSlots * kBarrierBytes; }

  __device__ const uint8_t* wait(uint32_t slot, int part) const {
    guarded_wait(full_at(slot, static_cast<uint32_t>(part)), slot / kSlots & 1);
    return s.ring[slot % kSlots];
  }
  // The address of part `part` of the keys or values whose first slot is `slot`.
  __device__ uint32_t rows_at(uint32_t slot, int part) const {
    slot += static_cast<uint32_t>(part) / kSlotParts;
    return rows_of_slot(shared_address(s.ring[slot % kSlots])) +
           static_cast<uint32_t>(part) % kSlotParts * kPartRowsBytes;
  }
  __device__ uint32_t wait_rows(uint32_t slot, int part) const {
    wait(slot + static_cast<uint32_t>(part) / kSlotParts, part % kSlotParts);
    return rows_at(slot, part);
  }
  // By one lane of each warp that multiplies.
  __device__ void free(uint32_t slot) const { barrier_arrive(empty_at(slot)); }
  // By one thread.
  __device__ void set_window(int parts) const {
    *const_cast<volatile uint32_t*>(&s.window) = static_cast<uint32_t>(parts);
  }
};

// One thread.
template <Mode kMode>
class CopyWarp {
 public:
  __device__ explicit CopyWarp(const Place& at)
      : at_(at),
        ring_(at.s),
        slots_(shared_address(at.s.ring)),
        policy_(kernels::cuda::l2_policy<kernels::cuda::L2Policy::evict_first>()) {}

  __device__ void run() {
    const Params& p = at_.p;
    const int sm = at_.sm;
    for (int layer = 0; layer < p.layers; ++layer) {
      const uint8_t* w = p.weights + layer * kLayerBytes;
      copy_tiles(w, sm, kQkvTiles, kChunks);
      w += kQkvBytes;
      if (kMode != Mode::weights_alone && item_of(sm) < kItems) {
        // Items are splits of one head after another, so that their rows follow each other.
        const int keys = layer * 2 * kKvHeads * kKeys + item_of(sm) * kSplitKeys;
        copy_split(keys);
        copy_split(keys + kKvHeads * kKeys);
      }
      copy_tiles(w, sm, kTiles, kChunks);
      w += kOutBytes;
      for (int t = 0; t < pairs_of(sm); ++t) copy_tile(w, pair_at(sm, t), 2 * kChunks);
      w += kGateUpBytes;
      // All tiles of a step, so that a step of h serves them all.
      for (int step = 0; step < kDownSteps; ++step)
        for (int t = sm; t < kTiles; t += kSms)
          copy_slot(w + (int64_t{t} * kFfnChunks + kProductWarps * step) * kBlockBytes);
    }
  }

 private:
  // Tile after tile, of `blocks` blocks each.
  __device__ void copy_tiles(const uint8_t* weight, int first, int tiles, int blocks) {
    for (int t = first; t < tiles; t += kSms) copy_tile(weight, t, blocks);
  }
  __device__ void copy_tile(const uint8_t* weight, int tile, int blocks) {
    for (int b = 0; b < blocks; b += kProductWarps) copy_slot(weight + (int64_t{tile} * blocks + b) * kBlockBytes);
  }
  __device__ void copy_slot(const uint8_t* from) {
    fill_slot(kPartBytes, [&](uint32_t slot, uint32_t part, uint32_t full) {
      kernels::cuda::copy_bulk_async(slot + part * kPartBytes, from + part * kPartBytes, kPartBytes, full, policy_);
    });
  }
  // The keys or values of a split, from a row of the cache on.
  __device__ void copy_split(int row) {
#pragma unroll 1
    for (int i = 0; i < kSplitSlots; ++i, row += kSlotParts * kPartKeys)
      fill_slot(kPartRowsBytes, [&](uint32_t slot, uint32_t part, uint32_t full) {
        kernels::cuda::copy_box_async(rows_of_slot(slot) + part * kPartRowsBytes, at_.p.cache_map,
                                      row + static_cast<int>(part) * kPartKeys, 0, full, policy_);
      });
  }
  // Calls copy(address of the slot, part, barrier) for each part, of `part_bytes` bytes.
  template <typename Copy>
  __device__ void fill_slot(uint32_t part_bytes, const Copy& copy) {
    if (slot_ >= kSlots) guarded_wait(ring_.empty_at(slot_), (slot_ / kSlots - 1) & 1);
#pragma unroll 1
    for (uint32_t part = 0; part < kSlotParts; ++part) {
      const uint32_t full = ring_.full_at(slot_, part);
      if (kMode == Mode::chain_alone && slot_ >= kSlots) {
        barrier_arrive(full);
        continue;
      }
      // The part so far before this one has arrived.
      const uint32_t window = *const_cast<const volatile uint32_t*>(&at_.s.window);
      const uint32_t number = kSlotParts * slot_ + part, before = number - window;
      if (number >= window)
        guarded_wait(ring_.full_at(before / kSlotParts, before % kSlotParts), before / kSlotParts / kSlots & 1);
      kernels::cuda::barrier_arrive_expecting(full, part_bytes);
      copy(slots_ + slot_ % kSlots * kSlotBytes, part, full);
    }
    ++slot_;
  }

  const Place& at_;
  Ring ring_;
  uint32_t slots_;
  uint64_t policy_;
  uint32_t slot_ = 0;
};

}  // namespace eadem::persistent
