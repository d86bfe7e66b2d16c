// SPDX-License-Identifier: Apache-2.0
//
// What the products of few rows share (linear_stream.cu for bf16 weights, packed_stream.cu for encoded ones,
// fp8_stream.cu for 8-bit floats): a ring of stages in shared memory, the threads that copy tokens and plain weights
// into it, and the warps that multiply by mma.sync. A stage holds kChunk
// elements of k of all rows of a tile.
#pragma once

#include "eadem/kernels/cuda/activation.cuh"
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/instructions/ring.cuh"
#include "eadem/kernels/cuda/instructions/tensor_map.cuh"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/pace.cuh"

namespace eadem::kernels::cuda {

inline constexpr int kFragmentRows = 16;                // rows of weights in a fragment
inline constexpr int kFragmentTokens = 8;               // the columns of an accumulator
inline constexpr int kSteps = 4;                        // k16 steps whose fragments are loaded together: a panel's
inline constexpr int kGroups = 4;                       // panels of a stage
inline constexpr int kChunk = kGroups * kPanelColumns;  // elements of k in a stage
inline constexpr int kSharedLimit = 227 * 1024;         // shared memory of a block on Hopper
static_assert(kLinearStreamMultiple == kPanelColumns && kSteps * 16 == kPanelColumns);

// How a block divides its work: a tile has kRowWarps * 16 weight rows and kTokenWarps * kTokenTiles * 8 tokens. One
// more warp copies tokens, kWeightWarps more bring the weights. A stage has the weights first: panels of kRows rows,
// or, with kFragments, the fragments of each 16 rows, [16 steps of k16][32 lanes][16 bytes]; then panels of kTokens
// rows.
template <int kRowWarps_, int kTokenWarps_, int kTokenTiles_, int kStages_, int kWeightWarps_, bool kFragments_>
struct StreamShape {
  static constexpr int kRowWarps = kRowWarps_, kTokenWarps = kTokenWarps_, kTokenTiles = kTokenTiles_;
  static constexpr int kStages = kStages_;
  static constexpr bool kFragments = kFragments_;
  static constexpr int kBlocks = 1;  // on a multiprocessor
  static constexpr int kWarps = kRowWarps * kTokenWarps;
  static constexpr int kRows = kRowWarps * kFragmentRows;
  static constexpr int kGatedBoxRows = kRows / 2;  // one box of each weight
  static constexpr int kTokens = kTokenWarps * kTokenTiles * kFragmentTokens;
  static constexpr int kWeightBytes = kRows * kChunk * 2;
  static constexpr int kStageBytes = kWeightBytes + kTokens * kChunk * 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kWeightWarps = kWeightWarps_;
  static constexpr int kThreads = (kWarps + 1 + kWeightWarps) * kWarp;
  static_assert(kSharedBytes <= kSharedLimit);
};

// The tiles of a launch: those of one part follow those of the part before. Gated tiles have rows of `weight` in the
// even row warps and rows of `up` in the odd ones.
template <typename S, bool kGated>
struct StreamTiles {
  static constexpr int kOutputs = kGated ? S::kRows / 2 : S::kRows;  // outputs of a tile
  static constexpr int kMostParts = kGated ? 1 : kMostLinearStreamParts;

