// SPDX-License-Identifier: Apache-2.0
//
// Products of few rows (up to 64 tokens), which are bound by reading the weights. Asynchronous copies stream the
// weights once into a ring of stages in shared memory, and each output is one chain of mma.sync over ascending k. The
// chain has the bits of cuBLASLt without split-K (see mma.cuh), so a row's bits depend neither on the number of rows
// nor on whether this kernel or cuBLASLt computes them.
#include <algorithm>

#include "eadem/kernels/cuda/activation.cuh"
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kFragmentRows = 16;         // rows of weights in a fragment
constexpr int kFragmentTokens = 8;        // the columns of an accumulator
constexpr int kSteps = 4;                 // k16 steps whose fragments are loaded together
constexpr int kGroup = kSteps * 16;       // elements of k in a group of steps
constexpr int kChunk = 256;               // elements of k in a stage: one copy instruction of a warp moves one row
constexpr int kPitch = kChunk + 8;        // pitch of a row in shared memory: eight rows begin in eight different banks
constexpr int kSharedLimit = 227 * 1024;  // shared memory of a block on Hopper
static_assert(kLinearStreamMultiple == kGroup);

// How a block divides its work: a tile has kRowWarps * 16 weight rows and kTokenWarps * kTokenTiles * 8 tokens. Two
// more warps copy, one of them weights and one tokens. A stage holds kChunk elements of k for all rows of a tile.
template <int kRowWarps_, int kTokenWarps_, int kTokenTiles_, int kStages_>
struct Shape {
  static constexpr int kRowWarps = kRowWarps_, kTokenWarps = kTokenWarps_, kTokenTiles = kTokenTiles_;
  static constexpr int kStages = kStages_;
  static constexpr int kWarps = kRowWarps * kTokenWarps;
  static constexpr int kRows = kRowWarps * kFragmentRows;
  static constexpr int kTokens = kTokenWarps * kTokenTiles * kFragmentTokens;
  static constexpr int kStageBytes = (kRows + kTokens) * kPitch * 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kThreads = (kWarps + 2) * kWarp;
  static_assert(kSharedBytes <= kSharedLimit);
};

// The fragments of one group of k.
template <int kTokenTiles>
struct Fragments {
  uint32_t weight[kSteps][4];
  uint32_t token[kTokenTiles][kSteps][2];

  // Loads from the addresses of this lane's rows of weights and tokens.
  __device__ void load(uint32_t weights, uint32_t tokens) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_matrices(weight[step], weights + step * 32);
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        uint32_t r[4];
        load_matrices(r, tokens + tile * kFragmentTokens * kPitch * 2 + step * 32);
        token[tile][step][0] = r[0], token[tile][step][1] = r[1];
        token[tile][step + 1][0] = r[2], token[tile][step + 1][1] = r[3];
      }
  }
  __device__ void multiply(float (&sum)[kTokenTiles][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile)
        mma(sum[tile], weight[step], token[tile][step][0], token[tile][step][1]);
  }
};

