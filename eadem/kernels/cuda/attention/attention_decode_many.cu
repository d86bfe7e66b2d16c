// SPDX-License-Identifier: Apache-2.0
//
// Attention on tensor cores for decode steps of many sequences, at the rate of the memory. A warp computes the state of
// a split by itself, chunk after chunk, and meets no other warp. It has a ring of stages, each the keys or the values
// of a chunk, which tensor maps fill while it computes; the stages of its next split follow those of this one.
// attention_tiles.cuh says what is computed.
//
// A copy brings a box of rows of a block of the cache, as many as surely lie in one block. The rows of a box that the
// query does not see may hold anything, even NaN: their scores are replaced, and their values set to 0.
#include <algorithm>
#include <bit>
#include <utility>

#include "eadem/kernels/cuda/attention/attention_splits.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/instructions/ring.cuh"
#include "eadem/kernels/cuda/instructions/tensor_map.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
// The ring of a warp. All rings of a multiprocessor have up to 128 KB under way, and loads of states, queries and
// tables of blocks wait behind these copies: with rings of 24 KB, 64 sequences of 4,096 keys take 3 % longer.
constexpr int kRingBytes = 16 * 1024;

// A stage has the keys or the values of some rows of a chunk: panels of 64 columns, as wgmma.cuh describes them.
template <int kD>
struct StageShape {
  static constexpr int kStages = 2;
  static constexpr uint32_t kBytes = kRingBytes / kStages;
  static constexpr int kRows = static_cast<int>(kBytes) / (kD * 2);
  static constexpr int kParts = kChunk / kRows;  // stages of the keys of a chunk, and of its values
  static constexpr int kPanels = kD / kPanelColumns;
  static constexpr uint32_t kPanelBytes = kRows * kPanelRowBytes;
  static_assert(kRows % 16 == 0 && kParts * kRows == kChunk);
};

// The keys and values of the cache, as [rows, head_dim].
struct CacheMaps {
  CUtensorMap k, v;
  int box_shift;    // log2 of the rows of a box
  int block_shift;  // of those of a block of the cache, or negative if that is no power of two
};

// The stages of a warp's items, one after another: the keys of a chunk, then its values.
template <int kD>
struct StageWalk {
  using Shape = StageShape<kD>;

  int index;  // of the item
  SplitItem item;
  int32_t row;  // the first position of the stage
  bool values;
  int32_t block;  // where the cache has the box that this lane copies first

  __device__ static int32_t first_chunk(const SplitItem& item) { return max(item.split, item.begin / kChunk * kChunk); }
  __device__ static int32_t last_chunk(const SplitItem& item) {
    return min(item.split + kSplit - kChunk, item.position / kChunk * kChunk);
  }
  __device__ int32_t block_of(const AttentionParams& p, const CacheMaps& maps, int32_t key) const {
    return maps.block_shift >= 0 ? key >> maps.block_shift : key / static_cast<int32_t>(p.block_size);
  }
  // Looks the block up one stage before it is needed.
  __device__ void look_up(const AttentionParams& p, const CacheMaps& maps, int lane) {
    const int32_t key = min(row + (lane << maps.box_shift), item.position);
    block = __ldg(item.sequence.blocks + block_of(p, maps, key));
  }
  __device__ void begin(const AttentionParams& p, const CacheMaps& maps, const SplitItems& items, int at, int lane) {
    index = at;
    values = false;
    if (index >= items.count) return;
    item = items.at(p, index);
    row = first_chunk(item);
    look_up(p, maps, lane);
  }
  __device__ void advance(const AttentionParams& p, const CacheMaps& maps, const SplitItems& items, int stride,
                          int lane) {
    row += Shape::kRows;
    if (row % kChunk == 0) {
      values = !values;
      if (values) {
        row -= kChunk;
      } else if (row > last_chunk(item)) {
        begin(p, maps, items, index + stride, lane);
        return;
      }
    }
    look_up(p, maps, lane);
  }
};

// Which boxes of a stage are copied: all, those before the token of this step, or the one that has it.
enum class Boxes : uint8_t { all, earlier, newest };

