// SPDX-License-Identifier: Apache-2.0
//
// Products of many rows whose operands are 8-bit floats, with the bits of fp8_stream.cu. A block computes tiles of 128
// tokens and 128 rows of a weight: a warpgroup has 64 of the tokens, one thread copies 128 columns of k of both
// operands at a time into a ring of stages.
//
// Blocks are paired (a cluster of two), with the same rows of the weight and tokens one after another: each copies half
// of the weight's rows for both, so that the L2 cache delivers a quarter less.
//
// Gated activations: half of a tile's rows are of `gate`, the others the same of `up`. The warps that multiply leave
// both products, rounded, in shared memory and go on; warps beside the one that copies compute the activations.
#include <algorithm>
#include <type_traits>

#include "eadem/kernels/cuda/activation.cuh"
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/cluster.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/instructions/ring.cuh"
#include "eadem/kernels/cuda/instructions/tensor_map.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kTileTokens = 128, kTileRows = 128;
constexpr int kPair = 2;                                     // blocks of a cluster
constexpr int kPanelCodes = static_cast<int>(kFp8Multiple);  // columns of a stage
constexpr int kGroupTokens = 64;                             // of a warpgroup
constexpr int kWarpgroups = kTileTokens / kGroupTokens;
constexpr int kStages = 6;
constexpr uint32_t kTokenBytes = kTileTokens * kPanelRowBytes, kWeightBytes = kTileRows * kPanelRowBytes;
constexpr uint32_t kStageBytes = kTokenBytes + kWeightBytes;
constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;  // one of the last copies
// Registers of a thread that multiplies, and of the others. What all have at first is all there is.
template <bool kGated>
constexpr int kGrown = kGated ? 224 : 232;
template <bool kGated>
constexpr int kShrunk = kGated ? 56 : 40;
static_assert(kWarpgroups * kGrown<true> + kShrunk<true> == kWarpgroups * kGrown<false> + kShrunk<false> &&
              kWarpgroups * kGrown<true> + kShrunk<true> == (kWarpgroups + 1) * (65536 / kThreads / 8 * 8));
constexpr int kActivatingWarps = kWarpgroup / kWarp - 1;  // the others of that warpgroup
constexpr int kRowTiles = kTileRows / 8;                  // of eight rows of the weight
constexpr uint32_t kStepBytes = 32;                       // of k in one wgmma
static_assert(kPanelCodes == static_cast<int>(kPanelRowBytes) && kPanelCodes == 4 * static_cast<int>(kStepBytes));

struct TileMaps {
  CUtensorMap tokens, weights[kMostLinearStreamParts];
};

// Pairs of tiles with the same rows of a weight.
__host__ __device__ inline int token_pairs_of(const LinearStreamParams& p) {
  return static_cast<int>(ceil_div(p.tokens, int64_t{kPair} * kTileTokens));
}
// The outputs of a tile, and how many tiles those of a part are.
template <bool kGated>
inline constexpr int kTileOutputs = kGated ? kTileRows / 2 : kTileRows;
template <bool kGated>
__host__ __device__ inline int outputs_of(const LinearStreamPart& part) {
  return static_cast<int>(ceil_div(part.out, int64_t{kTileOutputs<kGated>}));
}

// The tiles of a launch, tokens first, one part after another: pairs of blocks take pairs of tiles in turns.
template <bool kGated>
struct Tiles {
  const LinearStreamParams& p;
  int token_pairs, outputs = 0;
  int pair, num_pairs;  // this pair of blocks

  __device__ explicit Tiles(const LinearStreamParams& params)
      : p(params),
        token_pairs(token_pairs_of(params)),
        pair(static_cast<int>(blockIdx.x) / kPair),
        num_pairs(static_cast<int>(gridDim.x) / kPair) {
    for (const LinearStreamPart& part : p.parts) outputs += outputs_of<kGated>(part);
  }
  // Calls f(part, first token, first output) for each of this block's tiles.
  template <typename F>
  __device__ void for_each(int rank, F&& f) const {
    for (int tile = pair; tile < token_pairs * outputs; tile += num_pairs) {
      int part = 0, output = tile / token_pairs;
      for (int here; part + 1 < kMostLinearStreamParts && output >= (here = outputs_of<kGated>(p.parts[part])); ++part)
        output -= here;
      f(part, (tile % token_pairs * kPair + rank) * kTileTokens, output * kTileOutputs<kGated>);
    }
  }
};

