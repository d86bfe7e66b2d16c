// SPDX-License-Identifier: Apache-2.0
//
// A layer by plain kernels: the same values in the same precision, with the same order of sums where it shows in bf16.
// Norms and attention add in double, since their results, rounded to bf16, do not depend on the order but by accident.
#include <cuda_fp16.h>

#include "benchmarks/cuda/persistent/layers.h"

namespace eadem::persistent {
namespace {

__device__ inline float round_bf16(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }

__device__ inline int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + static_cast<int64_t>(threadIdx.x);
}

// One block of 256 threads.
__global__ void plain_norm(float* y, const float* x, const __nv_bfloat16* weight) {
  __shared__ double sums[256];
  const int thread = static_cast<int>(threadIdx.x);
  double sum = 0;
  for (int i = thread; i < kHidden; i += 256) sum += static_cast<double>(x[i]) * x[i];
  sums[thread] = sum;
  __syncthreads();
  for (int n = 128; n > 0; n /= 2) {
    if (thread < n) sums[thread] += sums[thread + n];
    __syncthreads();
  }
  const float scale = static_cast<float>(1.0 / sqrt(sums[0] / kHidden + kEpsilon));
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

// A block for each head, a thread for each column.
__global__ void plain_attention(float* y, const float* qkv, const __nv_bfloat16* cache, const float2* rope) {
  const int head = static_cast<int>(blockIdx.x), kv = head / (kHeads / kKvHeads), d = static_cast<int>(threadIdx.x);
  __shared__ float q[kHeadDim], k[kHeadDim], scores[kKeys];
  const auto turned = [&](const float* v) {
    constexpr int kHalf = kHeadDim / 2;
    const float2 turn = rope[d % kHalf];
    return round_bf16(d < kHalf ? v[d] * turn.x - v[d + kHalf] * turn.y : v[d] * turn.x + v[d - kHalf] * turn.y);
  };
  q[d] = turned(qkv + head * kHeadDim);
  k[d] = turned(qkv + (kHeads + kv) * kHeadDim);
  const float newest_value = qkv[(kHeads + kKvHeads + kv) * kHeadDim + d];
  __syncthreads();
  const __nv_bfloat16* keys = cache + int64_t{kv} * kKeys * kHeadDim;
  const __nv_bfloat16* values = keys + kCacheOfLayer / 2;
  for (int key = d; key < kKeys; key += kHeadDim) {
    double sum = 0;
    for (int i = 0; i < kHeadDim; ++i)
      sum += static_cast<double>(q[i]) * (key == kKeys - 1 ? k[i] : __bfloat162float(keys[key * kHeadDim + i]));
    scores[key] = static_cast<float>(sum / sqrt(static_cast<double>(kHeadDim)));
  }
  __syncthreads();
  double most = -1e30, below = 0, above = 0;
  for (int key = 0; key < kKeys; ++key) most = fmax(most, static_cast<double>(scores[key]));
  for (int key = 0; key < kKeys; ++key) {
    const double probability = exp(scores[key] - most);
    below += probability;
    above += probability * (key == kKeys - 1 ? newest_value : __bfloat162float(values[key * kHeadDim + d]));
  }
  y[head * kHeadDim + d] = round_bf16(static_cast<float>(above / below));
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
  plain_attention<<<kHeads, kHeadDim, 0, stream>>>(room.attended, room.qkv, p.cache + layer * kCacheOfLayer, p.rope);
  product(room.middle, room.attended, out, kHidden, kChunks, 1, 0, x);
  plain_norm<<<1, 256, 0, stream>>>(room.normed, room.middle, norms + kHidden);
  product(room.gate, room.normed, gate_up, kFfn, kChunks, 2, 0, nullptr);
  product(room.up, room.normed, gate_up, kFfn, kChunks, 2, 1, nullptr);
  plain_gate<<<blocks_for(kFfn, 128), 128, 0, stream>>>(room.h, room.gate, room.up);
  product(x, room.h, down, kHidden, kFfnChunks, 1, 0, room.middle);
  return cudaGetLastError();
}

}  // namespace eadem::persistent
