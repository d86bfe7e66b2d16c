// SPDX-License-Identifier: Apache-2.0
//
// Products of many rows of 8-bit codes with K-quants, with the bits of integer_stream.cu. A warp decodes the 16 rows it
// multiplies into fragments of f16, codes times their sub-scales; wgmma multiplies them with the codes of the tokens,
// which lie in shared memory as f16. The warpgroups multiply a chunk of 256 columns in turns.
#include "eadem/kernels/cuda/linear/integer_tiles.cuh"

namespace eadem::kernels::cuda {

namespace {

using namespace tiles;

constexpr int kFirstTurn = 1;  // the named barrier of the first warpgroup's turns

// By a warp of those that multiply: decodes, multiplies and stores its rows of this block's tiles.
template <typename Y, typename S>
__device__ inline void multiply_halves(const LinearStreamParams& p, const Memory& memory, int num_chunks, int rank,
                                       int warp, int lane) {
  constexpr int kPanels = S::kPanels, kStagePanels = S::kStagePanels;
  const int group = warp / (kWarpgroup / kWarp);
  const int row_block = S::row_block(warp), group_token = S::first_token(group);
  const Tiles<S> tiles(p);
  RingPlace<S::kStages> place;
  RingPlace<kSlots> slot_place;
  float sum[S::kTokenTiles][4], chain[S::kTokenTiles][4];
  uint32_t a[2][2][4];  // of two batches of products
  const uint32_t left = address_in_block(memory.ring.empty, lane % kPair);
  const auto leave = [&](int stage) {
    arrive_in_cluster(left + static_cast<uint32_t>(stage) * kBarrierBytes, lane < kPair);
  };
  const auto last_of_all = [&](int tile, int chunk) {
    return tile + tiles.step() >= tiles.count() && chunk + 1 == num_chunks;
  };
  if (group == 1) named_barrier_arrive(kFirstTurn, kWarpgroups * kWarpgroup);
  for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
#pragma unroll
    for (int t = 0; t < S::kTokenTiles; ++t) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.0f;
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      constexpr int kBatches = 2 * kPanels;
      const uint8_t* const slot = memory.slots + slot_place.stage * S::kSlotBytes;
      const uint8_t* const block = slot + S::kSumBytes + S::kScaleBytes + row_block * S::kBlockBytes;
      barrier_wait(memory.slot_ring.full_at(slot_place.stage), slot_place.parity);
      float scale[2];
      typename Codes<S::kCodes>::Factors factors;
      uint32_t min[4];
      if constexpr (S::kCodes == IntegerCodes::six) {
        const auto* d = reinterpret_cast<const __half*>(block + kSixBits.scales) + lane / 4;
        scale[0] = __half2float(d[0]) * (1 / kSixUnit), scale[1] = __half2float(d[8]) * (1 / kSixUnit);
      } else {
        const MinScales scales(block, lane);
        scale[0] = scales.row[0].scale * (1 / kUnit), scale[1] = scales.row[1].scale * (1 / kUnit);
        factors = CodeFactors(scales.row[0].factor, scales.row[1].factor);
        load_minimums(min, block, scales, lane);
      }
      int before = 0;  // the stage before
      Codes<S::kCodes> codes(block, 0, lane);
      codes.decode(a[0], 0, factors);
      barrier_wait(memory.ring.full_at(place.stage), place.parity);
      // The warpgroups multiply in turns: while one has the tensor cores, the other scales and adds.
      named_barrier_sync(kFirstTurn + group, kWarpgroups * kWarpgroup);
#pragma unroll
      for (int batch = 0; batch < kBatches; ++batch) {  // of two products, whose fragments the batch before decoded
        const int in_stage = batch / 2 % kStagePanels, half = batch % 2;
        const bool first_of_stage = in_stage == 0 && half == 0, last_of_stage = (batch + 1) % (2 * kStagePanels) == 0;
        if (first_of_stage && batch > 0) barrier_wait(memory.ring.full_at(place.stage), place.parity);
        const Operand tokens((memory.stages + static_cast<uint32_t>(place.stage) * S::kStageBytes) +
                                 static_cast<uint32_t>(in_stage) * S::kPanelBytes +
                                 static_cast<uint32_t>(group_token) * kPanelRowBytes,
                             0);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step)
          wgmma_f16(chain, a[half][step], tokens.at(static_cast<uint32_t>(2 * half + step) * kStepBytes),
                    batch + step > 0);
        if (S::kHasMin && batch == kBatches - 1)
          wgmma_f16(chain, min, narrow_operand(shared_address(slot) + static_cast<uint32_t>(group_token) * 32), true);
        wgmma_commit();
        if (batch + 1 < kBatches) {
          if (half == 1) codes = Codes<S::kCodes>(block, (batch + 1) / 2, lane);
          wgmma_wait<1>();  // the batch before has ended: its fragments, and its stage, are free
          if (first_of_stage && batch > 0) leave(before);
          codes.decode(a[1 - half], 1 - half, factors);
        }
        if (last_of_stage) {
          before = place.stage;
          place.advance();
        }
      }
      if (group == 0 || !last_of_all(tile, chunk))
        named_barrier_arrive(kFirstTurn + 1 - group, kWarpgroups * kWarpgroup);
      wgmma_wait<0>();
      pin(chain);
      leave(before);
      const uint32_t token_scales =
          shared_address(slot) + S::kSumBytes + static_cast<uint32_t>(group_token + lane % 4 * 2) * 4;
#pragma unroll
      for (int t = 0; t < S::kTokenTiles; ++t) {
        const float2 token_scale = load_f32x2(token_scales + t * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sum[t][i] = fmaf(__fmul_rn(chain[t][i], scale[i / 2]), i % 2 == 0 ? token_scale.x : token_scale.y, sum[t][i]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(memory.slot_ring.empty_at(slot_place.stage));
      slot_place.advance();
    }
    wait_for_earlier_kernels();
    store_outputs<Y>(p.parts[0], p.tokens, sum, tiles.token_of(tile) + group_token,
                     tiles.output_of(tile, rank) + row_block * kFragmentBlockRows, lane);
  }
}

template <IntegerCodes kCodes, bool kWide, int kTokens>
struct HalfTiles : Shape<kCodes, kWide, kTokens> {
  template <typename Y>
  __device__ static void multiply(const LinearStreamParams& p, const FragmentLayout&, const Memory& memory,
                                  int num_chunks, int rank, int warp, int lane) {
    multiply_halves<Y, HalfTiles>(p, memory, num_chunks, rank, warp, lane);
  }
};
template <bool kWide, int kTokens>
using FourBitTiles = HalfTiles<IntegerCodes::four, kWide, kTokens>;
template <bool kWide, int kTokens>
using SixBitTiles = HalfTiles<IntegerCodes::six, kWide, kTokens>;

}  // namespace

cudaError_t launch_integer_tiles(const PackedStreamParams& packed, cudaStream_t stream) {
  const LinearStreamParams& p = packed.product;
  if (p.tokens == 0 || p.parts[0].out == 0) return cudaSuccess;
  if (p.tokens <= kIntegerStreamMaxTokens || p.in % kIntegerChunk != 0 || p.up != nullptr) return cudaErrorInvalidValue;
  const int64_t tiles = ceil_div(p.tokens, kIntegerTurnTile) * ceil_div(p.parts[0].out, kIntegerTurnTile);
  if (p.parts[1].out != 0 || tiles <= p.multiprocessors) return launch_integer_turns(packed, stream);
  const IntegerCodes codes = integer_codes_of(packed.layouts[0]);
  if (codes == IntegerCodes::groups) return launch_integer_group_tiles(packed, stream);
  return with_f32_or_bf16(p.y_dtype, [&](auto y) {
    using Y = decltype(y);
    switch (codes) {
      case IntegerCodes::four: return launch_tiles<Y, FourBitTiles>(packed, stream);
      case IntegerCodes::six: return launch_tiles<Y, SixBitTiles>(packed, stream);
      default: return cudaErrorInvalidValue;
    }
  });
}

}  // namespace eadem::kernels::cuda
