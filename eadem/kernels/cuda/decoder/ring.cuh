// SPDX-License-Identifier: Apache-2.0
//
// The ring of weights in shared memory, and the warp that fills it. It copies ahead of everything else, in the order in
// which the warps that multiply read, and waits for two things: a free slot, and that what is on its way has come down
// to the window, since small loads of other warps wait behind all that was asked for before them.
#pragma once

#include "eadem/kernels/cuda/decoder/weights.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/instructions/tensor_map.cuh"

namespace eadem::kernels::cuda::decoder {
namespace {

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

// W: the weights.
template <typename W>
__device__ inline void init_barriers(Shared& s) {
  const auto init = [](uint64_t* barriers, int count, int arrivals) {
    for (int i = 0; i < count; ++i) barrier_init(shared_address(barriers + i), arrivals);
  };
  init(&s.full[0][0], kMostSlots * kSlotParts, 1);
  init(s.empty, kMostSlots, kProductWarps);
  constexpr int kTileWarps = W::kIsBf16 ? 1 : kProductWarps;
  init(s.qkv_ready, kMostQkvTiles, kTileWarps);
  init(s.out_ready, kMostTiles, kTileWarps);
  init(s.gate_up_ready, kMostPairs, W::kIsBf16 ? 2 : kProductWarps);
  init(&s.down_ready, 1, kTileWarps);
  init(s.h_ready, kDownSteps, W::kIsFloat ? kSumWarps + kRoundWarps : kRoundWarps);
  fence_barriers();
}

// Where keys or values begin in a slot.
__device__ inline uint32_t rows_of_slot(uint32_t slot_address) { return (slot_address + 1023) / 1024 * 1024; }

// Slots are numbered through all layers; slot i stands at i % W::kSlots. W: the weights.
template <typename W>
struct Ring {
  static constexpr int kSlots = W::kSlots, kSlotBytes = W::kSlotBytes, kBytes = kSlots * kSlotBytes;
  static_assert(kSlots <= kMostSlots && kSlots >= 2 * kSplitSlots && kSlotBytes % 256 == 0);
  static_assert(kSlotParts * kPartRowsBytes + (kSlotBytes % 1024 == 0 ? 0 : 1024 - 256) <= kSlotBytes);

  Shared& s;
  uint8_t* slots;
  uint32_t full, empty;  // addresses of the barriers

  __device__ explicit Ring(const Place& at)
      : s(at.s), slots(at.ring), full(shared_address(at.s.full)), empty(shared_address(at.s.empty)) {}

  __device__ uint32_t full_at(uint32_t slot, uint32_t part) const {
    return full + (slot % kSlots * kSlotParts + part) * kBarrierBytes;
  }
  __device__ uint32_t empty_at(uint32_t slot) const { return empty + slot % kSlots * kBarrierBytes; }

  __device__ const uint8_t* at(uint32_t slot) const { return slots + slot % kSlots * kSlotBytes; }
  __device__ const uint8_t* wait(uint32_t slot, int part) const {
    guarded_wait(full_at(slot, static_cast<uint32_t>(part)), slot / kSlots & 1);
    return at(slot);
  }
  // The address of part `part` of the keys or values whose first slot is `slot`.
  __device__ uint32_t rows_at(uint32_t slot, int part) const {
    slot += static_cast<uint32_t>(part) / kSlotParts;
    return rows_of_slot(shared_address(slots + slot % kSlots * kSlotBytes)) +
           static_cast<uint32_t>(part) % kSlotParts * kPartRowsBytes;
  }
  __device__ uint32_t wait_rows(uint32_t slot, int part) const {
    wait(slot + static_cast<uint32_t>(part) / kSlotParts, part % kSlotParts);
    return rows_at(slot, part);
  }
  // By one lane of each warp that multiplies.
  __device__ void free(uint32_t slot) const { barrier_arrive(empty_at(slot)); }
  // By one lane of the one warp that read the slot.
  __device__ void free_whole(uint32_t slot) const { barrier_arrive(empty_at(slot), kProductWarps); }
  // The block of a warp that multiplies, of eight whose first slot is `slot`. `six`: of q6_k.
  __device__ const uint8_t* wait_block(uint32_t slot, int warp, bool six) const {
    const int in_slot = warp % blocks_of_slot(six);
    return wait(slot_of(slot, warp, six), in_slot * kSlotParts / blocks_of_slot(six)) + in_slot * W::block_bytes(six);
  }
  __device__ void free_block(uint32_t slot, int warp, bool six) const {
    // Half of the warps have blocks in a slot of six bits, and count for the others.
    barrier_arrive(empty_at(slot_of(slot, warp, six)), slots_of(six));
  }
  // How many slots the blocks of eight chunks take.
  __device__ static constexpr uint32_t slots_of(bool six) { return W::kHasSixBits && six ? 2 : 1; }
  __device__ static constexpr int blocks_of_slot(bool six) { return kProductWarps / static_cast<int>(slots_of(six)); }
  __device__ static constexpr uint32_t part_bytes(bool six) {
    return static_cast<uint32_t>(blocks_of_slot(six) / kSlotParts * W::block_bytes(six));
  }
  // By one thread.
  __device__ void set_window(uint32_t parts) const { *const_cast<volatile uint32_t*>(&s.window) = parts; }

