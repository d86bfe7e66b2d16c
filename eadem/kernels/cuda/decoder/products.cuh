// SPDX-License-Identifier: Apache-2.0
//
// The warps that multiply. Each computes norms and codes for itself: warp w has chunk w of a row, and w + 8 of a longer
// one, and multiplies what the ring brings by them, or with weights in e4m3 by the whole row; with weights in bf16 it
// multiplies a tile of its own by the whole row. Terms go to shared memory, for the warps that add.
#pragma once

#include "eadem/kernels/cuda/decoder/attention.cuh"
#include "eadem/kernels/cuda/decoder/bf16_products.cuh"
#include "eadem/kernels/cuda/decoder/codes.cuh"
#include "eadem/kernels/cuda/decoder/exchange.cuh"
#include "eadem/kernels/cuda/decoder/float_products.cuh"
#include "eadem/kernels/cuda/decoder/ring.cuh"

namespace eadem::kernels::cuda::decoder {
namespace {

// W: the weights.
template <typename W>
class ProductWarps {
 public:
  __device__ explicit ProductWarps(const Place& at)
      : at_(at),
        ring_(at),
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
        Factors x[kRowChunks];
        round_row(x, op, layer, epoch);
        // From here on most warps wait for weights.
        if (op == kGateUp && is_first_thread()) ring_.set_window(at_.p.wide);
        if constexpr (W::kIsBf16)
          multiply_own_tile(op);
        else
          multiply_tiles(op, layer, x);
        if (op == kQkv) attend(layer, epoch);
      }
      multiply_down(layer);
    }
    // All multiprocessors have given values of h by now, for which they have read the number of launches.
    if (at_.sm == 0 && is_first_thread()) ++*at_.p.launches;
  }

 private:
  using Factors = typename W::Factors;

  __device__ static float4 add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

  enum Op : int { kQkv, kOut, kGateUp };  // those of rows of kHidden

  __device__ bool is_first_thread() const { return at_.warp == 0 && at_.lane == 0; }

  __device__ void attend(int layer, uint32_t epoch) {
    const int first = first_item(at_.sm);
    // A warp without a tile comes early, and would take the slot before in the same place for that of keys (Bf16).
    if (W::kIsBf16 && first < at_.items()) sync_product_warps();
    for (int item = first; item < at_.items(); item += kSms, slot_ += 2 * kSplitSlots)
      SplitAttention<W>(at_, Item(item)).run(layer, slot_, epoch);
  }

  // This warp's chunks of the input of a product, normalized if it has a norm, as codes.
  __device__ void round_row(Factors (&x)[kRowChunks], int op, int layer, uint32_t epoch) {
    const Params& p = at_.p;
    Shared& s = at_.s;
    const int warp = at_.warp, lane = at_.lane;
    const bool normed = op != kOut;
    // 1. The weights of the norm, then the row.
    float norm[kRowChunks][8] = {};
    if (normed) {
      const DecoderLayerParams& of = p.layers[layer].of;
      const float* from = (op == kQkv ? of.norm : of.mlp_norm) + warp * kColumns + lane * 8;
#pragma unroll
      for (int k = 0; k < kRowChunks; ++k) load_vector(norm[k], from + k * kProductWarps * kColumns);
    }
    uint32_t d[kRowChunks][4];
    fetch_chunks(d, at_,
                 op == kQkv   ? p.x_words
                 : op == kOut ? p.attended
                              : p.x_middle,
                 op == kQkv   ? kCountX
                 : op == kOut ? kCountAttended
                              : kCountMiddle,
                 worth_looking(op == kOut ? kMergesOfChunk : kTilesOfChunk, layer), warp, kProductWarps,
                 op == kQkv ? epoch - 1 : epoch);
    // 2. The row's scale by its norm: sums of chunks, then of the row, in the order of rms_norm_rows (norm.cu) and its
    // block_sum.
    float scale = 1.0f;
    if (normed) {
      float squares[kRowChunks] = {};
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int k = 0; k < kRowChunks; ++k) {
          squares[k] = fmaf(low_bf16(d[k][n]), low_bf16(d[k][n]), squares[k]);
          squares[k] = fmaf(high_bf16(d[k][n]), high_bf16(d[k][n]), squares[k]);
        }
#pragma unroll
      for (int k = 0; k < kRowChunks; ++k) {
        squares[k] = warp_reduce(squares[k], Sum{});
        if (lane == 0) s.squares[op / 2][warp + k * kProductWarps] = squares[k];
      }
      sync_product_warps();
      float4 sums[kChunks / 4];
#pragma unroll
      for (int c = 0; c < kChunks / 4; ++c) sums[c] = reinterpret_cast<const float4*>(s.squares[op / 2])[c];
#pragma unroll
      for (int half = kChunks / 8; half > 0; half /= 2)
#pragma unroll
        for (int c = 0; c < half; ++c) sums[c] = add(sums[c], sums[c + half]);
      const float4 sum = sums[0];
      const float mean = ((sum.x + sum.z) + (sum.y + sum.w)) / static_cast<float>(kHidden);
      scale = 1.0f / sqrtf(mean + (op == kQkv ? p.eps : p.mlp_eps));
    }
    // 3. Codes.
    float v[kRowChunks][8];
