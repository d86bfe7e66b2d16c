// SPDX-License-Identifier: Apache-2.0
//
// Attention on tensor cores for bf16 queries, keys and values. Two kernels, one for steps with prompts and one for pure
// decode steps, give a query the same bits, because both compute, for every query,
//   chunks of 64 key positions, begun at multiples of 64:   s = q . k, one chain of mma.sync over head_dim
//     m' = max(m, max s * c),  c = scale * log2 e           p = exp2(s * c - m')
//     l' = l * exp2(m - m') + sum p                         acc' = acc * exp2(m - m') + p v, one chain over 64 keys,
//                                                           for which p is rounded to bf16
//   spans of kAttentionSpanKeys positions, begun at their multiples: a state {m, l, acc} of their own, merged in order
//     M' = max(M, m)   L' = L * exp2(M - M') + l * exp2(m - M')   A' = A * exp2(M - M') + acc * exp2(m - M')
//   y = A / L
// A chunk or span in which the query sees no key changes none of its numbers, so a query's bits do not depend on the
// other queries of its tile. For sums of p, each lane adds the sixteen columns of a chunk that its fragments hold, from
// left to right, and groups of four lanes add their sums at the end of a span.
//
// The query heads that share a key head are rows of one tile, so that keys are read once.
#include <algorithm>

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/mma.cuh"
#include "eadem/kernels/cuda/overlap.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kChunk = static_cast<int>(kAttentionChunk);
constexpr int kSpan = static_cast<int>(kAttentionSpanKeys);
constexpr int kSpanChunks = kSpan / kChunk;
constexpr int kKeyTiles = kChunk / 8;  // accumulators of 8 keys
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kFragmentRows = 16;
constexpr int kTileRows = kWarps * kFragmentRows;  // rows of a tile in the prompt kernel: queries times heads
constexpr int kPadding = 8;                        // elements after each row of keys or values, against bank conflicts
constexpr int kMaxSequences = static_cast<int>(kAttentionMmaMaxSequences);
static_assert(kSpanChunks == kWarps, "a warp of the decode kernel has one chunk");

__device__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The factor that rescales sums from the maximum `from` to the maximum `to`; 0 if there was no key yet.
__device__ float rescale(float from, float to) { return fast_exp2(from - (to == -INFINITY ? 0.0f : to)); }
// exp2(s c - m); 0 for a masked score.
__device__ float probability(float s, float c, float m) { return fast_exp2(fmaf(s, c, m == -INFINITY ? 0.0f : -m)); }

__device__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// A sequence's part of a step, and the location of its keys.
struct Sequence {
  int32_t first_token, tokens;
  int32_t first_position;  // position of first_token
  int32_t length;          // number of keys
  const int32_t* blocks;   // null when direct
};

__device__ Sequence sequence_of(const AttentionParams& p, int s) {
  const int32_t first = p.query_start[s], tokens = p.query_start[s + 1] - first, length = p.kv_length[s];
  return {first, tokens, length - tokens, length,
          p.block_table == nullptr ? nullptr : p.block_table + s * p.max_blocks};
}

// The row of a key, counting rows of head_dim elements; at most 2^31 such rows fit a device's memory.
__device__ int32_t key_row(const AttentionParams& p, const Sequence& sequence, int32_t kv_head, int32_t key) {
  if (sequence.blocks == nullptr) return (sequence.first_token + key - sequence.first_position) * p.kv_heads + kv_head;
  const int32_t size = static_cast<int32_t>(p.block_size), block = key / size;
  return (sequence.blocks[block] * p.kv_heads + kv_head) * size + key - block * size;
}
constexpr int32_t kNoRow = -1;

// Returns the first key that a query at `position` attends to.
__device__ int32_t first_key(const AttentionParams& p, const Sequence& sequence, int32_t position) {
  const int32_t begin = p.window > 0 ? max(position - p.window + 1, 0) : 0;
  return sequence.blocks == nullptr ? max(begin, sequence.first_position) : begin;
}

