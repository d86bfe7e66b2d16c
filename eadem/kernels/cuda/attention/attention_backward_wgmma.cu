// SPDX-License-Identifier: Apache-2.0
//
// The gradients of attention by wgmma: bf16, heads of at most 128. attention_gradients.cuh says what is computed; p and
// ds are rounded to bf16 before they are multiplied. Heads are computed as kD, 64 or 128, columns: zeros follow those
// of queries, keys, values and dy, and what is computed of these is not stored.
//
// A block has 128 keys of a head, 64 for each warpgroup that computes. It walks through the queries that see them, of
// every head of the group, in chunks of 64, which other warps copy into a ring, and keeps the sums of dk and dv in
// registers. The sums of dq are in global memory: a block multiplies ds of a chunk with its keys, and one thread adds
// the product to the sums of the chunk by a bulk copy. Blocks add to a chunk each in its turn, in an order that depends
// on the length of the sequence alone. A last kernel rounds the sums. Sequences of one block need none.
//
// The sums of a chunk are stored as the fragments in which they are computed: value i of tile t of thread n of the
// warpgroups is element (t * kConsumerThreads + n) * 4 + i. The first warpgroup has the first half of the columns.
#include <algorithm>

#include "eadem/kernels/cuda/attention/attention_gradient_order.cuh"
#include "eadem/kernels/cuda/attention/attention_gradients.cuh"
#include "eadem/kernels/cuda/instructions/bulk_sums.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/instructions/ring.cuh"
#include "eadem/kernels/cuda/instructions/tensor_map.cuh"
#include "eadem/kernels/cuda/instructions/wgmma.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kQueries = 64, kQueryTiles = kQueries / 8;  // of a chunk
constexpr int kWarpgroupKeys = 64, kConsumers = 2, kKeys = kConsumers * kWarpgroupKeys;
constexpr int kConsumerThreads = kConsumers * kWarpgroup, kThreads = kWarpgroup + kConsumerThreads;
// The first warpgroup computes nothing: two of its warps copy rows into shared memory, and two add to the sums of
// dq in turn, so that an addition begins before the one before is complete.
constexpr int kAdders = 2;
constexpr int kCopyThreads = 64;
static_assert(kCopyThreads + kAdders * kWarp == kWarpgroup);
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
constexpr uint32_t kPanelBytes = kQueries * kPanelRowBytes;
constexpr float kLog2e = 1.4426950408889634f;
static_assert(kQueries == kPanelColumns, "a warpgroup's p and ds are 64 x 64");
static_assert(kQueries == kGradientChunk && kKeys == kGradientKeys);

// dq of a chunk is multiplied two chunks later, so that the warpgroups need not keep step. Four ds are kept: when a
// warpgroup stores ds, it has seen the other one's of two chunks before, and that one had its product with those of
// four chunks before.
constexpr int kLag = 2, kSlopes = 2 * kLag;

template <int kD>
struct Config {
  // Values, a left operand, are in registers where the sums leave room for them. There, too, p as an operand has
  // registers that ds does not need.
  static constexpr bool kHasRegisters = kD == 64;
  static constexpr int kStages = kD == 64 ? 4 : 2;
  static constexpr bool kAlternate = kD == 64;  // with heads of 128 products take most of the time
  static constexpr int kPanels = kD / kPanelColumns;
  static constexpr int kHalfTiles = kD / 2 / 8;                  // of dq, for each warpgroup
  static constexpr uint32_t kTileBytes = kPanels * kPanelBytes;  // 64 rows of one matrix
  static constexpr uint32_t kKeyBytes = kConsumers * kTileBytes;
  // From a multiple of 1024: the keys and values, the stages of the ring, each two tiles, ds of some chunks, and a
  // product for dq.
  static constexpr uint32_t kStagesAt = kHasRegisters ? kKeyBytes : 2 * kKeyBytes;
  static constexpr uint32_t kSlopesAt = kStagesAt + 2 * kStages * kTileBytes;
  static constexpr uint32_t kSlopesBytes = kConsumers * kPanelBytes;
  static constexpr uint32_t kProductAt = kSlopesAt + kSlopes * kSlopesBytes;
  static constexpr uint32_t kProductBytes = kQueries * kD * sizeof(float);
  static constexpr int kProducts = kD == 64 ? 2 : 1;  // where there is memory for two
  // For each stage, lse and delta of its queries.
  static constexpr uint32_t kNumbersAt = kProductAt + kProducts * kProductBytes,
                            kNumbersBytes = kQueries * sizeof(float);
  static constexpr uint32_t kBarriersAt = kNumbersAt + kStages * 2 * kNumbersBytes;
  static constexpr uint32_t kSharedBytes =
      kBarriersAt + (2 * kStages + kSlopes + 1 + kAdders + kProducts) * kBarrierBytes + 1024;
};