// y = x weight^T (+ bias). With kGated, y = f(x weight^T) * (x up^T), where both products are first rounded to the
// dtype of y, so that the bits equal those of the separate ops. Gated tiles have rows of `weight` in the even row warps
// and rows of `up` in the odd ones. The tiles of one part follow those of the part before. A block computes tiles
// blockIdx.x, blockIdx.x + gridDim.x, ..., and its copies continue from one tile into the next without waiting.
template <typename Y, typename S, bool kGated>
__global__ void __launch_bounds__(S::kThreads, 1) linear_stream(LinearStreamParams p) {
  extern __shared__ __align__(128) uint8_t memory[];  // kStages x { weights [kRows, kPitch], tokens [kTokens, kPitch] }
  __shared__ uint64_t barriers[2 * S::kStages];       // full, empty
  __shared__ float up_products[kGated ? S::kRows / 2 * S::kTokens : 1];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  constexpr int kOutputs = kGated ? S::kRows / 2 : S::kRows;  // outputs of a tile
  constexpr int kMostParts = kGated ? 1 : kMostLinearStreamParts;
  int num_tiles = 0;
#pragma unroll
  for (int i = 0; i < kMostParts; ++i) num_tiles += static_cast<int>(ceil_div(p.parts[i].out, kOutputs));
  // Returns the part that a tile belongs to, and makes `tile` count from that part's first one.
  const auto part_of = [&](int& tile) -> const LinearStreamPart& {
    int part = 0;
    if constexpr (!kGated) {
#pragma unroll
      for (int i = 0; i + 1 < kMostParts; ++i) {
        const int tiles = static_cast<int>(ceil_div(p.parts[i].out, kOutputs));
        if (part == i && tile >= tiles) tile -= tiles, ++part;
      }
    }
    return p.parts[part];
  };
  const int in = static_cast<int>(p.in), tokens = static_cast<int>(p.tokens);
  const int num_chunks = static_cast<int>(ceil_div(in, kChunk));

  const uint32_t shared = shared_address(memory), full = shared_address(barriers);
  const uint32_t empty = full + S::kStages * kBarrierBytes;
  if (threadIdx.x < S::kStages) {
    barrier_init(full + threadIdx.x * kBarrierBytes, 2 * kWarp);  // the lanes of both copying warps
    barrier_init(empty + threadIdx.x * kBarrierBytes, S::kWarps);
  }
  __syncthreads();
  allow_next_kernel();

  // Returns the output within its tile to which a weight row of the tile belongs.
  const auto output_of = [](int row) {
    if constexpr (kGated) return row / (2 * kFragmentRows) * kFragmentRows + row % kFragmentRows;
    return row;
  };

  // 1. Two warps copy, one row of a chunk at a time. The weights do not depend on earlier kernels.
  if (warp >= S::kWarps) {
    const bool copies_tokens = warp > S::kWarps;
    const uint64_t policy = copies_tokens ? l2_policy<L2Policy::evict_last>() : l2_policy<L2Policy::evict_first>();
    if (copies_tokens) wait_for_earlier_kernels();
    int stage = 0;
    uint32_t parity = 1;  // parity of the phase before the first: the first round waits for nothing
    for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
      int tile_of_part = tile;
      const LinearStreamPart part = part_of(tile_of_part);
      const int64_t first_output = int64_t{tile_of_part} * kOutputs;
      for (int chunk = 0; chunk < num_chunks; ++chunk) {
        barrier_wait(empty + stage * kBarrierBytes, parity);
        const uint32_t to = shared + static_cast<uint32_t>(stage * S::kStageBytes + lane * 16);
        const int k = chunk * kChunk + lane * 8;
        if (k < in) {
          if (copies_tokens) {
            const auto* x = static_cast<const __nv_bfloat16*>(p.x) + k;
#pragma unroll 4
            for (int token = 0; token < tokens; ++token, x += in)
              copy_16_async(to + static_cast<uint32_t>((S::kRows + token) * kPitch * 2), x, policy);
          } else {
#pragma unroll
            for (int row_warp = 0; row_warp < S::kRowWarps; ++row_warp) {
              const bool up = kGated && row_warp % 2 == 1;
              const int64_t output = first_output + output_of(row_warp * kFragmentRows);
              const auto* weight = static_cast<const __nv_bfloat16*>(up ? p.up : part.weight) + output * in + k;
              const int rows = static_cast<int>(min(part.out - output, int64_t{kFragmentRows}));
#pragma unroll
              for (int row = 0; row < kFragmentRows; ++row, weight += in)
                if (row < rows)
                  copy_16_async(to + static_cast<uint32_t>((row_warp * kFragmentRows + row) * kPitch * 2), weight,
                                policy);
            }
          }
        }
        barrier_arrive_after_copies(full + stage * kBarrierBytes);
        if (++stage == S::kStages) stage = 0, parity ^= 1;
      }
    }
    return;
  }

  // 2. The other warps multiply. A dependent mma can be issued every 24 clocks at best, so any instruction between two
  // of a chain costs time. Therefore a chunk is one piece of straight code that loads fragments one group ahead.
  const int row_warp = warp % S::kRowWarps, token_warp = warp / S::kRowWarps;
  // Lane l addresses row l % 8 of matrix l / 8. For weights, matrices 1 and 3 are 8 rows further down, and 2 and 3 are
  // 8 further in k. For tokens, matrices 1, 2 and 3 are 8, 16 and 24 further in k, which gives the fragments of two
  // steps.
  const uint32_t weight_rows =
      shared + static_cast<uint32_t>(((row_warp * kFragmentRows + lane % 16) * kPitch + lane / 16 * 8) * 2);
  const uint32_t token_rows =
      shared + static_cast<uint32_t>(
                   ((S::kRows + token_warp * S::kTokenTiles * kFragmentTokens + lane % 8) * kPitch + lane / 8 * 8) * 2);
  constexpr int kGroups = kChunk / kGroup;  // groups of a chunk
  const int last_groups = (in - (num_chunks - 1) * kChunk) / kGroup;
  int stage = 0;
  uint32_t parity = 0;
  float sum[S::kTokenTiles][4];
  const auto multiply_chunk = [&](int chunk) {
    barrier_wait(full + stage * kBarrierBytes, parity);
    const uint32_t weights = weight_rows + stage * S::kStageBytes, tokens_of_k = token_rows + stage * S::kStageBytes;
    Fragments<S::kTokenTiles> f[2];
    if (chunk + 1 < num_chunks || last_groups == kGroups) {
      f[0].load(weights, tokens_of_k);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int next = group + 1;
        if (next < kGroups) f[next % 2].load(weights + next * kGroup * 2, tokens_of_k + next * kGroup * 2);
        f[group % 2].multiply(sum);
      }
    } else {
      for (int group = 0; group < last_groups; ++group) {
        f[0].load(weights + group * kGroup * 2, tokens_of_k + group * kGroup * 2);
        f[0].multiply(sum);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + stage * kBarrierBytes);
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  };

  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
    int tile_of_part = tile;
    const LinearStreamPart& part = part_of(tile_of_part);
    const int64_t first_output = int64_t{tile_of_part} * kOutputs;
