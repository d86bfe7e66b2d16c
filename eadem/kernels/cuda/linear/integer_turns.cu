// SPDX-License-Identifier: Apache-2.0
//
// Products that have too few tiles for integer_tiles.cu, with the same bits: of more than 32 rows of 8-bit codes with
// narrow weights, some of which may share a launch. A tile has 64 rows of the weight and 64 tokens. Four warpgroups
// take its chunks of 256 columns in turns: each multiplies a chunk by wgmma while the others multiply theirs, and adds
// it to sums in shared memory when the chunk before has been added. Each has a warp that copies what it multiplies.
#include <algorithm>
#include <type_traits>

#include "eadem/kernels/cuda/linear/integer_tiles.cuh"

namespace eadem::kernels::cuda {

namespace {

using tiles::kLargestGroups;
using tiles::kStepBytes;

constexpr int kWarpgroups = 4;  // that multiply
constexpr int kRows = tiles::kGroupRows, kBlockRows = kRows / kFragmentBlockRows;
constexpr int kWarpsOfGroup = kWarpgroup / kWarp;
constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
static_assert(kWarpgroups == kWarpsOfGroup);  // the last warpgroup has a warp for each of the others
// Registers of a thread that multiplies, and of one that copies: what all have at first is all there is.
constexpr int kGrown = 112, kShrunk = 32;
static_assert(kWarpgroups * kGrown + kShrunk <= (kWarpgroups + 1) * (65536 / kThreads / 8 * 8));
constexpr int kTokens = 64, kTokenTiles = kTokens / 8;
static_assert(kRows == kIntegerTurnTile && kTokens == kIntegerTurnTile);
constexpr uint32_t kPanelBytes = kTokens * kPanelRowBytes;
constexpr int kSlots = 2;                                   // of a warpgroup
constexpr uint32_t kSumsOfWarp = kTokenTiles * kWarp * 16;  // bytes

// Weights are kGroups of four bits, or K-quants of which each part has one kind.
template <bool kGroups_>
struct Shape {
  static constexpr bool kGroups = kGroups_;
  static constexpr int kPanels = kGroups ? 2 : 4;  // of a chunk of the tokens
  static constexpr int kStages = kGroups ? 4 : 3;  // panels of a warpgroup that are in memory
  // The slot of a chunk has its encoded blocks, then the scales of its tokens, and of q4_k sums of their codes
  // (narrow_operand).
  static constexpr uint32_t kScaleBytes = kTokens * 4, kSumBytes = kTokens * 32;
  static constexpr int kMostBlockBytes = kGroups ? kLargestGroups.block_bytes : kSixBits.block_bytes;
  static constexpr uint32_t kWithoutSums = kBlockRows * kMostBlockBytes + kScaleBytes,
                            kWithSums = kBlockRows * kFourBits.block_bytes + kScaleBytes + kSumBytes,
                            kSlotBytes = kGroups ? kWithoutSums : std::max(kWithoutSums, kWithSums);
  static_assert(kSlotBytes % 128 == 0);
  static constexpr uint32_t kSharedBytes =
      kWarpgroups * (kStages * kPanelBytes + kSlots * kSlotBytes) + kWarpsOfGroup * kSumsOfWarp;
  static_assert(kSharedBytes <= 226 * 1024);
};

// Shared memory of warpgroup `group`, and the barriers in it.
template <typename S>
struct Memory {
  uint8_t* bytes;
  uint32_t first, first_barrier;  // of `bytes`, and of the barriers
  int group;

  static constexpr int kBarriersOfGroup = 2 * S::kStages + 2 * kSlots + kWarpsOfGroup;

