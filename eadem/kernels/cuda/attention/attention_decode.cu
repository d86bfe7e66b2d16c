// SPDX-License-Identifier: Apache-2.0
//
// Attention on tensor cores for decode steps: one token of every sequence. A block computes the state of one split for
// one key head, so that few sequences reach many multiprocessors, and the block that stores the last state of a
// sequence's rows merges them in order. attention_tiles.cuh says what is computed; attention_decode_many.cu does the
// same for many sequences.
//
// Some warps copy keys and their values to shared memory, 32 at a time, by tensor maps where the query sees all of them
// and they are from earlier steps, else row by row. What makes the queries and the newest row may still run then; the
// other warps wait for it, and bring those. Where the newest row is not in the cache yet (NewRows), the queries and it
// are rotated here, and it is appended. The result may be rounded for the product that reads it (Int8Chunks).
#include <algorithm>

#include "eadem/kernels/cuda/attention/attention_panels.cuh"
#include "eadem/kernels/cuda/attention/attention_splits.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/int8_chunks.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kSplitChunks = kSplit / kChunk;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kWarpKeys = kSplit / kWarps;
constexpr int kWarpTiles = kWarpKeys / 8;
// The warps of a block divide what a work item has to load: the first kCopyWarps copy the keys and values of earlier
// steps, kNewestWarp loads the newest row, and the others load the queries.
constexpr int kCopyWarps = 4, kPartsOfCopyWarp = kWarps / kCopyWarps, kNewestWarp = kCopyWarps;
constexpr int kFirstQueryThread = (kNewestWarp + 1) * kWarp;
constexpr int kPadding = 8;        // elements after each row of queries and of probabilities, against bank conflicts
constexpr int kLeastBoxShift = 3;  // log2 of the rows of a box that is worth a copy of its own
constexpr int32_t kNewest = -2;    // in the place of a row of the cache
static_assert(kWarpKeys == kWarp && 2 * kWarpKeys == kChunk, "two warps have a chunk, and a lane has a row");

// The keys, or the values, of a warp.
template <int kD, typename Code>
using Part = RowPanels<kD, Code, kWarpKeys>;

// Copies the rows of keys or values that the lanes of a warp name. kNoRow gives zeros, because a cache may hold
// anything there (even NaN), and its product with 0 must be 0. So do pieces beyond a row's `row_bytes`. Row kNewest is
// left out.
template <typename Panels>
__device__ void copy_rows_async(const void* from, int32_t row, uint32_t to, int row_bytes, int lane) {
  constexpr int kPieces = static_cast<int>(Panels::kRowBytes) / 16, kAtOnce = kWarp / kPieces;
  const int piece = lane % kPieces;
  const auto* bytes = static_cast<const uint8_t*>(from) + piece * 16;
#pragma unroll 8
  for (int first = 0; first < kWarpKeys; first += kAtOnce) {
    const int at = first + lane / kPieces;
    const int32_t source = __shfl_sync(kAllLanes, row, at);
    if (source == kNewest) continue;
    copy_16_async(to + Panels::offset(at, piece), bytes + int64_t{max(source, 0)} * row_bytes,
                  source != kNoRow && piece * 16 < row_bytes);
  }
}

// Adds the values of 32 keys at `values` to `acc`, whose kTiles tiles of 8 elements begin with `first_tile`.
template <int kD, typename Code, int kTiles>
__device__ void multiply_values(float (&acc)[kTiles][4], const uint32_t (&weights)[2][4], uint32_t values,
                                int first_tile, int lane) {
  // Lane l addresses row l of a piece of 16 bytes: two steps of 16 keys.
  constexpr int kPieceTiles = Code::kEncoded ? 2 : 1;
#pragma unroll
  for (int t = 0; t < kTiles; t += kPieceTiles) {
    uint32_t v[4];
    load_matrices_transposed(v, values + Part<kD, Code>::offset(lane, (first_tile + t) / kPieceTiles));
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      if constexpr (Code::kEncoded) {
        mma(acc[t], weights[step], even_levels<Code>(v[2 * step]), even_levels<Code>(v[2 * step + 1]));
        mma(acc[t + 1], weights[step], odd_levels<Code>(v[2 * step]), odd_levels<Code>(v[2 * step + 1]));
      } else {
        mma(acc[t], weights[step], v[2 * step], v[2 * step + 1]);
      }
    }
  }
}

