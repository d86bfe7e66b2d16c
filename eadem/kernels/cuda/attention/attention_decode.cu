// SPDX-License-Identifier: Apache-2.0
//
// Attention on tensor cores for decode steps: one token of every sequence. A block computes the state of one split for
// one key head, so that few sequences reach many multiprocessors, and the block that stores the last state of a
// sequence's rows merges them in order. attention_tiles.cuh says what is computed; attention_decode_many.cu does the
// same for many sequences.
#include <algorithm>

#include "eadem/kernels/cuda/attention/attention_splits.cuh"
#include "eadem/kernels/cuda/attention/kv_codes.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kSplitChunks = kSplit / kChunk;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kPadding = 8;        // elements after each row of probabilities, against bank conflicts
constexpr int kPaddingBytes = 16;  // likewise, of keys or values
static_assert(kSplitChunks == kWarps, "a warp of the decode kernel has one chunk");

// The bytes of a row of keys or values, and from one row to the next in shared memory.
template <int kD, typename Code>
constexpr int kRowBytes = kD* Code::kBytes;
template <int kD, typename Code>
constexpr int kPitchBytes = kRowBytes<kD, Code> + kPaddingBytes;

// Copies the `kRows` rows of keys or values that `rows` (in shared memory) lists. kNoRow gives zeros, because a cache
// may hold anything there (even NaN), and its product with 0 must be 0. Row `but` is left out.
template <int kBytes, int kRows, int kCopiers>
__device__ void copy_rows_async(const void* from, const int32_t* rows, uint32_t to, int copier, int but = kNoRow) {
  constexpr int kPieces = kBytes / 16, kAtOnce = kCopiers / kPieces;
  const auto* bytes = static_cast<const uint8_t*>(from) + copier % kPieces * 16;
  to += static_cast<uint32_t>(copier / kPieces * (kBytes + kPaddingBytes) + copier % kPieces * 16);
#pragma unroll 8
  for (int row = 0; row < kRows; row += kAtOnce, to += kAtOnce * (kBytes + kPaddingBytes)) {
    const int32_t source = rows[row + copier / kPieces];
    if (row + copier / kPieces != but) copy_16_async(to, bytes + int64_t{max(source, 0)} * kBytes, source != kNoRow);
  }
}

// Copies row `row` alone, by those of the copiers of which each has a piece; nothing if it is no row of 0 to kRows - 1.
template <int kBytes, int kRows>
__device__ void copy_row_async(const void* from, const int32_t* rows, uint32_t to, int copier, int row) {
  if (row < 0 || row >= kRows || copier >= kBytes / 16) return;
  const auto* bytes = static_cast<const uint8_t*>(from) + int64_t{rows[row]} * kBytes;
  copy_16_async(to + static_cast<uint32_t>(row * (kBytes + kPaddingBytes) + copier * 16), bytes + copier * 16, true);
}

// Computes s[tile] = q . k for the 64 keys at `keys`, 8 keys a tile.
template <int kD, typename Code>
__device__ void multiply_keys(float (&s)[kKeyTiles][4], const uint32_t (&q)[kD / 16][4], uint32_t keys, int lane) {
  constexpr int kPitch = kPitchBytes<kD, Code>, kSteps = 4 / Code::kBytes;  // of four matrices of 16 bytes a row
#pragma unroll
  for (int tile = 0; tile < kKeyTiles; ++tile) s[tile][0] = s[tile][1] = s[tile][2] = s[tile][3] = 0.0f;
  // Lane l addresses row l % 8 of the matrix of piece l / 8. Eight independent chains run side by side.
  const uint32_t address = keys + static_cast<uint32_t>(lane % 8 * kPitch + lane / 8 * 16);
#pragma unroll
  for (int step = 0; step < kD / 16; step += kSteps) {
    uint32_t k[kKeyTiles][4];
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile)
      load_matrices(k[tile], address + tile * 8 * kPitch + step * 16 * Code::kBytes);
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) multiply_step<Code>(s[tile], q[step + i], k[tile], i);
  }
}

