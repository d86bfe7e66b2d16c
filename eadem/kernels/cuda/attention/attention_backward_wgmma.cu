// SPDX-License-Identifier: Apache-2.0
//
// The gradients of attention by wgmma: bf16, heads of 64 or 128. attention_gradients.cuh says what is computed; p and
// ds are rounded to bf16 before they are multiplied.
//
// A block has 64 rows for each warpgroup that computes: keys (dk, dv) or queries (dq). It walks through the columns,
// queries or keys, in chunks of 64, which another warpgroup copies into a ring. The scores of the next chunk are
// multiplied with the sums of this one.
#include "eadem/kernels/cuda/attention/attention_copies.cuh"
#include "eadem/kernels/cuda/attention/attention_gradients.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/instructions/ring.cuh"
#include "eadem/kernels/cuda/instructions/tensor_map.cuh"
#include "eadem/kernels/cuda/instructions/wgmma.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kColumns = 64, kColumnTiles = kColumns / 8;
constexpr int kWarpgroupRows = 64;
constexpr uint32_t kPanelBytes = 64 * kPanelRowBytes;
constexpr float kLog2e = 1.4426950408889634f;
static_assert(kColumns == kPanelColumns, "a warpgroup's p and ds are 64 x 64");

template <int kD, bool kKeys>
struct Config {
  // The left operands of scores, rows of k and v or of q and dy, are in registers where the sums leave room for them.
  static constexpr bool kFirstInRegisters = !kKeys || kD == 64, kSecondInRegisters = kKeys && kD == 64;
  // Whether products with both matrices of a chunk begin at once.
  static constexpr bool kBothScores = !(kKeys && kD == 128);
  static constexpr int kConsumers = !kKeys && kD == 64 ? 3 : 2;
  static constexpr int kRows = kConsumers * kWarpgroupRows;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  static constexpr int kStages = kD == 64 ? 4 : 3;
  static constexpr uint32_t kTileBytes = kD / kPanelColumns * kPanelBytes;  // 64 rows of one matrix
  static constexpr uint32_t kFirstBytes = kFirstInRegisters ? 0 : kConsumers * kTileBytes;
  static constexpr uint32_t kRowsBytes = kFirstBytes + (kSecondInRegisters ? 0 : kConsumers * kTileBytes);
  // The rows, then the stages of the ring, each two tiles, from a multiple of 1024.
  static constexpr uint32_t kSharedBytes = kRowsBytes + 2 * kStages * kTileBytes + 1024;
};

// The two matrices of the columns as [tokens, heads * kD], in boxes of a chunk and a panel.
struct ColumnMaps {
  CUtensorMap first, second;
};

// A head's rows of a matrix [tokens, heads, kD].
struct HeadRows {
  const __nv_bfloat16* first;  // the first token of the sequence
  int64_t stride;              // elements
  int32_t tokens;              // of the sequence
};

// Copies 64 rows from `row` on; those beyond the sequence become zeros.
template <int kD>
__device__ void copy_tile(uint32_t to, const HeadRows& from, int32_t row, const TileCopies<kD>& copies) {
  copies.copy(to, from.first + row * from.stride, from.stride, 0, max(from.tokens - row, 0));
}

// Loads 16 rows as fragments; those beyond the sequence become zeros.
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
      fragments[step][half] = real ? elements[step * 8] : 0;
      fragments[step][half + 2] = real ? elements[step * 8 + 4] : 0;
    }
  }
}

// The left operand of scores: 64 rows of a warpgroup, in registers or in panels.
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
__device__ void multiply_chunk(float (&sum)[kD / 8][4], const uint32_t (&packed)[kColumns / 16][4], uint32_t chunk) {
  const Operand operand(chunk, kPanelBytes);
  pin(sum);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step)
    wgmma<Major::n>(sum, packed[step], operand.at(static_cast<uint32_t>(step) * 16 * kPanelRowBytes), true);
  wgmma_commit();
  pin(sum);
}