// A stage whose rows are all beyond the query's expects no bytes.
template <int kD, Boxes kBoxes>
__device__ void copy_stage(const AttentionParams& p, const CacheMaps& maps, const StageWalk<kD>& walk, uint32_t stage,
                           uint32_t full, uint64_t policy, int lane) {
  using Shape = StageShape<kD>;
  const int32_t newest = walk.item.position - walk.row;  // of the stage's rows, or not among them
  const int first = max(walk.item.begin - walk.row, 0) >> maps.box_shift;
  const int end = newest < 0 ? first : (min(newest, Shape::kRows - 1) >> maps.box_shift) + 1;
  if (kBoxes != Boxes::newest && lane == 0)
    barrier_arrive_expecting(full, static_cast<uint32_t>(max(end - first, 0) << maps.box_shift) * kD * 2);
  __syncwarp();
  for (int box = lane; box < end; box += kWarp) {
    const bool is_newest = box == newest >> maps.box_shift;
    if (box < first || (kBoxes != Boxes::all && is_newest != (kBoxes == Boxes::newest))) continue;
    const int row = box << maps.box_shift;
    const int32_t key = walk.row + row, index = walk.block_of(p, maps, key);
    const int32_t block = box == lane ? walk.block : __ldg(walk.item.sequence.blocks + index);
    const int32_t size = static_cast<int32_t>(p.block_size);
    const int32_t cache_row = (block * p.kv_heads + walk.item.kv_head) * size + key - index * size;
#pragma unroll
    for (int panel = 0; panel < Shape::kPanels; ++panel)
      copy_box_async(
          stage + static_cast<uint32_t>(panel) * Shape::kPanelBytes + static_cast<uint32_t>(row) * kPanelRowBytes,
          walk.values ? maps.v : maps.k, cache_row, panel, full, policy);
  }
}

// Computes s[tile] = q . k for the keys of a stage, 8 keys a tile.
template <int kD>
__device__ void multiply_keys(float (*s)[4], const uint32_t (&q)[kD / 16][4], uint32_t keys, int lane) {
  constexpr int kTiles = StageShape<kD>::kRows / 8;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) s[tile][0] = s[tile][1] = s[tile][2] = s[tile][3] = 0.0f;
  // Lane l addresses row l % 8 of the matrix of elements 8 (l / 8). Independent chains run side by side.
  const uint32_t row = keys + static_cast<uint32_t>(lane % 8) * kPanelRowBytes;
#pragma unroll
  for (int step = 0; step < kD / 16; step += 2) {
    const uint32_t address = row + static_cast<uint32_t>(step / 4) * StageShape<kD>::kPanelBytes +
                             static_cast<uint32_t>(((step % 4 * 2 + lane / 8) ^ lane % 8) * 16);
    uint32_t k[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) load_matrices(k[tile], address + tile * 8 * kPanelRowBytes);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) mma(s[tile], q[step], k[tile][0], k[tile][1]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) mma(s[tile], q[step + 1], k[tile][2], k[tile][3]);
  }
}

// Adds the values of a stage: acc += weights v.
template <int kD>
__device__ void multiply_values(float (&acc)[kD / 8][4], const uint32_t (*weights)[4], uint32_t values, int lane) {
#pragma unroll
  for (int step = 0; step < StageShape<kD>::kRows / 16; ++step) {
    const uint32_t row = values + static_cast<uint32_t>(step * 16 + lane % 16) * kPanelRowBytes;
#pragma unroll
    for (int t = 0; t < kD / 8; t += 2) {
      uint32_t v[4];
      load_matrices_transposed(v, row + static_cast<uint32_t>(t / 8) * StageShape<kD>::kPanelBytes +
                                      static_cast<uint32_t>(((t % 8 + lane / 16) ^ lane % 8) * 16));
      mma(acc[t], weights[step], v[0], v[1]);
      mma(acc[t + 1], weights[step], v[2], v[3]);
    }
  }
}

// Counts an arrival, and starts again at 0 after `last`; returns the count before. What the warp stored before is there
// for whoever sees the count.
__device__ inline unsigned arrive_counting(unsigned* count, unsigned last) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(count), "r"(last) : "memory");
  return before;
}

// Merges the states of all splits of the item's rows, in order.
template <int kD>
__device__ void merge_rows(const AttentionParams& p, const SplitItem& item, int first_slot, int splits, int lane) {
  constexpr int kPairs = kD / 2 / kWarp, kRowsAtOnce = 4;
  const int group = p.heads / p.kv_heads, rows = min(group - item.first_row, kFragmentRows);
  const int64_t pitch = int64_t{p.heads} * (kD + 2), first = item.kv_head * group + item.first_row;
  for (int base = 0; base < rows; base += kRowsAtOnce) {
    MergedState<kPairs> merged[kRowsAtOnce];
    const float* states[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r)
      states[r] = p.states + first_slot * pitch + (first + min(base + r, rows - 1)) * (kD + 2);
#pragma unroll 4
    for (int split = 0; split < splits; ++split)
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        float2 values[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
          values[i] = load_state_pair(states[r] + split * pitch + 2 + (i * kWarp + lane) * 2);
        merged[r].add(load_state_pair(states[r] + split * pitch), values);
      }
    auto* y = static_cast<__nv_bfloat16*>(p.y) + (int64_t{item.sequence.first_token} * p.heads + first) * kD;
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        if (base + r < rows)
          *reinterpret_cast<uint32_t*>(y + (base + r) * kD + (i * kWarp + lane) * 2) = merged[r].result(i);
  }
}

