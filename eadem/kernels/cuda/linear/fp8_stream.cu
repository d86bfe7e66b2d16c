// SPDX-License-Identifier: Apache-2.0
//
// Products of few rows (up to 64 tokens) whose operands are 8-bit floats, with a scale for each token. As in
// linear_stream.cu, tensor maps stream the weights into a ring of stages; nothing is decoded, because wgmma multiplies
// codes where they lie. The tokens are the left operand, whose 64 rows they fill or not: what lies behind the last
// token makes rows that nobody stores. So a tile can have as few as 16 rows of the weight.
//
//   y[t, n] = ((sum over chunks c of chain_c) * scale of weight row n) * scale of token t (+ bias), rounded once
//   y[t, n] = (sum over chunks c of chain_c * scale of the weight's block) * scale of token t, with blocks of 128 x 128
//
// chain_c is a chain of four wgmma over 128 columns, which begins at 0; sums of chunks are made in f32 in order of k,
// by one fma for each chunk where blocks have scales. The tensor core keeps fewer than 24 bits in a chain, so that a
// chain over all of k would lose some. cuBLASLt does the same where it does not accumulate "fast", with the same bits:
// exact_product.cc tests it.
#include <algorithm>

#include "eadem/kernels/cuda/linear/linear_stream.cuh"

