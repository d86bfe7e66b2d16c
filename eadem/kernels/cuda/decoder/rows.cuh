// SPDX-License-Identifier: Apache-2.0
//
// The warps on either side of those that multiply: one kind adds terms to rows, which it gives to all multiprocessors;
// the other collects rows of h from all of them and rounds these for the product down. With weights in e4m3 both do the
// latter.
#pragma once

#include "eadem/kernels/cuda/activation.cuh"
#include "eadem/kernels/cuda/decoder/attention.cuh"
#include "eadem/kernels/cuda/decoder/bf16_products.cuh"
#include "eadem/kernels/cuda/decoder/codes.cuh"
#include "eadem/kernels/cuda/decoder/exchange.cuh"
#include "eadem/kernels/cuda/decoder/float_products.cuh"
#include "eadem/kernels/cuda/decoder/ring.cuh"

namespace eadem::kernels::cuda::decoder {
namespace {

// Eight neighbouring values of a row.
__device__ inline void widen(float (&v)[8], const uint32_t (&d)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v[2 * i] = low_bf16(d[i]), v[2 * i + 1] = high_bf16(d[i]);
}

// By a warp: says that its codes of a step of h are there.
__device__ inline void arrive_at_step(const Place& at, int step) {
  __syncwarp();
  if (at.lane == 0) barrier_arrive(shared_address(at.s.h_ready + step));
}

// By the warps that add and those that round: rounds all of h with one scale. They keep h in registers until they know
// the scale.
// Warp i has every seventh chunk from chunk i on.
template <typename W>
__device__ inline void round_float_row(const Place& at, int layer) {
  constexpr int kWarps = kSumWarps + kRoundWarps, kNum = (kFfnChunks + kWarps - 1) / kWarps, kLargestBarrier = 7;
  static_assert(kWarps == kProductWarps - 1 && kNum == kDownSteps + 1);
  auto& s = shared_of<W>(at);
  const int i = at.warp - kProductWarps;
  uint32_t d[kNum][1][4];
  const auto has_chunk = [&](int n) { return kWarps * (n + 1) <= kFfnChunks || kWarps * n + i < kFfnChunks; };
  uint32_t pair = 0;  // the largest magnitudes of lower and of upper halves of words
#pragma unroll
  for (int n = 0; n < kNum; ++n) {
    if (!has_chunk(n)) continue;
    fetch_chunks(d[n], at, at.p.h, kCountH, worth_looking(kTilesOfChunk, layer), kWarps * n + i, 1,
                 at.epoch + static_cast<uint32_t>(layer) + 1);
#pragma unroll
    for (int k = 0; k < 4; ++k) pair = __vmaxu2(pair, d[n][0][k] & 0x7fff7fffu);
  }
  uint32_t most = __reduce_max_sync(kAllLanes, max(pair & 0xffffu, pair >> 16)) << 16;
  float* largest = s.h_scales + 1;
  if (at.lane == 0) largest[i] = __uint_as_float(most);
  named_barrier_sync(kLargestBarrier, kWarps * kWarp);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) most = max(most, __float_as_uint(largest[w]));
  const float scale = bf16_row_scale(most);
  const Divisor divided(scale);
  if (i == 0 && at.lane == 0) s.h_scales[0] = scale;
#pragma unroll
  for (int n = 0; n < kNum; ++n) {
    if (has_chunk(n)) {
      float v[8];
      widen(v, d[n][0]);
      store_codes(s.h_codes + code_at((kWarps * n + i) * kColumns + at.lane * 8), v, divided);
    }
    // All chunks of step n - 1 come before this warp's next one.
    if (n == 0) continue;
    fence_shared_for_async();
    arrive_at_step(at, n - 1);
  }
}

// Warp i has tile i of each product, and every third pair of gate and up. A lane has a row, whose residual stays in a
// register through all layers. W: the weights.
template <typename W>
class SumWarps {
 public:
  __device__ explicit SumWarps(const Place& at) : at_(at), i_(at.warp - kProductWarps), row_(at.lane % kTileRows) {}