// Loads 16 rows of queries into shared memory [16][kD + kPadding]; with kNew, where head_dim is kD, they are rotated by
// the token's row of the table. The threads from kFirstQueryThread on call this.
template <int kD, bool kNew>
__device__ void bring_queries(const AttentionParams& p, const SplitItem& i, bf16_t* to) {
  constexpr int kHalf = kD / 2, kWidth = 8, kVectors = kHalf / kWidth;  // of half a row
  const int group = p.heads / p.kv_heads, rows = group - i.first_row;
  const float* table = kNew ? p.new_rows.table + int64_t{i.sequence.first_token} * kD : nullptr;
  const auto* from = static_cast<const bf16_t*>(p.q) +
                     (int64_t{i.sequence.first_token} * p.heads + i.kv_head * group + i.first_row) * p.head_dim;
  for (int n = static_cast<int>(threadIdx.x) - kFirstQueryThread; n < kFragmentRows * kVectors;
       n += kThreads - kFirstQueryThread) {
    const int row = n / kVectors, column = n % kVectors * kWidth;
    float first[kWidth] = {}, second[kWidth] = {};
    if (row < rows) {
      if (kNew || column < p.head_dim) load_vector(first, from + row * p.head_dim + column);
      if (kNew || kHalf + column < p.head_dim) load_vector(second, from + row * p.head_dim + kHalf + column);
      if constexpr (kNew) {
        float cosines[kWidth], sines[kWidth];
        load_vector(cosines, table + column);
        load_vector(sines, table + kHalf + column);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float2 result = rotated(first[e], second[e], cosines[e], sines[e]);
          first[e] = result.x, second[e] = result.y;
        }
      }
    }
    store_vector(to + row * (kD + kPadding) + column, first);
    store_vector(to + row * (kD + kPadding) + kHalf + column, second);
  }
}

// Puts the newest row `to` shared memory, row `at` of keys and of values, and if `appends` at `row` into the cache,
// too. All lanes of a warp call this.
template <int kD>
__device__ void bring_new_row(const AttentionParams& p, int64_t token, int kv_head, int64_t row, bool appends,
                              uint8_t* keys, uint8_t* values, int at, int lane) {
  using Panels = Part<kD, PlainRows>;
  constexpr int kHalf = kD / 2, kPairs = kHalf / kWarp, kElements = 2 * kPairs;  // of a lane
  const int pair = lane * kPairs, element = lane * kElements;
  const auto place = [&](int e) { return Panels::offset(at, e / 8) + static_cast<uint32_t>(e % 8 * 2); };
  const int64_t from = (token * p.kv_heads + kv_head) * kD;
  const auto* k = static_cast<const bf16_t*>(p.new_rows.k) + from;
  const auto* v = static_cast<const bf16_t*>(p.new_rows.v) + from;
  const float* table = p.new_rows.table + token * kD;
  auto* cache_k = static_cast<bf16_t*>(p.new_rows.cache_k) + row * kD;
  auto* cache_v = static_cast<bf16_t*>(p.new_rows.cache_v) + row * kD;

  float first[kPairs], second[kPairs], cosines[kPairs], sines[kPairs], value[kElements];
  load_vector(first, k + pair);
  load_vector(second, k + kHalf + pair);
  load_vector(value, v + element);
  load_vector(cosines, table + pair);
  load_vector(sines, table + kHalf + pair);
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const float2 result = rotated(first[n], second[n], cosines[n], sines[n]);
    first[n] = result.x, second[n] = result.y;
  }
  store_vector(reinterpret_cast<bf16_t*>(keys + place(pair)), first);
  store_vector(reinterpret_cast<bf16_t*>(keys + place(kHalf + pair)), second);
  store_vector(reinterpret_cast<bf16_t*>(values + place(element)), value);
  if (!appends) return;
  store_vector(cache_k + pair, first);
  store_vector(cache_k + kHalf + pair, second);
  store_vector(cache_v + element, value);
}

