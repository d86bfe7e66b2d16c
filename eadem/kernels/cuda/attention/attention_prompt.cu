// SPDX-License-Identifier: Apache-2.0
//
// Attention on tensor cores for steps with prompts: one block per 128 or 192 rows of a sequence and key head, over all
// keys in order. attention_tiles.cuh says what is computed.
//
// One warpgroup copies keys and values into a ring of chunks; the others compute 64 rows each. A warpgroup multiplies
// the keys of the next chunk and the values of this one while it takes exponentials. The warpgroups take turns to issue
// products, so that one has its scores while the other multiplies.
#include "eadem/kernels/cuda/attention/attention_copies.cuh"
#include "eadem/kernels/cuda/attention/attention_tiles.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/instructions/ring.cuh"
#include "eadem/kernels/cuda/instructions/wgmma.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kWarpgroupRows = 64;
constexpr int kStages = 4;
constexpr uint32_t kPanelBytes = kChunk * kPanelRowBytes;
// Numbers of named barriers; __syncthreads has 0. Warpgroup w waits at kTurnBarrier + w until it may issue products.
constexpr int kProducerBarrier = 1, kTurnBarrier = 2;
static_assert(kChunk == kPanelColumns && kChunk == TileCopies<64>::kRows, "a chunk is 64 keys in one panel");

// Sizes that depend on head_dim. Small heads leave registers for a third warpgroup that computes.
template <int kD>
struct Config {
  static constexpr int kConsumers = kD <= 64 ? 3 : 2;
  static constexpr int kRows = kConsumers * kWarpgroupRows;  // queries times heads
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kProducerRegisters = kD <= 64 ? 32 : 40, kConsumerRegisters = kD <= 64 ? 160 : 232;
  static constexpr uint32_t kTileBytes = kD / kPanelColumns * kPanelBytes;  // keys or values of a chunk
  // Keys [kStages] and values [kStages], from a multiple of 1024.
  static constexpr uint32_t kSharedBytes = 2 * kStages * kTileBytes + 1024;
};

using Place = RingPlace<kStages>;

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
template <int kD, bool kEven>
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
  Place place;
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
      to += static_cast<uint32_t>(place.stage) * Config<kD>::kTileBytes;
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

template <int kD>
__device__ void consume(const AttentionParams& p, const Tile& tile, uint32_t keys, uint32_t values,
                        const Ring& key_ring, const Ring& value_ring) {
  constexpr int kConsumers = Config<kD>::kConsumers, kValueTiles = kD / 8;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup - 1, next_warpgroup = (warpgroup + 1) % kConsumers;
  const int first_row = (static_cast<int>(threadIdx.x) / kWarp - kWarpgroup / kWarp) * kFragmentRows;
  const int group = p.heads / p.kv_heads;

  // 1. Load the queries, and find the keys that each of this lane's two rows attends to.
  uint32_t q[kD / 16][4];
  load_queries<kD>(q, p, tile.kv_head, tile.sequence.first_token + tile.token, tile.tokens, first_row, lane);
  int32_t last[2], first[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    last[half] = tile.position + min((first_row + lane / 4 + half * 8) / group, tile.tokens - 1);
    first[half] = first_key(p, tile.sequence, last[half]);
  }
  // Chunks between these need no mask in this warp.
  const int32_t mask_before = first_key(p, tile.sequence, tile.position + tile.tokens - 1);
  const int32_t mask_after = tile.position + min(first_row / group, tile.tokens - 1);

  const float c = p.scale * 1.4426950408889634f;
  float s[kKeyTiles][4], acc[kValueTiles][4] = {}, merged[kValueTiles][4] = {};
  float correction[2];
  uint32_t weights[kChunk / 16][4];
  RowState state, merged_state;
  Place key_place, value_place;

  const auto multiply_keys = [&] {
    barrier_wait(key_ring.full_at(key_place.stage), key_place.parity);
    fence_shared_for_wgmma();
    const Operand chunk(keys + static_cast<uint32_t>(key_place.stage) * Config<kD>::kTileBytes, 0);
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kD / 16; ++step)
      wgmma<Major::k>(s, q[step], chunk.at(step / 4 * kPanelBytes + step % 4 * 32), step > 0);
    wgmma_commit();
    pin(s);
  };
  const auto multiply_values = [&] {
    barrier_wait(value_ring.full_at(value_place.stage), value_place.parity);
    fence_shared_for_wgmma();
    const Operand chunk(values + static_cast<uint32_t>(value_place.stage) * Config<kD>::kTileBytes, kPanelBytes);
    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step)
      wgmma<Major::n>(acc, weights[step], chunk.at(step * 16 * kPanelRowBytes), true);
    wgmma_commit();
    pin(acc);
  };
  const auto release = [&](const Ring& ring, Place& place) {
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
  release(key_ring, key_place);
  mask(tile.first_chunk);
  take_exponentials(s, correction, state, c);
  pack_left(weights, s);

  // 3. In each round, the products of the next chunk's keys and of this chunk's values.
  for (int32_t chunk = tile.first_chunk + kChunk; chunk < tile.end; chunk += kChunk) {
    named_barrier_sync(kTurnBarrier + warpgroup, 2 * kWarpgroup);
    multiply_keys();
    multiply_values();
    named_barrier_arrive(kTurnBarrier + next_warpgroup, 2 * kWarpgroup);
    wgmma_wait<1>();
    pin(s);
    release(key_ring, key_place);
    mask(chunk);
    const bool new_split = chunk % kSplit == 0;
    const RowState split = state;
    if (new_split) state = RowState{};
    take_exponentials(s, correction, state, c);
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
    const float inverse = 1.0f / merged_state.l[half];
    const int64_t token = tile.sequence.first_token + tile.token + row / group;
    auto* y = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.y) +
                                          (token * p.heads + tile.kv_head * group + row % group) * kD + lane % 4 * 2);