// c [64, 64] = rows [64, kD] times the rows of chunk [64, kD].
template <int kD, bool kInRegisters>
__device__ void multiply_rows(float (&c)[kColumnTiles][4], const LeftRows<kD, kInRegisters>& rows, uint32_t chunk) {
  const Operand operand(chunk, 0);
  pin(c);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kD / 16; ++step)
    wgmma<Major::k>(c, rows.at(step), operand.at(static_cast<uint32_t>(step / 4) * kPanelBytes + step % 4 * 32),
                    step > 0);
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
    for (int t = 0; t < kD / 8; ++t) y[t * 4] = pack_bf16(sum[t][2 * half] * scale, sum[t][2 * half + 1] * scale);
  }
}

// The work of a block: its rows, of one head, and the columns that they meet, in chunks. Rows that are keys meet the
// queries of every head of their group, one head after the other.
template <int kD, bool kKeys>
struct Work {
  const AttentionBackwardParams& b;
  GradientTile tile;
  int32_t row_head, group;
  int32_t first_column, chunks, steps;

  __device__ Work(const AttentionBackwardParams& params, const GradientTile& found, int32_t head)
      : b(params), tile(found), row_head(head), group(params.forward.heads / params.forward.kv_heads) {
    constexpr int kRows = Config<kD, kKeys>::kRows;
    const int32_t window = b.forward.window, end_row = min(tile.row + kRows, tile.tokens);
    const int32_t first = kKeys ? tile.row : window > 0 ? max(tile.row - window + 1, 0) : 0;
    const int32_t end = !kKeys ? end_row : window > 0 ? min(end_row - 1 + window, tile.tokens) : tile.tokens;
    first_column = first / kColumns * kColumns;
    chunks = (end - first_column + kColumns - 1) / kColumns;
    steps = chunks * (kKeys ? group : 1);
  }

  __device__ HeadRows rows_of(const void* matrix, int32_t heads, int32_t head) const {
    return {static_cast<const __nv_bfloat16*>(matrix) + (int64_t{tile.first_token} * heads + head) * kD,
            int64_t{heads} * kD, tile.tokens};
  }
  // k and v, or q and dy.
  __device__ HeadRows first_rows() const {
    return kKeys ? rows_of(b.forward.k, b.forward.kv_heads, row_head) : rows_of(b.forward.q, b.forward.heads, row_head);
  }
  __device__ HeadRows second_rows() const {
    return kKeys ? rows_of(b.forward.v, b.forward.kv_heads, row_head) : rows_of(b.dy, b.forward.heads, row_head);
  }
  // Those after which a warpgroup's queries see no key. Its keys may be seen in every step.
  __device__ int32_t steps_of(int warpgroup) const {
    if constexpr (kKeys) return steps;
    const int32_t first = tile.row + warpgroup * kWarpgroupRows, end = min(first + kWarpgroupRows, tile.tokens);
    return first < end ? (end - first_column + kColumns - 1) / kColumns : 0;
  }
  __device__ int32_t column_of(int32_t step) const { return first_column + step % chunks * kColumns; }
  // Whether all columns of a chunk belong to the sequence.
  __device__ bool fills(int32_t column) const { return column + kColumns <= tile.tokens; }
  __device__ int32_t column_head(int32_t step) const {
    return kKeys ? row_head * group + step / chunks : row_head / group;
  }
};

// Numbers of queries that are columns, for each stage.
template <int kStages>
struct QueryNumbers {
  float lse[kStages][kColumns], delta[kStages][kColumns];
};

