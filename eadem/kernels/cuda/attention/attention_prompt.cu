// SPDX-License-Identifier: Apache-2.0
//
// Attention on tensor cores for steps with prompts: one block per 64 to 192 rows of a sequence and key head, over all
// keys in order. attention_tiles.cuh says what is computed.
//
// One warpgroup copies keys and values into a ring of chunks, and decodes those of 8-bit codes on the way; the others
// compute 64 rows each. A warpgroup multiplies
// the keys of the next chunk and the values of this one while it takes exponentials. The warpgroups take turns to issue
// products, so that one has its scores while the other multiplies.
#include <type_traits>

#include "eadem/kernels/cuda/attention/attention_copies.cuh"
#include "eadem/kernels/cuda/attention/attention_tiles.cuh"
#include "eadem/kernels/cuda/attention/kv_codes.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/instructions/ring.cuh"
#include "eadem/kernels/cuda/instructions/wgmma.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kWarpgroupRows = 64;
constexpr int kMostStages = 4;
constexpr uint32_t kPanelBytes = kChunk * kPanelRowBytes;
constexpr uint32_t kScalesBytes = 2 * kChunk * 4;
static_assert(2 * kChunk == kWarpgroup, "a thread has one scale of a chunk");
// Numbers of named barriers; __syncthreads has 0. Warpgroup w waits at kTurnBarrier + w until it may issue products.
constexpr int kProducerBarrier = 1, kTurnBarrier = 2, kQueriesBarrier = 5;
static_assert(kChunk == kPanelColumns && kChunk == TileCopies<64>::kRows, "a chunk is 64 keys in one panel");

// Sizes that depend on head_dim, and on whether keys and values are codes. Small heads leave registers for a third
// warpgroup that computes. Heads of 256 leave none for whole rows: two warpgroups compute the same scores, and each its
// half of the values; the queries are in shared memory.
template <int kD, bool kCapped, bool kEncoded>
struct Config {
  static constexpr bool kHalves = kD > 128;
  static constexpr bool kSharedQueries = kHalves || kEncoded;
  static constexpr int kConsumers = kD <= 64 ? 3 : 2;
  static constexpr int kRows = (kHalves ? 1 : kConsumers) * kWarpgroupRows;  // queries times heads
  static constexpr int kColumns = kHalves ? kD / 2 : kD;                     // of values, for a warpgroup
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  // Registers of a thread, of the warpgroup that copies and of those that compute: multiples of 8, and together no more
  // than all threads were launched with, or they wait for each other for ever.
  static constexpr bool kMoreForCaps = kD == 128 && kCapped && !kEncoded;
  static constexpr int kProducerRegisters = kD <= 64 ? 32 : kMoreForCaps ? 24 : 40;
  static constexpr int kConsumerRegisters = kD <= 64 ? 160 : kMoreForCaps ? 240 : 232;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (1 + kConsumers));
  static constexpr int kStages = kHalves || (kEncoded && kD > 64) ? 3 : kMostStages;
  static constexpr uint32_t kTileBytes = kD / kPanelColumns * kPanelBytes;  // keys or values of a chunk
  using Place = RingPlace<kStages>;

  // Codes on their way, [kStages][2][kCopies][kWarpgroup][16 bytes], then their scales f32 [kStages][kWarpgroup], each
  // written and read by one thread; and scales that are ready, twice kStages times those of the keys and of the values
  // of a chunk.
  static constexpr int kPieces = kD / 16;  // of 16 codes
  static constexpr int kRowsAtOnce = kWarpgroup / kPieces, kCopies = kChunk / kRowsAtOnce;
  static constexpr uint32_t kCodesBytes = 2 * kCopies * kWarpgroup * 16;

  // From a multiple of 1024: keys [kStages], values [kStages], queries if they are shared, codes and scales if there
  // are such.
  static constexpr uint32_t kValues = kStages * kTileBytes, kQueries = 2 * kValues,
                            kCodes = kQueries + (kSharedQueries ? kRows * kD * 2 : 0),
                            kScales = kCodes + kStages * (kCodesBytes + kScalesBytes);
  static constexpr uint32_t kSharedBytes = 1024 + (kEncoded ? kScales + 2 * kStages * kScalesBytes : kCodes);
};