#pragma unroll
    for (int n = 0; n < kRowChunks; ++n)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[n][i] = i % 2 == 0 ? low_bf16(d[n][i / 2]) : high_bf16(d[n][i / 2]);
        if (normed) v[n][i] = rounded<bf16_t>(v[n][i] * scale * norm[n][i]);
      }
    if constexpr (W::kIsBf16)
      store_values(v);
    else if constexpr (W::kIsFloat)
      store_float_codes(v, op);
    else
      store_chunk_codes(x, v, op);
  }

  // The row as it is, of which each warp has a part. The row before may be read until all warps are here.
  __device__ void store_values(const float (&v)[kRowChunks][8]) {
    auto& s = shared_of<W>(at_);
    sync_product_warps();
#pragma unroll
    for (int n = 0; n < kRowChunks; ++n) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = pack_bf16(v[n][2 * i], v[n][2 * i + 1]);
      store_bf16(s.codes, (at_.warp + n * kProductWarps) * kColumns + at_.lane * 8, pairs);
    }
    sync_product_warps();
  }

  // The row's codes with one scale, of which each warp has a part.
  __device__ void store_float_codes(const float (&v)[kRowChunks][8], int op) {
    auto& s = shared_of<W>(at_);
    const int column = at_.warp * kColumns + at_.lane * 8;
    uint32_t most = 0;
#pragma unroll
    for (int n = 0; n < kRowChunks; ++n) most = largest_magnitude(most, v[n]);
    most = __reduce_max_sync(kAllLanes, most);
    float* largest = s.scales[op] + 1;
    if (at_.lane == 0) largest[at_.warp] = __uint_as_float(most);
    sync_product_warps();
#pragma unroll
    for (int w = 0; w < kProductWarps; ++w) most = max(most, __float_as_uint(largest[w]));
    const float scale = bf16_row_scale(most);
    const Divisor divided(scale);
#pragma unroll
    for (int n = 0; n < kRowChunks; ++n)
      store_codes(s.codes + code_at(column + n * kProductWarps * kColumns), v[n], divided);
    if (is_first_thread()) s.scales[op][0] = scale;
    fence_shared_for_async();
    sync_product_warps();
  }

  // The codes of this warp's chunks.
  __device__ void store_chunk_codes(Factors (&x)[kRowChunks], const float (&v)[kRowChunks][8], int op) {
    auto& s = shared_of<W>(at_);
    const int warp = at_.warp, lane = at_.lane;
    float scales[kRowChunks];
    int sums[kRowChunks];
    uint8_t* codes[kRowChunks];
#pragma unroll
    for (int n = 0; n < kRowChunks; ++n) codes[n] = s.codes + (warp + n * kProductWarps) * kColumns;
    round_chunks(codes, scales, sums, v, lane);
#pragma unroll
    for (int n = 0; n < kRowChunks; ++n) {
      x[n].sums = typename W::Sums(sums[n], lane);
      if (lane == 0) s.scales[op][warp + n * kProductWarps] = scales[n];
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kRowChunks; ++n) x[n].set_codes(codes[n], lane);
  }

  __device__ bool is_six_tile(int op, int layer, int t) const {
    if (!W::kHasSixBits) return false;
    const DecoderLayerParams& of = at_.p.layers[layer].of;
    if (op == kOut) return is_six(of.o);
    if (op == kGateUp) return is_six(t % 2 == 0 ? of.gate : of.up);
    int tile = at_.sm + t * kSms;
    return is_six(qkv_weight(of, tile));
  }

  // What an op of rows of kHidden multiplies: how many tiles, the first barrier that says that their terms are there,
  // and these. Gate and up have a tile each of a pair.
  static constexpr int kNextTile = SharedOf<W>::kTerms * kTileRows;  // to the terms of the next one
  __device__ int tiles_of_op(int op) const { return op == kQkv ? qkv_tiles_ : op == kOut ? tiles_ : 2 * pairs_; }
  __device__ uint32_t ready_of(int op) const {
    const Shared& s = at_.s;
    return shared_address(op == kQkv ? s.qkv_ready : op == kOut ? s.out_ready : s.gate_up_ready);
  }
  __device__ float* terms_of(int op) const {
    auto& s = shared_of<W>(at_);
    return op == kQkv ? &s.qkv_terms[0][0][0] : op == kOut ? &s.out_terms[0][0][0] : &s.gate_up_terms[0][0][0][0];
  }
  // A tile has blocks of all chunks of a row, or slots of e4m3.
  __device__ void multiply_tiles(int op, int layer, const Factors (&x)[kRowChunks]) {
    const int tiles = tiles_of_op(op);
    const uint32_t ready = ready_of(op);
    float* to = terms_of(op) + at_.warp * kTileRows;
#pragma unroll 1
    for (int t = 0; t < tiles; ++t, to += kNextTile) {
      if constexpr (W::kIsFloat) {
        multiply_slots(to, shared_of<W>(at_).codes, kFloatTileSlots);
      } else {
        const bool six = is_six_tile(op, layer, t);
        float* const lane_to = to + at_.lane / 4;
        if (kRowChunks == 1 && op == kGateUp && six == is_six_tile(op, layer, t + 1)) {
          // Two blocks at once, because one would leave the warp waiting.
          multiply_blocks<2>(lane_to, kNextTile, six, x);
          ++t, to += kNextTile;
        } else {
          multiply_blocks<kRowChunks>(lane_to, kProductWarps * kTileRows, six, x);
        }
      }
      if (at_.lane == 0) {
        if (op != kGateUp)
          barrier_arrive(ready + static_cast<uint32_t>(t) * kBarrierBytes);
        else if (t % 2 == 1)
          barrier_arrive(ready + static_cast<uint32_t>(t / 2) * kBarrierBytes);
      }
    }
  }
  // The tile of a weight in bf16 that this warp has, if it has one.
  __device__ void multiply_own_tile(int op) {
    const int tiles = tiles_of_op(op);
    if (at_.warp < tiles) {
      float sum[4] = {};
      multiply_chains(sum, ring_, slot_ + static_cast<uint32_t>(at_.warp), static_cast<uint32_t>(tiles), kBf16TileSlots,
                      shared_of<W>(at_).codes, at_.lane);
      store_chains(terms_of(op) + at_.warp * kNextTile, sum,
                   ready_of(op) + static_cast<uint32_t>(op == kGateUp ? at_.warp / 2 : at_.warp) * kBarrierBytes);
    }
    slot_ += static_cast<uint32_t>(tiles * kBf16TileSlots);
  }
  // The rows of a tile, to `to`; they are what barrier `ready` waits for.
  __device__ void store_chains(float* to, const float (&sum)[4], uint32_t ready) const {
    store_terms(to + at_.lane / 4, {sum[0], sum[2]}, at_.lane);
    __syncwarp();
    if (at_.lane == 0) barrier_arrive(ready);
  }
  // This warp's block of each of `groups` groups of eight, the first of which is in slot `slot_`, times x, or each
  // times its own of them. Terms of a block go `next` further than those of the one before. With fewer groups than
  // kNum the last one is multiplied again.
  template <int kNum, int kFactors>
  __device__ void multiply_blocks(float* to, int next, bool six, const Factors (&x)[kFactors], int groups = kNum) {
    const uint32_t slots = ring_.slots_of(six);
    const uint8_t* blocks[kNum];
#pragma unroll
    for (int n = 0; n < kNum; ++n)
      blocks[n] = ring_.wait_block(slot_ + static_cast<uint32_t>(min(n, groups - 1)) * slots, at_.warp, six);
    float2 terms[kNum];
    multiply<W>(terms, blocks, x, six, at_.lane);
#pragma unroll
    for (int n = 0; n < kNum; ++n) store_terms(to + n * next, terms[n], at_.lane);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kNum; ++n) {
      if (n >= groups) break;
      if (at_.lane == 0) ring_.free_block(slot_, at_.warp, six);
      slot_ += slots;
    }
  }
  // The next `slots` slots of a tile in e4m3. `codes`: of their columns.
  __device__ void multiply_slots(float* to, const uint8_t* codes, int slots) {
#pragma unroll 1
    for (int i = 0; i < slots; ++i, ++slot_, codes += kFloatSlotColumns, to += kProductWarps * kTileRows) {
      const uint8_t* slot = ring_.wait(slot_, at_.warp / (kWarpgroup / kWarp));
      __syncwarp();  // wgmma is for all lanes together
      multiply_floats(to, shared_address(slot), codes, at_.warp, at_.lane);
      __syncwarp();
      if (at_.lane == 0) ring_.free(slot_);
    }
  }

  // Step by step as h comes.
  __device__ void multiply_down(int layer) {
    Shared& s = at_.s;
    [[maybe_unused]] float sum[4] = {};
#pragma unroll 1
    for (int step = 0; step < kDownSteps; ++step) {
      guarded_wait(shared_address(s.h_ready + step), static_cast<uint32_t>(layer) & 1);
      // The next norm comes soon. What is on its way by then should be little.
      if (step == kNarrowStep && is_first_thread()) ring_.set_window(at_.p.narrow);
      if constexpr (W::kIsBf16)
        multiply_bf16_step(sum, step);
      else if constexpr (W::kIsFloat)
        multiply_float_step(step);
      else
        multiply_step(layer, step);
    }
    if constexpr (W::kIsBf16) {
      if (at_.warp == 0) store_chains(shared_of<W>(at_).down_terms[0][0], sum, shared_address(&s.down_ready));
    } else {
      if (at_.lane == 0) barrier_arrive(shared_address(&s.down_ready));
    }
  }
  // The first warp has the tile, if there is one.
  __device__ void multiply_bf16_step(float (&sum)[4], int step) {
    if (tiles_ == 0) return;
    if (at_.warp == 0)
      multiply_chains(sum, ring_, slot_, 1, kBf16StepSlots,
                      shared_of<W>(at_).h_codes + step * kBf16StepSlots * kRowSlotBytes, at_.lane);
    slot_ += kBf16StepSlots;
  }
  // Chunk 8 step + warp of all tiles.
  __device__ void multiply_step(int layer, int step) {
    if (tiles_ == 0) return;
    auto& s = shared_of<W>(at_);
    const int c = kProductWarps * step + at_.warp;
    Factors x[1];
    x[0].set_codes(s.h_codes + c * kColumns, at_.lane), x[0].sums.load(s.h_sums[c], at_.lane);
    multiply_blocks<kMostTiles>(&s.down_terms[0][c][at_.lane / 4], kFfnChunks * kTileRows,
                                W::kHasSixBits && is_six(at_.p.layers[layer].of.down), x, tiles_);
  }
  __device__ void multiply_float_step(int step) {
    auto& s = shared_of<W>(at_);
    const int first = step * kFloatStepSlots;
    for (int t = 0; t < tiles_; ++t)
      multiply_slots(s.down_terms[t][first * kProductWarps + at_.warp], s.h_codes + first * kFloatSlotColumns,
                     kFloatStepSlots);
  }

  static constexpr int kNarrowStep = kDownSteps - 2;

  const Place& at_;
  Ring<W> ring_;
  int qkv_tiles_, tiles_, pairs_;
  uint32_t slot_ = 0;  // the next one
};

}  // namespace
}  // namespace eadem::kernels::cuda::decoder
