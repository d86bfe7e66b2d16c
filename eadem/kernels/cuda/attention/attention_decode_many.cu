// SPDX-License-Identifier: Apache-2.0
//
// Attention on tensor cores for decode steps of many sequences, at the rate of the memory. A warp computes the state of
// a split by itself, chunk after chunk, and meets no other warp. It has a ring of stages, each the keys or the values
// of a chunk, which tensor maps fill while it computes; the stages of its next split follow those of this one.
// attention_tiles.cuh says what is computed.
//
// A copy brings a box of rows of a block of the cache, as many as surely lie in one block. The rows of a box that the
// query does not see may hold anything, even NaN: their scores are replaced, and their values set to 0. Codes of 8 bits
// are numbers whatever they are, and are left.
#include <algorithm>

#include "eadem/kernels/cuda/attention/attention_panels.cuh"
#include "eadem/kernels/cuda/attention/attention_splits.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/instructions/ring.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
// The ring of a warp. All rings of a multiprocessor have up to 128 KB under way, and loads of states, queries and
// tables of blocks wait behind these copies: with rings of 24 KB, 64 sequences of 4,096 keys take 3 % longer.
constexpr int kRingBytes = 16 * 1024;

// A stage has the keys or the values of some rows of a chunk.
template <int kD, typename Code>
struct StageShape : RowPanels<kD, Code, std::min(kChunk, kRingBytes / 2 / (kD * Code::kBytes))> {
  using Panels = RowPanels<kD, Code, std::min(kChunk, kRingBytes / 2 / (kD * Code::kBytes))>;
  static constexpr int kStages = kRingBytes / static_cast<int>(Panels::kBytes);
  static constexpr int kParts = kChunk / Panels::kRows;  // stages of the keys of a chunk, and of its values
  static_assert(Panels::kRows % 16 == 0 && kParts * Panels::kRows == kChunk && kStages % 2 == 0 &&
                (!Code::kEncoded || kParts == 1));
};
// Heads of 256 leave no registers for queries: a lane has its fragments in shared memory.
template <int kD>
constexpr bool kSharedQueries = kD > 128;
template <int kD>
constexpr int kQuerySteps = kSharedQueries<kD> ? 1 : kD / 16;
template <int kD>
constexpr uint32_t kQueriesBytes = kSharedQueries<kD> ? kD / 16 * kWarp * 16 : 0;  // of a warp
// With codes: the scales of the keys and of the values of a chunk, for each stage of keys, which are every other one.
constexpr uint32_t kScalesBytes = 2 * kChunk * 4;

// The stages of a warp's items, one after another: the keys of a chunk, then its values.
template <typename Shape>
struct StageWalk {
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

// A stage whose rows are all beyond the query's expects no bytes. With codes, the stage of a chunk's keys brings the
// scales to `scales`; those of rows that the query does not see become 0.
template <typename Shape, bool kEncoded, Boxes kBoxes>
__device__ void copy_stage(const AttentionParams& p, const CacheMaps& maps, const StageWalk<Shape>& walk,
                           uint32_t stage, uint32_t full, uint32_t scales, uint64_t policy, int lane) {
  const int32_t newest = walk.item.position - walk.row;  // of the stage's rows, or not among them
  const int first = max(walk.item.begin - walk.row, 0) >> maps.box_shift;
  const int end = newest < 0 ? first : (min(newest, Shape::kRows - 1) >> maps.box_shift) + 1;
  if (kBoxes != Boxes::newest && lane == 0)
    barrier_arrive_expecting(full, static_cast<uint32_t>(max(end - first, 0) << maps.box_shift) * Shape::kRowBytes);
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
      copy_panel_async(
          stage + static_cast<uint32_t>(panel) * Shape::kPanelBytes + static_cast<uint32_t>(row) * Shape::kPanelRow,
          walk.values ? maps.v : maps.k, cache_row, panel, full, policy);
  }
  if constexpr (kEncoded) {
    if (walk.values) return;
#pragma unroll
    for (int row = lane; row < kChunk; row += kWarp) {
      const int box = row >> maps.box_shift;
      const int32_t key = walk.row + row, index = walk.block_of(p, maps, min(key, walk.item.position));
      int32_t block = __shfl_sync(kAllLanes, walk.block, min(box, kWarp - 1));
      if (box >= kWarp) block = __ldg(walk.item.sequence.blocks + index);
      if (kBoxes != Boxes::all && (box == newest >> maps.box_shift) != (kBoxes == Boxes::newest)) continue;
      const bool seen = key >= walk.item.begin && key <= walk.item.position;
      const int32_t size = static_cast<int32_t>(p.block_size);
      const int32_t cache_row = seen ? (block * p.kv_heads + walk.item.kv_head) * size + key - index * size : 0;
      const uint32_t to = scales + static_cast<uint32_t>(row) * 4;
      copy_4_async(to, p.k_scales + cache_row, seen);
      copy_4_async(to + kChunk * 4, p.v_scales + cache_row, seen);
    }
    if (kBoxes != Boxes::earlier) barrier_arrive_after_copies(full);
  }
}