// Copies the `kRows` rows of keys or values that `rows` (in shared memory) lists to rows of kD + kPadding elements.
// kNoRow gives zeros, because a cache may hold anything there (even NaN), and its product with 0 must be 0.
template <int kD, int kRows, int kCopiers>
__device__ void copy_rows_async(const void* from, const int32_t* rows, uint32_t to, int copier) {
  constexpr int kPieces = kD / 8;  // pieces of 16 bytes
  constexpr int kAtOnce = kCopiers / kPieces;
  const auto* elements = static_cast<const __nv_bfloat16*>(from) + copier % kPieces * 8;
  to += static_cast<uint32_t>((copier / kPieces * (kD + kPadding) + copier % kPieces * 8) * 2);
#pragma unroll 8
  for (int row = 0; row < kRows; row += kAtOnce, to += kAtOnce * (kD + kPadding) * 2) {
    const int32_t source = rows[row + copier / kPieces];
    copy_16_async(to, elements + int64_t{max(source, 0)} * kD, source != kNoRow);
  }
}

// Loads the queries of 16 rows as fragments. Row r of a tile is head r % group of token r / group; rows past the last
// are 0.
template <int kD>
__device__ void load_queries(uint32_t (&q)[kD / 16][4], const AttentionParams& p, int32_t kv_head, int32_t first_token,
                             int32_t tokens, int first_row, int lane) {
  const int group = p.heads / p.kv_heads;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane / 4 + half * 8, token = row / group;
    const bool real = token < tokens;
    const int64_t offset =
        real ? (int64_t{first_token + token} * p.heads + kv_head * group + row % group) * kD + lane % 4 * 2 : 0;
    const auto* from = reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(p.q) + offset);
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      q[step][half] = real ? from[step * 8] : 0;
      q[step][half + 2] = real ? from[step * 8 + 4] : 0;
    }
  }
}

// Computes s[tile] = q . k for the 64 keys at `keys`, 8 keys a tile.
template <int kD>
__device__ void multiply_keys(float (&s)[kKeyTiles][4], const uint32_t (&q)[kD / 16][4], uint32_t keys, int lane) {
#pragma unroll
  for (int tile = 0; tile < kKeyTiles; ++tile) s[tile][0] = s[tile][1] = s[tile][2] = s[tile][3] = 0.0f;
  // Lane l addresses row l % 8 of the matrix of elements 8 (l / 8). Eight independent chains run side by side.
  const uint32_t address = keys + static_cast<uint32_t>((lane % 8 * (kD + kPadding) + lane / 8 * 8) * 2);
#pragma unroll
  for (int step = 0; step < kD / 16; step += 2) {
    uint32_t k[kKeyTiles][4];
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile)
      load_matrices(k[tile], address + tile * 8 * (kD + kPadding) * 2 + step * 32);
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) mma(s[tile], q[step], k[tile][0], k[tile][1]);
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) mma(s[tile], q[step + 1], k[tile][2], k[tile][3]);
  }
}

// The key, of the chunk, of a lane's score i in a tile of 8 keys. The score is in row lane / 4 + i / 2 * 8.
__device__ int key_of(int tile, int i, int lane) { return tile * 8 + lane % 4 * 2 + i % 2; }

// --- Steps with prompts: one block per 64 rows of a sequence and key head, over all keys in order.

// Shared memory: keys [2][64][kD + kPadding], values of equal shape, and the merged accumulators of every thread.
template <int kD>
constexpr int kPromptBytes = 4 * kChunk*(kD + kPadding) * 2 + kTileRows* kD * 4;

