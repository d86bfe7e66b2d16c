// SPDX-License-Identifier: Apache-2.0
//
// The ring of weights in shared memory, and the warp that fills it. It copies ahead of everything else, in the order in
// which the warps that multiply read, and waits for two things: a free slot, and that what is on its way has come down
// to the window, since small loads of other warps wait behind all that was asked for before them.
#pragma once

#include "eadem/kernels/cuda/decoder/place.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/instructions/tensor_map.cuh"

namespace eadem::kernels::cuda::decoder {

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
    if (clock64() - start > 20'000'000'000) __trap();
}
__device__ inline void guarded_wait(uint32_t barrier, uint32_t parity) {
  if (!barrier_test(barrier, parity)) barrier_wait_long(barrier, parity);
}

__device__ inline void init_barriers(Shared& s) {
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
  fence_barriers();
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
  __device__ void set_window(uint32_t parts) const { *const_cast<volatile uint32_t*>(&s.window) = parts; }
};

// One thread. W: the weights.
template <typename W>
class CopyWarp {
 public:
  __device__ explicit CopyWarp(const Place& at)
      : at_(at), ring_(at.s), slots_(shared_address(at.s.ring)), policy_(l2_policy<L2Policy::evict_first>()) {}

  __device__ void run() {
    const int sm = at_.sm;
#pragma unroll 1
    for (int i = 0; i < at_.p.num_layers; ++i) {
      const Layer& layer = at_.p.layers[i];
      for (int t = sm; t < kQkvTiles; t += kSms) {
        if (t < kQTiles)
          copy_tile(layer.of.q, t);
        else if (t < kQTiles + kKvTiles)
          copy_tile(layer.of.k, t - kQTiles);
        else
          copy_tile(layer.of.v, t - kQTiles - kKvTiles);
      }
      for (int item = first_item(sm); item < at_.items(); item += kSms) {
        copy_split(layer.k_map, Item(item));
        copy_split(layer.v_map, Item(item));
      }
      for (int t = sm; t < kTiles; t += kSms) copy_tile(layer.of.o, t);
      for (int t = 0; t < pairs_of(sm); ++t) {
        copy_tile(layer.of.gate, pair_at(sm, t));
        copy_tile(layer.of.up, pair_at(sm, t));
      }
      // All tiles of a step, so that a step of h serves them all.
      for (int step = 0; step < kDownSteps; ++step)
        for (int t = sm; t < kTiles; t += kSms) copy_blocks(layer.of.down, t * kFfnChunks + kProductWarps * step);
    }
  }

 private:
  // A tile of a weight with rows of kHidden.
  __device__ void copy_tile(const void* weight, int tile) {
#pragma unroll 1
    for (int b = 0; b < kChunks; b += kProductWarps) copy_blocks(weight, tile * kChunks + b);
  }
  __device__ void copy_blocks(const void* weight, int first) {
    const uint8_t* from = static_cast<const uint8_t*>(weight) + int64_t{first} * W::kBlockBytes;
    constexpr uint32_t kPartBytes = kPartBlocks * W::kBlockBytes;
    fill_slot([&](uint32_t slot, uint32_t part, uint32_t full) {
      barrier_arrive_expecting(full, kPartBytes);
      copy_bulk_async(slot + part * kPartBytes, from + part * kPartBytes, kPartBytes, full, policy_);
    });
  }
  // The keys or values of an item, of earlier tokens. A box lies in one block of the cache. Parts that have none arrive
  // at once.
  __device__ void copy_split(const CUtensorMap& map, const Item& item) {
    const int box_rows = at_.p.box_rows, keys = at_.position() - item.first_key;
    const uint32_t panel = kPartRowsBytes / 2, box_bytes = static_cast<uint32_t>(box_rows * kRowBytes);
#pragma unroll 1
    for (int first = 0; first < kSplitKeys; first += kSlotParts * kPartKeys)
      fill_slot([&](uint32_t slot, uint32_t part, uint32_t full) {
        const int begin = first + static_cast<int>(part) * kPartKeys, end = min(begin + kPartKeys, keys);
        const int boxes = max(end - begin + box_rows - 1, 0) / box_rows;
        barrier_arrive_expecting(full, static_cast<uint32_t>(boxes) * box_bytes);
        uint32_t to = rows_of_slot(slot) + part * kPartRowsBytes;
        for (int key = begin; key < end; key += box_rows, to += box_bytes / 2) {
          const int row = cache_row(at_, item.kv_head, item.first_key + key);
          copy_box_async(to, map, row, 0, full, policy_);
          copy_box_async(to + panel, map, row, 1, full, policy_);
        }
      });
  }
  // Calls copy(address of the slot, part, barrier) for each part.
  template <typename Copy>
  __device__ void fill_slot(const Copy& copy) {
    if (slot_ >= kSlots) guarded_wait(ring_.empty_at(slot_), (slot_ / kSlots - 1) & 1);
#pragma unroll 1
    for (uint32_t part = 0; part < kSlotParts; ++part) {
      // The part so far before this one has arrived.
      const uint32_t window = *const_cast<const volatile uint32_t*>(&at_.s.window);
      const uint32_t number = kSlotParts * slot_ + part, before = number - window;
      if (number >= window)
        guarded_wait(ring_.full_at(before / kSlotParts, before % kSlotParts), before / kSlotParts / kSlots & 1);
      copy(slots_ + slot_ % kSlots * kSlotBytes, part, ring_.full_at(slot_, part));
    }
    ++slot_;
  }

  const Place& at_;
  Ring ring_;
  uint32_t slots_;
  uint64_t policy_;
  uint32_t slot_ = 0;
};

}  // namespace eadem::kernels::cuda::decoder