  __host__ __device__ static int count(const LinearStreamParams& p) {
    int tiles = 0;
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
  // The rows of a box of weights: with kGated a stage has boxes of `weight` and of `up` in turns.
  static constexpr int kBoxRows = kGated ? S::kGatedBoxRows : kOutputs;
  // Returns where a row warp's rows begin in a stage of panels, in the first panel that has them.
  __device__ static uint32_t panel_of(int row_warp) {
    constexpr uint32_t kBoxBytes = kGroups * kBoxRows * kPanelRowBytes, kWarpBytes = kFragmentRows * kPanelRowBytes;
    if constexpr (kGated)
      return static_cast<uint32_t>(row_warp % 2) * kBoxBytes + static_cast<uint32_t>(row_warp / 2) * kWarpBytes;
    return static_cast<uint32_t>(row_warp) * kWarpBytes;
  }
};

// The rows of the weight that the multiprocessor with most tiles reads.
template <typename S>
int64_t most_rows(const LinearStreamParams& p) {
  return ceil_div(StreamTiles<S, false>::count(p), p.multiprocessors) * S::kRows;
}

// The addresses of a ring in shared memory: its stages, and the barriers of full and of empty ones.
struct StreamRing {
  uint32_t stages, full, empty;
};

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

// By one thread: copies the tokens of every chunk of every tile of this block.
template <typename S>
__device__ inline void copy_tokens(const LinearStreamParams& p, const CUtensorMap& map, const StreamRing& ring,
                                   int num_tiles) {
  const int num_chunks = static_cast<int>(ceil_div(p.in, kChunk));
  const uint64_t policy = l2_policy<L2Policy::evict_last>();
  wait_for_earlier_kernels();
  RingPlace<S::kStages> place{0, 1};  // parity of the phase before the first: the first round waits for nothing
  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x))
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      barrier_wait(ring.empty + place.stage * kBarrierBytes, place.parity);
      const uint32_t full = ring.full + place.stage * kBarrierBytes;
      barrier_arrive_expecting(full, S::kStageBytes - S::kWeightBytes);
      copy_box_async(ring.stages + static_cast<uint32_t>(place.stage * S::kStageBytes + S::kWeightBytes), map, 0,
                     chunk * kGroups, full, policy);
      place.advance();
    }
}

// The matrices of a launch whose stages are panels.
struct StreamMaps {
  CUtensorMap weights[kMostLinearStreamParts];
  CUtensorMap up, tokens;
};

// By one thread: copies the weights of every chunk of every tile of this block. They do not depend on earlier kernels.
template <typename S, bool kGated>
__device__ inline void copy_weights(const LinearStreamParams& p, const StreamMaps& maps, const StreamRing& ring,
                                    int num_tiles) {
  using Tiles = StreamTiles<S, kGated>;
  const int num_chunks = static_cast<int>(ceil_div(p.in, kChunk));
  const uint64_t policy = l2_policy<L2Policy::evict_first>();
  RingPlace<S::kStages> place{0, 1};  // parity of the phase before the first: the first round waits for nothing
  Pace pace(S::kStages, S::kWeightBytes, static_cast<int>(gridDim.x));
  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
    int tile_of_part = tile;
    const CUtensorMap& map = maps.weights[Tiles::part_of(p, tile_of_part)];
    const int row = tile_of_part * Tiles::kOutputs;
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      pace.wait();
      barrier_wait(ring.empty + place.stage * kBarrierBytes, place.parity);
      const uint32_t full = ring.full + place.stage * kBarrierBytes;
      const uint32_t to = ring.stages + static_cast<uint32_t>(place.stage * S::kStageBytes);
      barrier_arrive_expecting(full, S::kWeightBytes);
      constexpr uint32_t kBoxBytes = Tiles::kBoxRows * kChunk * 2;
#pragma unroll
      for (int box = 0; box < Tiles::kOutputs / Tiles::kBoxRows; ++box) {
        const uint32_t at = to + static_cast<uint32_t>(box) * (kGated ? 2 : 1) * kBoxBytes;
        copy_box_async(at, map, row + box * Tiles::kBoxRows, chunk * kGroups, full, policy);
        if constexpr (kGated)
          copy_box_async(at + kBoxBytes, maps.up, row + box * Tiles::kBoxRows, chunk * kGroups, full, policy);
      }
      place.advance();
    }
  }
}

template <typename S, bool kGated>
cudaError_t make_stream_maps(StreamMaps& maps, const LinearStreamParams& p) {
  using Tiles = StreamTiles<S, kGated>;
  cudaError_t error = make_panel_map(maps.tokens, p.x, p.tokens, p.in, S::kTokens, kGroups);
  for (int i = 0; i < Tiles::kMostParts && error == cudaSuccess; ++i)
    if (p.parts[i].out > 0)
      error = make_panel_map(maps.weights[i], p.parts[i].weight, p.parts[i].out, p.in, Tiles::kBoxRows, kGroups);
  if (kGated && error == cudaSuccess)
    error = make_panel_map(maps.up, p.up, p.parts[0].out, p.in, Tiles::kBoxRows, kGroups);
  return error;
}