template <int kD>
__global__ void __launch_bounds__(kThreads, kD <= 128 ? 2 : 1) attention_prompt(AttentionParams p) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ int32_t rows[2][kChunk];  // rows of keys and values, by stage
  constexpr int kTileBytes = kChunk * (kD + kPadding) * 2;
  constexpr int kValueTiles = kD / 8;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = p.heads / p.kv_heads, tile_tokens = kTileRows / group;
  const auto kv_head = static_cast<int32_t>(blockIdx.x % p.kv_heads);
  // Later tokens have more keys, so their tiles start first.
  int tile = static_cast<int>(gridDim.x / p.kv_heads - 1 - blockIdx.x / p.kv_heads);

  allow_next_kernel();
  wait_for_earlier_kernels();

  // 1. Find the tile's sequence.
  Sequence sequence{};
  bool found = false;
  for (int base = 0; base < p.sequences && !found; base += kWarp) {
    const int s = base + lane;
    int tiles = s < p.sequences ? static_cast<int>(ceil_div(p.query_start[s + 1] - p.query_start[s], tile_tokens)) : 0;
    int end = tiles;  // inclusive sum
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int left = __shfl_up_sync(kAllLanes, end, distance);
      if (lane >= distance) end += left;
    }
    const unsigned here = __ballot_sync(kAllLanes, tile < end);
    if (here != 0) {
      const int winner = __ffs(static_cast<int>(here)) - 1;
      tile -= __shfl_sync(kAllLanes, end - tiles, winner);
      sequence = sequence_of(p, base + winner);
      found = true;
    } else {
      tile -= __shfl_sync(kAllLanes, end, kWarp - 1);
    }
  }
  if (!found) return;
  const int32_t tile_token = tile * tile_tokens;  // index within the sequence
  const int32_t tokens = min(tile_tokens, sequence.tokens - tile_token);
  const int32_t tile_position = sequence.first_position + tile_token;
  const int32_t begin = first_key(p, sequence, tile_position), end = tile_position + tokens;  // keys of any of its rows

  // 2. Load the queries, and find the keys that each of this lane's two rows attends to.
  uint32_t q[kD / 16][4];
  const int row = warp * kFragmentRows;
  load_queries<kD>(q, p, kv_head, sequence.first_token + tile_token, tokens, row, lane);
  int32_t last[2], first[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    last[half] = tile_position + min((row + lane / 4 + half * 8) / group, tokens - 1);
    first[half] = first_key(p, sequence, last[half]);
  }

  const uint32_t keys = shared_address(memory), values = keys + 2 * kTileBytes;
  float* merged = reinterpret_cast<float*>(memory + 4 * kTileBytes) + threadIdx.x;  // element i at [i * kThreads]
  const auto find_rows = [&](int32_t chunk, int stage) {
    if (threadIdx.x >= kChunk) return;
    const int32_t key = chunk + static_cast<int32_t>(threadIdx.x);
    rows[stage][threadIdx.x] = key >= begin && key < end ? key_row(p, sequence, kv_head, key) : kNoRow;
  };
  const auto copy_chunk = [&](int stage) {
    copy_rows_async<kD, kChunk, kThreads>(p.k, rows[stage], keys + stage * kTileBytes, threadIdx.x);
    commit_copies();
    copy_rows_async<kD, kChunk, kThreads>(p.v, rows[stage], values + stage * kTileBytes, threadIdx.x);
    commit_copies();
  };

  const float c = p.scale * 1.4426950408889634f;
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, acc[kValueTiles][4] = {};  // softmax state of the span
  float merged_m[2] = {-INFINITY, -INFINITY}, merged_l[2] = {};
  bool any_merged = false;
  int stage = 0;
  const int32_t first_chunk = begin / kChunk * kChunk;
  find_rows(first_chunk, 0);
  find_rows(first_chunk + kChunk, 1);
  __syncthreads();
  copy_chunk(0);
  for (int32_t chunk = first_chunk; chunk < end; chunk += kChunk, stage ^= 1) {
    if (chunk + kChunk < end)
      copy_chunk(stage ^ 1);
    else
      commit_copies(), commit_copies();  // empty groups keep the counts of wait_for_copies right

    // 3. Compute scores, mask them, and take exponentials.
    wait_for_copies<3>();
    __syncthreads();
    find_rows(chunk + 2 * kChunk, stage);
    float s[kKeyTiles][4];
    multiply_keys<kD>(s, q, keys + stage * kTileBytes, lane);
    if (chunk + kChunk - 1 > tile_position || chunk < first_key(p, sequence, end - 1)) {
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int32_t key = chunk + key_of(t, i, lane);
          if (key > last[i / 2] || key < first[i / 2]) s[t][i] = -INFINITY;
        }
    }
    float correction[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = -INFINITY;
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) largest = fmaxf(largest, fmaxf(s[t][2 * half], s[t][2 * half + 1]));
      const float next = fmaxf(m[half], quad_max(largest) * c);
      correction[half] = rescale(m[half], next);
      m[half] = next;
      float sum = 0.0f;
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s[t][i] = probability(s[t][i], c, next);
          sum += s[t][i];
        }
      l[half] = fmaf(l[half], correction[half], sum);
    }

    // 4. Add the values.