// The rows that a block computes, and the keys that any of them attends to.
struct Tile {
  Sequence sequence;
  int32_t kv_head;
  int32_t token, tokens;  // within the sequence
  int32_t position;       // of the first token
  int32_t begin, end;     // keys
  int32_t first_chunk;
};

// Returns false if the block has no tile. Blocks of later tokens have more keys; they start first.
__device__ bool find_tile(Tile& found, const AttentionParams& p, int rows, int lane) {
  const int tile_tokens = rows / (p.heads / p.kv_heads);
  int tile = static_cast<int>(gridDim.x / p.kv_heads - 1 - blockIdx.x / p.kv_heads);
  for (int base = 0; base < p.sequences; base += kWarp) {
    const int s = base + lane;
    const int tiles =
        s < p.sequences ? static_cast<int>(ceil_div(p.query_start[s + 1] - p.query_start[s], tile_tokens)) : 0;
    int end = tiles;  // inclusive sum
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int left = __shfl_up_sync(kAllLanes, end, distance);
      if (lane >= distance) end += left;
    }
    const unsigned here = __ballot_sync(kAllLanes, tile < end);
    if (here == 0) {
      tile -= __shfl_sync(kAllLanes, end, kWarp - 1);
      continue;
    }
    const int winner = __ffs(static_cast<int>(here)) - 1;
    tile -= __shfl_sync(kAllLanes, end - tiles, winner);
    found.sequence = sequence_of(p, base + winner);
    found.kv_head = static_cast<int32_t>(blockIdx.x % p.kv_heads);
    found.token = tile * tile_tokens;
    found.tokens = min(tile_tokens, found.sequence.tokens - found.token);
    found.position = found.sequence.first_position + found.token;
    found.begin = first_key(p, found.sequence, found.position);
    found.end = found.position + found.tokens;
    found.first_chunk = found.begin / kChunk * kChunk;
    return true;
  }
  return false;
}