// Shared memory, by address.
template <int kD>
struct Shared {
  using Sizes = Config<kD>;
  uint32_t memory;

  __device__ uint32_t keys() const { return memory; }
  __device__ uint32_t q_at(int stage) const {
    return memory + Sizes::kStagesAt + static_cast<uint32_t>(stage) * 2 * Sizes::kTileBytes;
  }
  __device__ uint32_t dy_at(int stage) const { return q_at(stage) + Sizes::kTileBytes; }
  __device__ uint32_t slopes_at(int32_t step) const {
    return memory + Sizes::kSlopesAt + static_cast<uint32_t>(step) % kSlopes * Sizes::kSlopesBytes;
  }
  __device__ static uint32_t product_of(int32_t step) { return static_cast<uint32_t>(step) % Sizes::kProducts; }
  __device__ uint32_t product_at(int32_t step) const {
    return memory + Sizes::kProductAt + product_of(step) * Sizes::kProductBytes;
  }
  __device__ uint32_t lse_at(int stage) const {
    return memory + Sizes::kNumbersAt + static_cast<uint32_t>(stage) * 2 * Sizes::kNumbersBytes;
  }
  __device__ uint32_t delta_at(int stage) const { return lse_at(stage) + Sizes::kNumbersBytes; }
  __device__ uint32_t barrier(int number) const {
    return memory + Sizes::kBarriersAt + static_cast<uint32_t>(number) * kBarrierBytes;
  }
  __device__ uint32_t full_at(int stage) const { return barrier(stage); }
  __device__ uint32_t empty_at(int stage) const { return barrier(Sizes::kStages + stage); }
  __device__ uint32_t slopes_full_at(int32_t step) const {
    return barrier(2 * Sizes::kStages + static_cast<int>(static_cast<uint32_t>(step) % kSlopes));
  }
  __device__ uint32_t keys_full() const { return barrier(2 * Sizes::kStages + kSlopes); }
  __device__ uint32_t product_full_at(int32_t step) const {
    return barrier(2 * Sizes::kStages + kSlopes + 1 + static_cast<int>(static_cast<uint32_t>(step) % kAdders));
  }
  __device__ uint32_t product_empty_at(int32_t step) const {
    return barrier(2 * Sizes::kStages + kSlopes + 1 + kAdders + static_cast<int>(product_of(step)));
  }
};

// Matrices as [tokens, heads, width], in boxes of 64 rows and a panel of a head.
struct Maps {
  CUtensorMap k, v, q, dy;
};

// The thread's lane, read where it is used: the compiler keeps no register through all chunks for what depends on it.
__device__ int read_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// One thread copies the boxes of 64 rows of a head; `full` counts their bytes.
template <int kD>
__device__ void copy_boxes(uint32_t to, const CUtensorMap& map, int32_t row, int32_t head, uint32_t full) {
#pragma unroll
  for (int panel = 0; panel < kD / kPanelColumns; ++panel)
    copy_columns_async(to + static_cast<uint32_t>(panel) * kPanelBytes, map, panel * kPanelColumns, row, head, full);
}

// Each of 64 threads copies a row, of those from `row` on; those beyond the sequence become zeros, as do columns beyond
// the head.
template <int kD>
__device__ void copy_row(uint32_t to, const HeadRows& from, int32_t row, int thread) {
  const bool wanted = row + thread < from.tokens;
  const __nv_bfloat16* elements = from.first + (wanted ? row + thread : 0) * from.stride;
#pragma unroll 1
  for (int piece = 0; piece < kD / 8; ++piece)
    copy_16_async(to + static_cast<uint32_t>(piece / 8) * kPanelBytes + panel_offset(thread, piece % 8),
                  elements + piece * 8, wanted && piece * 8 < from.width);
}

