// SPDX-License-Identifier: Apache-2.0
//
// The warps on either side of those that multiply: one kind adds terms to rows, which it gives to all multiprocessors;
// the other collects rows of h from all of them and rounds these for the product down.
#pragma once

#include "benchmarks/cuda/persistent/attention.cuh"
#include "benchmarks/cuda/persistent/codes.cuh"
#include "benchmarks/cuda/persistent/exchange.cuh"
#include "benchmarks/cuda/persistent/ring.cuh"

namespace eadem::persistent {

__device__ inline float silu(float g) { return g / (1.0f + __expf(-g)); }

// Warp i has tile i of each product, and every third pair of gate and up. A lane has a row, whose residual stays in a
// register through all layers.
class SumWarps {
 public:
  __device__ explicit SumWarps(const Place& at) : at_(at), i_(at.warp - kProductWarps), row_(at.lane % kTileRows) {}

  __device__ void run() {
    const Params& p = at_.p;
    Shared& s = at_.s;
    const int qkv_tiles = tiles_of(kQkvTiles, at_.sm), pairs = pairs_of(at_.sm);
    const bool has_tile = i_ < tiles_of(kTiles, at_.sm);
    const int row = (at_.sm + i_ * kSms) * kTileRows + row_;  // of the whole product
    float residual = 0.0f;
    if (has_tile) {
      residual = __bfloat162float(p.x0[row]);
      publish_tile(at_, p.x, row / 2, kCountX + row / kChunk, residual, p.epoch);
    }
#pragma unroll 1
    for (int layer = 0; layer < p.layers; ++layer) {
      const uint32_t epoch = p.epoch + static_cast<uint32_t>(layer) + 1, parity = static_cast<uint32_t>(layer) & 1;
      if (i_ < qkv_tiles) {
        guarded_wait(shared_address(s.qkv_ready + i_), parity);
        const float y = sum_terms<kChunks>(&s.qkv_terms[i_][0][row_], s.scales[0]);
        publish_tile(at_, p.qkv, row / 2, qkv_counter(row), y, epoch);
      }
      if (has_tile) {
        guarded_wait(shared_address(s.out_ready + i_), parity);
        residual = add(residual, sum_terms<kChunks>(&s.out_terms[i_][0][row_], s.scales[1]));
        publish_tile(at_, p.x_middle, row / 2, kCountMiddle + row / kChunk, residual, epoch);
      }
#pragma unroll 1
      for (int t = i_; t < pairs; t += kSumWarps) {  // lanes 0 to 15 have gate, the others up
        guarded_wait(shared_address(s.gate_up_ready + t), parity);
        const float y = round_bf16(sum_terms<kChunks>(&s.gate_up_terms[t][at_.lane / 16][0][row_], s.scales[2]));
        const float up = __shfl_down_sync(kAllLanes, y, 16);
        const int h = pair_at(at_.sm, t) * kTileRows + row_;
        publish_tile(at_, p.h, h / 2, kCountH + h / kChunk, silu(y) * up, epoch);
      }
      if (has_tile) {
        guarded_wait(shared_address(&s.down_ready), parity);
        residual = add(residual, sum_terms<kFfnChunks>(&s.down_terms[i_][0][row_], s.h_scales));
        publish_tile(at_, p.x, row / 2, kCountX + row / kChunk, residual, epoch);
      }
    }
    if (has_tile && at_.lane < kTileRows) p.x_out[row] = __float2bfloat16_rn(residual);
  }

 private:
  __device__ static float add(float residual, float y) { return round_bf16(residual + round_bf16(y)); }
  __device__ static int qkv_counter(int row) {
    constexpr int kQRows = kHeads * kHeadDim, kKRows = kKvHeads * kHeadDim;
    if (row < kQRows) return kCountQ + row / (2 * kHeadDim);
    if (row < kQRows + kKRows) return kCountK + (row - kQRows) / kHeadDim;
    return kCountV + (row - kQRows - kKRows) / kHeadDim;
  }

  const Place& at_;
  int i_, row_;
};

// Warp i has chunks i and i + 4 of each step.
class RoundWarps {
 public:
  __device__ explicit RoundWarps(const Place& at) : at_(at), i_(at.warp - kProductWarps - kSumWarps) {}

  __device__ void run() {
    Shared& s = at_.s;
    const uint32_t h_ready = shared_address(s.h_ready);
#pragma unroll 1
    for (int layer = 0; layer < at_.p.layers; ++layer) {
      const uint32_t epoch = at_.p.epoch + static_cast<uint32_t>(layer) + 1;
      if (i_ == 0 && at_.sm < kMergeSms) merge_splits(at_, layer, epoch);
#pragma unroll 1
      for (int step = 0; step < kDownSteps; ++step) {
        const int c = kProductWarps * step + i_;
        uint32_t d[2][4];
        fetch_chunks(d, at_, at_.p.h, kCountH, kTilesOfChunk * (static_cast<uint32_t>(layer) + 1), c, kRoundWarps,
                     epoch);
        float v[2][8], scales[2];
        int2 half_sums[2];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) v[n][2 * i] = low_bf16(d[n][i]), v[n][2 * i + 1] = high_bf16(d[n][i]);
        uint8_t* to[2] = {s.h_codes + c * kChunk, s.h_codes + (c + kRoundWarps) * kChunk};
        round_chunks(to, scales, half_sums, v, at_.lane);
#pragma unroll
        for (int n = 0; n < 2; ++n)
          if (at_.lane == 0) s.h_scales[c + n * kRoundWarps] = scales[n], s.h_sums[c + n * kRoundWarps] = half_sums[n];
        __syncwarp();
        if (at_.lane == 0) barrier_arrive(h_ready + static_cast<uint32_t>(step) * kBarrierBytes);
      }
    }
  }

 private:
  const Place& at_;
  int i_;
};

}  // namespace eadem::persistent
