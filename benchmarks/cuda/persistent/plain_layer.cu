// SPDX-License-Identifier: Apache-2.0
//
// A layer by plain kernels: the same values in the same precision, with the same order of sums.
#include <cuda_fp16.h>

#include "benchmarks/cuda/persistent/layers.h"
#include "eadem/kernels/cuda/attention/attention_tiles.cuh"

namespace eadem::persistent {
namespace {

__device__ inline float round_bf16(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }

__device__ inline int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + static_cast<int64_t>(threadIdx.x);
}

// One block of 256 threads, each of which adds 8 columns of chunk `warp` and 8 of chunk `warp` + 8.
__global__ void plain_norm(float* y, const float* x, const __nv_bfloat16* weight) {
  __shared__ float sums[256];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  float squares[2] = {};
  for (int n = 0; n < 2; ++n)
    for (int i = 0; i < 8; ++i) {
      const float v = x[(warp + n * kProductWarps) * kChunk + lane * 8 + i];
      squares[n] = fmaf(v, v, squares[n]);
    }
  sums[thread] = squares[0] + squares[1];
  __syncthreads();
  for (int n = 16; n > 0; n /= 2) {
    if (lane < n) sums[thread] += sums[thread + n];
    __syncthreads();
  }
  float total = 0;
  for (int w = 0; w < kProductWarps; ++w) total += sums[w * 32];
  const float scale = rsqrtf(total * (1.0f / kHidden) + kEpsilon);
  for (int i = thread; i < kHidden; i += 256) y[i] = round_bf16(x[i] * scale * __bfloat162float(weight[i]));
}

// A thread for each chunk; codes in the order of columns.
__global__ void plain_round(int8_t* codes, float* scales, const float* x, int chunks) {
  const int c = static_cast<int>(thread_index());
  if (c >= chunks) return;
  x += c * kChunk, codes += c * kChunk;
  float largest = 0;
  for (int i = 0; i < kChunk; ++i) largest = fmaxf(largest, fabsf(x[i]));
  float levels = 127;
  for (;;) {
    int magnitudes = 0;
    for (int i = 0; i < kChunk; ++i) {
      const int code = __float2int_rn(x[i] * (levels / largest));
      codes[i] = static_cast<int8_t>(code);
      magnitudes += abs(code);
    }
    if (magnitudes <= kMostCodeSum || levels == 63) break;
    levels = 63;
  }
  scales[c] = largest * (1.0f / levels);
}

__device__ inline int code_of(const uint8_t* block, int row, int column) {
  const int piece = column / 64, step = column % 64 / 16, in_step = column % 16;
  const int lane = 4 * (row % 8) + in_step % 8 / 2, byte = in_step / 8 * 2 + in_step % 2;
  const uint8_t codes = block[(piece * 128 + lane * 4 + step) * 4 + byte];
  return row < 8 ? codes & 15 : codes >> 4;
}

// A thread for each chunk of a row of matrix `which` of `matrices`, whose tiles take turns.
__global__ void plain_terms(float* terms, const uint8_t* weight, const int8_t* codes, int rows, int chunks,
                            int matrices, int which) {
  const int64_t i = thread_index();
  if (i >= int64_t{rows} * chunks) return;
  const int row = static_cast<int>(i / chunks), c = static_cast<int>(i % chunks), in_tile = row % kTileRows;
  const uint8_t* block = weight + (int64_t{row / kTileRows * matrices + which} * chunks + c) * kBlockBytes;
  float halves[2];
  for (int half = 0; half < 2; ++half) {
    int sum = 0;
    for (int k = half * 128; k < half * 128 + 128; ++k) sum += (code_of(block, in_tile, k) - 8) * codes[c * kChunk + k];
    halves[half] = static_cast<float>(sum);
  }
  const __half* scales = reinterpret_cast<const __half*>(block + kCodeBytes) + in_tile % 8 * 4 + in_tile / 8;
  terms[i] = fmaf(halves[1], __half2float(scales[2]), __fmul_rn(halves[0], __half2float(scales[0])));
}

// A thread for each row.
__global__ void plain_sum(float* y, const float* terms, const float* scales, int rows, int chunks,
                          const float* residual) {
  const int row = static_cast<int>(thread_index());
  if (row >= rows) return;
  float sum = 0;
  for (int c = 0; c < chunks; ++c) sum = fmaf(terms[int64_t{row} * chunks + c], scales[c], sum);
  y[row] = residual != nullptr ? round_bf16(residual[row] + round_bf16(sum)) : round_bf16(sum);
}

// A warp for each head: what attention_tiles.cuh defines, with nothing in parallel but the lanes of a fragment, whose
// row 0 has the query.
__global__ void plain_attention(float* y, const float* qkv, const __nv_bfloat16* cache, const float2* rope) {
  using namespace kernels::cuda;
  constexpr int kDims = kHeadDim, kHalf = kDims / 2, kStep = 16;
  constexpr float kFactor = 0.08838834764831845f * kLog2E;
  const int head = static_cast<int>(blockIdx.x), kv = head / kGroup, lane = static_cast<int>(threadIdx.x);
  __shared__ float q[kDims], new_key[kDims], scores[kKeys];
  const float* new_value = qkv + (kHeads + kKvHeads + kv) * kDims;
  for (int d = lane; d < kHalf; d += 32) {
    const float *from_q = qkv + head * kDims + d, *from_k = qkv + (kHeads + kv) * kDims + d;
    const float2 of_q = rotated(from_q[0], from_q[kHalf], rope[d].x, rope[d].y);
    const float2 of_k = rotated(from_k[0], from_k[kHalf], rope[d].x, rope[d].y);
    q[d] = of_q.x, q[d + kHalf] = of_q.y, new_key[d] = of_k.x, new_key[d + kHalf] = of_k.y;
  }
  __syncwarp();
  const __nv_bfloat16* keys = cache + int64_t{kv} * kKeys * kDims;
  const auto key_at = [&](int key, int d) {
    return key == kKeys - 1 ? new_key[d] : __bfloat162float(keys[key * kDims + d]);
  };
  const auto value_at = [&](int key, int d) {
    return key == kKeys - 1 ? new_value[d] : __bfloat162float(keys[kCacheOfLayer / 2 + key * kDims + d]);
  };
  // Adds products of 16 values of row 0, and of as many for each of 8 columns. a(i) and b(i, column) give them.
  const auto add_step = [&](float(&sums)[4], const auto& a, const auto& b) {
    const int i = lane % 4 * 2, column = lane / 4;
    const auto pair = [&](int at) { return column == 0 ? pack_bf16(a(at), a(at + 1)) : 0; };
    const uint32_t row[4] = {pair(i), 0, pair(i + 8), 0};
    mma(sums, row, pack_bf16(b(i, column), b(i + 1, column)), pack_bf16(b(i + 8, column), b(i + 9, column)));
  };
  for (int key = 0; key < kKeys; key += 8) {
    float sums[4] = {};
    for (int d = 0; d < kDims; d += kStep)
      add_step(
          sums, [&](int i) { return q[d + i]; }, [&](int i, int column) { return key_at(key + column, d + i); });
    if (lane < 4) scores[key + lane * 2] = sums[0], scores[key + lane * 2 + 1] = sums[1];
  }
  __syncwarp();
  float merged_m = -INFINITY, merged_l = 0.0f, merged[kDims / 8][2] = {};
  for (int split = 0; split < kKeys; split += kSplitKeys) {
    float m = -INFINITY, l = 0.0f, sums[kDims / 8][4] = {};
    for (int chunk = split; chunk < split + kSplitKeys; chunk += 64) {
      float largest = -INFINITY, sum = 0.0f;
      for (int key = chunk; key < chunk + 64; ++key) largest = fmaxf(largest, scores[key]);
      const float next = next_maximum(m, largest, kFactor), correction = rescale(m, next);
      const auto probability_of = [&](int key) { return probability(scores[key], kFactor, next); };
      for (int key = chunk + lane % 4 * 2; key < chunk + 64; key += 8) {
        sum += probability_of(key);
        sum += probability_of(key + 1);
      }
      l = fmaf(l, correction, sum);
      for (int tile = 0; tile < kDims / 8; ++tile) {
        for (float& v : sums[tile]) v *= correction;
        for (int key = chunk; key < chunk + 64; key += kStep)
          add_step(
              sums[tile], [&](int i) { return probability_of(key + i); },
              [&](int i, int column) { return value_at(key + i, tile * 8 + column); });
      }
      m = next;
    }
    const float next = next_maximum(merged_m, m, 1.0f), old_factor = rescale(merged_m, next), factor = rescale(m, next);
    merged_l = fmaf(merged_l, old_factor, quad_sum(l) * factor);
    for (int tile = 0; tile < kDims / 8; ++tile)
      for (int i = 0; i < 2; ++i) merged[tile][i] = fmaf(sums[tile][i], factor, merged[tile][i] * old_factor);
    merged_m = next;
  }
  const float factor = 1.0f / merged_l;
  for (int tile = 0; lane < 4 && tile < kDims / 8; ++tile)
    for (int i = 0; i < 2; ++i) y[head * kDims + tile * 8 + lane * 2 + i] = round_bf16(merged[tile][i] * factor);
}

__global__ void plain_gate(float* h, const float* gate, const float* up) {
  const int64_t i = thread_index();
  if (i < kFfn) h[i] = round_bf16(gate[i] / (1.0f + __expf(-gate[i])) * up[i]);
}

unsigned blocks_for(int64_t threads, int64_t in_block) {
  return static_cast<unsigned>((threads + in_block - 1) / in_block);
}

}  // namespace