 private:
  __device__ static uint32_t slot_of(uint32_t slot, int warp, bool six) {
    return slot + static_cast<uint32_t>(warp / blocks_of_slot(six));
  }
};

// A warp, of which lane 0 copies, and all lanes look up where rows of the cache are. W: the weights.
template <typename W>
class CopyWarp {
 public:
  __device__ explicit CopyWarp(const Place& at)
      : at_(at), ring_(at), slots_(shared_address(at.ring)), policy_(l2_policy<L2Policy::evict_first>()) {}

  __device__ void run() {
    constexpr int kKnown = kWarp / kSplitBoxes;  // items whose boxes the lanes hold at once
    const int sm = at_.sm;
    find_rows(first_item(sm));
    const bool finds_again = first_item(sm) + kKnown * kSms < at_.items();
#pragma unroll 1
    for (int i = 0; i < at_.p.num_layers; ++i) {
      const Layer& layer = at_.p.layers[i];
      if (at_.lane == 0) prefetch_map(layer.k_map), prefetch_map(layer.v_map);
      copy_tiles(tiles_of(kQkvTiles, sm), [&](int t) {
        int tile = sm + t * kSms;
        const DecoderWeight& weight = qkv_weight(layer.of, tile);
        return Tile{weight, tile};
      });
      for (int n = 0, item = first_item(sm); item < at_.items(); ++n, item += kSms) {
        if (finds_again && n % kKnown == 0) find_rows(item);
        copy_split(layer.k_map, Item(item), n % kKnown * kSplitBoxes);
        copy_split(layer.v_map, Item(item), n % kKnown * kSplitBoxes);
      }
      copy_tiles(tiles_of(kTiles, sm), [&](int t) { return Tile{layer.of.o, sm + t * kSms}; });
      copy_tiles(2 * pairs_of(sm), [&](int t) {
        return Tile{t % 2 == 0 ? layer.of.gate : layer.of.up, pair_at(sm, t / 2)};
      });
      // All tiles of a step, so that a step of h serves them all.
      for (int step = 0; step < kDownSteps; ++step)
        for (int t = sm; t < kTiles; t += kSms) copy_step(layer.of.down, t, step);
    }
  }

