// SPDX-License-Identifier: Apache-2.0
//
// Products of many rows of 8-bit codes with codes of four bits in groups, with the bits of integer_stream.cu. A warp
// makes bytes, code minus zero point, of the 16 rows it multiplies; wgmma multiplies integers, a chain for each half of
// a chunk. While one warpgroup scales and adds, the products of the other run.
#include "eadem/kernels/cuda/linear/integer_tiles.cuh"

namespace eadem::kernels::cuda {

namespace {

using namespace tiles;

template <typename Y, typename S, bool kKnown>
__device__ inline void multiply_bytes(const LinearStreamParams& p, const FragmentLayout& layout, const Memory& memory,
                                      int num_chunks, int rank, int warp, int lane) {
  // So many tokens are multiplied at once. Beside the sums there are no registers for the chains of more.
  constexpr int kAtOnce = 64;
  const int group = warp / (kWarpgroup / kWarp);
  const int row_block = S::row_block(warp), group_token = S::first_token(group);
  const Tiles<S> tiles(p);
  RingPlace<S::kStages> place;
  RingPlace<kSlots> slot_place;
  float sum[S::kTokenTiles][4];
  int chain[2][kAtOnce / 8][4];  // of both halves of a chunk
  uint32_t a[2][kHalfSteps][4];
  float scale[2][2];
  const uint32_t left = address_in_block(memory.ring.empty, lane % kPair);
  // Waits for the chunk at `slot_place`, and decodes the rows of this warp.
  const auto decode = [&] {
    barrier_wait(memory.slot_ring.full_at(slot_place.stage), slot_place.parity);
    const uint8_t* const block =
        memory.slots + slot_place.stage * S::kSlotBytes + S::kSumBytes + S::kScaleBytes + row_block * S::kBlockBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const GroupScales scales = scales_of_half<kKnown>(layout, block, half, lane);
      scale[half][0] = scales.scale[0], scale[half][1] = scales.scale[1];
      decode_half(a[half], block, half, scales, lane);
    }
  };
  decode();
  for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
#pragma unroll
    for (int t = 0; t < S::kTokenTiles; ++t) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.0f;
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      const int slot = slot_place.stage;
      const float scales[2][2] = {{scale[0][0], scale[0][1]}, {scale[1][0], scale[1][1]}};
      int stages[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        barrier_wait(memory.ring.full_at(place.stage), place.parity);
        stages[half] = place.stage;
        place.advance();
      }
#pragma unroll
      for (int first = 0; first < S::kGroupTokens; first += kAtOnce) {
        wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Operand tokens(memory.stages + static_cast<uint32_t>(stages[half]) * S::kStageBytes +
                                   static_cast<uint32_t>(group_token + first) * kPanelRowBytes,
                               0);
#pragma unroll
          for (int step = 0; step < kHalfSteps; ++step)
            wgmma_s8(chain[half], a[half][step], tokens.at(static_cast<uint32_t>(step) * kStepBytes), step > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(chain[0]);
        pin(chain[1]);
        if (first + kAtOnce == S::kGroupTokens) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            arrive_in_cluster(left + static_cast<uint32_t>(stages[half]) * kBarrierBytes, lane < kPair);
          slot_place.advance();
          if (tile + tiles.step() < tiles.count() || chunk + 1 < num_chunks) decode();
        }
        const uint32_t token_scales = shared_address(memory.slots + slot * S::kSlotBytes) + S::kSumBytes +
                                      static_cast<uint32_t>(group_token + first + lane % 4 * 2) * 4;
#pragma unroll
        for (int t = 0; t < kAtOnce / 8; ++t) {
          const float2 token_scale = load_f32x2(token_scales + t * 32);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float u = __fmul_rn(static_cast<float>(chain[0][t][i]), scales[0][i / 2]);
            float& to = sum[first / 8 + t][i];
            to = fmaf(fmaf(static_cast<float>(chain[1][t][i]), scales[1][i / 2], u),
                      i % 2 == 0 ? token_scale.x : token_scale.y, to);
          }
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(memory.slot_ring.empty_at(slot));
    }
    wait_for_earlier_kernels();
    store_outputs<Y>(p.parts[0], p.tokens, sum, tiles.token_of(tile) + group_token,
                     tiles.output_of(tile, rank) + row_block * kFragmentBlockRows, lane);
  }
}

template <bool kWide, int kTokens>
struct GroupTiles : Shape<IntegerCodes::groups, kWide, kTokens> {
  template <typename Y>
  __device__ static void multiply(const LinearStreamParams& p, const FragmentLayout& layout, const Memory& memory,
                                  int num_chunks, int rank, int warp, int lane) {
    if (layout.known == kGroupLayout)
      multiply_bytes<Y, GroupTiles, true>(p, layout, memory, num_chunks, rank, warp, lane);
    else
      multiply_bytes<Y, GroupTiles, false>(p, layout, memory, num_chunks, rank, warp, lane);
  }
};

}  // namespace

cudaError_t launch_integer_group_tiles(const PackedStreamParams& packed, cudaStream_t stream) {
  return with_f32_or_bf16(packed.product.y_dtype,
                          [&](auto y) { return launch_tiles<decltype(y), GroupTiles>(packed, stream); });
}

}  // namespace eadem::kernels::cuda