#pragma unroll
    for (int t = 0; t < kValueTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[t][i] *= correction[i / 2];
    wait_for_copies<2>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      const uint32_t weights[4] = {pack_bf16(s[2 * step][0], s[2 * step][1]), pack_bf16(s[2 * step][2], s[2 * step][3]),
                                   pack_bf16(s[2 * step + 1][0], s[2 * step + 1][1]),
                                   pack_bf16(s[2 * step + 1][2], s[2 * step + 1][3])};
      const uint32_t address = values + stage * kTileBytes +
                               static_cast<uint32_t>(((step * 16 + lane % 16) * (kD + kPadding) + lane / 16 * 8) * 2);
#pragma unroll
      for (int t = 0; t < kValueTiles; t += 2) {
        uint32_t v[4];
        load_matrices_transposed(v, address + t * 16);
        mma(acc[t], weights, v[0], v[1]);
        mma(acc[t + 1], weights, v[2], v[3]);
      }
    }
    __syncthreads();  // the next copies overwrite this stage

    // 5. At the end of a span, or of the keys, merge its state.
    if ((chunk + kChunk) % kSpan != 0 && chunk + kChunk < end) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float next = fmaxf(merged_m[half], m[half]);
      const float old_factor = rescale(merged_m[half], next), new_factor = rescale(m[half], next);
      merged_l[half] = fmaf(merged_l[half], old_factor, quad_sum(l[half]) * new_factor);
      merged_m[half] = next;
#pragma unroll
      for (int t = 0; t < kValueTiles; ++t)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          float* total = merged + (t * 4 + i) * kThreads;
          *total = fmaf(any_merged ? *total : 0.0f, old_factor, acc[t][i] * new_factor);
          acc[t][i] = 0.0f;
        }
      m[half] = -INFINITY, l[half] = 0.0f;
    }
    any_merged = true;
  }

  // 6. Divide and store.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + lane / 4 + half * 8;
    if (r / group >= tokens) continue;
    const float inverse = 1.0f / merged_l[half];
    const int64_t token = sequence.first_token + tile_token + r / group;
    auto* y = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.y) +
                                          (token * p.heads + kv_head * group + r % group) * kD + lane % 4 * 2);
#pragma unroll
    for (int t = 0; t < kValueTiles; ++t) {
      const float low = merged[(t * 4 + 2 * half) * kThreads], high = merged[(t * 4 + 2 * half + 1) * kThreads];
      y[t * 4] = pack_bf16(low * inverse, high * inverse);
    }
  }
}

// --- Decode: one token of every sequence. A block computes the state of one span for one key head; a second kernel
// merges a head's spans in order.

// Shared memory: keys [kSpan][kD + kPadding], values of equal shape, and probabilities [16][kSpan + kPadding].
template <int kD>
constexpr int kDecodeBytes = 2 * kSpan*(kD + kPadding) * 2 + kFragmentRows*(kSpan + kPadding) * 2;

// The spans in which sequence s, which has one token in this step, sees keys.
struct SpanRange {
  int32_t begin, end;
};
__device__ SpanRange spans_of(const AttentionParams& p, const Sequence& sequence) {
  const int32_t position = sequence.length - 1;
  return {first_key(p, sequence, position) / kSpan, position / kSpan + 1};
}