// Adds the values of a stage: acc += weights v.
template <int kD, typename Code>
__device__ void multiply_values(float (&acc)[kD / 8][4], const uint32_t (*weights)[4], uint32_t values, int lane) {
  using Shape = StageShape<kD, Code>;
#pragma unroll
  for (int step = 0; step < Shape::kRows / 16; ++step) {
    const uint32_t rows = values + static_cast<uint32_t>(step * 16) * Shape::kPanelRow;
#pragma unroll
    for (int piece = 0; piece < kD * Code::kBytes / 16; piece += 2) {
      uint32_t v[4];
      load_matrices_transposed(v, rows + Shape::offset(lane % 16, piece + lane / 16));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (Code::kEncoded) {
          const int t = (piece + i) * 2;
          mma(acc[t], weights[step], even_levels<Code>(v[2 * i]), even_levels<Code>(v[2 * i + 1]));
          mma(acc[t + 1], weights[step], odd_levels<Code>(v[2 * i]), odd_levels<Code>(v[2 * i + 1]));
        } else {
          mma(acc[piece + i], weights[step], v[2 * i], v[2 * i + 1]);
        }
      }
    }
  }
}

// Merges the states of all splits of the item's rows, in order.
template <int kD>
__device__ void merge_rows(const AttentionParams& p, const SplitItem& item, int first_slot, int splits, int lane) {
  constexpr int kPairs = kD / 2 / kWarp, kRowsAtOnce = 4;
  const int group = p.heads / p.kv_heads, rows = min(group - item.first_row, kFragmentRows);
  const int64_t pitch = int64_t{p.heads} * (kD + 2), first = item.kv_head * group + item.first_row;
  const auto element = [&](int pair) { return (pair * kWarp + lane) * 2; };
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
        for (int i = 0; i < kPairs; ++i) values[i] = load_state_pair(states[r] + split * pitch + 2 + element(i));
        merged[r].add(load_state_pair(states[r] + split * pitch), values);
      }
    auto* y = static_cast<__nv_bfloat16*>(p.y) + (int64_t{item.sequence.first_token} * p.heads + first) * p.head_dim;
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (base + r >= rows) break;
      const float factor = final_factor(merged[r].m, merged[r].l, p.sinks, static_cast<int>(first) + base + r);
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        if (element(i) < p.head_dim)
          *reinterpret_cast<uint32_t*>(y + (base + r) * p.head_dim + element(i)) = merged[r].result(i, factor);
    }
  }
}

