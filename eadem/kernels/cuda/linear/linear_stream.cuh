// SPDX-License-Identifier: Apache-2.0
//
// What the products of few rows share (linear_stream.cu for bf16 weights, packed_stream.cu for encoded ones): a ring of
// stages in shared memory, the warp that copies tokens into it, and the warps that multiply. A stage holds kChunk
// elements of k of all rows of a tile.
#pragma once

#include "eadem/kernels/cuda/activation.cuh"
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

inline constexpr int kFragmentRows = 16;         // rows of weights in a fragment
inline constexpr int kFragmentTokens = 8;        // the columns of an accumulator
inline constexpr int kSteps = 4;                 // k16 steps whose fragments are loaded together
inline constexpr int kGroup = kSteps * 16;       // elements of k in a group of steps
inline constexpr int kChunk = 256;               // elements of k in a stage: one copy instruction moves one row
inline constexpr int kPitch = kChunk + 8;        // pitch of a row in shared memory: eight rows begin in eight banks
inline constexpr int kSharedLimit = 227 * 1024;  // shared memory of a block on Hopper
static_assert(kLinearStreamMultiple == kGroup);

// How a block divides its work: a tile has kRowWarps * 16 weight rows and kTokenWarps * kTokenTiles * 8 tokens. One
// more warp copies tokens, kWeightWarps more bring the weights. In a stage, weights come first: rows of kPitch
// elements, or, with kFragments, the fragments of each 16 rows, [16 steps of k16][32 lanes][16 bytes].
template <int kRowWarps_, int kTokenWarps_, int kTokenTiles_, int kStages_, int kWeightWarps_, bool kFragments_>
struct StreamShape {
  static constexpr int kRowWarps = kRowWarps_, kTokenWarps = kTokenWarps_, kTokenTiles = kTokenTiles_;
  static constexpr int kStages = kStages_;
  static constexpr bool kFragments = kFragments_;
  static constexpr int kWarps = kRowWarps * kTokenWarps;
  static constexpr int kRows = kRowWarps * kFragmentRows;
  static constexpr int kTokens = kTokenWarps * kTokenTiles * kFragmentTokens;
  static constexpr int kWeightBytes = kRows * (kFragments ? kChunk : kPitch) * 2;
  static constexpr int kStageBytes = kWeightBytes + kTokens * kPitch * 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kWeightWarps = kWeightWarps_;
  static constexpr int kThreads = (kWarps + 1 + kWeightWarps) * kWarp;
  static_assert(kSharedBytes <= kSharedLimit);
};

// A place in a ring of stages, and the parity of the phase that its barriers are in.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// The tiles of a launch: those of one part follow those of the part before. Gated tiles have rows of `weight` in the
// even row warps and rows of `up` in the odd ones.
template <typename S, bool kGated>
struct StreamTiles {
  static constexpr int kOutputs = kGated ? S::kRows / 2 : S::kRows;  // outputs of a tile
  static constexpr int kMostParts = kGated ? 1 : kMostLinearStreamParts;

  __device__ static int count(const LinearStreamParams& p) {
    int tiles = 0;
#pragma unroll
    for (int i = 0; i < kMostParts; ++i) tiles += static_cast<int>(ceil_div(p.parts[i].out, kOutputs));
    return tiles;
  }
  // Returns the part that a tile belongs to, and makes `tile` count from that part's first one.
  __device__ static int part_of(const LinearStreamParams& p, int& tile) {
    int part = 0;
    if constexpr (!kGated) {
#pragma unroll
      for (int i = 0; i + 1 < kMostParts; ++i) {
        const int tiles = static_cast<int>(ceil_div(p.parts[i].out, kOutputs));
        if (part == i && tile >= tiles) tile -= tiles, ++part;
      }
    }
    return part;
  }
  // Returns the output within its tile to which a weight row of the tile belongs.
  __device__ static int output_of(int row) {
    if constexpr (kGated) return row / (2 * kFragmentRows) * kFragmentRows + row % kFragmentRows;
    return row;
  }
};

// The addresses of a ring in shared memory: its stages, and the barriers of full and of empty ones.
struct StreamRing {
  uint32_t stages, full, empty;
};

// By one warp: copies the tokens of every chunk of every tile of this block, one row at a time.
template <typename S>
__device__ inline void copy_tokens(const LinearStreamParams& p, const StreamRing& ring, int num_tiles, int lane) {
  const int in = static_cast<int>(p.in), tokens = static_cast<int>(p.tokens);
  const int num_chunks = static_cast<int>(ceil_div(in, kChunk));
  const uint64_t policy = l2_policy<L2Policy::evict_last>();
  wait_for_earlier_kernels();
  RingPlace<S::kStages> place{0, 1};  // parity of the phase before the first: the first round waits for nothing
  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x))
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      barrier_wait(ring.empty + place.stage * kBarrierBytes, place.parity);
      const int k = chunk * kChunk + lane * 8;
      if (k < in) {
        const uint32_t to =
            ring.stages + static_cast<uint32_t>(place.stage * S::kStageBytes + S::kWeightBytes + lane * 16);
        const auto* x = static_cast<const __nv_bfloat16*>(p.x) + k;
#pragma unroll 4
        for (int token = 0; token < tokens; ++token, x += in)
          copy_16_async(to + static_cast<uint32_t>(token * kPitch * 2), x, policy);
      }
      barrier_arrive_after_copies(ring.full + place.stage * kBarrierBytes);
      place.advance();
    }
}

// The fragments of one group of k.
template <int kTokenTiles, bool kFragments>
struct Fragments {
  // The bytes from a group's weights to those of the next.
  static constexpr int kGroupBytes = kFragments ? kSteps * kWarp * 16 : kGroup * 2;