// kEven: whether every chunk lies in one block of the cache, or there is no cache. A cache may hold anything (even NaN)
// in rows that no query attends to; they become zeros, because their product with 0 must be 0.
template <typename Shape, int kD, bool kEven>
__device__ void produce(const AttentionParams& p, const Tile& tile, int32_t (&rows)[2][kChunk], uint32_t keys,
                        uint32_t values, const Ring& key_ring, const Ring& value_ring) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const TileCopies<kD> copies(thread);
  const int32_t stride = tile.sequence.blocks == nullptr ? p.kv_heads * kD : kD;
  const auto row_at = [&](int32_t chunk) {  // of the chunk's first key, or of this thread's
    const int32_t key = kEven ? chunk : chunk + thread;
    const bool wanted = kEven ? chunk < tile.end : thread < kChunk && key >= tile.begin && key < tile.end;
    return wanted ? key_row(p, tile.sequence, tile.kv_head, key) : kNoRow;
  };
  typename Shape::Place place;
  int buffer = 0;
  int32_t next_row = row_at(tile.first_chunk);
  for (int32_t chunk = tile.first_chunk; chunk < tile.end; chunk += kChunk, buffer ^= 1) {
    const int32_t row = next_row;
    if constexpr (!kEven) {
      if (thread < kChunk) rows[buffer][thread] = row;
      named_barrier_sync(kProducerBarrier, kWarpgroup);
    }
    next_row = row_at(chunk + kChunk);  // read ahead of the copies
    const auto fill = [&](const void* from, uint32_t to, const Ring& ring) {
      const auto* elements = static_cast<const __nv_bfloat16*>(from);
      to += static_cast<uint32_t>(place.stage) * Shape::kTileBytes;
      barrier_wait(ring.empty_at(place.stage), place.parity ^ 1);
      if constexpr (kEven)
        copies.copy(to, elements + int64_t{row} * kD, stride, tile.begin - chunk, tile.end - chunk);
      else
        copies.gather(to, elements, rows[buffer]);
      barrier_arrive_after_copies(ring.full_at(place.stage));
    };
    fill(p.k, keys, key_ring);
    fill(p.v, values, value_ring);
    place.advance();
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// The place of a chunk's scales. There are twice as many as stages, because those of values are read when the stage of
// the chunk's keys is filled again.
template <typename Shape>
__device__ inline uint32_t scales_at(uint32_t scales, int32_t chunk) {
  return scales + static_cast<uint32_t>(chunk / kChunk) % (2 * Shape::kStages) * kScalesBytes;
}

// As produce, from a cache of codes. A thread copies some pieces of 16 codes into memory of its own, kStages - 1 chunks
// ahead, and stores their levels in the panels: of keys, in the order that load_queries calls "in fours".
template <typename Shape, int kD, bool kEven, typename Code>
__device__ void produce_levels(const AttentionParams& p, const Tile& tile, int32_t (&rows)[2][kChunk], uint32_t keys,
                               uint32_t values, uint32_t codes, uint32_t scales, const Ring& key_ring,
                               const Ring& value_ring) {
  constexpr int kStages = Shape::kStages;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int first = thread / Shape::kPieces, piece = thread % Shape::kPieces, scale_key = thread % kChunk;
  const float* const all_scales = thread < kChunk ? p.k_scales : p.v_scales;
  const uint32_t own_codes = codes + static_cast<uint32_t>(thread) * 16;
  const uint32_t own_scales = codes + kStages * Shape::kCodesBytes + static_cast<uint32_t>(thread) * 4;
  const auto codes_at = [&](int stage, int of_values, int copy) {
    return own_codes + static_cast<uint32_t>(stage) * Shape::kCodesBytes +
           static_cast<uint32_t>((of_values * Shape::kCopies + copy) * kWarpgroup) * 16;
  };
  int buffer = 0;
  const auto request = [&](int32_t chunk, int stage) {
    if (chunk < tile.end) {
      int32_t even_row = 0;  // of the chunk's first key
      if constexpr (kEven) {
        even_row = key_row(p, tile.sequence, tile.kv_head, chunk);
      } else {
        const int32_t key = chunk + thread;
        if (thread < kChunk)
          rows[buffer][thread] =
              key >= tile.begin && key < tile.end ? key_row(p, tile.sequence, tile.kv_head, key) : kNoRow;
        named_barrier_sync(kProducerBarrier, kWarpgroup);
      }
      const auto row_at = [&](int row) {
        if constexpr (kEven) return chunk + row >= tile.begin && chunk + row < tile.end ? even_row + row : kNoRow;
        return rows[buffer][row];
      };
#pragma unroll 1
      for (int copy = 0; copy < Shape::kCopies; ++copy) {
        const int32_t row = row_at(first + copy * Shape::kRowsAtOnce);
        const int64_t from = int64_t{max(row, 0)} * kD + piece * 16;
        copy_16_async(codes_at(stage, 0, copy), static_cast<const uint8_t*>(p.k) + from, row != kNoRow);
        copy_16_async(codes_at(stage, 1, copy), static_cast<const uint8_t*>(p.v) + from, row != kNoRow);
      }
      const int32_t row = row_at(scale_key);
      copy_4_async(own_scales + static_cast<uint32_t>(stage) * kScalesBytes, all_scales + max(row, 0), row != kNoRow);
      buffer ^= 1;
    }
    commit_copies();
  };
  for (int stage = 0; stage < kStages - 1; ++stage) request(tile.first_chunk + stage * kChunk, stage);

  typename Shape::Place place;
  for (int32_t chunk = tile.first_chunk; chunk < tile.end; chunk += kChunk) {
    request(chunk + (kStages - 1) * kChunk, (place.stage + kStages - 1) % kStages);
    wait_for_copies<kStages - 1>();
    const auto fill = [&](uint32_t to, const Ring& ring, auto of_values) {
      constexpr bool kOfValues = decltype(of_values)::value;
      to += static_cast<uint32_t>(place.stage) * Shape::kTileBytes + static_cast<uint32_t>(piece / 4) * kPanelBytes;
      barrier_wait(ring.empty_at(place.stage), place.parity ^ 1);
#pragma unroll 1
      for (int copy = 0; copy < Shape::kCopies; ++copy) {
        uint32_t words[4], levels[2][4];
        load_16(words, codes_at(place.stage, kOfValues, copy));
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          if constexpr (kOfValues) {
            levels[w / 2][w % 2 * 2] = half_levels<Code, 0>(words[w]);
            levels[w / 2][w % 2 * 2 + 1] = half_levels<Code, 1>(words[w]);
          } else {
            levels[0][w] = even_levels<Code>(words[w]);
            levels[1][w] = odd_levels<Code>(words[w]);
          }
        }
        const int row = first + copy * Shape::kRowsAtOnce;
        store_16(to + panel_offset(row, piece % 4 * 2), levels[0]);
        store_16(to + panel_offset(row, piece % 4 * 2 + 1), levels[1]);
      }
      if constexpr (!kOfValues) {
        const uint32_t from = own_scales + static_cast<uint32_t>(place.stage) * kScalesBytes;
        store_f32(scales_at<Shape>(scales, chunk) + static_cast<uint32_t>(thread) * 4, load_f32(from));
      }
      fence_shared_for_wgmma();
      barrier_arrive(ring.full_at(place.stage));
    };
    fill(keys, key_ring, std::false_type{});
    fill(values, value_ring, std::true_type{});
    place.advance();
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// The softmax state of a lane's two rows.
struct RowState {
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {};
};

// Replaces a chunk's scores by their exponentials, and updates the state. correction[half] rescales earlier sums.
__device__ void take_exponentials(float (&s)[kKeyTiles][4], float (&correction)[2], RowState& state, float c) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = -INFINITY;
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) largest = fmaxf(largest, fmaxf(s[t][2 * half], s[t][2 * half + 1]));
    const float next = fmaxf(state.m[half], quad_max(largest) * c);
    correction[half] = rescale(state.m[half], next);
    state.m[half] = next;
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        s[t][i] = probability(s[t][i], c, next);
        sum += s[t][i];
      }
    state.l[half] = fmaf(state.l[half], correction[half], sum);
  }
}

