// SPDX-License-Identifier: Apache-2.0
//
// The warps on either side of those that multiply: one kind adds terms to rows, which it gives to all multiprocessors;
// the other collects rows of h from all of them and rounds these for the product down.
#pragma once

#include "eadem/kernels/cuda/activation.cuh"
#include "eadem/kernels/cuda/decoder/attention.cuh"
#include "eadem/kernels/cuda/decoder/codes.cuh"
#include "eadem/kernels/cuda/decoder/exchange.cuh"
#include "eadem/kernels/cuda/decoder/ring.cuh"

namespace eadem::kernels::cuda::decoder {

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
      residual = __bfloat162float(p.x[row]);
      publish_tile(at_, p.x_words, row / 2, kCountX + row / kColumns, residual, at_.epoch);
    }
#pragma unroll 1
    for (int layer = 0; layer < p.num_layers; ++layer) {
      const uint32_t epoch = at_.epoch + static_cast<uint32_t>(layer) + 1, parity = static_cast<uint32_t>(layer) & 1;
      if (i_ < qkv_tiles) {
        guarded_wait(shared_address(s.qkv_ready + i_), parity);
        const float y = sum_terms<kChunks>(&s.qkv_terms[i_][0][row_], s.scales[0]);
        publish_tile(at_, p.qkv, row / 2, qkv_counter(row), y, epoch);
      }
      if (has_tile) {
        guarded_wait(shared_address(s.out_ready + i_), parity);
        residual = add(residual, sum_terms<kChunks>(&s.out_terms[i_][0][row_], s.scales[1]));
        publish_tile(at_, p.x_middle, row / 2, kCountMiddle + row / kColumns, residual, epoch);
      }
#pragma unroll 1
      for (int t = i_; t < pairs; t += kSumWarps) {  // lanes 0 to 15 have gate, the others up
        guarded_wait(shared_address(s.gate_up_ready + t), parity);
        const float y = rounded<bf16_t>(sum_terms<kChunks>(&s.gate_up_terms[t][at_.lane / 16][0][row_], s.scales[2]));
        const float up = __shfl_down_sync(kAllLanes, y, 16);
        const int h = pair_at(at_.sm, t) * kTileRows + row_;
        publish_tile(at_, p.h, h / 2, kCountH + h / kColumns, activate(ActivationKind::silu, y) * up, epoch);
      }
      if (has_tile) {
        guarded_wait(shared_address(&s.down_ready), parity);
        residual = add(residual, sum_terms<kFfnChunks>(&s.down_terms[i_][0][row_], s.h_scales));
        publish_tile(at_, p.x_words, row / 2, kCountX + row / kColumns, residual, epoch);
      }
    }
    if (has_tile && at_.lane < kTileRows) p.y[row] = __float2bfloat16_rn(residual);
  }

 private:
  __device__ static float add(float residual, float y) { return rounded<bf16_t>(residual + rounded<bf16_t>(y)); }
  __device__ static int qkv_counter(int row) {
    if (row < kQRows) return kCountQ + row / (2 * kHeadDim);
    if (row < kQRows + kKvRows) return kCountK + (row - kQRows) / kHeadDim;
    return kCountV + (row - kQRows - kKvRows) / kHeadDim;
  }

  const Place& at_;
  int i_, row_;
};

// Warp i has chunks i and i + 4 of each step. W: the weights.
template <typename W>
class RoundWarps {
 public:
  __device__ explicit RoundWarps(const Place& at) : at_(at), i_(at.warp - kProductWarps - kSumWarps) {}

  __device__ void run() {
    Shared& s = at_.s;
    const uint32_t h_ready = shared_address(s.h_ready);
#pragma unroll 1
    for (int layer = 0; layer < at_.p.num_layers; ++layer) {
      const uint32_t epoch = at_.epoch + static_cast<uint32_t>(layer) + 1;
      if (at_.sm < kMergeSms) merge_splits(at_, i_, layer, epoch);
#pragma unroll 1
      for (int step = 0; step < kDownSteps; ++step) {
        const int c = kProductWarps * step + i_;
        uint32_t d[2][4];
        fetch_chunks(d, at_, at_.p.h, kCountH, kTilesOfChunk * (static_cast<uint32_t>(layer) + 1), c, kRoundWarps,
                     epoch);
        float v[2][8], scales[2];
        int sums[2];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) v[n][2 * i] = low_bf16(d[n][i]), v[n][2 * i + 1] = high_bf16(d[n][i]);
        uint8_t* to[2] = {s.h_codes + c * kColumns, s.h_codes + (c + kRoundWarps) * kColumns};
        round_chunks(to, scales, sums, v, at_.lane);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (at_.lane == 0) s.h_scales[c + n * kRoundWarps] = scales[n];
          typename W::Sums(sums[n], at_.lane).store(s.h_sums[c + n * kRoundWarps], at_.lane);
        }
        __syncwarp();
        if (at_.lane == 0) barrier_arrive(h_ready + static_cast<uint32_t>(step) * kBarrierBytes);
      }
    }
  }

 private:
  const Place& at_;
  int i_;
};

}  // namespace eadem::kernels::cuda::decoder
