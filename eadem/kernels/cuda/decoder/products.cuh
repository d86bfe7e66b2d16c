// SPDX-License-Identifier: Apache-2.0
//
// The warps that multiply. Each computes norms and codes for itself: warp w has chunks w and w + 8 of a row, and
// multiplies what the ring brings by them. Terms go to shared memory, for the warps that add.
#pragma once

#include "eadem/kernels/cuda/decoder/attention.cuh"
#include "eadem/kernels/cuda/decoder/codes.cuh"
#include "eadem/kernels/cuda/decoder/exchange.cuh"
#include "eadem/kernels/cuda/decoder/ring.cuh"

namespace eadem::kernels::cuda::decoder {

// W: the weights.
template <typename W>
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
    for (int layer = 0; layer < at_.p.num_layers; ++layer) {
      const uint32_t epoch = at_.epoch + static_cast<uint32_t>(layer) + 1;
      // One loop, so that the code of the three products stands once in the instruction cache.
#pragma unroll 1
      for (int op = kQkv; op <= kGateUp; ++op) {
        Fragments x[2];
        round_row(x, op, layer, epoch);
        // From here on most warps wait for weights.
        if (op == kGateUp && is_first_thread()) ring_.set_window(at_.p.wide);
        multiply_tiles(op, x);
        if (op == kQkv)
          for (int item = first_item(at_.sm); item < at_.items(); item += kSms, slot_ += 2 * kSplitSlots)
            SplitAttention(at_, Item(item)).run(layer, slot_, epoch);
      }
      multiply_down(layer);
    }
    // All multiprocessors have given values of h by now, for which they have read the number of launches.
    if (at_.sm == 0 && is_first_thread()) ++*at_.p.launches;
  }

 private:
  __device__ static float4 add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

  enum Op : int { kQkv, kOut, kGateUp };  // those of rows of kHidden

  __device__ bool is_first_thread() const { return at_.warp == 0 && at_.lane == 0; }
  // The part of a slot with this warp's block, and the block in a slot.
  __device__ int part() const { return at_.warp * kSlotParts / kProductWarps; }
  __device__ const uint8_t* wait_block(uint32_t slot) const {
    return ring_.wait(slot, part()) + at_.warp * W::kBlockBytes;
  }

  // This warp's chunks of the input of a product, normalized if it has a norm, as codes.
  __device__ void round_row(Fragments (&x)[2], int op, int layer, uint32_t epoch) {
    const Params& p = at_.p;
    Shared& s = at_.s;
    const int warp = at_.warp, lane = at_.lane;
    const bool normed = op != kOut;
    // 1. The weights of the norm, then the row.
    float norm[2][8] = {};
    if (normed) {
      const DecoderLayerParams& of = p.layers[layer].of;
      const float* from = (op == kQkv ? of.norm : of.mlp_norm) + warp * kColumns + lane * 8;
      load_vector(norm[0], from), load_vector(norm[1], from + kProductWarps * kColumns);
    }
    const uint32_t layers = static_cast<uint32_t>(layer) + 1;
    uint32_t d[2][4];
    fetch_chunks(d, at_,
                 op == kQkv   ? p.x_words
                 : op == kOut ? p.attended
                              : p.x_middle,
                 op == kQkv   ? kCountX
                 : op == kOut ? kCountAttended
                              : kCountMiddle,
                 (op == kOut ? kMergesOfChunk : kTilesOfChunk) * layers, warp, kProductWarps,
                 op == kQkv ? epoch - 1 : epoch);
    // 2. The row's scale by its norm: sums of chunks, then of the row, in the order of rms_norm_rows (norm.cu) and its
    // block_sum.
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
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        squares[k] = warp_reduce(squares[k], Sum{});
        if (lane == 0) s.squares[op / 2][warp + k * kProductWarps] = squares[k];
      }
      sync_product_warps();
      float4 sums[kChunks / 4];
#pragma unroll
      for (int c = 0; c < kChunks / 4; ++c) sums[c] = reinterpret_cast<const float4*>(s.squares[op / 2])[c];
      const float4 sum = add(add(sums[0], sums[2]), add(sums[1], sums[3]));
      const float mean = ((sum.x + sum.z) + (sum.y + sum.w)) / static_cast<float>(kHidden);
      scale = 1.0f / sqrtf(mean + (op == kQkv ? p.eps : p.mlp_eps));
    }
    // 3. Codes.
    float v[2][8], scales[2];
    int2 half_sums[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[n][i] = i % 2 == 0 ? low_bf16(d[n][i / 2]) : high_bf16(d[n][i / 2]);
        if (normed) v[n][i] = rounded<bf16_t>(v[n][i] * scale * norm[n][i]);
      }
    uint8_t* codes[2] = {s.codes + warp * kColumns, s.codes + (warp + kProductWarps) * kColumns};
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
      const float2 terms0 = multiply<W>(block0, x[0], at_.lane), terms1 = multiply<W>(block1, x[1], at_.lane);
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

  // Step by step as h comes: chunk 8 step + warp of both tiles. A multiprocessor with one tile computes it
  // twice.
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
      x.load(s.h_codes + c * kColumns, at_.lane), x.half_sums = s.h_sums[c];
      const uint32_t second = tiles_ == 2 ? slot_ + 1 : slot_;
      const uint8_t *block0 = wait_block(slot_), *block1 = wait_block(second);
      const float2 terms0 = multiply<W>(block0, x, at_.lane), terms1 = multiply<W>(block1, x, at_.lane);
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

}  // namespace eadem::kernels::cuda::decoder