// By the warpgroups that compute: stores the queries of a tile as wgmma's left operand, those for codes with the even
// elements of 16 before the odd ones.
template <typename Shape, int kD, bool kEncoded>
__device__ void store_queries(uint32_t to, const AttentionParams& p, const Tile& tile) {
  constexpr int kPieces = kD / 16, kThreads = Shape::kConsumers * kWarpgroup;
  const int group = p.heads / p.kv_heads;
  const int64_t first = int64_t{tile.sequence.first_token + tile.token} * p.heads + tile.kv_head * group;
  for (int i = static_cast<int>(threadIdx.x) - kWarpgroup; i < Shape::kRows * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces, token = row / group;
    uint4 low{}, high{};
    if (token < tile.tokens) {
      const auto* from = reinterpret_cast<const uint4*>(
          static_cast<const __nv_bfloat16*>(p.q) + (first + int64_t{token} * p.heads + row % group) * kD + piece * 16);
      low = from[0], high = from[1];
    }
    uint32_t words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
    if constexpr (kEncoded) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t a = w < 2 ? (w == 0 ? low.x : low.z) : (w == 2 ? high.x : high.z);
        const uint32_t b = w < 2 ? (w == 0 ? low.y : low.w) : (w == 2 ? high.y : high.w);
        words[0][w] = __byte_perm(a, b, 0x5410);
        words[1][w] = __byte_perm(a, b, 0x7632);
      }
    }
    // Tiles of 64 rows, one for each warpgroup.
    const uint32_t panel =
        to + static_cast<uint32_t>(row / kWarpgroupRows * (kD / kPanelColumns) + piece / 4) * kPanelBytes;
    store_16(panel + panel_offset(row % kWarpgroupRows, piece % 4 * 2), words[0]);
    store_16(panel + panel_offset(row % kWarpgroupRows, piece % 4 * 2 + 1), words[1]);
  }
  fence_shared_for_wgmma();
  named_barrier_sync(kQueriesBarrier, kThreads);
}