// Shared memory: keys [kWarps] Part, values likewise, probabilities [16][kSplit + kPadding], and with codes the scales
// of keys and values, f32 [2][kSplit].
template <int kD, typename Code>
constexpr uint32_t kRowsBytes = kWarps* Part<kD, Code>::kBytes;
constexpr uint32_t kWeightsBytes = kFragmentRows * (kSplit + kPadding) * 2;
template <int kD, typename Code>
constexpr uint32_t kDecodeBytes = 2 * kRowsBytes<kD, Code> + kWeightsBytes + (Code::kEncoded ? 2 * kSplit * 4 : 0);
template <int kD, typename Code>
constexpr int kBlocks = 2 * kDecodeBytes<kD, Code> < 200 * 1024 ? 2 : 1;  // on a multiprocessor

template <int kD, bool kCapped, bool kNew, typename Code>
__global__ void __launch_bounds__(kThreads, kBlocks<kD, Code>)
    attention_decode(const __grid_constant__ AttentionParams p, const __grid_constant__ CacheMaps maps) {
  using Panels = Part<kD, Code>;
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ int32_t slot_start[kMaxSequences + 1];
  __shared__ __align__(16) bf16_t query_rows[kFragmentRows * (kD + kPadding)];
  __shared__ uint64_t barriers[2][kWarps];  // of keys, of values
  __shared__ float part_max[kWarps][kFragmentRows];
  __shared__ float chunk_sum[kSplitChunks][kFragmentRows][4];
  __shared__ bool is_last;
  constexpr int kWeightPitch = kSplit + kPadding;
  // A piece of codes makes two tiles of 8 elements. The warps that multiply values, and the tiles of each.
  constexpr int kPieces = kD / 8 / (Code::kEncoded ? 2 : 1), kValueWarps = kPieces < kWarps ? kPieces : kWarps,
                kValueTiles = kD / 8 / kValueWarps;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = p.heads / p.kv_heads;
  const uint32_t keys = shared_address(memory), values = keys + kRowsBytes<kD, Code>,
                 weights = values + kRowsBytes<kD, Code>, scales = weights + kWeightsBytes;
  // Addresses in shared memory: of the 32 keys whose scores warp `of_warp` computes, of their values, of the scales of
  // both in a cache of codes, and of the barriers at which the copies of keys and of values arrive.
  const auto keys_of = [&](int of_warp) { return keys + static_cast<uint32_t>(of_warp) * Panels::kBytes; };
  const auto values_of = [&](int of_warp) { return values + static_cast<uint32_t>(of_warp) * Panels::kBytes; };
  const auto key_scales_of = [&](int of_warp) { return scales + static_cast<uint32_t>(of_warp * kWarpKeys) * 4; };
  const auto value_scales_of = [&](int of_warp) { return key_scales_of(of_warp) + kSplit * 4; };
  const auto keys_full = [&](int of_warp) { return shared_address(&barriers[0][of_warp]); };
  const auto values_full = [&](int of_warp) { return shared_address(&barriers[1][of_warp]); };
  auto* weight_rows = reinterpret_cast<uint32_t*>(memory + 2 * kRowsBytes<kD, Code>);  // pairs of bf16
  const uint64_t policy = l2_policy<L2Policy::evict_first>();
  const ScoreScale<kCapped> scale(p);
  const float c = scale.c;

  if (warp < kCopyWarps) {
    if (lane < 2 * kPartsOfCopyWarp)
      barrier_init(shared_address(&barriers[lane % 2][warp + lane / 2 * kCopyWarps]), kWarp + 1);
    fence_barriers();
    __syncwarp();
  }
  allow_next_kernel();
  const SplitItems items(slot_start, p);

  // The row of the cache that has this lane's key, of the 32 keys of warp `of_warp`.
  const auto row_of = [&](const SplitItem& i, int of_warp) {
    const int32_t key = i.split + of_warp * kWarpKeys + lane;
    if (key == i.position) return kNewest;
    return key >= i.begin && key < i.position ? key_row(p, i.sequence, i.kv_head, key) : kNoRow;
  };
  const auto copy_part = [&](const void* rows, const CUtensorMap& map, int32_t row, uint32_t to, uint32_t full) {
    const bool whole = maps.box_shift >= kLeastBoxShift && __all_sync(kAllLanes, row >= 0);
    if (lane == 0) barrier_arrive_expecting(full, whole ? Panels::kBytes : 0);
    __syncwarp();
    if (!whole) {
      copy_rows_async<Panels>(rows, row, to, p.head_dim * Code::kBytes, lane);
    } else if (lane % (1 << maps.box_shift) == 0) {
#pragma unroll
      for (int panel = 0; panel < Panels::kPanels; ++panel)
        copy_panel_async(
            to + static_cast<uint32_t>(panel) * Panels::kPanelBytes + static_cast<uint32_t>(lane) * Panels::kPanelRow,
            map, row, panel, full, policy);
    }
  };
  // Only the warps that copy use these, each for the keys and values of kPartsOfCopyWarp warps. next_rows has the rows
  // of the cache for the item that is copied next.
  int32_t next_rows[kPartsOfCopyWarp];
  const auto copy_keys = [&] {
#pragma unroll
    for (int part = 0; part < kPartsOfCopyWarp; ++part) {
      const int of_warp = warp + part * kCopyWarps;
      const int32_t row = next_rows[part];
      copy_part(p.k, maps.k, row, keys_of(of_warp), keys_full(of_warp));
      if (Code::kEncoded && row != kNewest) {
        const uint32_t at = static_cast<uint32_t>(lane) * 4;
        copy_4_async(key_scales_of(of_warp) + at, p.k_scales + max(row, 0), row != kNoRow);
        copy_4_async(value_scales_of(of_warp) + at, p.v_scales + max(row, 0), row != kNoRow);
      }
      barrier_arrive_after_copies(keys_full(of_warp));
    }
  };
  const auto copy_values = [&] {
#pragma unroll
    for (int part = 0; part < kPartsOfCopyWarp; ++part) {
      const int of_warp = warp + part * kCopyWarps;
      copy_part(p.v, maps.v, next_rows[part], values_of(of_warp), values_full(of_warp));
      barrier_arrive_after_copies(values_full(of_warp));
    }
  };
  // Loads the newest row into shared memory if it is in the item's split. One warp calls this.
  const auto bring_newest = [&](const SplitItem& i, int64_t row, bool is_new) {
    const int key = i.position - i.split, at = key % kWarpKeys, of_warp = key / kWarpKeys;
    if (key >= kSplit) return;
    uint8_t* const k = memory + static_cast<uint32_t>(of_warp) * Panels::kBytes;
    uint8_t* const v = k + kRowsBytes<kD, Code>;
    if constexpr (kNew) {
      if (is_new) {
        bring_new_row<kD>(p, i.sequence.first_token, i.kv_head, row, i.first_row == 0, k, v, at, lane);
        return;
      }
    }
    constexpr int kBytes = static_cast<int>(Panels::kRowBytes) / kWarp;
    using Bytes = std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>;
    static_assert(sizeof(Bytes) == kBytes);
    const uint32_t place = Panels::offset(at, lane * kBytes / 16) + static_cast<uint32_t>(lane * kBytes % 16);
    const int row_bytes = p.head_dim * Code::kBytes;
    const auto bytes_of = [&](const void* rows) {  // zeros beyond the row
      const auto* from = static_cast<const uint8_t*>(rows) + row * row_bytes + lane * kBytes;
      return lane * kBytes < row_bytes ? *reinterpret_cast<const Bytes*>(from) : Bytes{};
    };
    *reinterpret_cast<Bytes*>(k + place) = bytes_of(p.k);
    *reinterpret_cast<Bytes*>(v + place) = bytes_of(p.v);
    if (Code::kEncoded && lane == 0) {
      store_f32(key_scales_of(of_warp) + static_cast<uint32_t>(at) * 4, p.k_scales[row]);
      store_f32(value_scales_of(of_warp) + static_cast<uint32_t>(at) * 4, p.v_scales[row]);
    }
  };

  // Earlier kernels of this step make the queries, and the keys and values of its tokens. Those of all tokens before
  // are copied while these kernels run (see overlap.cuh). Waiting takes a while even where they have ended, so that
  // only the warps that need it wait; the others meet them at the barrier after that.
  SplitItem now{}, next{};
  // Where the cache has, or is to have, the newest row of `next`; and whether the row is new.
  int64_t newest_row = 0;
  bool is_new = false;
  const auto look_up_next = [&](int item) {
    next = items.at(p, item);
    if (warp < kCopyWarps) {
#pragma unroll
      for (int part = 0; part < kPartsOfCopyWarp; ++part) next_rows[part] = row_of(next, warp + part * kCopyWarps);
    } else if (warp == kNewestWarp) {
      newest_row = key_row(p, next.sequence, next.kv_head, next.position);
      if constexpr (kNew) is_new = p.new_rows.slots[next.sequence.first_token] >= 0;
    }
  };
  if (static_cast<int>(blockIdx.x) < items.count) {
    look_up_next(static_cast<int>(blockIdx.x));
    if (warp < kCopyWarps) {
      copy_keys();
      copy_values();
    } else {
      wait_for_earlier_kernels();
    }
  }
  uint32_t parity = 0;
  for (int item = static_cast<int>(blockIdx.x); item < items.count; item += static_cast<int>(gridDim.x), parity ^= 1) {
    now = next;
    const bool has_next = item + static_cast<int>(gridDim.x) < items.count;
    const Sequence& sequence = now.sequence;
    const int kv_head = now.kv_head, first_row = now.first_row;
    const int32_t first_key = now.split + warp * kWarpKeys;

    // 1. Bring the queries, and the newest row.
    if (warp == kNewestWarp)
      bring_newest(now, newest_row, is_new);
    else if (warp > kNewestWarp)
      bring_queries<kD, kNew>(p, now, query_rows);
    __syncthreads();

    // 2. Compute the scores of the warp's keys, and their maximum.
    uint32_t q[kD / 16][4];
    load_fragments<kD, Code::kEncoded>(
        q, [&](int row) { return reinterpret_cast<const __nv_bfloat16*>(query_rows) + row * (kD + kPadding); }, kD,
        lane);
    barrier_wait(keys_full(warp), parity);
    __syncwarp();
    float scores[kWarpTiles][4];
    multiply_keys<kD, Panels, Code>(
        scores,
        [&](int step) {
          return Fragment{{q[step][0], q[step][1], q[step][2], q[step][3]}};
        },
        keys_of(warp), lane);
    [[maybe_unused]] float2 scales_of_values[kWarpTiles];
    if constexpr (Code::kEncoded) {  // before the scales of the next item take their place
#pragma unroll
      for (int t = 0; t < kWarpTiles; ++t) {
        multiply_tile(scores[t], load_tile_scales(key_scales_of(warp), t, lane));
        scales_of_values[t] = load_tile_scales(value_scales_of(warp), t, lane);
      }
    }
    scale.cap(scores);
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t key = first_key + key_of(t, i, lane);
        if (key > now.position || key < now.begin) scores[t][i] = -INFINITY;
        largest[i / 2] = fmaxf(largest[i / 2], scores[t][i]);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float value = quad_max(largest[half]);
      if (lane % 4 == 0) part_max[warp][lane / 4 + half * 8] = value;
    }
    fence_shared_for_async();
    __syncthreads();
    if (has_next) {  // the keys are not needed any more: their memory takes those of the next item
      look_up_next(item + static_cast<int>(gridDim.x));
      if (warp < kCopyWarps) copy_keys();
    }

    // 3. Compute probabilities. The first warp of a chunk begins the sums of its rows, the second one goes on.
    const auto sum_of = [&](int chunk, int half) -> float& { return chunk_sum[chunk][lane / 4 + half * 8][lane % 4]; };
    const auto add_probabilities = [&](float sum, int half) {
#pragma unroll
      for (int t = 0; t < kWarpTiles; ++t) {
        sum += scores[t][2 * half];
        sum += scores[t][2 * half + 1];
      }
      return sum;
    };
    float m[2] = {-INFINITY, -INFINITY}, corrections[kSplitChunks][2];  // of all chunks
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      float m_here = -INFINITY;  // up to the end of the warp's chunk
#pragma unroll
      for (int chunk = 0; chunk < kSplitChunks; ++chunk) {
        const float larger = next_maximum(m[half], fmaxf(part_max[2 * chunk][row], part_max[2 * chunk + 1][row]), c);
        corrections[chunk][half] = rescale(m[half], larger);
        m[half] = larger;
        if (chunk == warp / 2) m_here = larger;
      }
#pragma unroll
      for (int t = 0; t < kWarpTiles; ++t) {
        float low = probability(scores[t][2 * half], c, m_here), high = probability(scores[t][2 * half + 1], c, m_here);
        scores[t][2 * half] = low, scores[t][2 * half + 1] = high;
        if constexpr (Code::kEncoded)
          low = __fmul_rn(low, scales_of_values[t].x), high = __fmul_rn(high, scales_of_values[t].y);
        weight_rows[row * (kWeightPitch / 2) + warp * (kWarpKeys / 2) + t * 4 + lane % 4] = pack_bf16(low, high);
      }
      if (warp % 2 == 0) sum_of(warp / 2, half) = add_probabilities(0.0f, half);
    }
    barrier_wait(values_full(warp), parity);
    __syncthreads();
    if (warp % 2 == 1)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum_of(warp / 2, half) = add_probabilities(sum_of(warp / 2, half), half);

    // 4. Add the values: each warp computes some columns, over the chunks in order.
    float acc[kValueTiles][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < kSplitChunks; ++chunk) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int t = 0; t < kValueTiles; ++t)
          acc[t][2 * half] *= corrections[chunk][half], acc[t][2 * half + 1] *= corrections[chunk][half];
      if (warp >= kValueWarps) continue;
