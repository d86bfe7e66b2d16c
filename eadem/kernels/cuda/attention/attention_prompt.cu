// SPDX-License-Identifier: Apache-2.0
//
// Attention on tensor cores for steps with prompts: one block per 64 to 192 rows of a sequence and key head, over all
// keys in order. attention_tiles.cuh says what is computed.
//
// One warpgroup copies keys and values into a ring of chunks, and decodes those of 8-bit codes on the way; the others
// compute 64 rows each. A warpgroup multiplies the keys of the next chunk and the values of this one. Then it takes
// exponentials, while another multiplies: they take turns to issue products.
#include <type_traits>

#include "eadem/kernels/cuda/attention/attention_copies.cuh"
#include "eadem/kernels/cuda/attention/attention_panels.cuh"
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

// Sizes that depend on kD, and on whether keys and values are codes. Small heads leave registers for a third
// warpgroup that computes. Heads of 256 leave none for whole rows: two warpgroups compute the same scores, and each its
// half of the values. Queries are in shared memory where registers have no room for them.
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
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
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

  // Whether every key of the chunk is one that the tile attends to.
  __device__ bool has_whole(int32_t chunk) const { return chunk >= begin && chunk + kChunk <= end; }
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

// By the warpgroup that copies: where the keys of a chunk are.
__device__ inline void find_rows(int32_t (&rows)[kChunk], const AttentionParams& p, const Tile& tile, int32_t chunk,
                                 int thread) {
  const int32_t key = chunk + thread;
  if (thread < kChunk)
    rows[thread] = key >= tile.begin && key < tile.end ? key_row(p, tile.sequence, tile.kv_head, key) : kNoRow;
  named_barrier_sync(kProducerBarrier, kWarpgroup);
}

// Whole chunks are boxes of tensor maps, if the maps describe any; others are copied piece by piece. kEven: whether
// every chunk lies in one block of the cache, or there is no cache. A cache may hold anything (even NaN) in rows that
// no query attends to; they become zeros, because their product with 0 must be 0.
template <typename Shape, int kD, bool kEven>
__device__ void produce(const AttentionParams& p, const CacheMaps& maps, const Tile& tile, int32_t (&rows)[2][kChunk],
                        uint32_t keys, uint32_t values, const Ring& key_ring, const Ring& value_ring) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const TileCopies<kD> copies(thread);
  const bool is_direct = tile.sequence.blocks == nullptr;
  // The first warp copies boxes, a lane one of them: a panel of the rows that surely lie in one block.
  constexpr int kPanels = kD / kPanelColumns;
  const int panel = thread % kPanels, box_row = thread / kPanels << max(maps.box_shift, 0);
  const bool has_box = thread < kWarp && box_row < kChunk;
  const auto box_at = [&](int32_t chunk) {  // the row that its box begins with
    const int32_t key = chunk + box_row;
    if (is_direct) return tile.sequence.first_token + key - tile.sequence.first_position;
    return has_box && key < tile.end ? key_row(p, tile.sequence, tile.kv_head, key) : kNoRow;
  };
  typename Shape::Place place;
  int buffer = 0;
  int32_t next_box = box_at(tile.first_chunk);
  for (int32_t chunk = tile.first_chunk; chunk < tile.end; chunk += kChunk) {
    const int32_t box = next_box;
    next_box = box_at(chunk + kChunk);  // read ahead of the copies
    const bool is_whole = maps.box_shift >= 0 && tile.has_whole(chunk);
    int32_t first_row = 0;  // of the chunk
    if (!is_whole) {
      if constexpr (kEven) {
        first_row = key_row(p, tile.sequence, tile.kv_head, chunk);
      } else {
        find_rows(rows[buffer], p, tile, chunk, thread);
      }
    }
    const auto fill = [&](const void* from, const CUtensorMap& map, uint32_t to, const Ring& ring) {
      const auto* elements = static_cast<const __nv_bfloat16*>(from);
      const uint32_t full = ring.full_at(place.stage);
      to += static_cast<uint32_t>(place.stage) * Shape::kTileBytes;
      barrier_wait(ring.empty_at(place.stage), place.parity ^ 1);
      if (is_whole) {
        if (thread == 0) barrier_arrive_expecting(full, Shape::kTileBytes);
        if (thread > 0) barrier_arrive(full);
        if (has_box)
          copy_columns_async(
              to + static_cast<uint32_t>(panel) * kPanelBytes + static_cast<uint32_t>(box_row) * kPanelRowBytes, map,
              panel * kPanelColumns, box, is_direct ? tile.kv_head : 0, full);
        return;
      }
      if constexpr (kEven)
        copies.template copy<2>(to, elements + int64_t{first_row} * p.head_dim,
                                is_direct ? p.kv_heads * p.head_dim : p.head_dim, p.head_dim, tile.begin - chunk,
                                tile.end - chunk);
      else
        copies.gather(to, elements, p.head_dim, rows[buffer]);
      barrier_arrive_after_copies(full);
    };
    fill(p.k, maps.k, keys, key_ring);
    fill(p.v, maps.v, values, value_ring);
    if (!is_whole) buffer ^= 1;
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
        find_rows(rows[buffer], p, tile, chunk, thread);
      }
      const auto row_at = [&](int row) {
        if constexpr (kEven) return chunk + row >= tile.begin && chunk + row < tile.end ? even_row + row : kNoRow;
        return rows[buffer][row];
      };