// Adds the values of 32 keys at `values` to `acc`, which has kTiles tiles of 8 elements from `first_tile` on.
template <int kD, typename Code, int kTiles>
__device__ void multiply_values(float (&acc)[kTiles][4], const uint32_t (&weights)[2][4], uint32_t values,
                                int first_tile, int lane) {
  constexpr int kPitch = kPitchBytes<kD, Code>;
  if constexpr (Code::kEncoded) {
    // Lane l addresses row l of a piece of 16 codes.
    const uint32_t address = values + static_cast<uint32_t>(lane * kPitch + first_tile * 8);
#pragma unroll
    for (int t = 0; t < kTiles; t += 2) {
      uint32_t v[4];
      load_matrices_transposed(v, address + t * 8);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        mma(acc[t], weights[step], even_levels<Code>(v[2 * step]), even_levels<Code>(v[2 * step + 1]));
        mma(acc[t + 1], weights[step], odd_levels<Code>(v[2 * step]), odd_levels<Code>(v[2 * step + 1]));
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint32_t address =
          values + static_cast<uint32_t>((step * 16 + lane % 16) * kPitch + first_tile * 16 + lane / 16 * 16);
#pragma unroll
      for (int t = 0; t < kTiles; t += 2) {
        uint32_t v[4];
        load_matrices_transposed(v, address + t * 16);
        mma(acc[t], weights[step], v[0], v[1]);
        mma(acc[t + 1], weights[step], v[2], v[3]);
      }
    }
  }
}

// Shared memory: keys [kSplit][kPitchBytes], values of equal shape, probabilities [16][kSplit + kPadding], and with
// codes the scales of keys and values, f32 [2][kSplit].
template <int kD, typename Code>
constexpr int kRowsBytes = kSplit* kPitchBytes<kD, Code>;
constexpr int kWeightsBytes = kFragmentRows * (kSplit + kPadding) * 2;
template <int kD, typename Code>
constexpr int kDecodeBytes = 2 * kRowsBytes<kD, Code> + kWeightsBytes + (Code::kEncoded ? 2 * kSplit * 4 : 0);