#pragma unroll
      for (int part = 2 * chunk; part < 2 * chunk + 2; ++part) {
        uint32_t a[2][4];
#pragma unroll
        for (int step = 0; step < 2; ++step)
          load_matrices(a[step],
                        weights + static_cast<uint32_t>(
                                      (lane % 16 * kWeightPitch + part * kWarpKeys + step * 16 + lane / 16 * 8) * 2));
        multiply_values<kD, Code>(acc, a, values_of(part), warp * kValueTiles, lane);
      }
    }
    __syncthreads();  // all sums are there
    float l[2] = {};
#pragma unroll
    for (int chunk = 0; chunk < kSplitChunks; ++chunk)
#pragma unroll
      for (int half = 0; half < 2; ++half) l[half] = fmaf(l[half], corrections[chunk][half], sum_of(chunk, half));

    // 5. Store the state, or the result where there is one split.
    const int splits = items.splits(now);
    const int rows_here = min(group - first_row, kFragmentRows);
    auto* y = static_cast<__nv_bfloat16*>(p.y) +
              (int64_t{sequence.first_token} * p.heads + kv_head * group + first_row) * p.head_dim;
    // A pair of elements of a row of the tile.
    const bool rounds = p.chunks.codes != nullptr;
    const auto store_result = [&](int row, int d, uint32_t pair) {
      if (rounds)
        *reinterpret_cast<uint32_t*>(query_rows + row * (kD + kPadding) + d) = pair;  // nobody reads queries any more
      else
        *reinterpret_cast<uint32_t*>(y + row * p.head_dim + d) = pair;
    };
    // Called when all results are stored. A warp rounds a chunk at a time. Afterwards results may be overwritten.
    const auto round_results = [&] {
      for (int chunk = warp; chunk < rows_here * p.head_dim / static_cast<int>(kIntegerChunk); chunk += kWarps) {
        const int at = chunk * static_cast<int>(kIntegerChunk) + lane * 8;
        const int row = at / p.head_dim, column = at % p.head_dim;
        float values[8];
        load_vector(values, query_rows + row * (kD + kPadding) + column);
        store_chunk(p.chunks, sequence.first_token, (kv_head * group + first_row) * p.head_dim / kIntegerChunk + chunk,
                    values, lane);
      }
      __syncthreads();
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8, head = kv_head * group + first_row + row;
      float sum = quad_sum(l[half]);
      if (row >= rows_here || warp >= kValueWarps) continue;
      const auto element = [&](int t) { return warp * kValueTiles * 8 + element_of<Code::kEncoded>(t, lane); };
      if (splits == 1) {
        const float factor = final_factor(m[half], sum, p.sinks, head);
#pragma unroll
        for (int t = 0; t < kValueTiles; ++t) {
          const float2 pair = pair_of<Code::kEncoded>(acc, t, half);
          if (element(t) < p.head_dim) store_result(row, element(t), pack_bf16(pair.x * factor, pair.y * factor));
        }
        continue;
      }
      float* state = p.states + (int64_t{now.slot} * p.heads + head) * (kD + 2);
      if (warp == 0 && lane % 4 == 0) *reinterpret_cast<float2*>(state) = {m[half], sum};
#pragma unroll
      for (int t = 0; t < kValueTiles; ++t)
        *reinterpret_cast<float2*>(state + 2 + element(t)) = pair_of<Code::kEncoded>(acc, t, half);
    }
    fence_shared_for_async();  // the newest row comes before the copy that takes its place
    __syncthreads();           // the next item overwrites shared memory
    if (has_next && warp < kCopyWarps) copy_values();
    // 6. The block that stores the last state of these rows merges all of them, in order.
    if (splits == 1) {
      if (rounds) round_results();
    } else {
      if (threadIdx.x == 0) {
        const auto last = static_cast<unsigned>(splits - 1);
        is_last = arrive_counting(items.arrivals(p, now), last) == last;
      }
      __syncthreads();
      if (is_last) {
        const float* states =
            p.states + (int64_t{items.first_slot(now.index)} * p.heads + kv_head * group + first_row) * (kD + 2);
        for (int i = static_cast<int>(threadIdx.x); i < rows_here * (kD / 2); i += kThreads) {
          const int row = i / (kD / 2), d = i % (kD / 2) * 2;
          if (d >= p.head_dim) continue;
          const float* state = states + row * (kD + 2);
          MergedState<1> merged;
#pragma unroll 4
          for (int split = 0; split < splits; ++split, state += int64_t{p.heads} * (kD + 2))
            merged.add(load_state_pair(state), {load_state_pair(state + 2 + d)});
          const float factor = final_factor(merged.m, merged.l, p.sinks, kv_head * group + first_row + row);
          store_result(row, d, merged.result(0, factor));
        }
        if (rounds) {
          __syncthreads();
          round_results();
        }
      }
    }
  }
}