// One thread copies chunks that the sequence fills; others are copied piece by piece.
template <int kD, bool kKeys>
__device__ void produce(const Work<kD, kKeys>& work, const ColumnMaps& maps, uint32_t rows, uint32_t rows_full,
                        uint32_t stages, const Ring& ring, const QueryNumbers<Config<kD, kKeys>::kStages>& numbers) {
  using Sizes = Config<kD, kKeys>;
  constexpr uint32_t kTileBytes = Sizes::kTileBytes;
  const AttentionBackwardParams& b = work.b;
  const AttentionParams& p = b.forward;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const TileCopies<kD> copies(thread);
  for (int w = 0; w < Sizes::kConsumers; ++w) {
    const int32_t row = work.tile.row + w * kWarpgroupRows;
    const uint32_t to = rows + static_cast<uint32_t>(w) * kTileBytes;
    if constexpr (!Sizes::kFirstInRegisters) copy_tile(to, work.first_rows(), row, copies);
    if constexpr (!Sizes::kSecondInRegisters) copy_tile(to + Sizes::kFirstBytes, work.second_rows(), row, copies);
  }
  barrier_arrive_after_copies(rows_full);
  constexpr int kPanels = kD / kPanelColumns;
  RingPlace<Sizes::kStages> place;
  for (int32_t step = 0; step < work.steps; ++step) {
    const int32_t column = work.column_of(step), head = work.column_head(step);
    const uint32_t to = stages + static_cast<uint32_t>(place.stage) * 2 * kTileBytes, full = ring.full_at(place.stage);
    barrier_wait(ring.empty_at(place.stage), place.parity ^ 1);
    if (work.fills(column)) {
      if (thread == 0) {
        barrier_arrive_expecting(full, 2 * kTileBytes);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          const uint32_t offset = static_cast<uint32_t>(panel) * kPanelBytes;
          const int row = work.tile.first_token + column;
          copy_box_async(to + offset, maps.first, row, head * kPanels + panel, full);
          copy_box_async(to + kTileBytes + offset, maps.second, row, head * kPanels + panel, full);
        }
      }
    } else {
      if (thread == 0) barrier_arrive(full);
      copy_tile(to, kKeys ? work.rows_of(p.q, p.heads, head) : work.rows_of(p.k, p.kv_heads, head), column, copies);
      copy_tile(to + kTileBytes, kKeys ? work.rows_of(b.dy, p.heads, head) : work.rows_of(p.v, p.kv_heads, head),
                column, copies);
    }
    if constexpr (kKeys) {
      const int own = thread % kColumns;
      const bool wanted = column + own < work.tile.tokens;
      const int64_t query = wanted ? int64_t{work.tile.first_token + column + own} * p.heads + head : 0;
      if (thread < kColumns)
        copy_4_async(shared_address(&numbers.lse[place.stage][own]), p.lse + query, wanted);
      else
        copy_4_async(shared_address(&numbers.delta[place.stage][own]), b.delta + query, wanted);
    }
    barrier_arrive_after_copies(full);
    place.advance();
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

template <int kD, bool kKeys>
__device__ void consume(const Work<kD, kKeys>& work, uint32_t rows, uint32_t rows_full, uint32_t stages,
                        const Ring& ring, const QueryNumbers<Config<kD, kKeys>::kStages>& numbers) {
  using Sizes = Config<kD, kKeys>;
  const AttentionParams& p = work.b.forward;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup - 1;
  const int32_t first_row = work.tile.row + (static_cast<int>(threadIdx.x) / kWarp - kWarpgroup / kWarp) * 16;

  // 1. The rows, and the numbers of those that are queries.
  const uint32_t own_rows = rows + static_cast<uint32_t>(warpgroup) * Sizes::kTileBytes;
  const LeftRows<kD, Sizes::kFirstInRegisters> first_left(work.first_rows(), first_row, lane, own_rows);
  const LeftRows<kD, Sizes::kSecondInRegisters> second_left(work.second_rows(), first_row, lane,
                                                            own_rows + Sizes::kFirstBytes);
  barrier_wait(rows_full, 0);
  fence_shared_for_wgmma();
  float row_lse[2] = {}, row_delta[2] = {};
  if constexpr (!kKeys) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = min(first_row + lane / 4 + half * 8, work.tile.tokens - 1);
      const int64_t query = int64_t{work.tile.first_token + row} * p.heads + work.row_head;
      row_lse[half] = p.lse[query] * kLog2e, row_delta[half] = work.b.delta[query];
    }
  }

  // 2. The chunks.
  const float c = p.scale * kLog2e;
  float weights[kColumnTiles][4], slopes[kColumnTiles][4];
  uint32_t packed_weights[kKeys ? kColumns / 16 : 1][4], packed_slopes[kColumns / 16][4];
  float first_sum[kD / 8][4] = {}, second_sum[kKeys ? kD / 8 : 1][4] = {};
  RingPlace<Sizes::kStages> place;
  const auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty_at(stage));
  };
  int previous = 0;
  const int32_t steps = work.steps_of(warpgroup);
  for (int32_t step = 0; step < steps; ++step) {
    const int stage = place.stage;
    const uint32_t first = stages + static_cast<uint32_t>(stage) * 2 * Sizes::kTileBytes;
    const uint32_t second = first + Sizes::kTileBytes;
    barrier_wait(ring.full_at(stage), place.parity);
    if (!work.fills(work.column_of(step))) fence_shared_for_wgmma();
    multiply_rows<kD>(weights, first_left, first);
    if constexpr (Sizes::kBothScores) multiply_rows<kD>(slopes, second_left, second);
    wgmma_wait<Sizes::kBothScores ? 1 : 0>();  // for the scores, and the sums of the chunk before
    pin(weights);
    if (step > 0) release(previous);

    // p, and its mask where a row of this warp does not see all columns. Columns beyond the sequence are zeros.
    const int32_t column = work.column_of(step);
    const int32_t first_query = kKeys ? column : first_row,
                  last_query = (kKeys ? column + kColumns : first_row + 16) - 1;
    const int32_t first_key = kKeys ? first_row : column, last_key = (kKeys ? first_row + 16 : column + kColumns) - 1;
    const bool all_seen = last_key <= first_query && (p.window == 0 || first_key > last_query - p.window);
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
      const int in_chunk = t * 8 + lane % 4 * 2;
      float log_sums[2];
      if constexpr (kKeys) {
        const float2 both = *reinterpret_cast<const float2*>(&numbers.lse[stage][in_chunk]);
        log_sums[0] = both.x * kLog2e, log_sums[1] = both.y * kLog2e;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weights[t][i] = fast_exp2(fmaf(weights[t][i], c, -(kKeys ? log_sums[i % 2] : row_lse[i / 2])));
    }
    if (!all_seen) {
#pragma unroll
      for (int t = 0; t < kColumnTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int32_t in_rows = first_row + lane / 4 + i / 2 * 8, in_columns = column + t * 8 + lane % 4 * 2 + i % 2;
          if (!sees(kKeys ? in_columns : in_rows, kKeys ? in_rows : in_columns, p.window)) weights[t][i] = 0.0f;
        }
    }
    if constexpr (!Sizes::kBothScores) multiply_rows<kD>(slopes, second_left, second);
    if constexpr (kKeys) {
      pack_left(packed_weights, weights);
      multiply_chunk<kD>(second_sum, packed_weights, second);
    }
    wgmma_wait<kKeys ? 1 : 0>();
    pin(slopes);

    // ds
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
      float products[2];
      if constexpr (kKeys) {
        const float2 both = *reinterpret_cast<const float2*>(&numbers.delta[stage][t * 8 + lane % 4 * 2]);
        products[0] = both.x, products[1] = both.y;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        slopes[t][i] = weights[t][i] * (slopes[t][i] - (kKeys ? products[i % 2] : row_delta[i / 2]));
    }
    if constexpr (!Sizes::kBothScores) wgmma_wait<0>();  // frees the registers of packed_weights
    pack_left(packed_slopes, slopes);
    multiply_chunk<kD>(first_sum, packed_slopes, first);
    previous = stage;
    place.advance();
  }
  wgmma_wait<0>();
  pin(first_sum);
  if constexpr (kKeys) pin(second_sum);
  if (steps > 0) release(previous);
  for (int32_t step = steps; step < work.steps; ++step, place.advance()) {
    barrier_wait(ring.full_at(place.stage), place.parity);
    release(place.stage);
  }

  // 3. Store.
  const HeadRows like = work.first_rows();
  const int32_t heads = kKeys ? p.kv_heads : p.heads;
  const int64_t offset = (int64_t{work.tile.first_token} * heads + work.row_head) * kD;
  if (void* gradient = kKeys ? work.b.dk : work.b.dq; gradient != nullptr)
    store_rows<kD>(gradient, first_sum, p.scale, like, first_row, offset, lane);
  if constexpr (kKeys)
    if (work.b.dv != nullptr) store_rows<kD>(work.b.dv, second_sum, 1.0f, like, first_row, offset, lane);
}