namespace eadem::kernels::cuda {

namespace {

// Two codes take the place of a bf16: a panel has 128 columns, and `in` counts pairs of codes below.
static_assert(kFp8Multiple == 2 * kPanelColumns);

// The members that StreamTiles and the copying threads ask for are those of StreamShape. kBlocks share a
// multiprocessor.
template <int kRows_, int kTokens_, int kStages_, int kBlocks_>
struct Fp8Shape {
  static constexpr int kRows = kRows_, kTokens = kTokens_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kWarps = kWarpgroup / kWarp;
  static constexpr int kGatedBoxRows = 8;  // the right operand has groups of eight rows of both weights in turns
  static constexpr int kWeightBytes = kRows * kChunk * 2;
  static constexpr int kStageBytes = kWeightBytes + kTokens * kChunk * 2;
  // The left operand has 64 rows: what follows the tokens of the last panel is read, too.
  static constexpr int kLeftRows = 64;
  static constexpr int kSharedBytes = kStages * kStageBytes + (kLeftRows - kTokens) * static_cast<int>(kPanelRowBytes);
  static constexpr int kThreads = (kWarps + 2) * kWarp;
  static_assert(kBlocks * (kSharedBytes + 2048) <= kSharedLimit + 1024);
};

// By a warpgroup: computes and stores every tile of this block.
template <typename Y, typename S, bool kGated, bool kBlockScales>
__device__ inline void multiply_fp8_tiles(const LinearStreamParams& p, const StreamRing& ring, int num_tiles, int warp,
                                          int lane) {
  using Tiles = StreamTiles<S, kGated>;
  constexpr int kTiles = S::kRows / 8;  // of eight rows of the weight; with kGated, the odd ones are those of `up`
  constexpr uint32_t kGroupBytes = 8 * kPanelRowBytes * (kGated ? kGroups : 1);
  constexpr uint32_t kTokenPanel = S::kTokens * kPanelRowBytes;
  constexpr uint32_t kWeightPanel = (kGated ? S::kGatedBoxRows : S::kRows) * kPanelRowBytes;
  constexpr uint32_t kStep = 32;  // bytes of k of one wgmma
  const int num_chunks = static_cast<int>(ceil_div(p.in, kChunk));
  const int tokens = static_cast<int>(p.tokens);
  RingPlace<S::kStages> place;
  float sum[kTiles][4], chain[kGroups][kTiles][4];
  // The scales of this chunk's blocks, of `weight` and of `up`.
  float block_scales[kGroups][kGated ? 2 : 1];
  const int num_blocks = static_cast<int>(p.in / kPanelColumns);  // of a row of blocks
  const auto add_chain = [&](int panel) {
    float(&done)[kTiles][4] = chain[panel];
    pin(done);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum[t][i] = kBlockScales ? fmaf(done[t][i], block_scales[panel][kGated ? t % 2 : 0], sum[t][i])
                                 : sum[t][i] + done[t][i];
  };

  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
    int tile_of_part = tile;
    const LinearStreamPart& part = p.parts[Tiles::part_of(p, tile_of_part)];
    const int64_t first = int64_t{tile_of_part} * Tiles::kOutputs + lane % 4 * 2;
    // The scales of this lane's outputs and tokens, which are on their way while it multiplies.
    float scales[kTiles][2], token_scales[2];
    if constexpr (!kBlockScales)
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t n = min(first + t / (kGated ? 2 : 1) * 8 + i, part.out - 1);
          scales[t][i] =
              __ldg((kGated && t % 2 == 1 ? p.up_scales : part.scales) + (p.scaling == WeightScaling::rows ? n : 0));
        }
    wait_for_earlier_kernels();
#pragma unroll
    for (int i = 0; i < 2; ++i) token_scales[i] = p.x_scales[min(warp * 16 + lane / 4 + i * 8, tokens - 1)];
      // 1. Multiply. Two chains run side by side; meanwhile the two before are added.
#pragma unroll
    for (int t = 0; t < kTiles; ++t) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.0f;
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      if constexpr (kBlockScales) {
#pragma unroll
        for (int panel = 0; panel < kGroups; ++panel) {
          const int64_t block = first / kFp8Multiple * num_blocks + min(chunk * kGroups + panel, num_blocks - 1);
          block_scales[panel][0] = __ldg(part.scales + block);
          if constexpr (kGated) block_scales[panel][1] = __ldg(p.up_scales + block);
        }
      }
      barrier_wait(ring.full + place.stage * kBarrierBytes, place.parity);
      const uint32_t stage = ring.stages + static_cast<uint32_t>(place.stage * S::kStageBytes);
      wgmma_fence();
#pragma unroll
      for (int pair = 0; pair < kGroups; pair += 2) {  // beyond the last column there are zeros
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
          for (int panel = pair; panel < pair + 2; ++panel) {
            const Operand left(stage + S::kWeightBytes + panel * kTokenPanel, 0);
            const Operand<kGroupBytes> right(stage + panel * kWeightPanel, 0);
            wgmma_e4m3(chain[panel], left.at(step * kStep), right.at(step * kStep), step > 0);
          }
        wgmma_commit();
      }
      wgmma_wait<1>();
      add_chain(0);
      add_chain(1);
      wgmma_wait<0>();
      add_chain(2);
      add_chain(3);
      if (lane == 0) barrier_arrive(ring.empty + place.stage * kBarrierBytes);
      place.advance();
    }

    // 2. Scale and store. Lane 4 g + t has tokens g and g + 8 of its warp's 16, outputs 2 t and 2 t + 1 of each eight.
#pragma unroll
    for (int t = 0; t < Tiles::kOutputs / 8; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = warp * 16 + lane / 4 + i / 2 * 8;
        const int64_t n = first + t * 8 + i % 2;
        if (token >= tokens || n >= part.out) continue;
        const auto scaled = [&](int of_tile) {
          const float s = sum[of_tile][i];
          return (kBlockScales ? s : s * scales[of_tile][i % 2]) * token_scales[i / 2];
        };
        float value = scaled(kGated ? 2 * t : t);
        if constexpr (kGated)
          value = activate(p.activation, rounded<Y>(value)) * rounded<Y>(scaled(2 * t + 1));
        else if (part.bias != nullptr)
          value += load(static_cast<const Y*>(part.bias) + n);
        store(static_cast<Y*>(part.y) + int64_t{token} * part.out + n, value);
      }
  }
}