  uint32_t weight[kSteps][4];
  uint32_t token[kTokenTiles][kSteps][2];

  // Loads from the addresses of this lane's rows of weights and tokens.
  __device__ void load(uint32_t weights, uint32_t tokens) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kFragments)
        load_16(weight[step], weights + step * kWarp * 16);
      else
        load_matrices(weight[step], weights + step * 32);
    }
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

// By S::kWarps warps: y = x weight^T (+ bias) for every tile of this block. With kGated, y = f(x weight^T) * (x up^T),
// where both products are first rounded to the dtype of y, so that the bits equal those of the separate ops.
// `up_products` [outputs of a tile, S::kTokens] is shared memory for that.
//
// A dependent mma can be issued every 24 clocks at best, so any instruction between two of a chain costs time.
// Therefore a chunk is one piece of straight code that loads fragments one group ahead.
template <typename Y, typename S, bool kGated>
__device__ inline void multiply_tiles(const LinearStreamParams& p, const StreamRing& ring, int num_tiles, int warp,
                                      int lane, float* up_products) {
  using Tiles = StreamTiles<S, kGated>;
  using Group = Fragments<S::kTokenTiles, S::kFragments>;
  const int in = static_cast<int>(p.in), tokens = static_cast<int>(p.tokens);
  const int num_chunks = static_cast<int>(ceil_div(in, kChunk));
  const int row_warp = warp % S::kRowWarps, token_warp = warp / S::kRowWarps;
  // Lane l addresses row l % 8 of matrix l / 8. For weights, matrices 1 and 3 are 8 rows further down, and 2 and 3 are
  // 8 further in k. For tokens, matrices 1, 2 and 3 are 8, 16 and 24 further in k, which gives the fragments of two
  // steps.
  const uint32_t weight_rows =
      ring.stages + static_cast<uint32_t>(S::kFragments
                                              ? row_warp * kFragmentRows * kChunk * 2 + lane * 16
                                              : ((row_warp * kFragmentRows + lane % 16) * kPitch + lane / 16 * 8) * 2);
  const uint32_t token_rows =
      ring.stages +
      static_cast<uint32_t>(S::kWeightBytes +
                            ((token_warp * S::kTokenTiles * kFragmentTokens + lane % 8) * kPitch + lane / 8 * 8) * 2);
  constexpr int kGroups = kChunk / kGroup;  // groups of a chunk
  const int last_groups = (in - (num_chunks - 1) * kChunk) / kGroup;
  RingPlace<S::kStages> place;
  float sum[S::kTokenTiles][4];
  const auto multiply_chunk = [&](int chunk) {
    barrier_wait(ring.full + place.stage * kBarrierBytes, place.parity);
    const uint32_t weights = weight_rows + place.stage * S::kStageBytes;
    const uint32_t tokens_of_k = token_rows + place.stage * S::kStageBytes;
    Group f[2];
    if (chunk + 1 < num_chunks || last_groups == kGroups) {
      f[0].load(weights, tokens_of_k);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int next = group + 1;
        if (next < kGroups) f[next % 2].load(weights + next * Group::kGroupBytes, tokens_of_k + next * kGroup * 2);
        f[group % 2].multiply(sum);
      }
    } else {
      for (int group = 0; group < last_groups; ++group) {
        f[0].load(weights + group * Group::kGroupBytes, tokens_of_k + group * kGroup * 2);
        f[0].multiply(sum);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty + place.stage * kBarrierBytes);
    place.advance();
  };

  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
    int tile_of_part = tile;
    const LinearStreamPart& part = p.parts[Tiles::part_of(p, tile_of_part)];
    const int64_t first_output = int64_t{tile_of_part} * Tiles::kOutputs;
#pragma unroll
    for (int t = 0; t < S::kTokenTiles; ++t) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.0f;
    for (int chunk = 0; chunk < num_chunks; ++chunk) multiply_chunk(chunk);

    // Apply bias or gate and round once. Lane 4 g + t holds rows g and g + 8, tokens 2 t and 2 t + 1.
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
        for_each_sum([&](int row, int token, float s) {
          up_products[Tiles::output_of(row) * S::kTokens + token] = rounded<Y>(s);
        });
      meet();
    }
    if (!kGated || row_warp % 2 == 0) {
      wait_for_earlier_kernels();  // an earlier kernel may still read the memory of y
      for_each_sum([&](int row, int token, float s) {
        const int64_t n = first_output + Tiles::output_of(row), i = int64_t{token} * part.out + n;
        if (token >= tokens || n >= part.out) return;
        if constexpr (kGated) {
          s = activate(p.activation, rounded<Y>(s)) * up_products[Tiles::output_of(row) * S::kTokens + token];
        } else {
          if (part.bias != nullptr) s += load(static_cast<const Y*>(part.bias) + n);
        }
        store(static_cast<Y*>(part.y) + i, s);
      });
    }
    if constexpr (kGated) meet();  // the next tile overwrites up_products
  }
}

// By the threads of a block: prepares the barriers of a ring; `fillers` arrive on a full stage's.
template <typename S>
__device__ inline StreamRing make_ring(const void* memory, const uint64_t* barriers, int fillers) {
  const uint32_t full = shared_address(barriers);
  const StreamRing ring{shared_address(memory), full, full + S::kStages * kBarrierBytes};
  if (threadIdx.x < S::kStages) {
    barrier_init(ring.full + threadIdx.x * kBarrierBytes, fillers);
    barrier_init(ring.empty + threadIdx.x * kBarrierBytes, S::kWarps);
  }
  return ring;
}

}  // namespace eadem::kernels::cuda