// kTall: more than eight query heads share a key head.
template <int kD, bool kTall>
__global__ void __launch_bounds__(kThreads)
    attention_decode_many(const __grid_constant__ AttentionParams p, const __grid_constant__ CacheMaps maps) {
  using Shape = StageShape<kD>;
  constexpr int kHalves = kTall ? 2 : 1;               // of the fragments' rows
  extern __shared__ __align__(1024) uint8_t memory[];  // [kWarps][kStages][kBytes]
  __shared__ uint64_t barriers[kWarps * Shape::kStages];
  __shared__ int32_t slot_start[kMaxSequences + 1];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = p.heads / p.kv_heads;
  const uint32_t stages = shared_address(memory) + static_cast<uint32_t>(warp * kRingBytes);
  const uint32_t full = shared_address(barriers) + static_cast<uint32_t>(warp * Shape::kStages) * kBarrierBytes;
  const auto stage_at = [&](int stage) { return stages + static_cast<uint32_t>(stage) * Shape::kBytes; };
  const auto full_at = [&](int stage) { return full + static_cast<uint32_t>(stage) * kBarrierBytes; };
  const uint64_t policy = l2_policy<L2Policy::evict_first>();
  const float c = p.scale * 1.4426950408889634f;

  if (threadIdx.x < kWarps * Shape::kStages) {
    barrier_init(shared_address(barriers) + threadIdx.x * kBarrierBytes, 1);
    fence_barriers();
  }
  allow_next_kernel();
  count_slots(slot_start, p);
  const SplitItems items(slot_start, p);
  // Blocks take items in turns, and so do the warps of a block.
  const int first_item = static_cast<int>(blockIdx.x) + warp * static_cast<int>(gridDim.x);
  const int stride = static_cast<int>(gridDim.x) * kWarps;

  // Earlier kernels of this step make the queries, and the keys and values of its tokens. Those of all tokens before
  // are copied while these kernels run (see overlap.cuh).
  StageWalk<kD> next;
  next.begin(p, maps, items, first_item, lane);
  StageWalk<kD> late = next;
  int filled = 0;
  for (; filled < Shape::kStages && items.count > next.index; ++filled) {
    copy_stage<kD, Boxes::earlier>(p, maps, next, stage_at(filled), full_at(filled), policy, lane);
    next.advance(p, maps, items, stride, lane);
  }
  wait_for_earlier_kernels();
  for (int stage = 0; stage < filled; ++stage) {
    copy_stage<kD, Boxes::newest>(p, maps, late, stage_at(stage), full_at(stage), policy, lane);
    late.advance(p, maps, items, stride, lane);
  }
  const auto refill = [&](int stage) {
    __syncwarp();
    if (next.index >= items.count) return;
    copy_stage<kD, Boxes::all>(p, maps, next, stage_at(stage), full_at(stage), policy, lane);
    next.advance(p, maps, items, stride, lane);
  };

  RingPlace<Shape::kStages> place;
  for (int index = first_item; index < items.count; index += stride) {
    const SplitItem item = items.at(p, index);
    uint32_t q[kD / 16][4];
    load_queries<kD>(q, p, item.kv_head, item.sequence.first_token, 1, item.first_row, lane);
    float acc[kD / 8][4] = {}, l[2] = {}, m[2] = {-INFINITY, -INFINITY};

    for (int32_t chunk = StageWalk<kD>::first_chunk(item); chunk <= StageWalk<kD>::last_chunk(item); chunk += kChunk) {
      const bool whole = chunk >= item.begin && chunk + kChunk - 1 <= item.position;
      // 1. Scores.
      float scores[kKeyTiles][4];
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        barrier_wait(full_at(place.stage), place.parity);
        multiply_keys<kD>(scores + part * (Shape::kRows / 8), q, stage_at(place.stage), lane);
        refill(place.stage);
        place.advance();
      }
      if (!whole) {
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int32_t key = chunk + key_of(t, i, lane);
            if (key > item.position || key < item.begin) scores[t][i] = -INFINITY;
          }
      }

      // 2. Probabilities, as left operands, and their sums.
      uint32_t weights[kChunk / 16][4] = {};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float largest = -INFINITY;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t)
          largest = fmaxf(largest, fmaxf(scores[t][2 * half], scores[t][2 * half + 1]));
        const float larger = fmaxf(m[half], quad_max(largest) * c), correction = rescale(m[half], larger);
        m[half] = larger;
        float sum = 0.0f;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
          const float low = probability(scores[t][2 * half], c, larger);
          const float high = probability(scores[t][2 * half + 1], c, larger);
          sum += low;
          sum += high;
          weights[t / 2][t % 2 * 2 + half] = pack_bf16(low, high);
        }
        l[half] = fmaf(l[half], correction, sum);
