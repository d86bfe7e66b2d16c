// SPDX-License-Identifier: Apache-2.0
//
// The warps that multiply. Each computes norms and codes for itself: warp w has chunks w and w + 8 of a row, and
// multiplies what the ring brings by them, or with weights in e4m3 by the whole row. Terms go to shared memory, for the
// warps that add.
#pragma once

#include "eadem/kernels/cuda/decoder/attention.cuh"
#include "eadem/kernels/cuda/decoder/codes.cuh"
#include "eadem/kernels/cuda/decoder/exchange.cuh"
#include "eadem/kernels/cuda/decoder/float_products.cuh"
#include "eadem/kernels/cuda/decoder/ring.cuh"

namespace eadem::kernels::cuda::decoder {

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
        Factors x[2];
        round_row(x, op, layer, epoch);
        // From here on most warps wait for weights.
        if (op == kGateUp && is_first_thread()) ring_.set_window(at_.p.wide);
        multiply_tiles(op, layer, x);
        if (op == kQkv)
          for (int item = first_item(at_.sm); item < at_.items(); item += kSms, slot_ += 2 * kSplitSlots)
            SplitAttention<W>(at_, Item(item)).run(layer, slot_, epoch);
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

  // This warp's chunks of the input of a product, normalized if it has a norm, as codes.
  __device__ void round_row(Factors (&x)[2], int op, int layer, uint32_t epoch) {
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
    float v[2][8];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[n][i] = i % 2 == 0 ? low_bf16(d[n][i / 2]) : high_bf16(d[n][i / 2]);
        if (normed) v[n][i] = rounded<bf16_t>(v[n][i] * scale * norm[n][i]);
      }
    if constexpr (W::kIsFloat)
      store_float_codes(v, op);
    else
      store_chunk_codes(x, v, op);
  }

  // The row's codes with one scale, of which each warp has a part.
  __device__ void store_float_codes(const float (&v)[2][8], int op) {
    Shared& s = at_.s;
    const int column = at_.warp * kColumns + at_.lane * 8;
    uint32_t most = __reduce_max_sync(kAllLanes, largest_magnitude(largest_magnitude(0, v[0]), v[1]));
    float* largest = s.scales[op] + 1;
    if (at_.lane == 0) largest[at_.warp] = __uint_as_float(most);
    sync_product_warps();
#pragma unroll
    for (int w = 0; w < kProductWarps; ++w) most = max(most, __float_as_uint(largest[w]));
    const float scale = bf16_row_scale(most);
    const Divisor divided(scale);
    store_codes(s.codes + code_at(column), v[0], divided);
    store_codes(s.codes + code_at(column + kProductWarps * kColumns), v[1], divided);
    if (is_first_thread()) s.scales[op][0] = scale;
    fence_shared_for_async();
    sync_product_warps();
  }

  // The codes of this warp's chunks.
  __device__ void store_chunk_codes(Factors (&x)[2], const float (&v)[2][8], int op) {
    Shared& s = at_.s;
    const int warp = at_.warp, lane = at_.lane;
    float scales[2];
    int sums[2];
    uint8_t* codes[2] = {s.codes + warp * kColumns, s.codes + (warp + kProductWarps) * kColumns};
    round_chunks(codes, scales, sums, v, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      x[n].sums = typename W::Sums(sums[n], lane);
      if (lane == 0) s.scales[op][warp + n * kProductWarps] = scales[n];
    }
    __syncwarp();
    x[0].set_codes(codes[0], lane), x[1].set_codes(codes[1], lane);
  }

  __device__ bool is_six_tile(int op, int layer, int t) const {
    if (!W::kHasSixBits) return false;
    const DecoderLayerParams& of = at_.p.layers[layer].of;
    if (op == kOut) return is_six(of.o);
    if (op == kGateUp) return is_six(t % 2 == 0 ? of.gate : of.up);
    int tile = at_.sm + t * kSms;
    return is_six(qkv_weight(of, tile));
  }

  // A tile has blocks of sixteen chunks, or four slots of e4m3, and gate and up have a tile each of a pair.
  __device__ void multiply_tiles(int op, int layer, const Factors (&x)[2]) {
    auto& s = shared_of<W>(at_);
    const int tiles = op == kQkv ? qkv_tiles_ : op == kOut ? tiles_ : 2 * pairs_;
    const uint32_t ready = shared_address(op == kQkv ? s.qkv_ready : op == kOut ? s.out_ready : s.gate_up_ready);
    float* to = op == kQkv ? &s.qkv_terms[0][0][0] : op == kOut ? &s.out_terms[0][0][0] : &s.gate_up_terms[0][0][0][0];
    to += at_.warp * kTileRows;
#pragma unroll 1
    for (int t = 0; t < tiles; ++t, to += s.kTerms * kTileRows) {
      if constexpr (W::kIsFloat)
        multiply_slots(to, s.codes, kFloatTileSlots);
      else
        multiply_chunks(to + at_.lane / 4, is_six_tile(op, layer, t), x);
      if (at_.lane == 0) {
        if (op != kGateUp)
          barrier_arrive(ready + static_cast<uint32_t>(t) * kBarrierBytes);
        else if (t % 2 == 1)
          barrier_arrive(ready + static_cast<uint32_t>(t / 2) * kBarrierBytes);
      }
    }
  }
  __device__ void multiply_chunks(float* to, bool six, const Factors (&x)[2]) {
    const uint32_t second = slot_ + ring_.slots_of(six);
    const uint8_t* const blocks[2] = {ring_.wait_block(slot_, at_.warp, six), ring_.wait_block(second, at_.warp, six)};
    float2 terms[2];
    multiply<W>(terms, blocks, x[0], x[1], six, at_.lane);
    store_terms(to, terms[0], at_.lane), store_terms(to + kProductWarps * kTileRows, terms[1], at_.lane);
    __syncwarp();
    if (at_.lane == 0) ring_.free_block(slot_, at_.warp, six), ring_.free_block(second, at_.warp, six);
    slot_ = second + ring_.slots_of(six);
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
    const uint32_t h_ready = shared_address(s.h_ready);
#pragma unroll 1
    for (int step = 0; step < kDownSteps; ++step) {
      guarded_wait(h_ready + static_cast<uint32_t>(step) * kBarrierBytes, static_cast<uint32_t>(layer) & 1);
      // The next norm comes soon. What is on its way by then should be little.
      if (step == kNarrowStep && is_first_thread()) ring_.set_window(at_.p.narrow);
      if constexpr (W::kIsFloat)
        multiply_float_step(step);
      else
        multiply_step(layer, step);
      if (step == kDownSteps - 1 && at_.lane == 0) barrier_arrive(shared_address(&s.down_ready));
    }
  }
  // Chunk 8 step + warp of both tiles. A multiprocessor with one tile computes it twice.
  __device__ void multiply_step(int layer, int step) {
    auto& s = shared_of<W>(at_);
    const bool six = W::kHasSixBits && is_six(at_.p.layers[layer].of.down);
    const int c = kProductWarps * step + at_.warp;
    Factors x;
    x.set_codes(s.h_codes + c * kColumns, at_.lane), x.sums.load(s.h_sums[c], at_.lane);
    const uint32_t second = tiles_ == 2 ? slot_ + ring_.slots_of(six) : slot_;
    const uint8_t* const blocks[2] = {ring_.wait_block(slot_, at_.warp, six), ring_.wait_block(second, at_.warp, six)};
    float2 terms[2];
    multiply<W>(terms, blocks, x, x, six, at_.lane);
    float* to = &s.down_terms[0][c][at_.lane / 4];
    store_terms(to, terms[0], at_.lane), store_terms(to + kFfnChunks * kTileRows, terms[1], at_.lane);
    __syncwarp();
    if (at_.lane == 0) {
      ring_.free_block(slot_, at_.warp, six);
      if (tiles_ == 2) ring_.free_block(second, at_.warp, six);
    }
    slot_ = second + ring_.slots_of(six);
  }
  __device__ void multiply_float_step(int step) {
    auto& s = shared_of<W>(at_);
    const int first = step * kFloatStepSlots;
    for (int t = 0; t < tiles_; ++t)
      multiply_slots(s.down_terms[t][first * kProductWarps + at_.warp], s.h_codes + first * kFloatSlotColumns,
                     kFloatStepSlots);
  }

  static constexpr int kNarrowStep = 5;

  const Place& at_;
  Ring<W> ring_;
  int qkv_tiles_, tiles_, pairs_;
  uint32_t slot_ = 0;  // the next one
};

}  // namespace eadem::kernels::cuda::decoder