template <typename Y, typename S, bool kGated, bool kBlockScales>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    fp8_stream(const __grid_constant__ LinearStreamParams p, const __grid_constant__ StreamMaps maps) {
  extern __shared__ __align__(1024) uint8_t memory[];  // stages
  __shared__ uint64_t barriers[2 * S::kStages];        // full, empty
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_tiles = StreamTiles<S, kGated>::count(p);
  const StreamRing ring = make_ring<S>(memory, barriers, 2);  // both copying threads
  fence_barriers();
  __syncthreads();
  allow_next_kernel();

  if (warp < S::kWarps)
    multiply_fp8_tiles<Y, S, kGated, kBlockScales>(p, ring, num_tiles, warp, lane);
  else if (warp == S::kWarps && lane == 0)
    copy_weights<S, kGated>(p, maps, ring, num_tiles);
  else if (warp > S::kWarps && lane == 0)
    copy_tokens<S>(p, maps.tokens, ring, num_tiles);
}

template <typename Y, typename S, bool kGated>
cudaError_t launch_shape(const LinearStreamParams& p, cudaStream_t stream) {
  StreamMaps maps{};
  const cudaError_t error = make_stream_maps<S, kGated>(maps, p);
  if (error != cudaSuccess) return error;
  const int blocks = std::min(StreamTiles<S, kGated>::count(p), static_cast<int>(p.multiprocessors) * S::kBlocks);
  const auto launch = [&](auto kernel) {
    return launch_overlapped(kernel, dim3(static_cast<unsigned>(blocks)), S::kThreads, S::kSharedBytes, stream, p,
                             maps);
  };
  return p.scaling == WeightScaling::blocks ? launch(fp8_stream<Y, S, kGated, true>)
                                            : launch(fp8_stream<Y, S, kGated, false>);
}

// Tiles of 16 rows where they spread the weight more evenly. Each reads the tokens, so they must be few.
template <typename Y, typename Narrow, typename Wide, bool kGated>
cudaError_t launch_even(const LinearStreamParams& p, cudaStream_t stream) {
  if constexpr (!kGated)
    if (most_rows<Narrow>(p) <= most_rows<Wide>(p)) return launch_shape<Y, Narrow, false>(p, stream);
  return launch_shape<Y, Wide, kGated>(p, stream);
}

// Two blocks share a multiprocessor, so that one adds and stores while the other multiplies, unless their rings would
// be too short.
template <typename Y, bool kGated>
cudaError_t launch_rows(const LinearStreamParams& p, cudaStream_t stream) {
  if (p.tokens <= 8) return launch_even<Y, Fp8Shape<16, 8, 8, 2>, Fp8Shape<32, 8, 5, 2>, kGated>(p, stream);
  if (p.tokens <= 16) return launch_even<Y, Fp8Shape<16, 16, 6, 2>, Fp8Shape<32, 16, 4, 2>, kGated>(p, stream);
  if (p.tokens <= 32) return launch_even<Y, Fp8Shape<16, 32, 4, 2>, Fp8Shape<32, 32, 3, 2>, kGated>(p, stream);
  return launch_shape<Y, Fp8Shape<32, 64, kGated ? 2 : 4, kGated ? 2 : 1>, kGated>(p, stream);
}

}  // namespace

cudaError_t launch_fp8_stream(const LinearStreamParams& params, cudaStream_t stream) {
  if (params.tokens == 0 || params.parts[0].out == 0) return cudaSuccess;
  if (params.tokens > kLinearStreamMaxTokens || params.in % kFp8Multiple != 0) return cudaErrorInvalidValue;
  LinearStreamParams p = params;
  p.in /= 2;
  if (p.up != nullptr) return launch_rows<bf16_t, true>(p, stream);
  return with_f32_or_bf16(p.y_dtype, [&](auto y) { return launch_rows<decltype(y), false>(p, stream); });
}

}  // namespace eadem::kernels::cuda