template <int kD, bool kKeys>
__global__ void __launch_bounds__(Config<kD, kKeys>::kThreads, 1)
    attention_gradient_wgmma(const __grid_constant__ AttentionBackwardParams b,
                             const __grid_constant__ ColumnMaps maps) {
  using Sizes = Config<kD, kKeys>;
  constexpr int kStages = Sizes::kStages;
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2][kStages], rows_barrier;
  __shared__ QueryNumbers<kStages> numbers;

  const Ring ring{shared_address(barriers[0]), shared_address(barriers[1])};
  const uint32_t rows_full = shared_address(&rows_barrier);
  if (threadIdx.x == 0) {
    barrier_init(rows_full, kWarpgroup);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(ring.full_at(stage), kWarpgroup + 1);  // all when their copies are done, and one for the boxes
      barrier_init(ring.empty_at(stage), Sizes::kConsumers * kWarpgroup / kWarp);
    }
  }
  __syncthreads();
  allow_next_kernel();
  wait_for_earlier_kernels();

  // Blocks with more columns start first: those of early keys and of late queries.
  const int32_t heads = kKeys ? b.forward.kv_heads : b.forward.heads;
  const auto block = static_cast<int32_t>(blockIdx.x) / heads, blocks = static_cast<int32_t>(gridDim.x) / heads;
  GradientTile tile;
  if (!find_gradient_tile(tile, b.forward, Sizes::kRows, kKeys ? block : blocks - 1 - block)) return;
  const Work<kD, kKeys> work(b, tile, static_cast<int32_t>(blockIdx.x) % heads);
  const uint32_t rows = (shared_address(memory) + 1023) / 1024 * 1024, stages = rows + Sizes::kRowsBytes;
  if (threadIdx.x < kWarpgroup) {
    shrink_registers<Sizes::kProducerRegisters>();
    produce(work, maps, rows, rows_full, stages, ring, numbers);
  } else {
    grow_registers<Sizes::kConsumerRegisters>();
    consume(work, rows, rows_full, stages, ring, numbers);
  }
}

