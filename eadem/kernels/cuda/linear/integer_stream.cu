// SPDX-License-Identifier: Apache-2.0
//
// Products of few rows (up to 32 tokens) of 8-bit codes with K-quants and groups of four bits, which are bound by
// reading the weight. The warps of a block take the chunks of 256 columns of its rows in turns. Each has a ring of
// encoded blocks of its own, and multiplies their codes as they are: an integer product for each group of columns with
// a scale, whose sum is exact (integer_products.cuh). The block then adds the chunks in order.
#include <algorithm>

#include "eadem/kernels/cuda/activation.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/instructions/ring.cuh"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/integer_products.cuh"
#include "eadem/kernels/cuda/linear/pace.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kRowsOfItem = kFragmentBlockRows;  // an item is the block that a warp decodes at a time
constexpr int kMostStages = 4, kMostWarps = 16;
constexpr int kSharedMemory = 228 * 1024;  // of a multiprocessor

// A tile has kRowTiles * 16 outputs and 8 * kTokenTiles tokens. With kGated an output has a row of each weight.
// kBlocks blocks of kWarps warps share a multiprocessor. Weights have kGroups of four bits, or are K-quants.
template <bool kGroups_, int kTokenTiles_, int kRowTiles_, int kBlocks_, bool kGated, int kWarps_ = 8>
struct Shape {
  static constexpr bool kGroups = kGroups_;
  static constexpr int kWarps = kWarps_, kThreads = kWarps * kWarp;
  static constexpr int kTokenTiles = kTokenTiles_, kRowTiles = kRowTiles_, kBlocks = kBlocks_;
  static constexpr int kTokens = kTokenTiles * 8, kOutputs = kRowTiles * kRowsOfItem;
  static constexpr int kMatrices = kGated ? 2 : 1;
  static constexpr int kItems = kRowTiles * kMatrices;  // of a chunk: those of `weight`, then those of `up`
  static constexpr int kThreadSums = (kOutputs * kTokens + kThreads - 1) / kThreads;  // of each matrix
  // Floats of a chunk in shared memory: its terms [item][16 rows][kPitch], then the scale of each token. Of 32 tokens,
  // the terms of eight rows and eight tokens, which a warp stores together, lie in different banks; for 16 that was
  // slower.
  static constexpr int kPitch = kTokens == 32 ? kTokens + 8 : kTokens;
  static constexpr int kTerms = kItems * kRowsOfItem * kPitch, kChunkTerms = kTerms + kTokens;
  // So many warps mostly have one chunk of each tile, and keep its tokens in registers. Where these are many, each item
  // is multiplied by one part of them after another.
  static constexpr bool kKeepsTokens = kWarps == 16;
  static constexpr int kPartTiles = kKeepsTokens ? std::min(kTokenTiles, 2) : kTokenTiles,
                       kParts = kTokenTiles / kPartTiles;
  static_assert(kTokens <= kWarp && kWarps <= kMostWarps);
};

// The part of a tile, and its place there.
template <typename S>
__device__ inline int part_of(const LinearStreamParams& p, int& tile) {
  int part = 0;
  if constexpr (S::kMatrices == 1) {
#pragma unroll
    for (int i = 0; i + 1 < kMostLinearStreamParts; ++i) {
      const int tiles = static_cast<int>(ceil_div(p.parts[i].out, int64_t{S::kOutputs}));
      if (part == i && tile >= tiles) tile -= tiles, ++part;
    }
  }
  return part;
}

template <typename S>
int count_tiles(const LinearStreamParams& p) {
  int64_t tiles = 0;
  for (const LinearStreamPart& part : p.parts) tiles += ceil_div(part.out, int64_t{S::kOutputs});
  return static_cast<int>(tiles);
}

// Where a warp is in the items of its block: chunks warp, warp + S::kWarps, ... of every tile.
template <typename S>
struct Place {
  int tile, chunk, item = 0;
  int part = 0, first_rows = 0;  // of the tile: its part, and there the first 16 rows of the tile