template <typename Shape, int kD, bool kCapped, bool kEncoded>
__device__ void consume(const AttentionParams& p, const Tile& tile, uint32_t keys, uint32_t values, uint32_t scales,
                        uint32_t queries, const Ring& key_ring, const Ring& value_ring) {
  constexpr int kConsumers = Shape::kConsumers, kValueTiles = Shape::kColumns / 8;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup - 1, next_warpgroup = (warpgroup + 1) % kConsumers;
  constexpr int kWarps = kWarpgroup / kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp - kWarps;
  const int first_row = (Shape::kHalves ? warp % kWarps : warp) * kFragmentRows;
  const int first_column = Shape::kHalves ? warpgroup * Shape::kColumns : 0;
  const int group = p.heads / p.kv_heads;

  // 1. Load the queries, and find the keys that each of this lane's two rows attends to.
  uint32_t q[Shape::kSharedQueries ? 1 : kD / 16][4];
  if constexpr (Shape::kSharedQueries)
    store_queries<Shape, kD, kEncoded>(queries, p, tile);
  else
    load_queries<kD, kEncoded>(q, p, tile.kv_head, tile.sequence.first_token + tile.token, tile.tokens, first_row,
                               lane);
  int32_t last[2], first[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    last[half] = tile.position + min((first_row + lane / 4 + half * 8) / group, tile.tokens - 1);
    first[half] = first_key(p, tile.sequence, last[half]);
  }
  // Chunks between these need no mask in this warp.
  const int32_t mask_before = first_key(p, tile.sequence, tile.position + tile.tokens - 1);
  const int32_t mask_after = tile.position + min(first_row / group, tile.tokens - 1);

  const ScoreScale<kCapped> scale(p);
  const float c = scale.c;
  float s[kKeyTiles][4], acc[kValueTiles][4] = {}, merged[kValueTiles][4] = {};
  float correction[2];
  uint32_t weights[kChunk / 16][4];
  RowState state, merged_state;
  typename Shape::Place key_place, value_place;

  const auto multiply_keys = [&] {
    barrier_wait(key_ring.full_at(key_place.stage), key_place.parity);
    fence_shared_for_wgmma();
    const Operand chunk(keys + static_cast<uint32_t>(key_place.stage) * Shape::kTileBytes, 0);
    // Queries that are in shared memory. The volatile move keeps their descriptors out of registers between chunks.
    Operand left(queries + (Shape::kHalves ? 0 : static_cast<uint32_t>(warpgroup) * Shape::kTileBytes), 0);
    if constexpr (Shape::kSharedQueries) asm volatile("mov.u32 %0, %0;" : "+r"(left.low));
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      const uint32_t offset = static_cast<uint32_t>(step) / 4 * kPanelBytes + static_cast<uint32_t>(step) % 4 * 32;
      if constexpr (Shape::kSharedQueries)
        wgmma<Major::k>(s, left.at(offset), chunk.at(offset), step > 0);
      else
        wgmma<Major::k>(s, q[step], chunk.at(offset), step > 0);
    }
    wgmma_commit();
    pin(s);
  };
  const auto multiply_values = [&] {
    barrier_wait(value_ring.full_at(value_place.stage), value_place.parity);
    fence_shared_for_wgmma();
    const Operand chunk(values + static_cast<uint32_t>(value_place.stage) * Shape::kTileBytes +
                            static_cast<uint32_t>(first_column / kPanelColumns) * kPanelBytes,
                        kPanelBytes);
    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step)
      wgmma<Major::n>(acc, weights[step], chunk.at(step * 16 * kPanelRowBytes), true);
    wgmma_commit();
    pin(acc);
  };
  const auto release = [&](const Ring& ring, auto& place) {
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty_at(place.stage));
    place.advance();
  };
  const auto mask = [&](int32_t chunk) {
    if (chunk + kChunk - 1 <= mask_after && chunk >= mask_before) return;
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t key = chunk + key_of(t, i, lane);
        if (key > last[i / 2] || key < first[i / 2]) s[t][i] = -INFINITY;
      }
  };
  // With codes: multiplies by the scales of a chunk's keys, or of its values.
  const auto multiply_by_scales = [&](int32_t chunk, bool of_values) {
    if constexpr (kEncoded) {
      const uint32_t from = scales_at<Shape>(scales, chunk) + (of_values ? kChunk * 4 : 0);
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        if (t % 2 == 0) __syncwarp();  // not all at once: that takes registers that there are not
        multiply_tile(s[t], load_tile_scales(from, t, lane));
      }
    }
  };
  const auto take_scores = [&](int32_t chunk) {
    release(key_ring, key_place);
    multiply_by_scales(chunk, false);
    scale.cap(s);
    mask(chunk);
  };
  const auto merge = [&](const RowState& split) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float next = fmaxf(merged_state.m[half], split.m[half]);
      const float old_factor = rescale(merged_state.m[half], next), new_factor = rescale(split.m[half], next);
      merged_state.l[half] = fmaf(merged_state.l[half], old_factor, quad_sum(split.l[half]) * new_factor);
      merged_state.m[half] = next;
