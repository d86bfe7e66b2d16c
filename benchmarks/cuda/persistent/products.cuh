// SPDX-License-Identifier: Apache-2.0
//
// The warps that multiply. Each computes norms and codes for itself: warp w has chunks w and w + 8 of a row, and
// multiplies what the ring brings by them. Terms go to shared memory, for the warps that add.
#pragma once

#include "benchmarks/cuda/persistent/attention.cuh"
#include "benchmarks/cuda/persistent/codes.cuh"
#include "benchmarks/cuda/persistent/exchange.cuh"
#include "benchmarks/cuda/persistent/ring.cuh"

namespace eadem::persistent {

class ProductWarps {
 public:
  __device__ explicit ProductWarps(const Place& at)
      : at_(at),
        ring_(at.s),
        qkv_tiles_(tiles_of(kQkvTiles, at.sm)),
        tiles_(tiles_of(kTiles, at.sm)),
        pairs_(pairs_of(at.sm)) {}

  __device__ void run() {
#pragma unroll 1
    for (int layer = 0; layer < at_.p.layers; ++layer) {
      const uint32_t epoch = at_.p.epoch + static_cast<uint32_t>(layer) + 1;
      // One loop, so that the code of the three products stands once in the instruction cache.
#pragma unroll 1
      for (int op = kQkv; op <= kGateUp; ++op) {
        Fragments x[2];
        round_row(x, op, layer, epoch);
        // From here on most warps wait for weights.
        if (op == kGateUp && is_first_thread()) ring_.set_window(at_.p.wide);
        multiply_tiles(op, x);
        if (op == kQkv && item_of(at_.sm) < kItems) {
          SplitAttention(at_).run(layer, slot_, epoch);
          slot_ += 2 * kSplitSlots;
        }
      }
      multiply_down(layer);
    }
  }

  // Frees what the ring brings without a look at it.
  __device__ void drain() {
    if (is_first_thread()) ring_.set_window(at_.p.wide);
    const int of_layer = 2 * qkv_tiles_ + 2 * tiles_ + 4 * pairs_ + kDownSteps * tiles_;
    for (int i = 0; i < at_.p.layers * of_layer; ++i, ++slot_) {
      ring_.wait(slot_, part());
      __syncwarp();
      if (at_.lane == 0) ring_.free(slot_);
    }
  }

 private:
  enum Op : int { kQkv, kOut, kGateUp };  // those of rows of kHidden

  __device__ bool is_first_thread() const { return at_.warp == 0 && at_.lane == 0; }
  // The part of a slot with this warp's block, and the block in a slot.
  __device__ int part() const { return at_.warp * kSlotParts / kProductWarps; }
  __device__ const uint8_t* wait_block(uint32_t slot) const {
    return ring_.wait(slot, part()) + at_.warp * kBlockBytes;
  }