// kTall: more than eight query heads share a key head.
template <int kD, bool kTall, bool kCapped, typename Code>
__global__ void __launch_bounds__(kThreads)
    attention_decode_many(const __grid_constant__ AttentionParams p, const __grid_constant__ CacheMaps maps) {
  using Shape = StageShape<kD, Code>;
  using Walk = StageWalk<Shape>;
  constexpr int kHalves = kTall ? 2 : 1;  // of the fragments' rows
  // [kWarps][kStages][kBytes], then [kWarps][kQueriesBytes], or with codes scales [kWarps][kStages / 2][kScalesBytes]
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ uint64_t barriers[kWarps * Shape::kStages];
  __shared__ int32_t slot_start[kMaxSequences + 1];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = p.heads / p.kv_heads;
  const uint32_t stages = shared_address(memory) + static_cast<uint32_t>(warp * kRingBytes);
  const uint32_t full = shared_address(barriers) + static_cast<uint32_t>(warp * Shape::kStages) * kBarrierBytes;
  const auto stage_at = [&](int stage) { return stages + static_cast<uint32_t>(stage) * Shape::kBytes; };
  const uint32_t scales =
      shared_address(memory) + static_cast<uint32_t>(kWarps * kRingBytes + warp * (Shape::kStages / 2) * kScalesBytes);
  const auto scales_at = [&](int stage) { return scales + static_cast<uint32_t>(stage / 2) * kScalesBytes; };
  const uint32_t queries =
      shared_address(memory) + kWarps * kRingBytes + static_cast<uint32_t>(warp) * kQueriesBytes<kD>;
  const auto full_at = [&](int stage) { return full + static_cast<uint32_t>(stage) * kBarrierBytes; };
  const uint64_t policy = l2_policy<L2Policy::evict_first>();
  const ScoreScale<kCapped> scale(p);
  const float c = scale.c;

  if (threadIdx.x < kWarps * Shape::kStages) {
    // With codes, every lane arrives when its scales have.
    barrier_init(shared_address(barriers) + threadIdx.x * kBarrierBytes,
                 Code::kEncoded && threadIdx.x % 2 == 0 ? 1 + kWarp : 1);
    fence_barriers();
  }
  allow_next_kernel();
  __syncthreads();  // every warp copies to barriers that the first threads have initialized
  const SplitItems items(slot_start, p);
  // Blocks take items in turns, and so do the warps of a block.
  const int first_item = static_cast<int>(blockIdx.x) + warp * static_cast<int>(gridDim.x);
  const int stride = static_cast<int>(gridDim.x) * kWarps;

  // Earlier kernels of this step make the queries, and the keys and values of its tokens. Those of all tokens before
  // are copied while these kernels run (see overlap.cuh).
  Walk next;
  next.begin(p, maps, items, first_item, lane);
  Walk late = next;
  int filled = 0;
  for (; filled < Shape::kStages && items.count > next.index; ++filled) {
    copy_stage<Shape, Code::kEncoded, Boxes::earlier>(p, maps, next, stage_at(filled), full_at(filled),
                                                      scales_at(filled), policy, lane);
    next.advance(p, maps, items, stride, lane);
  }
  wait_for_earlier_kernels();
  for (int stage = 0; stage < filled; ++stage) {
    copy_stage<Shape, Code::kEncoded, Boxes::newest>(p, maps, late, stage_at(stage), full_at(stage), scales_at(stage),
                                                     policy, lane);
    late.advance(p, maps, items, stride, lane);
  }
  const auto refill = [&](int stage) {
    __syncwarp();
    if (next.index >= items.count) return;
    copy_stage<Shape, Code::kEncoded, Boxes::all>(p, maps, next, stage_at(stage), full_at(stage), scales_at(stage),
                                                  policy, lane);
    next.advance(p, maps, items, stride, lane);
  };

  RingPlace<Shape::kStages> place;
  for (int index = first_item; index < items.count; index += stride) {
    const SplitItem item = items.at(p, index);
    uint32_t q[kQuerySteps<kD>][4];
    if constexpr (kSharedQueries<kD>) {
      uint32_t loaded[kD / 16][4];
      load_queries<kD, false>(loaded, p, item.kv_head, item.sequence.first_token, 1, item.first_row, lane);
#pragma unroll
      for (int step = 0; step < kD / 16; ++step)
        store_16(queries + static_cast<uint32_t>(step * kWarp + lane) * 16, loaded[step]);
    } else {
      load_queries<kD, Code::kEncoded>(q, p, item.kv_head, item.sequence.first_token, 1, item.first_row, lane);
    }
    const auto query = [&](int step) {
      Fragment fragment;
      if constexpr (kSharedQueries<kD>) {
        load_16(fragment.r, queries + static_cast<uint32_t>(step * kWarp + lane) * 16);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) fragment.r[i] = q[step][i];
      }
      return fragment;
    };
    float acc[kD / 8][4] = {}, l[2] = {}, m[2] = {-INFINITY, -INFINITY};

    for (int32_t chunk = Walk::first_chunk(item); chunk <= Walk::last_chunk(item); chunk += kChunk) {
      const bool whole = chunk >= item.begin && chunk + kChunk - 1 <= item.position;
      // 1. Scores.
      float scores[kKeyTiles][4];
      [[maybe_unused]] ChunkScales value_scales;
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        barrier_wait(full_at(place.stage), place.parity);
        multiply_keys<kD, Shape, Code>(scores + part * (Shape::kRows / 8), query, stage_at(place.stage), lane);
        if constexpr (Code::kEncoded) {
          ChunkScales key_scales;
          key_scales.load(scales_at(place.stage), lane);
          key_scales.multiply(scores);
          value_scales.load(scales_at(place.stage) + kChunk * 4, lane);
        }
        refill(place.stage);
        place.advance();
      }
      scale.cap(scores);
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
        const float larger = next_maximum(m[half], quad_max(largest), c), correction = rescale(m[half], larger);
        m[half] = larger;
        float sum = 0.0f;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
          float low = probability(scores[t][2 * half], c, larger);
          float high = probability(scores[t][2 * half + 1], c, larger);
          sum += low;
          sum += high;
          if constexpr (Code::kEncoded)
            low = __fmul_rn(low, value_scales.of[t].x), high = __fmul_rn(high, value_scales.of[t].y);
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
        if (!Code::kEncoded && !whole) {
          constexpr uint32_t zeros[4] = {};
          for (int row = lane; row < Shape::kRows; row += kWarp) {
            const int32_t key = chunk + part * Shape::kRows + row;
            if (key <= item.position && key >= item.begin) continue;
#pragma unroll
            for (int piece = 0; piece < kD / 8; ++piece)
              store_16(stage_at(place.stage) + Shape::offset(row, piece), zeros);
          }
          fence_shared_for_async();  // these writes come before the copy that fills the stage again
          __syncwarp();
        }
        multiply_values<kD, Code>(acc, weights + part * (Shape::kRows / 16), stage_at(place.stage), lane);
        refill(place.stage);
        place.advance();
      }
    }

    // 4. Store the state, or the result where there is one split.
    const int splits = items.splits(item);
    const auto element = [&](int t) { return element_of<Code::kEncoded>(t, lane); };
    auto* y = static_cast<__nv_bfloat16*>(p.y) +
              (int64_t{item.sequence.first_token} * p.heads + item.kv_head * group) * p.head_dim;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = item.first_row + lane / 4 + half * 8;
      float sum = quad_sum(l[half]);
      if (row >= group) continue;
      if (splits == 1) {
        const float factor = final_factor(m[half], sum, p.sinks, item.kv_head * group + row);
#pragma unroll
        for (int t = 0; t < kD / 8; ++t) {
          const float2 pair = pair_of<Code::kEncoded>(acc, t, half);
          if (element(t) < p.head_dim)
            *reinterpret_cast<uint32_t*>(y + row * p.head_dim + element(t)) =
                pack_bf16(pair.x * factor, pair.y * factor);
        }
        continue;
      }
      float* state = p.states + (int64_t{item.slot} * p.heads + item.kv_head * group + row) * (kD + 2);
      if (lane % 4 == 0) *reinterpret_cast<float2*>(state) = {m[half], sum};