// By one thread: copies the tokens of this block's tiles, and for both blocks half of the weight's rows. A stage is
// filled again when the warps of both blocks have left it. A tile without tokens copies the first ones, not zeros, with
// which launches were slower than with tokens.
template <bool kGated>
__device__ inline void copy_tiles(const TileMaps& maps, const Tiles<kGated>& tiles, const Ring& ring, uint32_t stages,
                                  int num_chunks, int rank) {
  constexpr uint32_t kHalf = kWeightBytes / kPair;
  RingPlace<kStages> place{0, 1};  // parity of the phase before the first: the first round waits for nothing
  const uint64_t policy = l2_policy<L2Policy::evict_last>();
  wait_for_earlier_kernels();
  tiles.for_each(rank, [&](int part, int token, int output) {
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      barrier_wait(ring.empty_at(place.stage), place.parity);
      const uint32_t full = ring.full_at(place.stage);
      const uint32_t stage = stages + static_cast<uint32_t>(place.stage) * kStageBytes;
      barrier_arrive_expecting(full, kStageBytes);
      copy_box_async(stage, maps.tokens, token < tiles.p.tokens ? token : 0, chunk, full, policy);
      copy_box_to_blocks_async(stage + kTokenBytes + static_cast<uint32_t>(rank) * kHalf,
                               maps.weights[kGated ? rank : part], output + (kGated ? 0 : rank * (kTileRows / kPair)),
                               chunk, full, (1 << kPair) - 1, policy);
      place.advance();
    }
  });
}

// By four lanes 4 g + q: lane q gives words[t] of tile t, its columns 2 q and 2 q + 1, and gets the words of tile q.
__device__ inline void exchange_tiles(uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if ((t & bit) != 0) continue;
      const bool upper = (lane & bit) != 0;
      const uint32_t given = upper ? words[t] : words[t + bit];
      const uint32_t got = __shfl_xor_sync(0xffffffff, given, bit);
      (upper ? words[t] : words[t + bit]) = got;
    }
}

// The sums of a warp: lane 4 g + q has tokens g and g + 8 of its 16, rows 2 q and 2 q + 1 of each eight.
using Sums = float[kRowTiles][4];

// By a warp: scales its sums, rounds once and stores. `first_token`: of the warp.
template <typename Y, bool kBlockScales>
__device__ inline void store_sums(const LinearStreamParams& p, const LinearStreamPart& part, const Sums& sum,
                                  int64_t first_token, int64_t first_output, int lane) {
  const bool row_scales = p.scaling == WeightScaling::rows;
  const auto value_of = [&](int t, int i, int64_t n, float token_scale) {
    float value = (kBlockScales ? sum[t][i] : sum[t][i] * part.scales[row_scales ? n : 0]) * token_scale;
    if (part.bias != nullptr) value += load(static_cast<const Y*>(part.bias) + n);
    return value;
  };
  // Whether outputs can be stored eight at a time.
  const bool whole = first_output + kTileRows <= part.out && part.out % 8 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t token = first_token + lane / 4 + half * 8;
    const bool wanted = token < p.tokens;
    const float token_scale = wanted ? p.x_scales[token] : 0.0f;
    Y* const row = static_cast<Y*>(part.y) + token * part.out;
    if constexpr (std::is_same_v<Y, bf16_t>)
      if (whole) {
#pragma unroll
        for (int first = 0; first < kRowTiles; first += 4) {
          uint32_t words[4];
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            const int64_t n = first_output + (first + t) * 8 + lane % 4 * 2;
            words[t] = pack_bf16(value_of(first + t, half * 2, n, token_scale),
                                 value_of(first + t, half * 2 + 1, n + 1, token_scale));
          }
          exchange_tiles(words, lane);
          if (wanted)
            *reinterpret_cast<uint4*>(row + first_output + (first + lane % 4) * 8) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
        continue;
      }
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t n = first_output + t * 8 + lane % 4 * 2 + i;
        if (wanted && n < part.out) store(row + n, value_of(t, half * 2 + i, n, token_scale));
      }
  }
}