// The fragments of one panel of k.
template <typename S>
struct Fragments {
  uint32_t weight[kSteps][4];
  uint32_t token[S::kTokenTiles][kSteps][2];

  // Where a lane finds its pieces of a panel: lane l addresses row l % 8 of matrix l / 8. For weights, matrices 1 and 3
  // are 8 rows further down, and 2 and 3 are 8 further in k. For tokens, matrices 1, 2 and 3 are 8, 16 and 24 further
  // in k, which gives the fragments of two steps.
  struct Lane {
    uint32_t weights, weight_piece;  // the row, and its first piece with the row's permutation
    uint32_t tokens, token_piece;

    // `first_row`: where the warp's rows begin in a stage.
    __device__ Lane(uint32_t first_row, int token, int lane)
        : weights(first_row +
                  static_cast<uint32_t>(S::kFragments ? lane * 16 : lane % 16 * static_cast<int>(kPanelRowBytes))),
          weight_piece(static_cast<uint32_t>((lane / 16 ^ lane % 8) * 16)),
          tokens(static_cast<uint32_t>(S::kWeightBytes + (token + lane % 8) * static_cast<int>(kPanelRowBytes))),
          token_piece(static_cast<uint32_t>((lane / 8 ^ lane % 8) * 16)) {}
  };

  // `stage`: the address of a stage, whose panels of weights have kBoxRows rows.
  template <int kBoxRows>
  __device__ void load(const Lane& lane, uint32_t stage, int panel) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (S::kFragments)
        load_16(weight[step], stage + lane.weights + (panel * kSteps + step) * kWarp * 16);
      else
        load_matrices(weight[step], stage + lane.weights + panel * (kBoxRows * kPanelRowBytes) +
                                        (lane.weight_piece ^ static_cast<uint32_t>(step * 32)));
    }
#pragma unroll
    for (int tile = 0; tile < S::kTokenTiles; ++tile)
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        uint32_t r[4];
        load_matrices(r, stage + lane.tokens + panel * (S::kTokens * kPanelRowBytes) +
                             tile * kFragmentTokens * kPanelRowBytes +
                             (lane.token_piece ^ static_cast<uint32_t>(step * 32)));
        token[tile][step][0] = r[0], token[tile][step][1] = r[1];
        token[tile][step + 1][0] = r[2], token[tile][step + 1][1] = r[3];
      }
  }
  __device__ void multiply(float (&sum)[S::kTokenTiles][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int tile = 0; tile < S::kTokenTiles; ++tile)
        mma(sum[tile], weight[step], token[tile][step][0], token[tile][step][1]);
  }
};

// The size of `up_products` below.
template <typename S, bool kGated>
inline constexpr int kUpProducts = kGated ? S::kRows / 2 * S::kTokens : 1;

// By the warps that multiply: applies bias or gate to the sums of a tile, rounds once and stores. Lane 4 g + t holds
// rows g and g + 8, tokens 2 t and 2 t + 1. With kGated, y = f(sums of weight) * (sums of up), where both are first
// rounded to the dtype of y, so that the bits equal those of the separate ops. `up_products` [outputs of a tile,
// S::kTokens] is shared memory for that.
template <typename Y, typename S, bool kGated>
__device__ inline void store_tile(const LinearStreamParams& p, const LinearStreamPart& part, int64_t first_output,
                                  const float (&sum)[S::kTokenTiles][4], int row_warp, int token_warp, int lane,
                                  Y* up_products) {
  using Tiles = StreamTiles<S, kGated>;
  const int tokens = static_cast<int>(p.tokens);
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
          [&](int row, int token, float s) { store(up_products + Tiles::output_of(row) * S::kTokens + token, s); });
    meet();
  }
  if (!kGated || row_warp % 2 == 0) {
    wait_for_earlier_kernels();  // an earlier kernel may still read the memory of y
    for_each_sum([&](int row, int token, float s) {
      const int64_t n = first_output + Tiles::output_of(row), i = int64_t{token} * part.out + n;
      if (token >= tokens || n >= part.out) return;
      if constexpr (kGated) {
        s = activate(p.activation, rounded<Y>(s)) * load(up_products + Tiles::output_of(row) * S::kTokens + token);
      } else {
        if (part.bias != nullptr) s += load(static_cast<const Y*>(part.bias) + n);
      }
      store(static_cast<Y*>(part.y) + i, s);
    });
  }
  if constexpr (kGated) meet();  // the next tile overwrites up_products
}