#pragma unroll 1
      for (int copy = 0; copy < Shape::kCopies; ++copy) {
        const int32_t row = row_at(first + copy * Shape::kRowsAtOnce);
        const int64_t from = int64_t{max(row, 0)} * p.head_dim + piece * 16;
        const bool real = row != kNoRow && piece * 16 < p.head_dim;
        copy_16_async(codes_at(stage, 0, copy), static_cast<const uint8_t*>(p.k) + from, real);
        copy_16_async(codes_at(stage, 1, copy), static_cast<const uint8_t*>(p.v) + from, real);
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
      fence_shared_for_async();
      barrier_arrive(ring.full_at(place.stage));
    };
    fill(keys, key_ring, std::false_type{});
    fill(values, value_ring, std::true_type{});
    place.advance();
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// A value that all lanes of a warp have, for registers that a warp has once.
__device__ inline int32_t uniform(int32_t value) { return __shfl_sync(kAllLanes, value, 0); }

// The thread's number, where the compiler is to compute what follows from it rather than to keep it in registers.
__device__ inline int recomputed_thread() {
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));
  return thread;
}

// The softmax state of a lane's two rows.
struct RowState {
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {};
};

// Packs a chunk's exponentials as left operands, once `scale(tile, p)` has scaled those of 8 keys. sum: of them before
// that, by row. `shift`: what the row's exponents are relative to, negative.
template <typename Scale>
__device__ void pack_exponentials(uint32_t (&weights)[kChunk / 16][4], float (&sum)[2], const float (&s)[kKeyTiles][4],
                                  const float (&shift)[2], float c, const Scale& scale) {
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t) {
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[i] = fast_exp2(fmaf(s[t][i], c, shift[i / 2]));
      sum[i / 2] += p[i];
    }
    scale(t, p);
#pragma unroll
    for (int half = 0; half < 2; ++half) weights[t / 2][t % 2 * 2 + half] = pack_bf16(p[2 * half], p[2 * half + 1]);
  }
}

// The largest scores of a lane's two rows.
__device__ void find_largest(float (&largest)[2], const float (&s)[kKeyTiles][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float lane_largest = -INFINITY;
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) lane_largest = fmaxf(lane_largest, fmaxf(s[t][2 * half], s[t][2 * half + 1]));
    largest[half] = quad_max(lane_largest);
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
      const auto* from =
          reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) +
                                         (first + int64_t{token} * p.heads + row % group) * p.head_dim + piece * 16);
      if (piece * 16 < p.head_dim) low = from[0];
      if (piece * 16 + 8 < p.head_dim) high = from[1];
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
  fence_shared_for_async();
  named_barrier_sync(kQueriesBarrier, kThreads);
}