#pragma unroll
        for (int t = 0; t < kD / 8; ++t) acc[t][2 * half] *= correction, acc[t][2 * half + 1] *= correction;
      }

      // 3. Values.
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        barrier_wait(full_at(place.stage), place.parity);
        if (!whole) {
          constexpr uint32_t zeros[4] = {};
          for (int row = lane; row < Shape::kRows; row += kWarp) {
            const int32_t key = chunk + part * Shape::kRows + row;
            if (key <= item.position && key >= item.begin) continue;
#pragma unroll
            for (int piece = 0; piece < kD / 8; ++piece)
              store_16(stage_at(place.stage) + static_cast<uint32_t>(piece / 8) * Shape::kPanelBytes +
                           panel_offset(row, piece % 8),
                       zeros);
          }
          fence_shared_for_wgmma();  // these writes come before the copy that fills the stage again
          __syncwarp();
        }
        multiply_values<kD>(acc, weights + part * (Shape::kRows / 16), stage_at(place.stage), lane);
        refill(place.stage);
        place.advance();
      }
    }

    // 4. Store the state, or the result where there is one split.
    const int splits = items.splits(item);
    auto* y =
        static_cast<__nv_bfloat16*>(p.y) + (int64_t{item.sequence.first_token} * p.heads + item.kv_head * group) * kD;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = item.first_row + lane / 4 + half * 8;
      const float sum = quad_sum(l[half]);
      if (row >= group) continue;
      if (splits == 1) {
        const float inverse = 1.0f / sum;
#pragma unroll
        for (int t = 0; t < kD / 8; ++t)
          *reinterpret_cast<uint32_t*>(y + row * kD + t * 8 + lane % 4 * 2) =
              pack_bf16(acc[t][2 * half] * inverse, acc[t][2 * half + 1] * inverse);
        continue;
      }
      float* state = p.states + (int64_t{item.slot} * p.heads + item.kv_head * group + row) * (kD + 2);
      if (lane % 4 == 0) *reinterpret_cast<float2*>(state) = {m[half], sum};
#pragma unroll
      for (int t = 0; t < kD / 8; ++t)
        *reinterpret_cast<float2*>(state + 2 + t * 8 + lane % 4 * 2) = {acc[t][2 * half], acc[t][2 * half + 1]};
    }
    // 5. The warp that stores the last state of these rows merges all of them.
    if (splits > 1) {
      __syncwarp();
      unsigned before = 0;
      if (lane == 0) before = arrive_counting(items.arrivals(p, item), static_cast<unsigned>(splits - 1));
      if (__shfl_sync(kAllLanes, before, 0) == static_cast<unsigned>(splits - 1))
        merge_rows<kD>(p, item, slot_start[item.index], splits, lane);
    }
  }
}

template <int kD>
cudaError_t launch(const AttentionParams& p, cudaStream_t stream) {
  CacheMaps maps{};
  const auto size = static_cast<uint64_t>(p.block_size);
  const int shift = std::countr_zero(size);  // blocks begin at multiples of this power of two
  maps.box_shift = std::min(shift, std::countr_zero(static_cast<unsigned>(StageShape<kD>::kRows)));
  maps.block_shift = std::has_single_bit(size) ? shift : -1;
  for (const auto& [map, rows] : {std::pair(&maps.k, p.k), std::pair(&maps.v, p.v)})
    if (const cudaError_t error = make_panel_map(*map, rows, p.cache_rows, kD, 1 << maps.box_shift, 1);
        error != cudaSuccess)
      return error;
  const int64_t items = p.max_splits * p.kv_heads * ceil_div(p.heads / p.kv_heads, kFragmentRows);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, p.multiprocessors));
  const bool tall = p.heads / p.kv_heads > kFragmentRows / 2;
  return launch_overlapped(tall ? attention_decode_many<kD, true> : attention_decode_many<kD, false>, dim3(blocks),
                           kThreads, size_t{kWarps} * kRingBytes, stream, p, maps);
}

}  // namespace

cudaError_t launch_attention_decode_many(const AttentionParams& p, cudaStream_t stream) {
  return p.head_dim == 64 ? launch<64>(p, stream) : launch<128>(p, stream);
}

}  // namespace eadem::kernels::cuda