  __device__ uint32_t panel(int stage) const {
    return first + static_cast<uint32_t>(group * S::kStages + stage) * kPanelBytes;
  }
  __device__ uint8_t* slot(int i) const {
    return bytes + kWarpgroups * S::kStages * kPanelBytes + static_cast<uint32_t>(group * kSlots + i) * S::kSlotBytes;
  }
  // Sums of the rows of warp `warp` of each warpgroup: [tile of eight tokens][lane][4].
  __device__ uint32_t sums(int warp, int lane) const {
    return first + S::kSharedBytes - static_cast<uint32_t>(kWarpsOfGroup - warp) * kSumsOfWarp +
           static_cast<uint32_t>(lane) * 16;
  }
  __device__ Ring ring() const { return {barrier(group, 0), barrier(group, S::kStages)}; }
  __device__ Ring slot_ring() const {
    return {barrier(group, 2 * S::kStages), barrier(group, 2 * S::kStages + kSlots)};
  }
  // For warp `warp` of a warpgroup: the chunk before has been added.
  __device__ uint32_t turn(int of_group, int warp) const {
    return barrier(of_group, 2 * S::kStages + 2 * kSlots + warp);
  }
  __device__ uint32_t barrier(int of_group, int index) const {
    return first_barrier + static_cast<uint32_t>(of_group * kBarriersOfGroup + index) * kBarrierBytes;
  }
};

// The lane of this thread, read again: kept from the beginning, it would take a register of all that follows.
__device__ inline int lane_now() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// The tiles that cover `size`.
__host__ __device__ inline int tiles_of(int64_t size, int tile) {
  return static_cast<int>(ceil_div(size, int64_t{tile}));
}

// The chunks that a warpgroup takes of the tiles of its block, one after another. Tiles of the same rows and other
// tokens follow each other, then come other rows, part after part.
struct Place {
  int tile, chunk, part = 0, output = 0, token = 0;

  __device__ Place(const LinearStreamParams& p, int num_chunks, int group)
      : tile(static_cast<int>(blockIdx.x)), chunk(group) {
    find_chunk(p, num_chunks);
  }
  __device__ void advance(const LinearStreamParams& p, int num_chunks) {
    chunk += kWarpgroups;
    if (chunk >= num_chunks) find_chunk(p, num_chunks);
  }