// By S::kWarps warps: y = x weight^T (+ bias), or with kGated y = f(x weight^T) * (x up^T), for every tile of this
// block.
//
// A dependent mma can be issued every 24 clocks at best, so any instruction between two of a chain costs time.
// Therefore a chunk is one piece of straight code that loads fragments one panel ahead, also those of the next chunk.
template <typename Y, typename S, bool kGated>
__device__ inline void multiply_tiles(const LinearStreamParams& p, const StreamRing& ring, int num_tiles, int warp,
                                      int lane, Y* up_products) {
  using Tiles = StreamTiles<S, kGated>;
  const int in = static_cast<int>(p.in);
  const int num_chunks = static_cast<int>(ceil_div(in, kChunk));
  const int row_warp = warp % S::kRowWarps, token_warp = warp / S::kRowWarps;
  const typename Fragments<S>::Lane at(
      S::kFragments ? static_cast<uint32_t>(row_warp * kFragmentRows * kChunk * 2) : Tiles::panel_of(row_warp),
      token_warp * S::kTokenTiles * kFragmentTokens, lane);
  const int last_panels = (in - (num_chunks - 1) * kChunk) / kPanelColumns;
  RingPlace<S::kStages> place;
  Fragments<S> f[2];
  float sum[S::kTokenTiles][4];
  const auto wait_and_load = [&] {
    barrier_wait(ring.full + place.stage * kBarrierBytes, place.parity);
    f[0].template load<Tiles::kBoxRows>(at, ring.stages + place.stage * S::kStageBytes, 0);
  };
  // Multiplies a chunk whose first panel is loaded; then that of the next chunk is, if there is one.
  const auto multiply_chunk = [&](int panels, bool more) {
    const uint32_t stage = ring.stages + place.stage * S::kStageBytes;
    const uint32_t empty = ring.empty + place.stage * kBarrierBytes;
    place.advance();
    if (panels == kGroups) {
#pragma unroll
      for (int panel = 0; panel < kGroups; ++panel) {
        if (panel + 1 < kGroups)
          f[(panel + 1) % 2].template load<Tiles::kBoxRows>(at, stage, panel + 1);
        else if (more)
          wait_and_load();
        f[panel % 2].multiply(sum);
      }
    } else {
      for (int panel = 0; panel < panels; ++panel) {
        if (panel > 0) f[0].template load<Tiles::kBoxRows>(at, stage, panel);
        f[0].multiply(sum);
      }
      if (more) wait_and_load();
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
  };

  if (static_cast<int>(blockIdx.x) < num_tiles) wait_and_load();
  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
    int tile_of_part = tile;
    const LinearStreamPart& part = p.parts[Tiles::part_of(p, tile_of_part)];
    const int64_t first_output = int64_t{tile_of_part} * Tiles::kOutputs;
    const bool last_tile = tile + static_cast<int>(gridDim.x) >= num_tiles;
#pragma unroll
    for (int t = 0; t < S::kTokenTiles; ++t) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.0f;
    for (int chunk = 0; chunk + 1 < num_chunks; ++chunk) multiply_chunk(kGroups, true);
    multiply_chunk(last_panels, !last_tile);

    store_tile<Y, S, kGated>(p, part, first_output, sum, row_warp, token_warp, lane, up_products);
  }
}

}  // namespace eadem::kernels::cuda