template <typename Shape, int kD, bool kCapped, bool kEncoded>
__device__ void consume(const AttentionParams& p, bool has_boxes, const Tile& tile, uint32_t keys, uint32_t values,
                        uint32_t scales, uint32_t queries, const Ring& key_ring, const Ring& value_ring) {
  constexpr int kConsumers = Shape::kConsumers, kValueTiles = Shape::kColumns / 8;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / kWarpgroup - 1);
  constexpr int kWarps = kWarpgroup / kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp - kWarps;
  const int first_row = (Shape::kHalves ? warp % kWarps : warp) * kFragmentRows;
  const int first_column = Shape::kHalves ? warpgroup * Shape::kColumns : 0;
  const int group = p.heads / p.kv_heads;

  // 1. Load the queries.
  uint32_t q[Shape::kSharedQueries ? 1 : kD / 16][4];
  if constexpr (Shape::kSharedQueries)
    store_queries<Shape, kD, kEncoded>(queries, p, tile);
  else
    load_queries<kD, kEncoded>(q, p, tile.kv_head, tile.sequence.first_token + tile.token, tile.tokens, first_row,
                               lane);
  // Chunks from here to the position of the first query need no mask.
  const int32_t mask_before = first_key(p, tile.sequence, tile.position + tile.tokens - 1);

  const ScoreScale<kCapped> scale(p);
  const float c = scale.c;
  float s[kKeyTiles][4], acc[kValueTiles][4] = {}, merged[kValueTiles][4] = {};
  uint32_t weights[kChunk / 16][4];
  RowState state, rows;  // of a split, and merged
  typename Shape::Place key_place, value_place;

  const auto multiply_keys = [&](int32_t first) {
    barrier_wait(key_ring.full_at(key_place.stage), key_place.parity);
    if (!has_boxes || !tile.has_whole(first)) fence_shared_for_async();
    const Operand chunk(keys + static_cast<uint32_t>(key_place.stage) * Shape::kTileBytes, 0);
    Operand left(queries + (Shape::kHalves ? 0 : static_cast<uint32_t>(warpgroup) * Shape::kTileBytes), 0);
    // The volatile move keeps descriptors out of registers between chunks, where there are too many.
    if constexpr (Shape::kHalves) asm volatile("mov.u32 %0, %0;" : "+r"(left.low));
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
  const auto multiply_values = [&](int32_t first) {
    barrier_wait(value_ring.full_at(value_place.stage), value_place.parity);
    if (!has_boxes || !tile.has_whole(first)) fence_shared_for_async();
    const Operand chunk(values + static_cast<uint32_t>(value_place.stage) * Shape::kTileBytes +
                            static_cast<uint32_t>(first_column / kPanelColumns) * kPanelBytes,
                        kPanelBytes);
    const bool is_first = first % kSplit == 0 || first == tile.first_chunk;  // of its split
    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step)
      wgmma<Major::n>(acc, weights[step], chunk.at(step * 16 * kPanelRowBytes), step > 0 || !is_first);
    wgmma_commit();
    pin(acc);
  };
  const auto release = [&](const Ring& ring, auto& place) {
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty_at(place.stage));
    place.advance();
  };
  const auto mask = [&](int32_t chunk) {
    if (chunk + kChunk - 1 <= tile.position && chunk >= mask_before) return;
    // The keys that each of this lane's two rows attends to. No register has them from chunk to chunk.
    const int thread = recomputed_thread(), lane = thread % kWarp;
    const int row = (Shape::kHalves ? thread % kWarpgroup : thread - kWarpgroup) / kWarp * kFragmentRows + lane / 4;
    int32_t last[2], first[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      last[half] = tile.position + min((row + half * 8) / group, tile.tokens - 1);
      first[half] = first_key(p, tile.sequence, last[half]);
    }
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t key = chunk + key_of(t, i, lane);
        if (key > last[i / 2] || key < first[i / 2]) s[t][i] = -INFINITY;
      }
  };
  const auto take_scores = [&](int32_t chunk) {
    if constexpr (kEncoded) {
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        if (t % 2 == 0) __syncwarp();  // not all at once: that takes registers that there are not
        multiply_tile(s[t], load_tile_scales(scales_at<Shape>(scales, chunk), t, lane));
      }
    }
    scale.cap(s);
    mask(chunk);
  };
  const auto multiply = [](float(&sums)[kValueTiles][4], const float(&factor)[2]) {
    if (!__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int t = 0; t < kValueTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[t][i] *= factor[i / 2];
  };
  const auto merge = [&] {
    float old_factor[2], new_factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float next = next_maximum(rows.m[half], state.m[half], 1.0f);
      old_factor[half] = rescale(rows.m[half], next), new_factor[half] = rescale(state.m[half], next);
      rows.l[half] = fmaf(rows.l[half], old_factor[half], quad_sum(state.l[half]) * new_factor[half]);
      rows.m[half] = next;
    }
#pragma unroll
    for (int t = 0; t < kValueTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        merged[t][i] = fmaf(acc[t][i], new_factor[i / 2], __fmul_rn(merged[t][i], old_factor[i / 2]));
    state = {};
  };
  // Makes weights of a chunk's scores, and updates the state.
  const auto take_exponentials = [&](int32_t chunk) {
    const auto scale_by_values = [&](int t, float(&p)[4]) {
      if constexpr (kEncoded) {
        if (t % 2 == 0) __syncwarp();
        multiply_tile(p, load_tile_scales(scales_at<Shape>(scales, chunk) + kChunk * 4, t, lane));
      }
    };
    float sum[2], correction[2] = {1.0f, 1.0f};
    const auto begin_again = [&] {
      float largest[2], shift[2];
      find_largest(largest, s);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = next_maximum(state.m[half], largest[half], c);
        correction[half] = rescale(state.m[half], next);
        state.m[half] = next;
        shift[half] = next == -INFINITY ? 0.0f : -next;
      }
      pack_exponentials(weights, sum, s, shift, c, scale_by_values);
    };
    const bool is_first = chunk == tile.first_chunk;
    if (is_first || chunk % kSplit == 0) {
      release(key_ring, key_place);
      if (!is_first) {
        release(value_ring, value_place);
        merge();
      }
      begin_again();
    } else {
      release(key_ring, key_place);
      release(value_ring, value_place);
      // Mostly the maxima stay what they are. They do if no sum says that an exponent may be larger than kSlack, or
      // that there was no maximum.
      constexpr float kSurelySmall = 128.0f;
      static_assert(kSlack == 8.0f);
      const float shift[2] = {-state.m[0], -state.m[1]};
      pack_exponentials(weights, sum, s, shift, c, scale_by_values);
      if (__any_sync(kAllLanes, !(sum[0] < kSurelySmall && sum[1] < kSurelySmall))) {
        begin_again();
        multiply(acc, correction);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) state.l[half] = fmaf(state.l[half], correction[half], sum[half]);
  };

  // 2. The first chunk's probabilities. The first warpgroup begins the turns.
  if (warpgroup == kConsumers - 1) named_barrier_arrive(kTurnBarrier, 2 * kWarpgroup);
  multiply_keys(tile.first_chunk);
  wgmma_wait<0>();
  pin(s);
  take_scores(tile.first_chunk);
  take_exponentials(tile.first_chunk);

  // 3. In each round, the products of the next chunk's keys and of this chunk's values.
  for (int32_t chunk = tile.first_chunk + kChunk; chunk < tile.end; chunk += kChunk) {
    named_barrier_sync(kTurnBarrier + warpgroup, 2 * kWarpgroup);
    multiply_keys(chunk);
    multiply_values(chunk - kChunk);
    const int next = recomputed_thread() / kWarpgroup;
    named_barrier_arrive(kTurnBarrier + (next == kConsumers ? 0 : next), 2 * kWarpgroup);
    wgmma_wait<0>();
    pin(s);
    pin(acc);
    take_scores(chunk);
    take_exponentials(chunk);
  }
  multiply_values((tile.end - 1) / kChunk * kChunk);
  wgmma_wait<0>();
  pin(acc);
  merge();

  // 4. Divide and store.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane / 4 + half * 8;
    if (row / group >= tile.tokens) continue;
    const int head = tile.kv_head * group + row % group;
    const float factor = final_factor(rows.m[half], rows.l[half], p.sinks, head);
    const int64_t token = tile.sequence.first_token + tile.token + row / group;
    auto* y = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.y) + (token * p.heads + head) * p.head_dim +
                                          first_column + lane % 4 * 2);