  __device__ Place(const PackedStreamParams& p, int tile_, int chunk_) : tile(tile_), chunk(chunk_) { find_tile(p); }
  __device__ void find_tile(const PackedStreamParams& p) {
    int tile_of_part = tile;
    part = part_of<S>(p.product, tile_of_part);
    first_rows = tile_of_part * S::kRowTiles;
  }
  __device__ void advance(const PackedStreamParams& p, int warp, int num_chunks) {
    if (++item < S::kItems) return;
    item = 0;
    chunk += S::kWarps;
    if (chunk < num_chunks) return;
    chunk = warp;
    tile += static_cast<int>(gridDim.x);
    find_tile(p);
  }
  __device__ bool is_up() const { return S::kMatrices == 2 && item >= S::kRowTiles; }
  __device__ int rows() const { return first_rows + (is_up() ? item - S::kRowTiles : item); }
  __device__ const FragmentLayout& layout(const PackedStreamParams& p) const {
    return is_up() ? p.up_layout : p.layouts[part];
  }
  // Whether the item has rows. A tile has some in any case.
  __device__ bool exists(const PackedStreamParams& p) const {
    if constexpr (S::kRowTiles == 1) return true;
    return int64_t{rows()} * kRowsOfItem < p.product.parts[part].out;
  }
  __device__ const uint8_t* block(const PackedStreamParams& p, int num_chunks, int block_bytes) const {
    const void* weight = is_up() ? p.product.up : p.product.parts[part].weight;
    return static_cast<const uint8_t*>(weight) + int64_t{rows() * num_chunks + chunk} * block_bytes;
  }
};

// The codes and sums of tokens that a lane multiplies by a chunk of the weight, and the chunk's scale of token `lane`.
template <typename S>
struct Tokens {
  int chunk = -1;
  float scale;
  IntegerTokens<S::kPartTiles> parts[S::kParts];

  Tokens() = default;
  __device__ Tokens(const IntegerRows& rows, const LinearStreamParams& p, int chunk_, int lane) : chunk(chunk_) {
    const int padded = (rows.tokens + 7) / 8 * 8;
    scale = __ldg(p.x_scales + chunk * padded + min(lane, padded - 1));
#pragma unroll
    for (int part = 0; part < S::kParts; ++part)
      parts[part] = IntegerTokens<S::kPartTiles>(rows, p, chunk, lane, part * S::kPartTiles);
  }
};