#pragma unroll
    for (int t = 0; t < kValueTiles; ++t)
      y[t * 4] = pack_bf16(merged[t][2 * half] * inverse, merged[t][2 * half + 1] * inverse);
    if (p.lse != nullptr && lane % 4 == 0)
      p.lse[token * p.heads + tile.kv_head * group + row % group] =
          log_of_sum(merged_state.m[half], merged_state.l[half]);
  }
}

template <int kD>
__global__ void __launch_bounds__(Config<kD>::kThreads, 1) attention_prompt(AttentionParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ int32_t rows[2][kChunk];  // rows of keys and values of a chunk
  __shared__ __align__(8) uint64_t barriers[4][kStages];

  const Ring key_ring{shared_address(barriers[0]), shared_address(barriers[1])};
  const Ring value_ring{shared_address(barriers[2]), shared_address(barriers[3])};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage)
      for (const Ring& ring : {key_ring, value_ring}) {
        barrier_init(ring.full_at(stage), kWarpgroup);
        barrier_init(ring.empty_at(stage), Config<kD>::kConsumers * kWarpgroup / kWarp);
      }
  }
  __syncthreads();
  allow_next_kernel();
  wait_for_earlier_kernels();

  Tile tile;
  if (!find_tile(tile, p, Config<kD>::kRows, static_cast<int>(threadIdx.x) % kWarp)) return;
  const uint32_t keys = (shared_address(memory) + 1023) / 1024 * 1024, values = keys + kStages * Config<kD>::kTileBytes;
  if (threadIdx.x < kWarpgroup) {
    shrink_registers<Config<kD>::kProducerRegisters>();
    if (p.block_table == nullptr || p.block_size % kChunk == 0)
      produce<kD, true>(p, tile, rows, keys, values, key_ring, value_ring);
    else
      produce<kD, false>(p, tile, rows, keys, values, key_ring, value_ring);
  } else {
    grow_registers<Config<kD>::kConsumerRegisters>();
    consume<kD>(p, tile, keys, values, key_ring, value_ring);
  }
}

template <int kD>
cudaError_t launch(const AttentionParams& p, cudaStream_t stream) {
  // Every sequence may end with a partial tile.
  const int64_t tiles = p.tokens / (Config<kD>::kRows / (p.heads / p.kv_heads)) + p.sequences;
  return launch_overlapped(attention_prompt<kD>, dim3(static_cast<unsigned>(tiles * p.kv_heads)), Config<kD>::kThreads,
                           Config<kD>::kSharedBytes, stream, p);
}

}  // namespace

cudaError_t launch_attention_prompt(const AttentionParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.heads == 0 || p.sequences == 0) return cudaSuccess;
  if (p.heads / p.kv_heads > kAttentionMmaMaxGroup) return cudaErrorInvalidValue;
  switch (p.head_dim) {
    case 64: return launch<64>(p, stream);
    case 128: return launch<128>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace eadem::kernels::cuda
