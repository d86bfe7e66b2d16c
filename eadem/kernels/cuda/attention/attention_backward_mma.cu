// SPDX-License-Identifier: Apache-2.0
//
// The gradients of attention on tensor cores, by mma.sync: bf16, heads of 64 or 128. attention_gradients.cuh says what
// is computed; p and ds are rounded to bf16 before they are multiplied.
//
// A block has 64 rows, 16 for each warp: keys (dk, dv) or queries (dq). It walks through the columns, queries or keys,
// kColumns at a time, copying the next ones while it multiplies.
#include "eadem/kernels/cuda/attention/attention_gradients.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 128, kRows = 64, kColumns = 32;
constexpr int kColumnTiles = kColumns / 8;
constexpr float kLog2e = 1.4426950408889634f;

// Bytes of a row of kD elements in shared memory: 16 more than they take, so that the same 16 bytes of eight rows are
// on different banks.
template <int kD>
constexpr uint32_t kRowBytes = kD * 2 + 16;

// Copies `rows` rows from a matrix whose rows are `stride` elements apart; rows from `present` on become zeros.
template <int kD>
__device__ void copy_rows(uint32_t to, const __nv_bfloat16* from, int64_t stride, int rows, int present) {
  constexpr int kPieces = kD / 8;
  for (int i = static_cast<int>(threadIdx.x); i < rows * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const bool wanted = row < present;
    copy_16_async(to + static_cast<uint32_t>(row) * kRowBytes<kD> + static_cast<uint32_t>(piece) * 16,
                  from + (wanted ? row * stride : 0) + piece * 8, wanted);
  }
}

// What a lane adds to the address of a 16 x 16 piece to load it as the left operand of mma, or, transposed, as two
// right operands whose rows are its rows.
template <int kD>
__device__ uint32_t rows_offset(int lane) {
  return static_cast<uint32_t>(lane % 16) * kRowBytes<kD> + static_cast<uint32_t>(lane / 16) * 16;
}
// The same for two right operands whose columns are its rows.
template <int kD>
__device__ uint32_t columns_offset(int lane) {
  return static_cast<uint32_t>(lane % 8 + lane / 16 * 8) * kRowBytes<kD> + static_cast<uint32_t>(lane / 8 % 2) * 16;
}

// c [16, kColumns] = left [16, kD] times the rows of right [kColumns, kD].
template <int kD>
__device__ void multiply(float (&c)[kColumnTiles][4], uint32_t left, uint32_t right, int lane) {
  left += rows_offset<kD>(lane), right += columns_offset<kD>(lane);
#pragma unroll
  for (int t = 0; t < kColumnTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) c[t][i] = 0.0f;
#pragma unroll
  for (int k = 0; k < kD; k += 16) {
    uint32_t a[4];
    load_matrices(a, left + k * 2);
#pragma unroll
    for (int t = 0; t < kColumnTiles; t += 2) {
      uint32_t b[4];
      load_matrices(b, right + t * 8 * kRowBytes<kD> + k * 2);
      mma(c[t], a, b[0], b[1]);
      mma(c[t + 1], a, b[2], b[3]);
    }
  }
}

// acc [16, kD] += c [16, kColumns], rounded to bf16, times right [kColumns, kD].
template <int kD>
__device__ void multiply_add(float (&acc)[kD / 8][4], const float (&c)[kColumnTiles][4], uint32_t right, int lane) {
  right += rows_offset<kD>(lane);
#pragma unroll
  for (int k = 0; k < kColumns; k += 16) {
    const float(&low)[4] = c[k / 8];
    const float(&high)[4] = c[k / 8 + 1];
    const uint32_t a[4] = {pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1]),
                           pack_bf16(high[2], high[3])};
#pragma unroll
    for (int n = 0; n < kD; n += 16) {
      uint32_t b[4];
      load_matrices_transposed(b, right + k * kRowBytes<kD> + n * 2);
      mma(acc[n / 8], a, b[0], b[1]);
      mma(acc[n / 8 + 1], a, b[2], b[3]);
    }
  }
}

template <int kD>
__device__ void store_rows(void* to, const float (&acc)[kD / 8][4], float scale, int64_t stride, int first_row,
                           int rows, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane / 4 + half * 8;
    if (row >= rows) continue;
    auto* y = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(to) + row * stride + lane % 4 * 2);