#pragma unroll
      for (int t = 0; t < kValueTiles; ++t)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          merged[t][i] = fmaf(merged[t][i], old_factor, acc[t][i] * new_factor);
          acc[t][i] = 0.0f;
        }
    }
  };

  // 2. The first chunk's probabilities. The first warpgroup begins the turns.
  if (warpgroup == kConsumers - 1) named_barrier_arrive(kTurnBarrier, 2 * kWarpgroup);
  multiply_keys();
  wgmma_wait<0>();
  pin(s);
  take_scores(tile.first_chunk);
  take_exponentials(s, correction, state, c);
  multiply_by_scales(tile.first_chunk, true);
  pack_left(weights, s);

  // 3. In each round, the products of the next chunk's keys and of this chunk's values.
  for (int32_t chunk = tile.first_chunk + kChunk; chunk < tile.end; chunk += kChunk) {
    named_barrier_sync(kTurnBarrier + warpgroup, 2 * kWarpgroup);
    multiply_keys();
    multiply_values();
    named_barrier_arrive(kTurnBarrier + next_warpgroup, 2 * kWarpgroup);
    wgmma_wait<1>();
    pin(s);
    take_scores(chunk);
    const bool new_split = chunk % kSplit == 0;
    const RowState split = state;
    if (new_split) state = RowState{};
    take_exponentials(s, correction, state, c);
    multiply_by_scales(chunk, true);
    wgmma_wait<0>();  // now the registers of acc and weights may change
    pin(acc);
    pack_left(weights, s);
    release(value_ring, value_place);
    if (new_split) {
      merge(split);
    } else if (__any_sync(kAllLanes, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
      for (int t = 0; t < kValueTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[t][i] *= correction[i / 2];
    }
  }
  multiply_values();
  wgmma_wait<0>();
  pin(acc);
  merge(state);

  // 4. Divide and store.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane / 4 + half * 8;
    if (row / group >= tile.tokens) continue;
    const int head = tile.kv_head * group + row % group;
    const float factor = final_factor(merged_state.m[half], merged_state.l[half], p.sinks, head);
    const int64_t token = tile.sequence.first_token + tile.token + row / group;
    auto* y = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.y) + (token * p.heads + head) * kD +
                                          first_column + lane % 4 * 2);
#pragma unroll
    for (int t = 0; t < kValueTiles; ++t)
      y[t * 4] = pack_bf16(merged[t][2 * half] * factor, merged[t][2 * half + 1] * factor);
    if (p.lse != nullptr && lane % 4 == 0 && first_column == 0)
      p.lse[token * p.heads + head] = log_of_sum(merged_state.m[half], merged_state.l[half]);
  }
}