#pragma unroll
      for (int t = 0; t < kD / 8; ++t)
        *reinterpret_cast<float2*>(state + 2 + element(t)) = pair_of<Code::kEncoded>(acc, t, half);
    }
    // 5. The warp that stores the last state of these rows merges all of them.
    if (splits > 1) {
      __syncwarp();
      unsigned before = 0;
      if (lane == 0) before = arrive_counting(items.arrivals(p, item), static_cast<unsigned>(splits - 1));
      if (__shfl_sync(kAllLanes, before, 0) == static_cast<unsigned>(splits - 1))
        merge_rows<kD>(p, item, items.first_slot(item.index), splits, lane);
    }
  }
}

template <int kD, typename Code>
cudaError_t launch(const AttentionParams& p, cudaStream_t stream) {
  using Shape = StageShape<kD, Code>;
  CacheMaps maps{};
  if (const cudaError_t error = make_cache_maps<kD, Code>(maps, p, Shape::kRows); error != cudaSuccess) return error;
  const int64_t items = p.max_splits * p.kv_heads * ceil_div(p.heads / p.kv_heads, kFragmentRows);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, p.multiprocessors));
  const bool tall = p.heads / p.kv_heads > kFragmentRows / 2;
  const auto kernel =
      p.softcap > 0.0f
          ? (tall ? attention_decode_many<kD, true, true, Code> : attention_decode_many<kD, false, true, Code>)
          : (tall ? attention_decode_many<kD, true, false, Code> : attention_decode_many<kD, false, false, Code>);
  const size_t behind =
      kWarps * size_t{kQueriesBytes<kD>} + (Code::kEncoded ? kWarps * (Shape::kStages / 2) * size_t{kScalesBytes} : 0);
  return launch_overlapped(kernel, dim3(blocks), kThreads, size_t{kWarps} * kRingBytes + behind, stream, p, maps);
}

}  // namespace

cudaError_t launch_attention_decode_many(const AttentionParams& p, cudaStream_t stream) {
  return with_padded_head_dim(p.head_dim, [&](auto width) {
    return with_kv_code(p.code, [&](auto code) {
      using Code = decltype(code);
      if constexpr (width() > 128 && Code::kEncoded)
        return cudaErrorInvalidValue;
      else
        return launch<width(), Code>(p, stream);
    });
  });
}

}  // namespace eadem::kernels::cuda