#pragma unroll
    for (int t = 0; t < kValueTiles; ++t)
      if (first_column + t * 8 < p.head_dim)
        y[t * 4] = pack_bf16(merged[t][2 * half] * factor, merged[t][2 * half + 1] * factor);
    if (p.lse != nullptr && lane % 4 == 0 && first_column == 0)
      p.lse[token * p.heads + head] = log_of_sum(rows.m[half], rows.l[half]);
  }
}

template <int kD, bool kCapped, typename Code>
__global__ void __launch_bounds__(Config<kD, kCapped, Code::kEncoded>::kThreads, 1)
    attention_prompt(const __grid_constant__ AttentionParams p, const __grid_constant__ CacheMaps maps) {
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
      produce<Shape, kD, true>(p, maps, tile, rows, keys, values, key_ring, value_ring);
    } else {
      produce<Shape, kD, false>(p, maps, tile, rows, keys, values, key_ring, value_ring);
    }
  } else {
    grow_registers<Shape::kConsumerRegisters>();
    consume<Shape, kD, kCapped, Code::kEncoded>(p, maps.box_shift >= 0, tile, keys, values, keys + Shape::kScales,
                                                keys + Shape::kQueries, key_ring, value_ring);
  }
}

// Describes boxes of keys and values; none if blocks of the cache divide chunks into boxes that are too small.
template <int kD>
cudaError_t make_maps(CacheMaps& maps, const AttentionParams& p) {
  if (p.block_table != nullptr) {
    constexpr int kLeastBoxShift = 3;
    const cudaError_t error = make_cache_maps<kD, PlainRows>(maps, p, kChunk);
    if (maps.box_shift < kLeastBoxShift) maps.box_shift = -1;
    return error;
  }
  maps.box_shift = std::countr_zero(static_cast<unsigned>(kChunk));
  for (const auto& [map, elements] : {std::pair(&maps.k, p.k), std::pair(&maps.v, p.v)})
    if (const cudaError_t error = make_head_map(*map, elements, p.tokens, p.kv_heads, p.head_dim, kChunk);
        error != cudaSuccess)
      return error;
  return cudaSuccess;
}

template <int kD, bool kCapped, typename Code>
cudaError_t launch(const AttentionParams& p, cudaStream_t stream) {
  using Shape = Config<kD, kCapped, Code::kEncoded>;
  static_assert(Shape::kSharedBytes + sizeof(int32_t) * 2 * kChunk + 1024 <= 227 * 1024);
  CacheMaps maps{};
  if constexpr (!Code::kEncoded)
    if (const cudaError_t error = make_maps<kD>(maps, p); error != cudaSuccess) return error;
  // Every sequence may end with a partial tile.
  const int64_t tiles = p.tokens / (Shape::kRows / (p.heads / p.kv_heads)) + p.sequences;
  return launch_overlapped(attention_prompt<kD, kCapped, Code>, dim3(static_cast<unsigned>(tiles * p.kv_heads)),
                           Shape::kThreads, Shape::kSharedBytes, stream, p, maps);
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
  return with_padded_head_dim(p.head_dim, [&](auto width) { return launch<width()>(p, stream); });
}

}  // namespace eadem::kernels::cuda