  __device__ void run() {
    const Params& p = at_.p;
    auto& s = shared_of<W>(at_);
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
      const DecoderLayerParams& of = p.layers[layer].of;
      if (i_ < qkv_tiles) {
        int tile = at_.sm + i_ * kSms;
        const DecoderWeight& weight = qkv_weight(of, tile);
        const float row_scale = scale_of(weight, tile * kTileRows + row_);
        guarded_wait(shared_address(s.qkv_ready + i_), parity);
        const float y = sum_terms<W, kHidden>(&s.qkv_terms[i_][0][row_], s.scales[0], row_scale);
        publish_tile(at_, p.qkv, row / 2, qkv_counter(row), y, epoch);
      }
      if (has_tile) {
        const float row_scale = scale_of(of.o, row);
        guarded_wait(shared_address(s.out_ready + i_), parity);
        residual = add(residual, sum_terms<W, kHidden>(&s.out_terms[i_][0][row_], s.scales[1], row_scale));
        publish_tile(at_, p.x_middle, row / 2, kCountMiddle + row / kColumns, residual, epoch);
      }
#pragma unroll 1
      for (int t = i_; t < pairs; t += kSumWarps) {  // lanes 0 to 15 have gate, the others up
        const int h = pair_at(at_.sm, t) * kTileRows + row_, of_pair = at_.lane / kTileRows;
        const float row_scale = scale_of(of_pair == 0 ? of.gate : of.up, h);
        guarded_wait(shared_address(s.gate_up_ready + t), parity);
        const float y =
            rounded<bf16_t>(sum_terms<W, kHidden>(&s.gate_up_terms[t][of_pair][0][row_], s.scales[2], row_scale));
        const float up = __shfl_down_sync(kAllLanes, y, 16);
        publish_tile(at_, p.h, h / 2, kCountH + h / kColumns, activate(ActivationKind::silu, y) * up, epoch);
      }
      if constexpr (W::kIsFloat) round_float_row<W>(at_, layer);
      if (has_tile) {
        const float row_scale = scale_of(of.down, row);
        guarded_wait(shared_address(&s.down_ready), parity);
        residual = add(residual, sum_terms<W, kFfn>(&s.down_terms[i_][0][row_], s.h_scales, row_scale));
        publish_tile(at_, p.x_words, row / 2, kCountX + row / kColumns, residual, epoch);
      }
    }
    if (has_tile && at_.lane < kTileRows) p.y[row] = __float2bfloat16_rn(residual);
  }

 private:
  // The scale of a row of a weight in e4m3; other weights have none.
  __device__ static float scale_of(const DecoderWeight& weight, int row) {
    return W::kIsFloat ? __ldg(weight.scales + row) : 0.0f;
  }
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
#pragma unroll 1
    for (int layer = 0; layer < at_.p.num_layers; ++layer) {
      const uint32_t epoch = at_.epoch + static_cast<uint32_t>(layer) + 1;
      if (at_.sm < kMergeSms) merge_splits(at_, i_, layer, epoch);
      if constexpr (W::kIsFloat)
        round_float_row<W>(at_, layer);
      else
        round_chunks_of_h(layer, epoch);
    }
  }

 private:
  __device__ void round_chunks_of_h(int layer, uint32_t epoch) const {
    auto& s = shared_of<W>(at_);
#pragma unroll 1
    for (int step = 0; step < kDownSteps; ++step) {
      const int c = kProductWarps * step + i_;
      uint32_t d[2][4];
      fetch_chunks(d, at_, at_.p.h, kCountH, worth_looking(kTilesOfChunk, layer), c, kRoundWarps, epoch);
      if constexpr (W::kIsBf16) {
#pragma unroll
        for (int n = 0; n < 2; ++n) store_bf16(s.h_codes, (c + n * kRoundWarps) * kColumns + at_.lane * 8, d[n]);
      } else {
        round_two(c, d);
      }
      arrive_at_step(at_, step);
    }
  }
  // Chunks c and c + 4.
  __device__ void round_two(int c, const uint32_t (&d)[2][4]) const {
    auto& s = shared_of<W>(at_);
    float v[2][8], scales[2];
    int sums[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) widen(v[n], d[n]);
    uint8_t* to[2] = {s.h_codes + c * kColumns, s.h_codes + (c + kRoundWarps) * kColumns};
    round_chunks(to, scales, sums, v, at_.lane);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (at_.lane == 0) s.h_scales[c + n * kRoundWarps] = scales[n];
      typename W::Sums(sums[n], at_.lane).store(s.h_sums[c + n * kRoundWarps], at_.lane);
    }
  }

  const Place& at_;
  int i_;
};

}  // namespace
}  // namespace eadem::kernels::cuda::decoder