 private:
  __device__ void find_chunk(const LinearStreamParams& p, int num_chunks) {
    for (; chunk >= num_chunks; chunk -= num_chunks) tile += static_cast<int>(gridDim.x);
    const int token_tiles = tiles_of(p.tokens, kTokens);
    int rows = tile / token_tiles;
    token = tile % token_tiles * kTokens;
    part = 0;
#pragma unroll
    for (int i = 0; i + 1 < kMostLinearStreamParts; ++i) {
      const int of_part = tiles_of(p.parts[i].out, kRows);
      if (part == i && rows >= of_part) rows -= of_part, ++part;
    }
    output = rows * kRows;
  }
};

// By a warp: copies what warpgroup `memory.group` multiplies.
template <typename S>
__device__ inline void copy_operands(const PackedStreamParams& packed, const CUtensorMap& map, const Memory<S>& memory,
                                     int num_chunks, int lane) {
  const LinearStreamParams& p = packed.product;
  const int token_groups = tiles_of(p.tokens, 8);
  RingPlace<S::kStages> place{0, 1};  // parity of the phase before the first: the first round waits for nothing
  uint32_t step = 0;
  for (Place now(p, num_chunks, memory.group); now.tile < packed.num_tiles; now.advance(p, num_chunks), ++step) {
    const LinearStreamPart& part = p.parts[now.part];
    const FragmentLayout& layout = packed.layouts[now.part];
    const auto block_bytes = static_cast<uint32_t>(layout.block_bytes);
    const bool has_sums = !S::kGroups && layout.has_min;
    const auto groups = static_cast<uint32_t>(min(kTokens / 8, token_groups - now.token / 8));
    const auto slot = static_cast<int>(step % kSlots);
    const uint32_t full = memory.slot_ring().full_at(slot), to = shared_address(memory.slot(slot));
    barrier_wait(memory.slot_ring().empty_at(slot), step / kSlots % 2 ^ 1);
    if (lane == 0) barrier_arrive_expecting(full, kBlockRows * block_bytes + groups * (has_sums ? 288 : 32));
    __syncwarp();
    if (lane < kBlockRows) {
      // Beyond the last row of blocks it is the last one.
      const int row = min(now.output / kFragmentBlockRows + lane, tiles_of(part.out, kFragmentBlockRows) - 1);
      copy_bulk_async(to + static_cast<uint32_t>(lane) * block_bytes,
                      static_cast<const uint8_t*>(part.weight) + (int64_t{row} * num_chunks + now.chunk) * block_bytes,
                      block_bytes, full, l2_policy<L2Policy::evict_first>());
    }
    if (step == 0) wait_for_earlier_kernels();  // weights do not depend on them
    const int64_t first_group = int64_t{now.chunk} * token_groups + now.token / 8;
    if (lane == kBlockRows)
      copy_bulk_async(to + kBlockRows * block_bytes, p.x_scales + first_group * 8, groups * 32, full,
                      l2_policy<L2Policy::evict_last>());
    if constexpr (!S::kGroups)
      if (lane == kBlockRows + 1 && has_sums)
        copy_bulk_async(to + kBlockRows * block_bytes + S::kScaleBytes, p.x_chunks.sums + first_group * 128,
                        groups * 256, full, l2_policy<L2Policy::evict_last>());
#pragma unroll 1
    for (int panel = 0; panel < S::kPanels; ++panel) {
      barrier_wait(memory.ring().empty_at(place.stage), place.parity);
      if (lane == 0) {
        const uint32_t panel_full = memory.ring().full_at(place.stage);
        barrier_arrive_expecting(panel_full, kPanelBytes);
        copy_box_async(memory.panel(place.stage), map, now.token, now.chunk * S::kPanels + panel, panel_full,
                       l2_policy<L2Policy::evict_last>());
      }
      place.advance();
    }
  }
}

// chain: the terms of the block of K-quants at `block`, without the scales of tokens. `sums` are those of their codes.
template <IntegerCodes kCodes, typename S>
__device__ inline void multiply_halves(float (&chain)[kTokenTiles][4], const Memory<S>& memory,
                                       RingPlace<S::kStages>& place, const uint8_t* block, uint32_t sums, int lane) {
  constexpr int kBatches = 2 * S::kPanels;
  constexpr bool kHasMin = kCodes == IntegerCodes::four;
  uint32_t a[2][2][4];  // of two batches of products
  float scale[2];
  typename Codes<kCodes>::Factors factors;
  uint32_t min[4];
  if constexpr (kHasMin) {
    const MinScales scales(block, lane);
    scale[0] = scales.row[0].scale * (1 / kUnit), scale[1] = scales.row[1].scale * (1 / kUnit);
    factors = CodeFactors(scales.row[0].factor, scales.row[1].factor);
    load_minimums(min, block, scales, lane);
  } else {
    const auto* d = reinterpret_cast<const __half*>(block + kSixBits.scales) + lane / 4;
    scale[0] = __half2float(d[0]) * (1 / kSixUnit), scale[1] = __half2float(d[8]) * (1 / kSixUnit);
  }
  int before = 0;  // the stage before
  Codes<kCodes> codes(block, 0, lane);
  codes.decode(a[0], 0, factors);
#pragma unroll
  for (int batch = 0; batch < kBatches; ++batch) {  // of two products, whose fragments the batch before decoded
    const int half = batch % 2;
    if (half == 0) barrier_wait(memory.ring().full_at(place.stage), place.parity);
    const Operand tokens(memory.panel(place.stage), 0);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i)
      wgmma_f16(chain, a[half][i], tokens.at(static_cast<uint32_t>(2 * half + i) * kStepBytes), batch + i > 0);
    if constexpr (kHasMin)
      if (batch == kBatches - 1) wgmma_f16(chain, min, narrow_operand(sums), true);
    wgmma_commit();
    if (batch + 1 < kBatches) {
      if (half == 1) codes = Codes<kCodes>(block, (batch + 1) / 2, lane);
      wgmma_wait<1>();  // the batch before has ended: its fragments, and its stage, are free
      if (half == 0 && batch > 0) arrive_in_cluster(memory.ring().empty_at(before), lane == 0);
      codes.decode(a[1 - half], 1 - half, factors);
    }
    if (half == 1) {
      before = place.stage;
      place.advance();
    }
  }
  wgmma_wait<0>();
  pin(chain);
  arrive_in_cluster(memory.ring().empty_at(before), lane == 0);
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) chain[t][i] = __fmul_rn(chain[t][i], scale[i / 2]);
}