// Fills slot_start [sequences + 1]: where each sequence's slots begin in p.states [slot, head, kD + 2], one sequence
// after another.
__device__ void count_slots(int32_t* slot_start, const AttentionParams& p) {
  for (int s = threadIdx.x; s < p.sequences; s += blockDim.x) {
    const SpanRange spans = spans_of(p, sequence_of(p, s));
    slot_start[s + 1] = spans.end - spans.begin;
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

template <int kD>
__global__ void __launch_bounds__(kThreads) attention_decode(AttentionParams p) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ int32_t slot_start[kMaxSequences + 1];
  __shared__ int32_t rows[kSpan];  // rows of keys and values
  __shared__ float chunk_max[kSpanChunks][kFragmentRows];
  __shared__ float chunk_sum[kSpanChunks][kFragmentRows][4];
  constexpr int kPitch = kD + kPadding, kWeightPitch = kSpan + kPadding;
  constexpr int kValueTiles = kD / 8 / kWarps;  // tiles of a warp
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = p.heads / p.kv_heads, row_tiles = static_cast<int>(ceil_div(group, kFragmentRows));
  const uint32_t keys = shared_address(memory), values = keys + kSpan * kPitch * 2,
                 weights = values + kSpan * kPitch * 2;
  auto* weight_rows = reinterpret_cast<uint32_t*>(memory + 2 * kSpan * kPitch * 2);  // pairs of bf16
  const float c = p.scale * 1.4426950408889634f;

  allow_next_kernel();
  wait_for_earlier_kernels();
  count_slots(slot_start, p);
  const int per_slot = p.kv_heads * row_tiles;
  const int num_items = slot_start[p.sequences] * per_slot;

  // A work item: some query rows of one key head over one span of a sequence.
  struct Item {
    Sequence sequence;
    int slot, kv_head, first_row;
    int32_t position, begin, span;  // the query's position, its first key, the span's first position
  };
  const auto item_at = [&](int item) {
    Item i{
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
    i.position = i.sequence.length - 1;
    i.begin = first_key(p, i.sequence, i.position);
    i.span = (spans_of(p, i.sequence).begin + i.slot - slot_start[s]) * kSpan;
    return i;
  };
  // Every warp finds the rows of its chunk and copies their keys; all warps together copy the values.
  const uint32_t warp_keys = keys + static_cast<uint32_t>(warp * kChunk * kPitch * 2);
  const auto copy_keys = [&](const Item& i) {
#pragma unroll
    for (int row = lane; row < kChunk; row += kWarp) {
      const int32_t key = i.span + warp * kChunk + row;
      rows[warp * kChunk + row] = key >= i.begin && key <= i.position ? key_row(p, i.sequence, i.kv_head, key) : kNoRow;
    }
    __syncwarp();
    copy_rows_async<kD, kChunk, kWarp>(p.k, rows + warp * kChunk, warp_keys, lane);
    commit_copies();
  };
  const auto copy_values = [&] {
    copy_rows_async<kD, kSpan, kThreads>(p.v, rows, values, threadIdx.x);
    commit_copies();
  };

  Item now{}, next{};
  if (static_cast<int>(blockIdx.x) < num_items) {
    next = item_at(static_cast<int>(blockIdx.x));
    copy_keys(next);
    __syncthreads();
    copy_values();
  }
  for (int item = static_cast<int>(blockIdx.x); item < num_items; item += static_cast<int>(gridDim.x)) {
    now = next;
    const bool has_next = item + static_cast<int>(gridDim.x) < num_items;
    const Sequence& sequence = now.sequence;
    const int slot = now.slot, kv_head = now.kv_head, first_row = now.first_row;
    const int32_t position = now.position, begin = now.begin, chunk = now.span + warp * kChunk;

    // 1. Load the queries.
    uint32_t q[kD / 16][4];
    load_queries<kD>(q, p, kv_head, sequence.first_token, 1, first_row, lane);

    // 2. Compute the scores of the warp's chunk, and the maximum up to and including it.
    wait_for_copies<1>();
    __syncwarp();
    float scores[kKeyTiles][4];
    multiply_keys<kD>(scores, q, warp_keys, lane);
    __syncwarp();
    // The keys are not needed any more: the keys of the next item are copied over them meanwhile.
    if (has_next) {
      next = item_at(item + static_cast<int>(gridDim.x));
      copy_keys(next);
    } else {
      commit_copies();  // an empty group keeps the counts of wait_for_copies right
    }
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t key = chunk + key_of(t, i, lane);
        if (key > position || key < begin) scores[t][i] = -INFINITY;
        largest[i / 2] = fmaxf(largest[i / 2], scores[t][i]);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float value = quad_max(largest[half]) * c;
      if (lane % 4 == 0) chunk_max[warp][lane / 4 + half * 8] = value;
    }
    __syncthreads();
    const auto max_up_to = [&](int last, int row) {
      float value = -INFINITY;
      for (int i = 0; i <= last; ++i) value = fmaxf(value, chunk_max[i][row]);
      return value;
    };

    // 3. Compute probabilities and their sums.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      const float m = max_up_to(warp, row);
      float sum = 0.0f;
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        const float low = probability(scores[t][2 * half], c, m), high = probability(scores[t][2 * half + 1], c, m);
        sum += low;
        sum += high;
        weight_rows[(row * kWeightPitch + warp * kChunk + t * 8) / 2 + lane % 4] = pack_bf16(low, high);
      }
      chunk_sum[warp][row][lane % 4] = sum;
    }
    wait_for_copies<1>();
    __syncthreads();

    // 4. Add the values: each warp computes a quarter of head_dim, over the chunks in order.
    float acc[kValueTiles][4] = {}, l[2] = {}, m[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kSpanChunks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + half * 8;
        const float next = fmaxf(m[half], chunk_max[i][row]), correction = rescale(m[half], next);
        m[half] = next;
        l[half] = fmaf(l[half], correction, chunk_sum[i][row][lane % 4]);
#pragma unroll
        for (int t = 0; t < kValueTiles; ++t) acc[t][2 * half] *= correction, acc[t][2 * half + 1] *= correction;
      }
#pragma unroll
      for (int step = 0; step < kChunk / 16; ++step) {
        const int key = i * kChunk + step * 16;
        uint32_t a[4];
        load_matrices(a, weights + static_cast<uint32_t>((lane % 16 * kWeightPitch + key + lane / 16 * 8) * 2));
        const uint32_t address =
            values + static_cast<uint32_t>(((key + lane % 16) * kPitch + warp * kValueTiles * 8 + lane / 16 * 8) * 2);
#pragma unroll
        for (int t = 0; t < kValueTiles; t += 2) {
          uint32_t v[4];
          load_matrices_transposed(v, address + t * 16);
          mma(acc[t], a, v[0], v[1]);
          mma(acc[t + 1], a, v[2], v[3]);
        }
      }
    }

    // 5. Store the state.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + lane / 4 + half * 8;
      const float sum = quad_sum(l[half]);
      if (row >= group) continue;
      float* state = p.states + (int64_t{slot} * p.heads + kv_head * group + row) * (kD + 2);
      if (warp == 0 && lane % 4 == 0) state[0] = m[half], state[1] = sum;