 private:
  struct Tile {
    const DecoderWeight& weight;
    int tile;
  };
  // `tiles` tiles of weights with rows of kHidden, one after another; of weights in bf16 a slot of each in turn, as
  // each is another warp's. tile_at(t): tile t of them.
  template <typename TileAt>
  __device__ void copy_tiles(int tiles, const TileAt& tile_at) {
    if constexpr (W::kIsBf16) {
#pragma unroll 1
      for (int i = 0; i < kBf16TileSlots; ++i)
#pragma unroll 1
        for (int t = 0; t < tiles; ++t) copy_rows<2 * kHidden>(at_.p.rows, tile_at(t), i, 1);
    } else {
#pragma unroll 1
      for (int t = 0; t < tiles; ++t) {
        const Tile of = tile_at(t);
        if constexpr (W::kIsFloat) {
          copy_rows<kHidden>(at_.p.rows, of, 0, kFloatTileSlots);
        } else {
#pragma unroll 1
          for (int b = 0; b < kChunks; b += kProductWarps) copy_blocks(of.weight, of.tile * kChunks + b);
        }
      }
    }
  }
  // What step `step` multiplies of a tile of down.
  __device__ void copy_step(const DecoderWeight& down, int tile, int step) {
    if constexpr (W::kIsBf16)
      copy_rows<2 * kFfn>(at_.p.down_rows, {down, tile}, step * kBf16StepSlots, kBf16StepSlots);
    else if constexpr (W::kIsFloat)
      copy_rows<kFfn>(at_.p.down_rows, {down, tile}, step * kFloatStepSlots, kFloatStepSlots);
    else
      copy_blocks(down, tile * kFfnChunks + kProductWarps * step);
  }
  // `slots` slots of a tile of a weight with rows of kWidth bytes, from the tile's slot `first` on.
  template <int kWidth>
  __device__ void copy_rows(const WeightRows& rows, const Tile& of, int first, int slots) {
    constexpr int kPanel = static_cast<int>(kPanelRowBytes);
    const int64_t offset = static_cast<const uint8_t*>(of.weight.blocks) - rows.base;
    const int row = static_cast<int>(offset / kWidth) + of.tile * kTileRows, byte = static_cast<int>(offset % kWidth);
    int panel = byte / kPanel + first * kSlotParts * kRowBoxPanels;
#pragma unroll 1
    for (int i = 0; i < slots; ++i)
      fill_slot([&](uint32_t slot, uint32_t part, uint32_t full) {
        if (at_.lane == 0) {
          barrier_arrive_expecting(full, kRowBoxBytes);
          copy_columns_async(slot + part * kRowBoxBytes, rows.map, byte % kPanel, row, panel, full, policy_);
        }
        panel += kRowBoxPanels;
      });
  }
  __device__ void copy_blocks(const DecoderWeight& weight, int first) {
    const bool six = is_six(weight);
    const uint8_t* from = static_cast<const uint8_t*>(weight.blocks) + int64_t{first} * W::block_bytes(six);
    const uint32_t part_bytes = Ring<W>::part_bytes(six);
#pragma unroll 1
    for (uint32_t i = 0; i < Ring<W>::slots_of(six); ++i)
      fill_slot([&](uint32_t slot, uint32_t part, uint32_t full) {
        if (at_.lane == 0) {
          barrier_arrive_expecting(full, part_bytes);
          copy_bulk_async(slot + part * part_bytes, from, part_bytes, full, policy_);
        }
        from += part_bytes;
      });
  }
  // Lane l finds the row of the cache at which box l begins, of the items from `item` on. A box lies in one block.
  __device__ void find_rows(int item) {
    const Item of(item + at_.lane / kSplitBoxes * kSms);
    const int key = of.first_key + at_.lane % kSplitBoxes * kBoxKeys;
    row_ = key < at_.position() ? cache_row(at_, of.kv_head, key) : 0;
  }
  // The keys or values of an item, of earlier tokens, of which lane `first_lane` has the first box. Parts that have
  // none arrive at once.
  __device__ void copy_split(const CUtensorMap& map, const Item& item, int first_lane) {
    constexpr int kPartBoxes = kPartKeys / kBoxKeys;
    const int all_boxes = (at_.position() - item.first_key + kBoxKeys - 1) / kBoxKeys;
    int box = 0;
#pragma unroll 1
    for (int slot_of_split = 0; slot_of_split < kSplitSlots; ++slot_of_split)
      fill_slot([&](uint32_t slot, uint32_t part, uint32_t full) {
        const int boxes = min(max(all_boxes - box, 0), kPartBoxes);
        if (at_.lane == 0) barrier_arrive_expecting(full, static_cast<uint32_t>(boxes * kBoxBytes));
        const uint32_t to = rows_of_slot(slot) + part * kPartRowsBytes;
#pragma unroll
        for (int b = 0; b < kPartBoxes; ++b) {
          const int row = __shfl_sync(kAllLanes, row_, first_lane + box + b);
          if (b < boxes && at_.lane == 0)
            copy_box_async(to + static_cast<uint32_t>(b * kBoxBytes), map, row, 0, full, policy_);
        }
        box += kPartBoxes;
      });
  }
  // Calls copy(address of the slot, part, barrier) for each part. What lies between two slots bounds how fast weights
  // come, so both parts wait together.
  template <typename Copy>
  __device__ void fill_slot(const Copy& copy) {
    constexpr uint32_t kSlots = W::kSlots;
    if (slot_ >= kSlots) guarded_wait(ring_.empty_at(slot_), (slot_ / kSlots - 1) & 1);
    // The part so far before the last one has arrived.
    const uint32_t window = *const_cast<const volatile uint32_t*>(&at_.s.window);
    const uint32_t last = kSlotParts * slot_ + kSlotParts - 1, before = last - window;
    if (last >= window)
      guarded_wait(ring_.full_at(before / kSlotParts, before % kSlotParts), before / kSlotParts / kSlots & 1);
    __syncwarp();
    const uint32_t to = slots_ + slot_ % kSlots * W::kSlotBytes;
#pragma unroll
    for (uint32_t part = 0; part < kSlotParts; ++part) copy(to, part, ring_.full_at(slot_, part));
    ++slot_;
  }

  const Place& at_;
  Ring<W> ring_;
  uint32_t slots_;
  uint64_t policy_;
  int row_ = 0;
  uint32_t slot_ = 0;
};

}  // namespace
}  // namespace eadem::kernels::cuda::decoder