template <int kD, bool kKeys>
cudaError_t launch_tiles(const AttentionBackwardParams& b, cudaStream_t stream) {
  using Sizes = Config<kD, kKeys>;
  const AttentionParams& p = b.forward;
  const int64_t columns = int64_t{kKeys ? p.heads : p.kv_heads} * kD;
  ColumnMaps maps{};
  cudaError_t error = make_panel_map(maps.first, kKeys ? p.q : p.k, p.tokens, columns, kColumns, 1);
  if (error == cudaSuccess) error = make_panel_map(maps.second, kKeys ? b.dy : p.v, p.tokens, columns, kColumns, 1);
  if (error != cudaSuccess) return error;
  // Every sequence may end with a partial tile.
  const int64_t tiles = p.tokens / Sizes::kRows + p.sequences;
  const auto blocks = static_cast<unsigned>(tiles * (kKeys ? p.kv_heads : p.heads));
  return launch_overlapped(attention_gradient_wgmma<kD, kKeys>, dim3(blocks), Sizes::kThreads, Sizes::kSharedBytes,
                           stream, b, maps);
}

template <int kD>
cudaError_t launch(const AttentionBackwardParams& b, cudaStream_t stream) {
  if (b.dk != nullptr || b.dv != nullptr) {
    const cudaError_t error = launch_tiles<kD, true>(b, stream);
    if (error != cudaSuccess) return error;
  }
  return b.dq != nullptr ? launch_tiles<kD, false>(b, stream) : cudaSuccess;
}

}  // namespace

cudaError_t launch_attention_backward_wgmma(const AttentionBackwardParams& b, cudaStream_t stream) {
  if (b.forward.tokens == 0 || b.forward.heads == 0 || b.forward.sequences == 0) return cudaSuccess;
  const cudaError_t error = launch_attention_delta(b, stream);
  if (error != cudaSuccess) return error;
  switch (b.forward.head_dim) {
    case 64: return launch<64>(b, stream);
    case 128: return launch<128>(b, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace eadem::kernels::cuda