#pragma unroll
    for (int t = 0; t < kD / 8; ++t) y[t * 4] = pack_bf16(acc[t][2 * half] * scale, acc[t][2 * half + 1] * scale);
  }
}

// Bytes of one matrix of rows, and of one of columns.
template <int kD>
constexpr uint32_t kRowsBytes = kRows* kRowBytes<kD>;
template <int kD>
constexpr uint32_t kColumnsBytes = kColumns* kRowBytes<kD>;
template <int kD>
constexpr uint32_t kSharedBytes = 2 * kRowsBytes<kD> + 4 * kColumnsBytes<kD>;

template <int kD, bool kKeys>
__global__ void __launch_bounds__(kThreads) attention_gradient_tiles(AttentionBackwardParams b) {
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ float lse[2][kColumns], delta[2][kColumns];  // of columns that are queries
  const AttentionParams& p = b.forward;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, first_row = static_cast<int>(threadIdx.x) / kWarp * 16;
  const int32_t row_heads = kKeys ? p.kv_heads : p.heads, column_heads = kKeys ? p.heads : p.kv_heads;
  const int32_t group = p.heads / p.kv_heads, row_head = static_cast<int32_t>(blockIdx.x % row_heads);
  allow_next_kernel();
  wait_for_earlier_kernels();
  // Blocks with more columns start first: those of early keys and of late queries.
  const auto block = static_cast<int32_t>(blockIdx.x / row_heads), blocks = static_cast<int32_t>(gridDim.x / row_heads);
  GradientTile tile;
  if (!find_gradient_tile(tile, p, kRows, kKeys ? block : blocks - 1 - block)) return;

  // 1. The rows: k and v, or q and dy.
  const uint32_t rows_first = shared_address(memory), rows_second = rows_first + kRowsBytes<kD>;
  const uint32_t columns = rows_second + kRowsBytes<kD>, own_rows = static_cast<uint32_t>(first_row) * kRowBytes<kD>;
  const auto matrix = [&](const void* elements, int32_t heads, int32_t head, int32_t token) {
    return static_cast<const __nv_bfloat16*>(elements) + (int64_t{tile.first_token + token} * heads + head) * kD;
  };
  const int64_t row_stride = int64_t{row_heads} * kD, column_stride = int64_t{column_heads} * kD;
  const int rows = min(kRows, tile.tokens - tile.row);
  copy_rows<kD>(rows_first, matrix(kKeys ? p.k : p.q, row_heads, row_head, tile.row), row_stride, kRows, rows);
  copy_rows<kD>(rows_second, matrix(kKeys ? p.v : b.dy, row_heads, row_head, tile.row), row_stride, kRows, rows);
  float row_lse[2] = {}, row_delta[2] = {};
  if constexpr (!kKeys) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + lane / 4 + half * 8;
      const int64_t query = int64_t{tile.first_token + tile.row + min(row, rows - 1)} * p.heads + row_head;
      row_lse[half] = p.lse[query] * kLog2e, row_delta[half] = b.delta[query];
    }
  }

  // 2. The columns that any row meets; of keys, those of every head of the group in turn.
  const int32_t first_column = kKeys          ? tile.row / kColumns * kColumns
                               : p.window > 0 ? max(tile.row - p.window + 1, 0) / kColumns * kColumns
                                              : 0;
  const int32_t end_column = !kKeys         ? tile.row + rows
                             : p.window > 0 ? min(tile.row + rows - 1 + p.window, tile.tokens)
                                            : tile.tokens;
  const int32_t chunks = (end_column - first_column + kColumns - 1) / kColumns, all = chunks * (kKeys ? group : 1);
  const auto column_of = [&](int32_t step) { return first_column + step % chunks * kColumns; };
  const auto copy_columns = [&](int32_t step) {
    const int buffer = step % 2;
    const int32_t column = column_of(step), present = min(kColumns, tile.tokens - column);
    const int32_t head = kKeys ? row_head * group + step / chunks : row_head / group;
    const uint32_t to = columns + static_cast<uint32_t>(buffer) * 2 * kColumnsBytes<kD>;
    copy_rows<kD>(to, matrix(kKeys ? p.q : p.k, column_heads, head, column), column_stride, kColumns, present);
    copy_rows<kD>(to + kColumnsBytes<kD>, matrix(kKeys ? b.dy : p.v, column_heads, head, column), column_stride,
                  kColumns, present);
    commit_copies();
    if constexpr (kKeys) {
      if (static_cast<int>(threadIdx.x) < kColumns) {
        const int64_t query =
            int64_t{tile.first_token + column + min(static_cast<int>(threadIdx.x), present - 1)} * p.heads + head;
        lse[buffer][threadIdx.x] = p.lse[query] * kLog2e, delta[buffer][threadIdx.x] = b.delta[query];
      }
    }
  };

  float first_sum[kD / 8][4] = {}, second_sum[kKeys ? kD / 8 : 1][4] = {};
  const float c = p.scale * kLog2e;
  copy_columns(0);
  for (int32_t step = 0; step < all; ++step) {
    const int buffer = step % 2;
    if (step + 1 < all) {
      copy_columns(step + 1);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    const uint32_t other_first = columns + static_cast<uint32_t>(buffer) * 2 * kColumnsBytes<kD>;
    const uint32_t other_second = other_first + kColumnsBytes<kD>;

    // 3. p and ds, with rows as the rows of both.
    float weights[kColumnTiles][4], slopes[kColumnTiles][4];
    multiply<kD>(weights, rows_first + own_rows, other_first, lane);
    multiply<kD>(slopes, rows_second + own_rows, other_second, lane);
    const int32_t column = column_of(step);
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int in_chunk = t * 8 + lane % 4 * 2 + i % 2;
        const int32_t row_position = tile.row + first_row + lane / 4 + i / 2 * 8, column_position = column + in_chunk;
        const int32_t query = kKeys ? column_position : row_position, key = kKeys ? row_position : column_position;
        const float log_sum = kKeys ? lse[buffer][in_chunk] : row_lse[i / 2];
        const float dy_y = kKeys ? delta[buffer][in_chunk] : row_delta[i / 2];
        const bool seen = query < tile.tokens && sees(query, key, p.window);
        weights[t][i] = seen ? exp2f(fmaf(weights[t][i], c, -log_sum)) : 0.0f;
        slopes[t][i] = weights[t][i] * (slopes[t][i] - dy_y);
      }

    // 4. The sums.
    multiply_add<kD>(first_sum, slopes, other_first, lane);
    if constexpr (kKeys) multiply_add<kD>(second_sum, weights, other_second, lane);
    __syncthreads();  // the copies of the next step but one overwrite these columns
  }

  const int64_t offset = (int64_t{tile.first_token + tile.row} * row_heads + row_head) * kD;
  const auto row_of = [&](void* gradient) { return static_cast<__nv_bfloat16*>(gradient) + offset; };
  if (void* first = kKeys ? b.dk : b.dq; first != nullptr)
    store_rows<kD>(row_of(first), first_sum, p.scale, row_stride, first_row, rows, lane);
  if constexpr (kKeys)
    if (b.dv != nullptr) store_rows<kD>(row_of(b.dv), second_sum, 1.0f, row_stride, first_row, rows, lane);
}

template <int kD>
cudaError_t launch(const AttentionBackwardParams& b, cudaStream_t stream) {
  // Every sequence may end with a partial tile.
  const int64_t tiles = b.forward.tokens / kRows + b.forward.sequences;
  const auto blocks = [&](int32_t heads) { return dim3(static_cast<unsigned>(tiles * heads)); };
  if (b.dk != nullptr || b.dv != nullptr) {
    const cudaError_t error = launch_overlapped(attention_gradient_tiles<kD, true>, blocks(b.forward.kv_heads),
                                                kThreads, kSharedBytes<kD>, stream, b);
    if (error != cudaSuccess) return error;
  }
  if (b.dq == nullptr) return cudaSuccess;
  return launch_overlapped(attention_gradient_tiles<kD, false>, blocks(b.forward.heads), kThreads, kSharedBytes<kD>,
                           stream, b);
}

}  // namespace

cudaError_t launch_attention_backward_mma(const AttentionBackwardParams& b, cudaStream_t stream) {
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