// Both products of a tile, rounded to bf16: 128 bytes of each token, whose pieces of 16 bytes are swapped so that
// threads that have one column write, and those that have one row read, different banks.
constexpr uint32_t kProductBytes = kTileTokens * kTileOutputs<true> * sizeof(bf16_t);
constexpr uint32_t kProductRowBytes = kTileOutputs<true> * sizeof(bf16_t);
static_assert(kProductRowBytes == 8 * 16);
struct Products {
  uint32_t gate, full, empty;  // the tokens of `gate`, followed by those of `up`, and barriers, by address

  __device__ uint32_t piece_at(int token, int piece) const {
    return gate + static_cast<uint32_t>(token) * kProductRowBytes + static_cast<uint32_t>((piece ^ token) % 8) * 16;
  }
};

// By a warp: scales its sums, the first half of them of `gate`, and rounds them for the warps that activate. `row`: of
// its first token in the tile. A row beyond the last one has sums of 0.
template <bool kBlockScales>
__device__ inline void give_products(const LinearStreamParams& p, const Sums& sum, const Products& products,
                                     int64_t first_token, int64_t first_output, int row, int lane) {
  constexpr int kHalfTiles = kRowTiles / 2;
  const LinearStreamPart& part = p.parts[0];
  const bool row_scales = p.scaling == WeightScaling::rows;
  float token_scales[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t token = first_token + lane / 4 + half * 8;
    token_scales[half] = token < p.tokens ? p.x_scales[token] : 0.0f;
  }
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    const int tile = t % kHalfTiles;
    const float* scales = t < kHalfTiles ? part.scales : p.up_scales;
    float weight_scales[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t n = first_output + tile * 8 + lane % 4 * 2 + i;
      weight_scales[i] = kBlockScales ? 1.0f : scales[row_scales ? min(n, part.out - 1) : 0];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto value = [&](int i) {
        const float s = sum[t][half * 2 + i];
        return (kBlockScales ? s : s * weight_scales[i]) * token_scales[half];
      };
      const uint32_t address = products.piece_at(row + lane / 4 + half * 8, tile) +
                               (t < kHalfTiles ? 0 : kProductBytes) + static_cast<uint32_t>(lane % 4) * 4;
      store_u32(address, pack_bf16(value(0), value(1)));
    }
  }
}

// By the warps that activate: the gated activations of this block's tiles. Eight lanes have a token, each of them eight
// of its outputs.
__device__ inline void activate_tiles(const LinearStreamParams& p, const Tiles<true>& tiles, const Products& products,
                                      int rank, int warp, int lane) {
  constexpr int kWidth = 8, kLanes = kTileOutputs<true> / kWidth, kTokensOfWarp = kWarp / kLanes;
  const int64_t out = p.parts[0].out;
  const int piece = lane % kLanes;
  uint32_t parity = 0;
  wait_for_earlier_kernels();
  with_activation(p.activation, [&](auto kind) {
    tiles.for_each(rank, [&](int, int first_token, int first_output) {
      barrier_wait(products.full, parity);
      const int64_t n = int64_t{first_output} + piece * kWidth;
      for (int first = warp * kTokensOfWarp; first < kTileTokens; first += kActivatingWarps * kTokensOfWarp) {
        const int row = first + lane / kLanes;
        const int64_t token = int64_t{first_token} + row;
        const bool wanted = token < p.tokens && n < out;
        const uint32_t address = products.piece_at(row, piece);
        uint32_t words[4], up[4], largest = 0;
        load_16(words, address);
        load_16(up, address + kProductBytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words[i] = pack_bf16(activate(decltype(kind)::value, low_bf16(words[i])) * low_bf16(up[i]),
                               activate(decltype(kind)::value, high_bf16(words[i])) * high_bf16(up[i]));
          largest = max(largest, max(words[i] << 16 & 0x7fffffffu, words[i] & 0x7fff0000u));
        }
        bf16_t* const to = static_cast<bf16_t*>(p.parts[0].y) + token * out + n;
        if (wanted && out % kWidth == 0) {
          *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
        } else if (wanted) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i)
            if (n + i < out) store(to + i, i % 2 == 0 ? low_bf16(words[i / 2]) : high_bf16(words[i / 2]));
        }
        // Beyond the last output all weights are 0, and so is what is made of them.
        if (p.y_largest == nullptr) continue;
#pragma unroll
        for (int other = 1; other < kLanes; other *= 2)
          largest = max(largest, __shfl_xor_sync(kAllLanes, largest, other));
        if (piece == 0 && token < p.tokens) atomicMax(p.y_largest + token, largest);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(products.empty);
      parity ^= 1;
    });
  });
}