// Dynamic shared memory has the warps' rings of `stages` blocks of `pitch` bytes, then the terms of `round_chunks`
// chunks. A round is a whole number of turns of the warps.
template <typename Y, typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    integer_stream(const __grid_constant__ PackedStreamParams p, int stages, int pitch, int round_chunks) {
  extern __shared__ __align__(1024) uint8_t memory[];
  constexpr int kWarps = S::kWarps, kThreads = S::kThreads;
  __shared__ uint64_t barriers[kWarps * kMostStages];
  const LinearStreamParams& product = p.product;
  // The shuffle tells the compiler that a warp has one value.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int num_chunks = static_cast<int>(product.in / kIntegerChunk), num_tiles = p.num_tiles;
  const uint32_t full = shared_address(barriers) + static_cast<uint32_t>(warp * kMostStages) * kBarrierBytes;
  uint8_t* const ring = memory + warp * stages * pitch;
  float* const terms = reinterpret_cast<float*>(memory + kWarps * stages * pitch);
  if (lane < kMostStages) barrier_init(full + static_cast<uint32_t>(lane) * kBarrierBytes, 1);
  fence_barriers();
  __syncwarp();
  allow_next_kernel();

  // The next block to copy, and where it goes; by lane 0.
  const int first_tile = static_cast<int>(blockIdx.x);
  Place<S> ahead(p, first_tile, warp);
  int ahead_stage = 0;
  const bool works = warp < num_chunks;
  const auto copy_next = [&] {
    if (ahead.tile < num_tiles) {
      const uint32_t barrier = full + static_cast<uint32_t>(ahead_stage) * kBarrierBytes;
      const int bytes = ahead.exists(p) ? ahead.layout(p).block_bytes : 0;
      barrier_arrive_expecting(barrier, static_cast<uint32_t>(bytes));
      if (bytes > 0)
        copy_bulk_async(shared_address(ring + ahead_stage * pitch), ahead.block(p, num_chunks, bytes),
                        static_cast<uint32_t>(bytes), barrier, l2_policy<L2Policy::evict_first>());
      ahead.advance(p, warp, num_chunks);
      if (++ahead_stage == stages) ahead_stage = 0;
    }
  };
  if (works && lane == 0) {
    Pace pace(stages, pitch, static_cast<int>(gridDim.x) * kWarps);
    for (int i = 0; i < stages && ahead.tile < num_tiles; ++i) {
      pace.wait();
      copy_next();
    }
  }
  wait_for_earlier_kernels();

  const int tokens = static_cast<int>(product.tokens);
  const IntegerRows rows(product, tokens, lane);
  Tokens<S> x;
  int stage = 0;
  uint32_t parity = 0;
  for (int tile = first_tile; tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
    Place<S> now(p, tile, warp);
    float sum[S::kMatrices][S::kThreadSums] = {};
    for (int round = 0; round < num_chunks; round += round_chunks) {
      const int round_end = min(round + round_chunks, num_chunks);
      // 1. This warp's chunks of the round.
      for (int chunk = round + warp; chunk < round_end; chunk += kWarps) {
        if (!S::kKeepsTokens || chunk != x.chunk) x = Tokens<S>(rows, product, chunk, lane);
        float* const terms_of_chunk = terms + (chunk - round) * S::kChunkTerms;
        if (lane < S::kTokens) terms_of_chunk[S::kTerms + lane] = x.scale;
#pragma unroll 1
        for (int i = 0; i < S::kItems; ++i) {
          now.item = i;
          barrier_wait(full + static_cast<uint32_t>(stage) * kBarrierBytes, parity);
          float* const to = terms_of_chunk + i * kRowsOfItem * S::kPitch;
          if (now.exists(p)) {
            const FragmentLayout& layout = now.layout(p);
            const uint8_t* block = ring + stage * pitch;
#pragma unroll
            for (int part = 0; part < S::kParts; ++part) {
              float u[S::kPartTiles][4];
              if constexpr (S::kGroups) {
                // A layout that is constant needs no instructions to find its scales and their type.
                if (constexpr FragmentLayout kKnown = kKnownLayouts[kGroupLayout]; layout.known == kGroupLayout) {
                  const FragmentLayout known = kKnown;
                  multiply_groups(u, x.parts[part], known, block, lane);
                } else {
                  multiply_groups(u, x.parts[part], layout, block, lane);
                }
              } else if (layout.code == FragmentLayout::Code::bits6) {
                multiply_six_bits(u, x.parts[part], block, lane);
              } else {
                multiply_four_bits(u, x.parts[part], block, lane);
              }
#pragma unroll
              for (int t = 0; t < S::kPartTiles; ++t)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                  *reinterpret_cast<float2*>(to + (lane / 4 + 8 * r) * S::kPitch + (part * S::kPartTiles + t) * 8 +
                                             lane % 4 * 2) = make_float2(u[t][2 * r], u[t][2 * r + 1]);
            }
          }
          __syncwarp();
          if (lane == 0) copy_next();
          if (++stage == stages) stage = 0, parity ^= 1;
        }
      }
      __syncthreads();
      // 2. All chunks of the round, in order.
#pragma unroll
      for (int n = 0; n < S::kThreadSums; ++n) {
        const int at = n * kThreads + static_cast<int>(threadIdx.x);
        if (at >= S::kOutputs * S::kTokens || at % S::kTokens >= tokens) continue;
        const int term = at / S::kTokens * S::kPitch + at % S::kTokens;
#pragma unroll 8
        for (int chunk = 0; chunk < round_end - round; ++chunk) {
          const float* of_chunk = terms + chunk * S::kChunkTerms;
          const float scale = of_chunk[S::kTerms + at % S::kTokens];
#pragma unroll
          for (int m = 0; m < S::kMatrices; ++m)
            sum[m][n] = fmaf(of_chunk[m * S::kOutputs * S::kPitch + term], scale, sum[m][n]);
        }
      }
      __syncthreads();
    }
    // 3. Store.
    const LinearStreamPart& to = product.parts[now.part];
    const int64_t first_output = int64_t{now.first_rows} * kRowsOfItem;
#pragma unroll
    for (int n = 0; n < S::kThreadSums; ++n) {
      const int at = n * kThreads + static_cast<int>(threadIdx.x);
      const int token = at % S::kTokens;
      const int64_t output = first_output + at / S::kTokens;
      if (at >= S::kOutputs * S::kTokens || token >= tokens || output >= to.out) continue;
      float y = sum[0][n];
      if constexpr (S::kMatrices == 2)
        y = activate(product.activation, rounded<Y>(y)) * rounded<Y>(sum[1][n]);
      else if (to.bias != nullptr)
        y += load(static_cast<const Y*>(to.bias) + output);
      store(static_cast<Y*>(to.y) + int64_t{token} * to.out + output, y);
    }
  }
}