template <int kD, bool kCapped, typename Code>
__global__ void __launch_bounds__(kThreads, Code::kEncoded ? 2 : 1) attention_decode(AttentionParams p) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ int32_t slot_start[kMaxSequences + 1];
  __shared__ int32_t rows[kSplit];  // rows of keys and values
  __shared__ float chunk_max[kSplitChunks][kFragmentRows];
  __shared__ float chunk_sum[kSplitChunks][kFragmentRows][4];
  __shared__ bool is_last;
  constexpr int kBytes = kRowBytes<kD, Code>, kPitch = kPitchBytes<kD, Code>, kWeightPitch = kSplit + kPadding;
  constexpr int kValueTiles = kD / 8 / kWarps;  // tiles of a warp
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = p.heads / p.kv_heads;
  const uint32_t keys = shared_address(memory), values = keys + kRowsBytes<kD, Code>,
                 weights = values + kRowsBytes<kD, Code>, scales = weights + kWeightsBytes;
  auto* weight_rows = reinterpret_cast<uint32_t*>(memory + (weights - keys));  // pairs of bf16
  const ScoreScale<kCapped> scale(p);
  const float c = scale.c;

  allow_next_kernel();
  count_slots(slot_start, p);
  const SplitItems items(slot_start, p);

  // Every warp finds the rows of its chunk and copies their keys; all warps together copy the values.
  const uint32_t warp_keys = keys + static_cast<uint32_t>(warp * kChunk * kPitch);
  // The scales of the warp's chunk: of keys, and kSplit behind them of values.
  const uint32_t key_scales = scales + static_cast<uint32_t>(warp * kChunk) * 4, value_scales = key_scales + kSplit * 4;
  const auto copy_scales = [&](int row) {
    const int32_t source = rows[warp * kChunk + row];
    const auto to = static_cast<uint32_t>(row) * 4;
    copy_4_async(key_scales + to, p.k_scales + max(source, 0), source != kNoRow);
    copy_4_async(value_scales + to, p.v_scales + max(source, 0), source != kNoRow);
  };
  const auto copy_keys = [&](const SplitItem& i, int but = kNoRow) {
#pragma unroll
    for (int row = lane; row < kChunk; row += kWarp) {
      const int32_t key = i.split + warp * kChunk + row;
      rows[warp * kChunk + row] = key >= i.begin && key <= i.position ? key_row(p, i.sequence, i.kv_head, key) : kNoRow;
      if (Code::kEncoded && row != but - warp * kChunk) copy_scales(row);
    }
    __syncwarp();
    copy_rows_async<kBytes, kChunk, kWarp>(p.k, rows + warp * kChunk, warp_keys, lane, but - warp * kChunk);
    commit_copies();
  };
  const auto copy_values = [&](int but = kNoRow) {
    copy_rows_async<kBytes, kSplit, kThreads>(p.v, rows, values, threadIdx.x, but);
    commit_copies();
  };

  // Earlier kernels of this step make the queries, and the keys and values of its tokens. Those of all tokens before
  // are copied while these kernels run (see overlap.cuh).
  SplitItem now{}, next{};
  if (static_cast<int>(blockIdx.x) < items.count) {
    next = items.at(p, static_cast<int>(blockIdx.x));
    const int new_row = next.position - next.split;
    copy_keys(next, new_row);
    __syncthreads();
    copy_values(new_row);
    wait_for_earlier_kernels();
    copy_row_async<kBytes, kChunk>(p.k, rows + warp * kChunk, warp_keys, lane, new_row - warp * kChunk);
    if (Code::kEncoded && lane == 0 && new_row / kChunk == warp) copy_scales(new_row % kChunk);
    commit_copies();
    copy_row_async<kBytes, kSplit>(p.v, rows, values, threadIdx.x, new_row);
    commit_copies();
  }
  for (int item = static_cast<int>(blockIdx.x); item < items.count; item += static_cast<int>(gridDim.x)) {
    now = next;
    const bool has_next = item + static_cast<int>(gridDim.x) < items.count;
    const Sequence& sequence = now.sequence;
    const int slot = now.slot, kv_head = now.kv_head, first_row = now.first_row;
    const int32_t position = now.position, begin = now.begin, chunk = now.split + warp * kChunk;

    // 1. Load the queries.
    uint32_t q[kD / 16][4];
    load_queries<kD, Code::kEncoded>(q, p, kv_head, sequence.first_token, 1, first_row, lane);

    // 2. Compute the scores of the warp's chunk, and the maximum up to and including it.
    wait_for_copies<1>();  // all but the values
    __syncwarp();
    float scores[kKeyTiles][4];
    multiply_keys<kD, Code>(scores, q, warp_keys, lane);
    [[maybe_unused]] ChunkScales scales_of_keys, scales_of_values;
    if constexpr (Code::kEncoded) {  // before the scales of the next item take their place
      scales_of_keys.load(key_scales, lane);
      scales_of_keys.multiply(scores);
      scales_of_values.load(value_scales, lane);
    }
    if (has_next) {  // the keys are not needed any more: their memory takes those of the next item
      __syncwarp();
      next = items.at(p, item + static_cast<int>(gridDim.x));
      copy_keys(next);
    } else {
      commit_copies();  // an empty group keeps the counts of wait_for_copies right
    }
    scale.cap(scores);
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
        float low = probability(scores[t][2 * half], c, m), high = probability(scores[t][2 * half + 1], c, m);
        sum += low;
        sum += high;
        if constexpr (Code::kEncoded)
          low = __fmul_rn(low, scales_of_values.of[t].x), high = __fmul_rn(high, scales_of_values.of[t].y);
        weight_rows[(row * kWeightPitch + warp * kChunk + t * 8) / 2 + lane % 4] = pack_bf16(low, high);
      }
      chunk_sum[warp][row][lane % 4] = sum;
    }
    wait_for_copies<1>();  // all but the keys of the next item
    __syncthreads();

    // 4. Add the values: each warp computes a quarter of head_dim, over the chunks in order.
    float acc[kValueTiles][4] = {}, l[2] = {}, m[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kSplitChunks; ++i) {
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
      for (int key = i * kChunk; key < (i + 1) * kChunk; key += 32) {
        uint32_t a[2][4];
#pragma unroll
        for (int step = 0; step < 2; ++step)
          load_matrices(a[step], weights + static_cast<uint32_t>(
                                               (lane % 16 * kWeightPitch + key + step * 16 + lane / 16 * 8) * 2));
        multiply_values<kD, Code>(acc, a, values + static_cast<uint32_t>(key * kPitch), warp * kValueTiles, lane);
      }
    }

    // 5. Store the state, or the result where there is one split.
    const int splits = items.splits(now);
    auto* y = static_cast<__nv_bfloat16*>(p.y) + (int64_t{sequence.first_token} * p.heads + kv_head * group) * kD;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + lane / 4 + half * 8;
      float sum = quad_sum(l[half]);
      if (row >= group) continue;
      if (splits == 1) {
        const float factor = final_factor(m[half], sum, p.sinks, kv_head * group + row);
#pragma unroll
        for (int t = 0; t < kValueTiles; ++t) {
          const float2 pair = pair_of<Code::kEncoded>(acc, t, half);
          *reinterpret_cast<uint32_t*>(y + row * kD + warp * kValueTiles * 8 + element_of<Code::kEncoded>(t, lane)) =
              pack_bf16(pair.x * factor, pair.y * factor);
        }
        continue;
      }
      float* state = p.states + (int64_t{slot} * p.heads + kv_head * group + row) * (kD + 2);
      if (warp == 0 && lane % 4 == 0) state[0] = m[half], state[1] = sum;