cudaError_t launch_plain_layer(float* x, const Params& p, int layer, const PlainRoom& room, cudaStream_t stream) {
  const auto product = [&](float* y, const float* from, const uint8_t* weight, int rows, int chunks, int matrices,
                           int which, const float* residual) {
    plain_round<<<1, 64, 0, stream>>>(room.codes, room.scales, from, chunks);
    plain_terms<<<blocks_for(int64_t{rows} * chunks, 128), 128, 0, stream>>>(room.terms, weight, room.codes, rows,
                                                                             chunks, matrices, which);
    plain_sum<<<blocks_for(rows, 128), 128, 0, stream>>>(y, room.terms, room.scales, rows, chunks, residual);
  };
  const uint8_t* qkv = p.weights + layer * kLayerBytes;
  const uint8_t *out = qkv + kQkvBytes, *gate_up = out + kOutBytes, *down = gate_up + kGateUpBytes;
  const __nv_bfloat16* norms = p.norms + int64_t{layer} * 2 * kHidden;
  plain_norm<<<1, 256, 0, stream>>>(room.normed, x, norms);
  product(room.qkv, room.normed, qkv, kQkvRows, kChunks, 1, 0, nullptr);
  plain_attention<<<kHeads, 32, 0, stream>>>(room.attended, room.qkv, p.cache + layer * kCacheOfLayer, p.rope);
  product(room.middle, room.attended, out, kHidden, kChunks, 1, 0, x);
  plain_norm<<<1, 256, 0, stream>>>(room.normed, room.middle, norms + kHidden);
  product(room.gate, room.normed, gate_up, kFfn, kChunks, 2, 0, nullptr);
  product(room.up, room.normed, gate_up, kFfn, kChunks, 2, 1, nullptr);
  plain_gate<<<blocks_for(kFfn, 128), 128, 0, stream>>>(room.h, room.gate, room.up);
  product(x, room.h, down, kHidden, kFfnChunks, 1, 0, room.middle);
  return cudaGetLastError();
}

}  // namespace eadem::persistent