// By a warpgroup: multiplies and stores its tokens of this block's tiles. A chain is added while the next one runs.
template <typename Y, bool kGated, bool kBlockScales>
__device__ inline void multiply_tiles(const LinearStreamParams& p, const Tiles<kGated>& tiles, const Ring& ring,
                                      const Products& products, uint32_t stages, int num_chunks, int rank, int group) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % (kWarpgroup / kWarp);
  RingPlace<kStages> place;
  uint32_t products_parity = 1;  // of the phase before the first
  Sums sum, chain[2];
  tiles.for_each(rank, [&](int part_index, int first_token, int first_output) {
    const LinearStreamPart& part = p.parts[part_index];
    const int64_t block = first_output / kFp8Multiple * num_chunks;
    uint32_t left_empty = 0;  // the barrier of the stage that the chain which runs reads
    float scale = 0.0f;       // of its block
    float up_scale = 0.0f;    // likewise of `up`
    const auto begin = [&](Sums& next) {
      barrier_wait(ring.full_at(place.stage), place.parity);
      const uint32_t stage = stages + static_cast<uint32_t>(place.stage) * kStageBytes;
      const Operand left(stage + static_cast<uint32_t>(group) * (kGroupTokens * kPanelRowBytes), 0);
      const Operand right(stage + kTokenBytes, 0);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma_e4m3(next, left.at(k * kStepBytes), right.at(k * kStepBytes), k > 0);
      wgmma_commit();
    };
    const auto add = [&](Sums& done) {
      pin(done);
      if (lane < kPair) arrive_at_block(left_empty, lane);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sum[t][i] = kBlockScales ? fmaf(done[t][i], kGated && t >= kRowTiles / 2 ? up_scale : scale, sum[t][i])
                                   : sum[t][i] + done[t][i];
    };
    // Called when a chain has begun: keeps its stage and its scale for the call of `add` that adds it.
    const auto advance = [&](int chunk) {
      left_empty = ring.empty_at(place.stage);
      if (kBlockScales) scale = __ldg(part.scales + block + chunk);
      if (kBlockScales && kGated) up_scale = __ldg(p.up_scales + block + chunk);
      place.advance();
    };
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.0f;
    begin(chain[0]);
    advance(0);
    int chunk = 1;
    for (; chunk + 1 < num_chunks; chunk += 2) {
      begin(chain[1]);
      wgmma_wait<1>();
      add(chain[0]);
      advance(chunk);
      begin(chain[0]);
      wgmma_wait<1>();
      add(chain[1]);
      advance(chunk + 1);
    }
    if (chunk < num_chunks) {
      begin(chain[1]);
      wgmma_wait<1>();
      add(chain[0]);
      advance(chunk);
      wgmma_wait<0>();
      add(chain[1]);
    } else {
      wgmma_wait<0>();
      add(chain[0]);
    }
    wait_for_earlier_kernels();
    const int row = group * kGroupTokens + warp * 16;
    if constexpr (kGated) {
      barrier_wait(products.empty, products_parity);
      products_parity ^= 1;
      give_products<kBlockScales>(p, sum, products, int64_t{first_token} + row, first_output, row, lane);
      __syncwarp();
      if (lane == 0) barrier_arrive(products.full);
    } else {
      store_sums<Y, kBlockScales>(p, part, sum, int64_t{first_token} + row, first_output, lane);
    }
  });
}