#pragma unroll
      for (int t = 0; t < kValueTiles; ++t) {
        const int d = (warp * kValueTiles + t) * 8 + lane % 4 * 2;
        state[2 + d] = acc[t][2 * half], state[3 + d] = acc[t][2 * half + 1];
      }
    }
    __syncthreads();  // the next item overwrites shared memory
    if (has_next) copy_values();
  }
}

// Merges states: one block per sequence and head, one thread per element.
template <int kD>
__global__ void __launch_bounds__(kD) attention_merge(AttentionParams p) {
  __shared__ int32_t slot_start[kMaxSequences + 1];
  const int s = static_cast<int>(blockIdx.x / p.heads), head = static_cast<int>(blockIdx.x % p.heads);
  allow_next_kernel();
  wait_for_earlier_kernels();
  count_slots(slot_start, p);
  float m = -INFINITY, l = 0.0f, acc = 0.0f;
  for (int slot = slot_start[s]; slot < slot_start[s + 1]; ++slot) {
    const float* state = p.states + (int64_t{slot} * p.heads + head) * (kD + 2);
    const float next = fmaxf(m, state[0]);
    const float old_factor = rescale(m, next), new_factor = rescale(state[0], next);
    l = fmaf(l, old_factor, state[1] * new_factor);
    acc = fmaf(acc, old_factor, state[2 + threadIdx.x] * new_factor);
    m = next;
  }
  const float inverse = 1.0f / l;
  const int64_t token = p.query_start[s];
  static_cast<__nv_bfloat16*>(p.y)[(token * p.heads + head) * kD + threadIdx.x] = __float2bfloat16_rn(acc * inverse);
}

template <int kD>
cudaError_t launch(const AttentionParams& p, cudaStream_t stream) {
  const int group = p.heads / p.kv_heads;
  if (p.tokens == p.sequences && p.states != nullptr) {
    const int64_t most = p.max_spans * p.kv_heads * ceil_div(group, kFragmentRows);
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(most, 3 * p.multiprocessors));
    const cudaError_t error =
        launch_overlapped(attention_decode<kD>, dim3(blocks), kThreads, kDecodeBytes<kD>, stream, p);
    if (error != cudaSuccess) return error;
    return launch_overlapped(attention_merge<kD>, dim3(static_cast<unsigned>(p.sequences * p.heads)), kD, 0, stream, p);
  }
  // Every sequence may end with a partial tile.
  const int64_t tiles = p.tokens / (kTileRows / group) + p.sequences;
  return launch_overlapped(attention_prompt<kD>, dim3(static_cast<unsigned>(tiles * p.kv_heads)), kThreads,
                           kPromptBytes<kD>, stream, p);
}

}  // namespace

cudaError_t launch_attention_mma(const AttentionParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.heads == 0 || p.sequences == 0) return cudaSuccess;
  if (p.heads / p.kv_heads > kAttentionMmaMaxGroup || p.sequences > kMaxSequences) return cudaErrorInvalidValue;
  switch (p.head_dim) {
    case 64: return launch<64>(p, stream);
    case 128: return launch<128>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace eadem::kernels::cuda