  // This warp's chunks of the input of a product, normalized if it has a norm, as codes.
  __device__ void round_row(Fragments (&x)[2], int op, int layer, uint32_t epoch) {
    const Params& p = at_.p;
    Shared& s = at_.s;
    const int warp = at_.warp, lane = at_.lane;
    const bool normed = op != kOut;
    // 1. The weights of the norm, then the row.
    uint4 norm[2] = {};
    if (normed) {
      const auto* from = reinterpret_cast<const uint4*>(p.norms + (int64_t{layer} * 2 + op / 2) * kHidden);
      norm[0] = __ldg(from + warp * 32 + lane), norm[1] = __ldg(from + (warp + 8) * 32 + lane);
    }
    const uint32_t layers = static_cast<uint32_t>(layer) + 1;
    uint32_t d[2][4];
    fetch_chunks(d, at_,
                 op == kQkv   ? p.x
                 : op == kOut ? p.attended
                              : p.x_middle,
                 op == kQkv   ? kCountX
                 : op == kOut ? kCountAttended
                              : kCountMiddle,
                 (op == kOut ? kMergesOfChunk : kTilesOfChunk) * layers, warp, kProductWarps,
                 op == kQkv ? epoch - 1 : epoch);
    // 2. The row's scale by its norm.
    float scale = 1.0f;
    if (normed) {
      float squares[2] = {};
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          squares[k] = fmaf(low_bf16(d[k][n]), low_bf16(d[k][n]), squares[k]);
          squares[k] = fmaf(high_bf16(d[k][n]), high_bf16(d[k][n]), squares[k]);
        }
      float sum = squares[0] + squares[1];
#pragma unroll
      for (int m = 16; m > 0; m /= 2) sum += __shfl_xor_sync(kAllLanes, sum, m);
      if (lane == 0) s.squares[op / 2][warp] = sum;
      sync_product_warps();
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kProductWarps; ++w) total += s.squares[op / 2][w];
      scale = rsqrtf(total * (1.0f / kHidden) + kEpsilon);
    }
    // 3. Codes.
    float v[2][8], scales[2];
    int2 half_sums[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t pairs[4] = {norm[n].x, norm[n].y, norm[n].z, norm[n].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float &low = v[n][2 * i], &high = v[n][2 * i + 1];
        low = low_bf16(d[n][i]), high = high_bf16(d[n][i]);
        if (normed) {
          low = round_bf16(low * scale * low_bf16(pairs[i]));
          high = round_bf16(high * scale * high_bf16(pairs[i]));
        }
      }
    }
    uint8_t* codes[2] = {s.codes + warp * kChunk, s.codes + (warp + kProductWarps) * kChunk};
    round_chunks(codes, scales, half_sums, v, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      x[n].half_sums = half_sums[n];
      if (lane == 0) s.scales[op][warp + n * kProductWarps] = scales[n];
    }
    __syncwarp();
    x[0].load(codes[0], lane), x[1].load(codes[1], lane);
  }

  // A tile has two slots, and gate and up have a tile each of a pair.
  __device__ void multiply_tiles(int op, const Fragments (&x)[2]) {
    Shared& s = at_.s;
    const int tiles = op == kQkv ? qkv_tiles_ : op == kOut ? tiles_ : 2 * pairs_;
    const uint32_t ready = shared_address(op == kQkv ? s.qkv_ready : op == kOut ? s.out_ready : s.gate_up_ready);
    float* to = op == kQkv ? &s.qkv_terms[0][0][0] : op == kOut ? &s.out_terms[0][0][0] : &s.gate_up_terms[0][0][0][0];
    to += at_.warp * kTileRows + at_.lane / 4;
#pragma unroll 1
    for (int t = 0; t < tiles; ++t) {
      const uint8_t *block0 = wait_block(slot_), *block1 = wait_block(slot_ + 1);
      const float2 terms0 = multiply(block0, x[0], at_.lane), terms1 = multiply(block1, x[1], at_.lane);
      store_terms(to, terms0, at_.lane), store_terms(to + kProductWarps * kTileRows, terms1, at_.lane);
      __syncwarp();
      if (at_.lane == 0) {
        ring_.free(slot_), ring_.free(slot_ + 1);
        if (op != kGateUp)
          barrier_arrive(ready + static_cast<uint32_t>(t) * kBarrierBytes);
        else if (t % 2 == 1)
          barrier_arrive(ready + static_cast<uint32_t>(t / 2) * kBarrierBytes);
      }
      to += kChunks * kTileRows, slot_ += 2;
    }
  }

  // Step by step as h comes: chunk 8 step + warp of both tiles. Who has one tile computes it twice.
  __device__ void multiply_down(int layer) {
    Shared& s = at_.s;
    const uint32_t h_ready = shared_address(s.h_ready);
    float* to = &s.down_terms[0][0][0] + at_.warp * kTileRows + at_.lane / 4;
#pragma unroll 1
    for (int step = 0; step < kDownSteps; ++step) {
      const int c = kProductWarps * step + at_.warp;
      guarded_wait(h_ready + static_cast<uint32_t>(step) * kBarrierBytes, static_cast<uint32_t>(layer) & 1);
      // The next norm comes soon. What is on its way by then should be little.
      if (step == kNarrowStep && is_first_thread()) ring_.set_window(at_.p.narrow);
      Fragments x;
      x.load(s.h_codes + c * kChunk, at_.lane), x.half_sums = s.h_sums[c];
      const uint32_t second = tiles_ == 2 ? slot_ + 1 : slot_;
      const uint8_t *block0 = wait_block(slot_), *block1 = wait_block(second);
      const float2 terms0 = multiply(block0, x, at_.lane), terms1 = multiply(block1, x, at_.lane);
      store_terms(to, terms0, at_.lane), store_terms(to + kFfnChunks * kTileRows, terms1, at_.lane);
      __syncwarp();
      if (at_.lane == 0) {
        ring_.free(slot_);
        if (tiles_ == 2) ring_.free(second);
        if (step == kDownSteps - 1) barrier_arrive(shared_address(&s.down_ready));
      }
      to += kProductWarps * kTileRows, slot_ += static_cast<uint32_t>(tiles_);
    }
  }

  static constexpr int kNarrowStep = 5;

  const Place& at_;
  Ring ring_;
  int qkv_tiles_, tiles_, pairs_;
  uint32_t slot_ = 0;  // the next one
};

}  // namespace eadem::persistent