// Loads 16 rows as fragments; those beyond the sequence become zeros, as do columns beyond the head.
template <int kD>
__device__ void load_rows(uint32_t (&fragments)[kD / 16][4], const HeadRows& from, int32_t row, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t own = row + lane / 4 + half * 8;
    const bool real = own < from.tokens;
    const auto* elements =
        reinterpret_cast<const uint32_t*>(from.first + (real ? own : 0) * from.stride + lane % 4 * 2);
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      fragments[step][half] = real && step * 16 < from.width ? elements[step * 8] : 0;
      fragments[step][half + 2] = real && step * 16 + 8 < from.width ? elements[step * 8 + 4] : 0;
    }
  }
}

// The left operand of scores: 64 keys or values of a warpgroup, as fragments of `from` or in panels.
template <int kD, bool kInRegisters>
struct LeftRows {
  uint32_t fragments[kD / 16][4];
  __device__ LeftRows(const HeadRows& from, int32_t row, int lane, uint32_t) {
    load_rows<kD>(fragments, from, row, lane);
  }
  __device__ const uint32_t (&at(int step) const)[4] { return fragments[step]; }
};
template <int kD>
struct LeftRows<kD, false> {
  Operand<> operand;
  __device__ LeftRows(const HeadRows&, int32_t, int, uint32_t panels) : operand(panels, 0) {}
  __device__ uint64_t at(int step) const {
    return operand.at(static_cast<uint32_t>(step / 4) * kPanelBytes + static_cast<uint32_t>(step % 4) * 32);
  }
};

// sum [64, kD] += packed [64, 64] chunk [64, kD]
template <int kD>
__device__ void multiply_chunk(float (&sum)[kD / 8][4], const uint32_t (&packed)[kQueries / 16][4], uint32_t chunk) {
  const Operand operand(chunk, kPanelBytes);
  pin(sum);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kQueries / 16; ++step)
    wgmma<Major::n>(sum, packed[step], operand.at(static_cast<uint32_t>(step) * 16 * kPanelRowBytes), true);
  wgmma_commit();
  pin(sum);
}

// c [64, 64] = rows [64, kD] times the rows of chunk [64, kD].
template <int kD, bool kInRegisters>
__device__ void multiply_rows(float (&c)[kQueryTiles][4], const LeftRows<kD, kInRegisters>& rows, uint32_t chunk) {
  const Operand operand(chunk, 0);
  forget(c);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kD / 16; ++step)
    wgmma<Major::k>(c, rows.at(step), operand.at(static_cast<uint32_t>(step / 4) * kPanelBytes + step % 4 * 32),
                    step > 0);
  wgmma_commit();
  pin(c);
}

// Half of the columns of c [64, kD] = the transpose of slopes [kKeys, 64], times keys [kKeys, kD].
template <int kD>
__device__ void multiply_keys(float (&c)[Config<kD>::kHalfTiles][4], uint32_t slopes, uint32_t keys, int half) {
  using Sizes = Config<kD>;
  constexpr int kStepsOfPanel = 64 / 16;
  const uint32_t bytes = static_cast<uint32_t>(half) * Sizes::kHalfTiles * 16;
  const Operand left(slopes, 0), right(keys + bytes / kPanelRowBytes * kPanelBytes + bytes % kPanelRowBytes, 0);
  forget(c);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    const auto panel = static_cast<uint32_t>(step / kStepsOfPanel);
    const uint32_t rows = static_cast<uint32_t>(step % kStepsOfPanel) * 16 * kPanelRowBytes;
    wgmma<Major::n, Major::n>(c, left.at(panel * kPanelBytes + rows), right.at(panel * Sizes::kTileBytes + rows),
                              step > 0);
  }
  wgmma_commit();
  pin(c);
}

template <int kD>
__device__ void store_rows(void* to, const float (&sum)[kD / 8][4], float scale, const HeadRows& like, int32_t row,
                           int64_t offset, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t own = row + lane / 4 + half * 8;
    if (own >= like.tokens) continue;
    auto* y = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(to) + offset + own * like.stride + lane % 4 * 2);