#pragma unroll
      for (int t = 0; t < kValueTiles; ++t) {
        const int d = warp * kValueTiles * 8 + element_of<Code::kEncoded>(t, lane);
        const float2 pair = pair_of<Code::kEncoded>(acc, t, half);
        state[2 + d] = pair.x, state[3 + d] = pair.y;
      }
    }
    __syncthreads();  // the next item overwrites shared memory
    if (has_next) copy_values();
    // 6. The block that stores the last state of these rows merges all of them, in order.
    if (splits > 1) {
      if (threadIdx.x == 0) {
        __threadfence();  // what the block stored before it met is there for whoever sees the count
        is_last =
            atomicInc(items.arrivals(p, now), static_cast<unsigned>(splits - 1)) == static_cast<unsigned>(splits - 1);
      }
      __syncthreads();
      if (is_last) {
        __threadfence();
        const int rows_here = min(group - first_row, kFragmentRows);
        const float* states =
            p.states + (int64_t{slot_start[now.index]} * p.heads + kv_head * group + first_row) * (kD + 2);
        for (int i = static_cast<int>(threadIdx.x); i < rows_here * (kD / 2); i += kThreads) {
          const int row = i / (kD / 2), d = i % (kD / 2) * 2;
          const float* state = states + row * (kD + 2);
          MergedState<1> merged;
#pragma unroll 4
          for (int split = 0; split < splits; ++split, state += int64_t{p.heads} * (kD + 2))
            merged.add(load_state_pair(state), {load_state_pair(state + 2 + d)});
          const float factor = final_factor(merged.m, merged.l, p.sinks, kv_head * group + first_row + row);
          *reinterpret_cast<uint32_t*>(y + (first_row + row) * kD + d) = merged.result(0, factor);
        }
      }
    }
  }
}

template <int kD>
cudaError_t launch(const AttentionParams& p, int64_t items, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, 4 * p.multiprocessors));
  return with_kv_code(p.code, [&](auto code) {
    using Code = decltype(code);
    return launch_overlapped(p.softcap > 0.0f ? attention_decode<kD, true, Code> : attention_decode<kD, false, Code>,
                             dim3(blocks), kThreads, static_cast<size_t>(kDecodeBytes<kD, Code>), stream, p);
  });
}

}  // namespace

cudaError_t launch_attention_decode(const AttentionParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.heads == 0) return cudaSuccess;
  if (p.tokens != p.sequences || p.states == nullptr || p.arrivals == nullptr || p.sequences > kMaxSequences ||
      (p.head_dim != 64 && p.head_dim != 128 && p.head_dim != 256))
    return cudaErrorInvalidValue;
  const int64_t per_slot = p.kv_heads * ceil_div(p.heads / p.kv_heads, kFragmentRows);
  // Copies of the other kernel begin at multiples of 128 bytes in shared memory, and so at even rows of 64.
  const bool odd_rows = p.code != KvCode::none && p.head_dim == 64 && p.block_size % 2 != 0;
  // Keys and values of a split that are 256 wide exceed shared memory here.
  if (p.head_dim == 256 || (p.sequences * per_slot > p.multiprocessors && !odd_rows))
    return launch_attention_decode_many(p, stream);
  return (p.head_dim == 64 ? launch<64> : launch<128>)(p, p.max_splits * per_slot, stream);
}

}  // namespace eadem::kernels::cuda