template <typename Y, bool kGated, bool kBlockScales>
__global__ void __launch_bounds__(kThreads, 1)
    fp8_tiles(const __grid_constant__ LinearStreamParams p, const __grid_constant__ TileMaps maps) {
  extern __shared__ __align__(1024) uint8_t memory[];  // stages, and products of gated activations
  __shared__ uint64_t barriers[2 * kStages + 2];       // full, empty, and the same of the products
  const uint32_t full = shared_address(barriers);
  const Ring ring{full, full + kStages * kBarrierBytes};
  if (threadIdx.x < kStages) {
    barrier_init(ring.full_at(static_cast<int>(threadIdx.x)), 1);
    barrier_init(ring.empty_at(static_cast<int>(threadIdx.x)), kPair * kWarpgroups * (kWarpgroup / kWarp));
  }
  const uint32_t stages = shared_address(memory);
  const uint32_t products_full = full + 2 * kStages * kBarrierBytes;
  const Products products{stages + kStages * kStageBytes, products_full, products_full + kBarrierBytes};
  if (kGated && threadIdx.x == kStages) {
    barrier_init(products.full, kWarpgroups * (kWarpgroup / kWarp));
    barrier_init(products.empty, kActivatingWarps);
  }
  fence_barriers();
  cluster_sync();
  allow_next_kernel();

  const int rank = cluster_rank(), num_chunks = static_cast<int>(p.in / kPanelCodes);
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  const Tiles<kGated> tiles(p);
  if (group < kWarpgroups) {
    grow_registers<kGrown<kGated>>();
    multiply_tiles<Y, kGated, kBlockScales>(p, tiles, ring, products, stages, num_chunks, rank, group);
  } else {
    shrink_registers<kShrunk<kGated>>();
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    if (warp == 0) {
      if (lane == 0) copy_tiles(maps, tiles, ring, stages, num_chunks, rank);
    } else if constexpr (kGated) {
      activate_tiles(p, tiles, products, rank, warp - 1, lane);
    }
  }
  __syncwarp();
  cluster_sync();  // the other block may still copy into this one's memory
}

template <typename Y, bool kGated>
cudaError_t launch_as(const LinearStreamParams& p, cudaStream_t stream) {
  TileMaps maps{};
  cudaError_t error = make_panel_map(maps.tokens, p.x, p.tokens, p.in / 2, kTileTokens, 1);
  int64_t pairs = 0;
  for (int i = 0; i < kMostLinearStreamParts; ++i) {
    const LinearStreamPart& part = p.parts[i];
    if (part.out == 0) continue;
    if (error == cudaSuccess)
      error = make_panel_map(maps.weights[i], part.weight, part.out, p.in / 2, kTileRows / kPair, 1);
    pairs += int64_t{token_pairs_of(p)} * outputs_of<kGated>(part);
  }
  if (kGated && error == cudaSuccess)
    error = make_panel_map(maps.weights[1], p.up, p.parts[0].out, p.in / 2, kTileRows / kPair, 1);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(kPair * std::min(pairs, p.multiprocessors / kPair));
  const size_t memory = size_t{kStages} * kStageBytes + (kGated ? 2 * kProductBytes : 0);
  const auto launch = [&](auto kernel) {
    return launch_clusters(kernel, kPair, dim3(blocks), kThreads, memory, stream, p, maps);
  };
  return p.scaling == WeightScaling::blocks ? launch(fp8_tiles<Y, kGated, true>) : launch(fp8_tiles<Y, kGated, false>);
}

}  // namespace

cudaError_t launch_fp8_tiles(const LinearStreamParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.parts[0].out == 0) return cudaSuccess;
  if (p.in % kFp8Multiple != 0) return cudaErrorInvalidValue;
  if (p.up != nullptr) return launch_as<bf16_t, true>(p, stream);
  return with_f32_or_bf16(p.y_dtype, [&](auto y) { return launch_as<decltype(y), false>(p, stream); });
}

}  // namespace eadem::kernels::cuda