#pragma unroll
    for (int t = 0; t < kD / 8; ++t)
      if (t * 8 < like.width) y[t * 4] = pack_bf16(sum[t][2 * half] * scale, sum[t][2 * half + 1] * scale);
  }
}

// Copies the keys and values, then chunks of queries. One thread copies boxes whose rows all belong to the sequence;
// else each thread copies a row.
template <int kD>
__device__ void copy_rows(const AttentionBackwardParams& b, const Maps& maps, const Work& work,
                          const Shared<kD>& shared) {
  using Sizes = Config<kD>;
  constexpr uint32_t kTileBytes = Sizes::kTileBytes;
  const AttentionParams& p = b.forward;
  const int thread = static_cast<int>(threadIdx.x);
  // 64 rows of a head of two matrices, or of the first alone.
  const auto copy = [&](uint32_t to, uint32_t to_second, const CUtensorMap& map, const CUtensorMap& second_map,
                        const void* matrix, const void* second, int32_t heads, int32_t head, int32_t row, bool both,
                        uint32_t full) {
    if (work.fills(row)) {
      if (thread != 0) return;
      barrier_arrive_expecting(full, both ? 2 * kTileBytes : kTileBytes);
      copy_boxes<kD>(to, map, work.tile.first_token + row, head, full);
      if (both) copy_boxes<kD>(to_second, second_map, work.tile.first_token + row, head, full);
    } else {
      if (thread == 0) barrier_arrive(full);
      copy_row<kD>(to, work.rows_of(p, matrix, heads, head), row, thread);
      if (both) copy_row<kD>(to_second, work.rows_of(p, second, heads, head), row, thread);
    }
  };
  for (int w = 0; w < kConsumers; ++w) {
    const uint32_t to = shared.keys() + static_cast<uint32_t>(w) * kTileBytes;
    copy(to, to + Sizes::kKeyBytes, maps.k, maps.v, p.k, p.v, p.kv_heads, work.head, work.tile.row + w * kWarpgroupKeys,
         !Sizes::kHasRegisters, shared.keys_full());
  }
  barrier_arrive_after_copies(shared.keys_full());
  RingPlace<Sizes::kStages> place;
  for (int32_t of = 0; of < work.group; ++of)
    for (int32_t query = work.tile.row; query < work.end_chunk; query += kQueries) {
      const int32_t head = work.head * work.group + of;
      const uint32_t full = shared.full_at(place.stage);
      barrier_wait(shared.empty_at(place.stage), place.parity ^ 1);
      copy(shared.q_at(place.stage), shared.dy_at(place.stage), maps.q, maps.dy, p.q, b.dy, p.heads, head, query, true,
           full);
      static_assert(kCopyThreads == kQueries);
      const bool wanted = query + thread < work.tile.tokens;
      const int64_t own = wanted ? int64_t{work.tile.first_token + query + thread} * p.heads + head : 0;
      copy_4_async(shared.lse_at(place.stage) + static_cast<uint32_t>(thread) * 4, p.lse + own, wanted);
      copy_4_async(shared.delta_at(place.stage) + static_cast<uint32_t>(thread) * 4, b.delta + own, wanted);
      barrier_arrive_after_copies(full);
      place.advance();
    }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Rounds products to dq, in sequences of which nobody else has products: those of the steps `first`, first + kAdders
// and so on. All threads of a warp call it.
template <int kD>
__device__ void round_products(const AttentionBackwardParams& b, const Work& work, const Shared<kD>& shared,
                               int32_t first) {
  for (int32_t step = first; step < work.steps; step += kAdders) {
    barrier_wait(shared.product_full_at(step), static_cast<uint32_t>(step) / kAdders % 2);
    const Chunk chunk(work, step);
    const HeadRows rows = work.rows_of(b.forward, b.dq, b.forward.heads, chunk.head);
#pragma unroll 1
    for (int i = read_lane(); b.dq != nullptr && i < kQueries * kD / 4; i += kWarp) {
      const int t = i / kConsumerThreads, n = i % kConsumerThreads;
      const int32_t row = chunk.query + n % kWarpgroup / kWarp * 16 + n % kWarp / 4;
      const int column = n / kWarpgroup * (kD / 2) + t * 8 + n % 4 * 2;
      for (int half = 0; half < 2; ++half) {
        const float2 two = load_f32x2(shared.product_at(step) + static_cast<uint32_t>(i * 4 + half * 2) * 4);
        auto* to = const_cast<__nv_bfloat16*>(rows.first) + (row + half * 8) * rows.stride + column;
        if (row + half * 8 < rows.tokens && column < rows.width)
          *reinterpret_cast<uint32_t*>(to) = pack_bf16(two.x * b.forward.scale, two.y * b.forward.scale);
      }
    }
    __syncwarp();
    if (read_lane() == 0) barrier_arrive(shared.product_empty_at(step));
  }
}

// One thread adds products to the sums of dq: those of the steps `first`, first + kAdders and so on.
template <int kD>
__device__ void add_products(const AttentionBackwardParams& b, const Work& work, const Shared<kD>& shared,
                             int32_t first) {
  constexpr uint32_t kBytes = Config<kD>::kProductBytes;
  Chunk next(work, first);
  for (int32_t step = first; step < work.steps; step += kAdders) {
    const int32_t turn = work.turn_at(b.forward, next.query);
    const int64_t chunk = work.chunk_at(b.forward, next.query, next.head);
    float* sums = b.sums + chunk * kQueries * kD;
    int32_t* turns = b.turns + 1 + chunk;
    if (turn > 0) wait_for_turn(turns, turn);
    barrier_wait(shared.product_full_at(step), static_cast<uint32_t>(step) / kAdders % 2);
    if (turn == 0)
      store_bulk_async(sums, shared.product_at(step), kBytes);
    else
      add_bulk_async(sums, shared.product_at(step), kBytes);
    commit_bulk();
    wait_for_bulk_reads();
    barrier_arrive(shared.product_empty_at(step));
    next.advance(work, kAdders);
    wait_for_bulk();
    end_turn(turns, turn);
  }
}

template <int kD>
__device__ void multiply(const AttentionBackwardParams& b, const Work& work, const Shared<kD>& shared,
                         float exponent_scale) {
  using Sizes = Config<kD>;
  const AttentionParams& p = b.forward;
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroup, lane = thread % kWarp;
  const int warpgroup = thread / kWarpgroup;
  const int32_t first_key = work.tile.row + thread / kWarp * 16;

  // 1. The keys and values.
  const uint32_t own_rows = shared.keys() + static_cast<uint32_t>(warpgroup) * Sizes::kTileBytes;
  const LeftRows<kD, false> keys({}, first_key, lane, own_rows);
  const LeftRows<kD, Sizes::kHasRegisters> values(work.rows_of(p, p.v, p.kv_heads, work.head), first_key, lane,
                                                  own_rows + Sizes::kKeyBytes);
  barrier_wait(shared.keys_full(), 0);
  fence_shared_for_async();

  // 2. The chunks.
  uint32_t packed_weights[kQueries / 16][4], packed_slopes[kQueries / 16][4];
  float dk[kD / 8][4] = {}, dv[kD / 8][4] = {};
  RingPlace<Sizes::kStages> place;
  const auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.empty_at(stage));
  };
  // One of a warp's threads arrives for all, whose stores wgmma and copies then see.
  const auto arrive_at = [&](uint32_t barrier) {
    fence_shared_for_async();
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };
  const auto wait_for_slopes = [&](int32_t step) {
    barrier_wait(shared.slopes_full_at(step), static_cast<uint32_t>(step) / kSlopes % 2);
  };
  // Stores the product of chunk `step` for the thread that adds it.
  const auto store_product = [&](const float(&product)[Sizes::kHalfTiles][4], int32_t step) {
    barrier_wait(shared.product_empty_at(step), (static_cast<uint32_t>(step) / Sizes::kProducts % 2) ^ 1);
    const uint32_t to = shared.product_at(step) + static_cast<uint32_t>(thread) * 16;
#pragma unroll
    for (int t = 0; t < Sizes::kHalfTiles; ++t)
      store_f32x4(to + static_cast<uint32_t>(t) * kConsumerThreads * 16, product[t]);
    arrive_at(shared.product_full_at(step));
  };
  const uint32_t slopes_offset =
      static_cast<uint32_t>(warpgroup) * kPanelBytes +
      panel_offset(thread % kWarpgroup / kWarp * 16 + lane / 8 % 2 * 8 + lane % 8, lane / 16);
  // Where warpgroups alternate, one multiplies scores while the other computes with its own.
  if (Sizes::kAlternate && warpgroup == 1) named_barrier_arrive(1, kConsumerThreads);
  int32_t step = 0, query = work.tile.row;
  do {
    if constexpr (Sizes::kAlternate) named_barrier_sync(1 + warpgroup, kConsumerThreads);
    const int stage = place.stage;
    const uint32_t q = shared.q_at(stage), dy = shared.dy_at(stage);
    // dq of an earlier chunk, when both warpgroups have stored its ds. In the first steps there is none, and nothing
    // reads the product.
    float weights[kQueryTiles][4], slopes[kQueryTiles][4], product[Sizes::kHalfTiles][4];
    const int32_t earlier = step - kLag;
    if (earlier >= 0) wait_for_slopes(earlier);
    multiply_keys<kD>(product, shared.slopes_at(earlier + kSlopes), shared.keys(), warpgroup);
    barrier_wait(shared.full_at(stage), place.parity);
    if (!work.fills(query)) fence_shared_for_async();
    multiply_rows<kD>(weights, keys, q);
    wgmma_wait<1>();
    pin(product);
    if (step > 0) release((stage == 0 ? Sizes::kStages : stage) - 1);
    if (earlier >= 0) store_product(product, earlier);
    multiply_rows<kD>(slopes, values, dy);
    wgmma_wait<1>();
    pin(weights);
    if constexpr (Sizes::kAlternate) named_barrier_arrive(2 - warpgroup, kConsumerThreads);

    // p, and its mask where a key of this warp is not seen by all queries. Queries beyond the sequence are zeros.
    const int32_t last_key = first_key + 15, last_query = query + kQueries - 1;
    const bool all_see = last_key <= query && (p.window == 0 || first_key > last_query - p.window);
#pragma unroll
    for (int t = 0; t < kQueryTiles; ++t) {
      const float2 lse = load_f32x2(shared.lse_at(stage) + static_cast<uint32_t>(t * 8 + lane % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weights[t][i] = fast_exp2(fmaf(weights[t][i], exponent_scale, -(i % 2 == 0 ? lse.x : lse.y) * kLog2e));
    }
    if (!all_see) {
      // `behind`: how many positions the key of the first element lies before its query.
      const int here = read_lane();
      const int32_t behind = query + here % 4 * 2 - first_key - here / 4;
      const int32_t window = p.window > 0 ? p.window : INT32_MAX;
#pragma unroll
      for (int t = 0; t < kQueryTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int32_t own = behind + (t * 8 + i % 2 - i / 2 * 8);
          if (own < 0 || own >= window) weights[t][i] = 0.0f;
        }
    }
    pack_left(packed_weights, weights);
    multiply_chunk<kD>(dv, packed_weights, dy);
    wgmma_wait<1>();
    pin(slopes);

    // ds
#pragma unroll
    for (int t = 0; t < kQueryTiles; ++t) {
      const float2 delta = load_f32x2(shared.delta_at(stage) + static_cast<uint32_t>(t * 8 + lane % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) slopes[t][i] = weights[t][i] * (slopes[t][i] - (i % 2 == 0 ? delta.x : delta.y));
    }
    if constexpr (!Sizes::kHasRegisters) wgmma_wait<0>();  // frees the registers of packed_weights
    pack_left(packed_slopes, slopes);
    // A panel permutes pieces by exclusive or, and so those of columns further on.
#pragma unroll
    for (uint32_t s = 0; s < kQueries / 16; ++s)
      store_matrices((shared.slopes_at(step) + slopes_offset) ^ s * 32, packed_slopes[s]);
    arrive_at(shared.slopes_full_at(step));
    multiply_chunk<kD>(dk, packed_slopes, q);
    place.advance();
    query += kQueries;
    if (query == work.end_chunk) query = work.tile.row;
  } while (++step < work.steps);
  if (Sizes::kAlternate && warpgroup == 0) named_barrier_sync(1, kConsumerThreads);
  wgmma_wait<0>();
  pin(dk);
  pin(dv);
  for (int32_t earlier = max(work.steps - kLag, 0); earlier < work.steps; ++earlier) {
    float product[Sizes::kHalfTiles][4];
    wait_for_slopes(earlier);
    multiply_keys<kD>(product, shared.slopes_at(earlier), shared.keys(), warpgroup);
    wgmma_wait<0>();
    pin(product);
    store_product(product, earlier);
  }

  // 3. Store.
  const HeadRows like = work.rows_of(p, nullptr, p.kv_heads, work.head);
  const int64_t offset = (int64_t{work.tile.first_token} * p.kv_heads + work.head) * p.head_dim;
  if (b.dk != nullptr) store_rows<kD>(b.dk, dk, p.scale, like, first_key, offset, lane);
  if (b.dv != nullptr) store_rows<kD>(b.dv, dv, 1.0f, like, first_key, offset, lane);
}

template <int kD>
__global__ void __launch_bounds__(kThreads, 1)
    attention_gradients_wgmma(const __grid_constant__ AttentionBackwardParams b, const __grid_constant__ Maps maps,
                              AtOnce at_once, float exponent_scale) {
  using Sizes = Config<kD>;
  extern __shared__ uint8_t memory[];
  __shared__ Work work;
  __shared__ bool has_work;

  const Shared<kD> shared{(shared_address(memory) + 1023) / 1024 * 1024};
  allow_next_kernel();
  wait_for_earlier_kernels();
  if (threadIdx.x == 0) {
    barrier_init(shared.keys_full(), kCopyThreads + kConsumers);
    for (int i = 0; i < kAdders; ++i) barrier_init(shared.product_full_at(i), kConsumerThreads / kWarp);
    for (int i = 0; i < Sizes::kProducts; ++i) barrier_init(shared.product_empty_at(i), 1);
    for (int i = 0; i < kSlopes; ++i) barrier_init(shared.slopes_full_at(i), kConsumerThreads / kWarp);
    for (int stage = 0; stage < Sizes::kStages; ++stage) {
      barrier_init(shared.full_at(stage), kCopyThreads + 1);  // all when their copies are done, and one for the boxes
      barrier_init(shared.empty_at(stage), kConsumerThreads / kWarp);
    }
  }
  if (threadIdx.x < kWarp) {
    // A block takes its work when it begins, so that those that it will wait for began before it.
    const int32_t ticket = __shfl_sync(kAllLanes, threadIdx.x == 0 ? atomicAdd(b.turns, 1) : 0, 0);
    GradientTile tile;
    int32_t head = 0;
    const bool found = find_keys(tile, head, b.forward, at_once, ticket);
    if (threadIdx.x == 0) {
      has_work = found;
      if (found) work.set(b.forward, tile, head);
    }
  }
  __syncthreads();

  if (!has_work) return;
  if (threadIdx.x < kWarpgroup) {
    shrink_registers<kProducerRegisters>();
    const int32_t adder = (static_cast<int32_t>(threadIdx.x) - kCopyThreads) / kWarp;
    if (threadIdx.x < kCopyThreads)
      copy_rows(b, maps, work, shared);
    else if (work.tile.tokens <= kKeys)
      round_products(b, work, shared, adder);
    else if (threadIdx.x % kWarp == 0)
      add_products(b, work, shared, adder);
  } else {
    grow_registers<kConsumerRegisters>();
    multiply(b, work, shared, exponent_scale);
  }
}

// Rounds the sums of a chunk to dq.
template <int kD>
__global__ void __launch_bounds__(kConsumerThreads) round_sums(AttentionBackwardParams b) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const AttentionParams& p = b.forward;
  const int32_t head = static_cast<int32_t>(blockIdx.x) % p.heads;
  GradientTile tile;
  if (!find_gradient_tile(tile, p, kQueries, static_cast<int32_t>(blockIdx.x) / p.heads)) return;
  if (tile.tokens <= kKeys) return;
  const int64_t chunk = int64_t{tile.first_chunk + tile.row / kQueries} * p.heads + head;
  const auto* sums = reinterpret_cast<const float4*>(b.sums + chunk * kQueries * kD);
  const int64_t stride = int64_t{p.heads} * p.head_dim;
  bf16_t* rows = static_cast<bf16_t*>(b.dq) + tile.first_token * stride + head * p.head_dim;

  // Eight columns of two rows, which lie in four neighbouring float4, at a time; neighbouring threads have neighbouring
  // columns.
  constexpr int kTiles = kD / 8, kHalfTiles = kTiles / 2, kPairs = kQueries / 2;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kTiles * kPairs; i += kConsumerThreads) {
    const int t = i % kTiles, pair = i / kTiles;
    if (t * 8 >= p.head_dim) continue;
    const int32_t row = tile.row + pair / 8 * 16 + pair % 8;
    const float4* from = sums + t % kHalfTiles * kConsumerThreads + t / kHalfTiles * kWarpgroup + pair * 4;
    float upper[8], lower[8];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float4 four = from[c];
      upper[2 * c] = four.x * p.scale, upper[2 * c + 1] = four.y * p.scale;
      lower[2 * c] = four.z * p.scale, lower[2 * c + 1] = four.w * p.scale;
    }
    bf16_t* to = rows + row * stride + t * 8;
    if (row < tile.tokens) store_vector(to, upper);
    if (row + 8 < tile.tokens) store_vector(to + 8 * stride, lower);
  }
}