#pragma unroll
    for (int t = 0; t < S::kTokenTiles; ++t) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.0f;
    for (int chunk = 0; chunk < num_chunks; ++chunk) multiply_chunk(chunk);

    // 3. Apply bias or gate and round once. Lane 4 g + t holds rows g and g + 8, tokens 2 t and 2 t + 1.
    const auto for_each_sum = [&](auto&& f) {
#pragma unroll
      for (int t = 0; t < S::kTokenTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = row_warp * kFragmentRows + lane / 4 + i / 2 * 8;
          f(row, (token_warp * S::kTokenTiles + t) * kFragmentTokens + lane % 4 * 2 + i % 2, sum[t][i]);
        }
    };
    constexpr auto meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(S::kWarps * kWarp) : "memory"); };
    if constexpr (kGated) {
      if (row_warp % 2 == 1)
        for_each_sum(
            [&](int row, int token, float s) { up_products[output_of(row) * S::kTokens + token] = rounded<Y>(s); });
      meet();
    }
    if (!kGated || row_warp % 2 == 0) {
      wait_for_earlier_kernels();  // an earlier kernel may still read the memory of y
      for_each_sum([&](int row, int token, float s) {
        const int64_t n = first_output + output_of(row), i = int64_t{token} * part.out + n;
        if (token >= tokens || n >= part.out) return;
        if constexpr (kGated) {
          s = activate(p.activation, rounded<Y>(s)) * up_products[output_of(row) * S::kTokens + token];
        } else {
          if (part.bias != nullptr) s += load(static_cast<const Y*>(part.bias) + n);
        }
        store(static_cast<Y*>(part.y) + i, s);
      });
    }
    if constexpr (kGated) meet();  // the next tile overwrites up_products
  }
}

template <typename Y, typename S, bool kGated>
cudaError_t launch_shape(const LinearStreamParams& p, cudaStream_t stream) {
  constexpr int64_t kOutputs = kGated ? S::kRows / 2 : S::kRows;
  constexpr int64_t kBlocks = kSharedLimit / (S::kSharedBytes + 2048);  // blocks that fit one multiprocessor
  int64_t tiles = 0;
  for (const LinearStreamPart& part : p.parts) tiles += ceil_div(part.out, kOutputs);
  const int64_t blocks = std::min(tiles, p.multiprocessors * std::max<int64_t>(kBlocks, 1));
  return launch_overlapped(linear_stream<Y, S, kGated>, dim3(static_cast<unsigned>(blocks)), S::kThreads,
                           S::kSharedBytes, stream, p);
}

// Few tokens use tiles of 16 rows, so that narrow weights still reach every multiprocessor. Each of such a tile's warps
// has eight tokens, because one warp alone would wait for its tensor core. Where there are tiles for two blocks on each
// multiprocessor, two of 100 KB share one; else one block has all stages. More tokens are read again for every tile, so
// tiles have 64 rows if the weight has enough rows for all multiprocessors.
template <typename Y, bool kGated>
cudaError_t launch_rows(const LinearStreamParams& p, cudaStream_t stream) {
  constexpr int kR = kGated ? 2 : 1;
  int64_t tiles = 0;  // of 16 rows
  for (const LinearStreamPart& part : p.parts) tiles += ceil_div(part.out, kFragmentRows);
  const bool wide = tiles * kR >= 400, deep = tiles <= p.multiprocessors;
  if (p.tokens <= 8) return launch_shape<Y, Shape<kR, 1, 1, kGated ? 5 : 8>, kGated>(p, stream);
  if (p.tokens <= 16) {
    if (wide) return launch_shape<Y, Shape<4, 1, 2, 5>, kGated>(p, stream);
    if (deep) return launch_shape<Y, Shape<kR, 2, 1, kGated ? 8 : 12>, kGated>(p, stream);
    return launch_shape<Y, Shape<kR, 2, 1, kGated ? 4 : 6>, kGated>(p, stream);
  }
  if (p.tokens <= 32) {
    if (wide) return launch_shape<Y, Shape<4, 2, 2, 4>, kGated>(p, stream);
    if (deep) return launch_shape<Y, Shape<kR, 4, 1, kGated ? 6 : 8>, kGated>(p, stream);
    return launch_shape<Y, Shape<kR, 4, 1, kGated ? 3 : 4>, kGated>(p, stream);
  }
  if (wide) return launch_shape<Y, Shape<4, 2, 4, 3>, kGated>(p, stream);
  return launch_shape<Y, Shape<kR, 8, 1, kGated ? 4 : 5>, kGated>(p, stream);
}

}  // namespace

cudaError_t launch_linear_stream(const LinearStreamParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.parts[0].out == 0) return cudaSuccess;
  if (p.tokens > kLinearStreamMaxTokens || p.in % kLinearStreamMultiple != 0) return cudaErrorInvalidValue;
  return with_f32_or_bf16(p.y_dtype, [&](auto y) {
    using Y = decltype(y);
    return p.up != nullptr ? launch_rows<Y, true>(p, stream) : launch_rows<Y, false>(p, stream);
  });
}

}  // namespace eadem::kernels::cuda