template <typename Y, typename S>
cudaError_t launch_shape(PackedStreamParams p, cudaStream_t stream) {
  int pitch = p.product.up != nullptr ? p.up_layout.block_bytes : 0;
  for (int i = 0; i < kMostLinearStreamParts; ++i)
    if (p.product.parts[i].out > 0) pitch = std::max(pitch, p.layouts[i].block_bytes);
  p.num_tiles = count_tiles<S>(p.product);
  // CUDA takes 1024 bytes of each block, barriers and alignment as much. A fifth of the rest is for terms.
  constexpr int kMemory = kSharedMemory / S::kBlocks - 2048;
  constexpr int kWarps = S::kWarps;
  constexpr int kTurnBytes = kWarps * S::kChunkTerms * static_cast<int>(sizeof(float));
  const int num_chunks = static_cast<int>(p.product.in / kIntegerChunk);
  const int turns = std::min(static_cast<int>(ceil_div(num_chunks, kWarps)), std::max(1, kMemory / 5 / kTurnBytes));
  const int stages = std::min(kMostStages, (kMemory - turns * kTurnBytes) / (kWarps * pitch));
  if (stages < 1) return cudaErrorInvalidValue;
  const int blocks = std::min(p.num_tiles, static_cast<int>(p.product.multiprocessors) * S::kBlocks);
  return launch_overlapped(integer_stream<Y, S>, dim3(static_cast<unsigned>(blocks)), S::kThreads,
                           static_cast<size_t>(kWarps * stages * pitch + turns * kTurnBytes), stream, p, stages, pitch,
                           turns * kWarps);
}

template <typename Y, bool kGroups, bool kGated>
cudaError_t launch_rows(const PackedStreamParams& p, cudaStream_t stream) {
  if (p.product.tokens <= 8) {
    // Blocks of a multiprocessor work side by side. One that has a tile more than the others ends alone, and the memory
    // has little to do meanwhile. So there are as many blocks as give a multiprocessor the fewest tiles at most, unless
    // that is little less than with more blocks. Fewer blocks have more warps each, where there are chunks for them,
    // and memory for the terms.
    const int64_t tiles = count_tiles<Shape<kGroups, 1, 1, 3, kGated>>(p.product),
                  chunks = p.product.in / kIntegerChunk;
    const auto most_tiles = [&](int blocks) { return blocks * ceil_div(tiles, blocks * p.product.multiprocessors); };
    if (chunks > 8 && most_tiles(1) * 10 < 9 * std::min(most_tiles(2), most_tiles(3)))
      return launch_shape<Y, Shape<kGroups, 1, 1, 1, kGated, 16>>(p, stream);
    if (most_tiles(2) * 10 < 9 * most_tiles(3)) {
      if (chunks > 16) return launch_shape<Y, Shape<kGroups, 1, 1, 2, kGated, 14>>(p, stream);
      return launch_shape<Y, Shape<kGroups, 1, 1, 2, kGated>>(p, stream);
    }
    return launch_shape<Y, Shape<kGroups, 1, 1, 3, kGated>>(p, stream);
  }
  if (p.product.tokens <= 16) return launch_shape<Y, Shape<kGroups, 2, 1, 2, kGated>>(p, stream);
  if constexpr (kGated)
    if (p.product.in / kIntegerChunk % 16 == 0) return launch_shape<Y, Shape<kGroups, 4, 1, 1, kGated, 16>>(p, stream);
  return launch_shape<Y, Shape<kGroups, 4, kGated ? 1 : 2, 1, kGated>>(p, stream);
}

template <bool kGroups>
cudaError_t launch_codes(const PackedStreamParams& p, cudaStream_t stream) {
  if (p.product.up != nullptr) return launch_rows<bf16_t, kGroups, true>(p, stream);
  return with_f32_or_bf16(p.product.y_dtype,
                          [&](auto y) { return launch_rows<decltype(y), kGroups, false>(p, stream); });
}

}  // namespace

cudaError_t launch_integer_stream(const PackedStreamParams& p, cudaStream_t stream) {
  if (p.product.tokens == 0 || p.product.parts[0].out == 0) return cudaSuccess;
  if (p.product.tokens > kIntegerStreamMaxTokens || p.product.in % kIntegerChunk != 0) return cudaErrorInvalidValue;
  int with_groups = 0, products = 0;
  const auto count = [&](const FragmentLayout& layout) {
    ++products;
    with_groups += integer_codes_of(layout) == IntegerCodes::groups ? 1 : 0;
  };
  for (int i = 0; i < kMostLinearStreamParts; ++i)
    if (p.product.parts[i].out > 0) count(p.layouts[i]);
  if (p.product.up != nullptr) count(p.up_layout);
  if (with_groups != 0 && with_groups != products) return cudaErrorInvalidValue;
  if (with_groups != 0) return launch_codes<true>(p, stream);
  return launch_codes<false>(p, stream);
}

}  // namespace eadem::kernels::cuda