template <int kD, bool kCapped, typename Code>
__global__ void __launch_bounds__(Config<kD, kCapped, Code::kEncoded>::kThreads, 1)
    attention_prompt(AttentionParams p) {
  using Shape = Config<kD, kCapped, Code::kEncoded>;
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ int32_t rows[2][kChunk];  // rows of keys and values of a chunk
  __shared__ __align__(8) uint64_t barriers[4][kMostStages];

  const Ring key_ring{shared_address(barriers[0]), shared_address(barriers[1])};
  const Ring value_ring{shared_address(barriers[2]), shared_address(barriers[3])};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage)
      for (const Ring& ring : {key_ring, value_ring}) {
        barrier_init(ring.full_at(stage), kWarpgroup);
        barrier_init(ring.empty_at(stage), Shape::kConsumers * kWarpgroup / kWarp);
      }
  }
  __syncthreads();
  allow_next_kernel();
  wait_for_earlier_kernels();

  Tile tile;
  if (!find_tile(tile, p, Shape::kRows, static_cast<int>(threadIdx.x) % kWarp)) return;
  const uint32_t keys = (shared_address(memory) + 1023) / 1024 * 1024, values = keys + Shape::kValues;
  if (threadIdx.x < kWarpgroup) {
    shrink_registers<Shape::kProducerRegisters>();
    const bool is_even = p.block_table == nullptr || p.block_size % kChunk == 0;
    if constexpr (Code::kEncoded) {
      const uint32_t codes = keys + Shape::kCodes, scales = keys + Shape::kScales;
      if (is_even)
        produce_levels<Shape, kD, true, Code>(p, tile, rows, keys, values, codes, scales, key_ring, value_ring);
      else
        produce_levels<Shape, kD, false, Code>(p, tile, rows, keys, values, codes, scales, key_ring, value_ring);
    } else if (is_even) {
      produce<Shape, kD, true>(p, tile, rows, keys, values, key_ring, value_ring);
    } else {
      produce<Shape, kD, false>(p, tile, rows, keys, values, key_ring, value_ring);
    }
  } else {
    grow_registers<Shape::kConsumerRegisters>();
    consume<Shape, kD, kCapped, Code::kEncoded>(p, tile, keys, values, keys + Shape::kScales, keys + Shape::kQueries,
                                                key_ring, value_ring);
  }
}

template <int kD, bool kCapped, typename Code>
cudaError_t launch(const AttentionParams& p, cudaStream_t stream) {
  using Shape = Config<kD, kCapped, Code::kEncoded>;
  static_assert(Shape::kSharedBytes + sizeof(int32_t) * 2 * kChunk + 1024 <= 227 * 1024);
  // Every sequence may end with a partial tile.
  const int64_t tiles = p.tokens / (Shape::kRows / (p.heads / p.kv_heads)) + p.sequences;
  return launch_overlapped(attention_prompt<kD, kCapped, Code>, dim3(static_cast<unsigned>(tiles * p.kv_heads)),
                           Shape::kThreads, Shape::kSharedBytes, stream, p);
}
template <int kD>
cudaError_t launch(const AttentionParams& p, cudaStream_t stream) {
  return with_kv_code(p.code, [&](auto code) {
    using Code = decltype(code);
    if constexpr (kD > 128 && Code::kEncoded)
      return cudaErrorInvalidValue;
    else
      return p.softcap > 0.0f ? launch<kD, true, Code>(p, stream) : launch<kD, false, Code>(p, stream);
  });
}

}  // namespace

cudaError_t launch_attention_prompt(const AttentionParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.heads == 0 || p.sequences == 0) return cudaSuccess;
  if (p.heads / p.kv_heads > kAttentionMmaMaxGroup) return cudaErrorInvalidValue;
  switch (p.head_dim) {
    case 64: return launch<64>(p, stream);
    case 128: return launch<128>(p, stream);
    case 256: return launch<256>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace eadem::kernels::cuda