template <int kD, bool kNew, typename Code>
cudaError_t launch_code(const AttentionParams& p, int64_t items, cudaStream_t stream) {
  CacheMaps maps{};
  if (const cudaError_t error = make_cache_maps<kD, Code>(maps, p, kWarpKeys); error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, kBlocks<kD, Code> * p.multiprocessors));
  return launch_overlapped(
      p.softcap > 0.0f ? attention_decode<kD, true, kNew, Code> : attention_decode<kD, false, kNew, Code>, dim3(blocks),
      kThreads, static_cast<size_t>(kDecodeBytes<kD, Code>), stream, p, maps);
}
template <int kD>
cudaError_t launch(const AttentionParams& p, int64_t items, cudaStream_t stream) {
  if (p.new_rows.table != nullptr) return launch_code<kD, true, PlainRows>(p, items, stream);
  return with_kv_code(p.code, [&](auto code) { return launch_code<kD, false, decltype(code)>(p, items, stream); });
}

int64_t items_per_slot(const AttentionParams& p) { return p.kv_heads * ceil_div(p.heads / p.kv_heads, kFragmentRows); }

// Whether a block computes a state, and not a warp (attention_decode_many.cu).
bool are_few(const AttentionParams& p) {
  // Keys and values of a split that are 256 wide exceed shared memory here.
  if (p.head_dim > 128) return false;
  // Copies of the other kernel begin at multiples of 128 bytes in shared memory, and so at even rows of 64.
  const bool odd_rows = p.code != KvCode::none && p.head_dim <= 64 && p.block_size % 2 != 0;
  return odd_rows || p.sequences * items_per_slot(p) <= p.multiprocessors;
}

}  // namespace

bool takes_new_rows(const AttentionParams& p) {
  return p.code == KvCode::none && (p.head_dim == 64 || p.head_dim == 128) && are_few(p);
}

bool writes_chunks(const AttentionParams& p) {
  return are_few(p) && p.heads / p.kv_heads * p.head_dim % kIntegerChunk == 0;
}

cudaError_t launch_attention_decode(const AttentionParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.heads == 0) return cudaSuccess;
  if (p.tokens != p.sequences || p.states == nullptr || p.arrivals == nullptr || p.sequences > kMaxSequences ||
      (p.new_rows.table != nullptr && !takes_new_rows(p)) || (p.chunks.codes != nullptr && !writes_chunks(p)))
    return cudaErrorInvalidValue;
  if (!are_few(p)) return launch_attention_decode_many(p, stream);
  return (p.head_dim <= 64 ? launch<64> : launch<128>)(p, p.max_splits * items_per_slot(p), stream);
}

}  // namespace eadem::kernels::cuda