template <int kD>
cudaError_t launch(const AttentionBackwardParams& b, cudaStream_t stream) {
  const AttentionParams& p = b.forward;
  Maps maps{};
  const auto make = [&](CUtensorMap& map, const void* matrix, int32_t heads) {
    return make_head_map(map, matrix, p.tokens, heads, p.head_dim, 64);
  };
  cudaError_t error = make(maps.k, p.k, p.kv_heads);
  if (error == cudaSuccess) error = make(maps.v, p.v, p.kv_heads);
  if (error == cudaSuccess) error = make(maps.q, p.q, p.heads);
  if (error == cudaSuccess) error = make(maps.dy, b.dy, p.heads);
  if (error != cudaSuccess) return error;
  // Every sequence may end with a partial tile.
  const auto blocks = [&](int64_t rows, int32_t heads) {
    return dim3(static_cast<unsigned>((p.tokens / rows + p.sequences) * heads));
  };
  // First halves of so many sequences and heads have about as many blocks as a device has multiprocessors. Of one head
  // at most 16 tiles run at a time, because each waits for the one before it.
  constexpr int64_t kBlocksAtOnce = 128, kTilesAtOnce = 16;
  const int64_t half = std::max<int64_t>(p.tokens / p.sequences / (2 * kKeys), 1);
  const int64_t heads = std::min<int64_t>(ceil_div(kBlocksAtOnce, std::min(half, kTilesAtOnce)), p.kv_heads);
  const AtOnce at_once = {
      .sequences = static_cast<int32_t>(std::clamp<int64_t>(ceil_div(kBlocksAtOnce, half * heads), 1, kWarp)),
      .heads = static_cast<int32_t>(heads)};
  error = launch_overlapped(attention_gradients_wgmma<kD>, blocks(kKeys, p.kv_heads), kThreads,
                            Config<kD>::kSharedBytes, stream, b, maps, at_once, p.scale * kLog2e);
  if (error != cudaSuccess || b.dq == nullptr) return error;
  return launch_overlapped(round_sums<kD>, blocks(kQueries, p.heads), kConsumerThreads, 0, stream, b);
}

}  // namespace

cudaError_t launch_attention_backward_wgmma(const AttentionBackwardParams& b, cudaStream_t stream) {
  const AttentionParams& p = b.forward;
  if (p.tokens == 0 || p.heads == 0 || p.sequences == 0) return cudaSuccess;
  const cudaError_t error = launch_attention_delta(b, ceil_div(p.tokens, kGradientTokens) * p.heads + 1, stream);
  if (error != cudaSuccess) return error;
  if (p.head_dim > kGradientHeadDim) return cudaErrorInvalidValue;
  return p.head_dim <= 64 ? launch<64>(b, stream) : launch<kGradientHeadDim>(b, stream);
}

}  // namespace eadem::kernels::cuda