// Multiplies a block of groups and calls add(terms, the first tile of tokens that they are of) for a part of the tokens
// at a time, since there are no registers for more.
template <typename S, typename Add>
__device__ inline void multiply_bytes(const FragmentLayout& layout, const Memory<S>& memory,
                                      RingPlace<S::kStages>& place, const uint8_t* block, int lane, Add&& add) {
  constexpr int kAtOnce = 32;
  uint32_t a[2][kHalfSteps][4];
  int stages[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    decode_half(a[half], block, half, GroupScales(layout, block, half, lane), lane);
    barrier_wait(memory.ring().full_at(place.stage), place.parity);
    stages[half] = place.stage;
    place.advance();
  }
#pragma unroll
  for (int first = 0; first < kTokens; first += kAtOnce) {
    int chain[2][kAtOnce / 8][4];
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Operand tokens(memory.panel(stages[half]) + static_cast<uint32_t>(first) * kPanelRowBytes, 0);
#pragma unroll
      for (int i = 0; i < kHalfSteps; ++i)
        wgmma_s8(chain[half], a[half][i], tokens.at(static_cast<uint32_t>(i) * kStepBytes), i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(chain[0]);
    pin(chain[1]);
    if (first + kAtOnce == kTokens)
#pragma unroll
      for (const int stage : stages) arrive_in_cluster(memory.ring().empty_at(stage), lane == 0);
    float term[kAtOnce / 8][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const GroupScales scales(layout, block, half, lane);
#pragma unroll
      for (int t = 0; t < kAtOnce / 8; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto value = static_cast<float>(chain[half][t][i]);
          term[t][i] = half == 0 ? __fmul_rn(value, scales.scale[i / 2]) : fmaf(value, scales.scale[i / 2], term[t][i]);
        }
    }
    add(term, first / 8);
  }
}

template <typename S>
__device__ inline void multiply(const PackedStreamParams& packed, const Memory<S>& memory, int num_chunks, int warp,
                                int lane) {
  const LinearStreamParams& p = packed.product;
  const int group = memory.group;
  RingPlace<S::kStages> place;
  uint32_t step = 0;
  for (Place now(p, num_chunks, group); now.tile < packed.num_tiles; now.advance(p, num_chunks), ++step) {
    const FragmentLayout& layout = packed.layouts[now.part];
    const auto slot = static_cast<int>(step % kSlots);
    const uint8_t* const blocks = memory.slot(slot);
    const uint8_t* const block = blocks + warp * layout.block_bytes;
    const uint32_t scales = shared_address(blocks) + kBlockRows * static_cast<uint32_t>(layout.block_bytes);
    // Adds terms to the sums of tiles of tokens, from `first` on. Of the last chunk it stores the results; earlier
    // kernels have ended by then, since the tokens came after them.
    const auto add = [&](auto& term, int first) {
      constexpr int kTiles = std::extent_v<std::remove_reference_t<decltype(term)>>;
      const bool is_first = now.chunk == 0, is_last = now.chunk + 1 == num_chunks;
      // The turn of the first chunk of all is there from the beginning.
      if (first == 0) barrier_wait(memory.turn(group, warp), (group == 0 ? step - 1 : step) % 2);
      const uint32_t sums = memory.sums(warp, lane);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const float2 scale = load_f32x2(scales + static_cast<uint32_t>((first + t) * 8 + lane % 4 * 2) * 4);
        uint32_t sum[4];
        load_16(sum, sums + static_cast<uint32_t>((first + t) * kWarp) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          term[t][i] = fmaf(term[t][i], i % 2 == 0 ? scale.x : scale.y, is_first ? 0.0f : __uint_as_float(sum[i]));
        if (!is_last) store_f32x4(sums + static_cast<uint32_t>((first + t) * kWarp) * 16, term[t]);
      }
      if (!is_last) return;
      const LinearStreamPart& part = p.parts[now.part];
      const int token = now.token + first * 8, output = now.output + warp * kFragmentBlockRows;
      if (p.y_dtype == DType::bf16)
        tiles::store_outputs<bf16_t>(part, p.tokens, term, token, output, lane);
      else
        tiles::store_outputs<float>(part, p.tokens, term, token, output, lane);
    };
    barrier_wait(memory.slot_ring().full_at(slot), step / kSlots % 2);
    if constexpr (S::kGroups) {
      multiply_bytes(layout, memory, place, block, lane, add);
    } else {
      float term[kTokenTiles][4];
      if (layout.has_min)
        multiply_halves<IntegerCodes::four>(term, memory, place, block, scales + S::kScaleBytes, lane);
      else
        multiply_halves<IntegerCodes::six>(term, memory, place, block, 0, lane);
      add(term, 0);
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(memory.turn((group + 1) % kWarpgroups, warp));
      barrier_arrive(memory.slot_ring().empty_at(slot));
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_in_turns(const __grid_constant__ PackedStreamParams p, const __grid_constant__ CUtensorMap token_map) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  __shared__ uint64_t barriers[kWarpgroups * Memory<S>::kBarriersOfGroup];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  const bool copies = warp >= kWarpgroups * kWarpsOfGroup;
  const Memory<S> memory{.bytes = bytes,
                         .first = shared_address(bytes),
                         .first_barrier = shared_address(barriers),
                         .group = copies ? warp % kWarpgroups : warp / kWarpsOfGroup};
  if (copies && thread % kWarp == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(memory.ring().full_at(i), 1);
      barrier_init(memory.ring().empty_at(i), kWarpsOfGroup);
    }
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(memory.slot_ring().full_at(i), 1);
      barrier_init(memory.slot_ring().empty_at(i), kWarpsOfGroup);
    }
    for (int i = 0; i < kWarpsOfGroup; ++i) barrier_init(memory.turn(memory.group, i), 1);
  }
  fence_barriers();
  __syncthreads();
  allow_next_kernel();

  const auto num_chunks = static_cast<int>(p.product.in / kIntegerChunk);
  if (copies) {
    shrink_registers<kShrunk>();
    copy_operands<S>(p, token_map, memory, num_chunks, lane_now());
  } else {
    grow_registers<kGrown>();
    multiply<S>(p, memory, num_chunks, warp % kWarpsOfGroup, lane_now());
  }
}

template <typename S>
cudaError_t launch_shape(PackedStreamParams packed, cudaStream_t stream) {
  const LinearStreamParams& p = packed.product;
  CUtensorMap map;
  const cudaError_t error = S::kGroups ? make_panel_map(map, p.x_chunks.codes, p.tokens, p.in / 2, kTokens, 1)
                                       : make_panel_map(map, p.x_chunks.halves, p.tokens, p.in, kTokens, 1);
  if (error != cudaSuccess) return error;
  packed.num_tiles = 0;
  for (const LinearStreamPart& part : p.parts)
    packed.num_tiles += tiles_of(p.tokens, kTokens) * tiles_of(part.out, kRows);
  const int blocks = std::min(packed.num_tiles, static_cast<int>(p.multiprocessors));
  return launch_overlapped(multiply_in_turns<S>, dim3(static_cast<unsigned>(blocks)), kThreads, size_t{S::kSharedBytes},
                           stream, packed, map);
}

}  // namespace

cudaError_t launch_integer_turns(const PackedStreamParams& packed, cudaStream_t stream) {
  const bool groups = integer_codes_of(packed.layouts[0]) == IntegerCodes::groups;
  for (int i = 0; i < kMostLinearStreamParts; ++i) {
    const IntegerCodes codes = integer_codes_of(packed.layouts[i]);
    if (packed.product.parts[i].out > 0 && (codes == IntegerCodes::none || (codes == IntegerCodes::groups) != groups))
      return cudaErrorInvalidValue;
  }
  return groups ? launch_shape<Shape<true>>(packed, stream) : launch_shape<Shape<false>>(packed, stream);
}

}  // namespace eadem::kernels::cuda
