// SPDX-License-Identifier: Apache-2.0
//
// Pseudo-random operands.
#include <cuda_fp16.h>

#include "benchmarks/cuda/persistent/layers.h"

namespace eadem::persistent {
namespace {

__device__ inline uint32_t mix(uint64_t v) {
  v ^= v >> 33, v *= 0xff51afd7ed558ccdull, v ^= v >> 33, v *= 0xc4ceb9fe1a85ec53ull, v ^= v >> 33;
  return static_cast<uint32_t>(v);
}
__device__ inline float uniform(uint64_t v) { return static_cast<float>(mix(v) >> 8) * 0x1p-24f; }

__global__ void fill_blocks(uint8_t* weights, int64_t blocks) {
  constexpr int64_t kOfLayer = kLayerBytes / kBlockBytes, kFirstDown = (kLayerBytes - kDownBytes) / kBlockBytes;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
    // Such that a product has values about as large as its input.
    const float size = 1.0f / (4.6f * sqrtf(static_cast<float>(b % kOfLayer >= kFirstDown ? kFfn : kHidden)));
    uint32_t* words = reinterpret_cast<uint32_t*>(weights + b * kBlockBytes);
    for (int i = thread; i < kCodeBytes / 4; i += threads) {
      uint32_t codes = mix(static_cast<uint64_t>(b * (kCodeBytes / 4) + i + 1));
      for (int n = 0; n < 32; n += 4)
        if ((codes >> n & 15) == 0) codes |= 8u << n;
      words[i] = codes;
    }
    __half* scales = reinterpret_cast<__half*>(weights + b * kBlockBytes + kCodeBytes);
    constexpr uint64_t kOtherNumbers = 0x1234567800000000ull;
    for (int i = thread; i < 32; i += threads)
      scales[i] = __float2half((0.5f + uniform(static_cast<uint64_t>(b * 32 + i) ^ kOtherNumbers)) * size);
  }
}

__global__ void fill_bf16(__nv_bfloat16* to, int64_t count, float mean, float range, uint64_t seed) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += threads)
    to[i] = __float2bfloat16_rn(mean + range * (2.0f * uniform(static_cast<uint64_t>(i) ^ seed << 40) - 1.0f));
}

}  // namespace

cudaError_t fill_weights(uint8_t* weights, int layers, cudaStream_t stream) {
  fill_blocks<<<kSms * 8, 128, 0, stream>>>(weights, layers * kLayerBytes / kBlockBytes);
  return cudaGetLastError();
}

cudaError_t fill_values(__nv_bfloat16* to, int64_t count, float mean, float range, uint64_t seed, cudaStream_t stream) {
  fill_bf16<<<kSms, 256, 0, stream>>>(to, count, mean, range, seed);
  return cudaGetLastError();
}

}  // namespace eadem::persistent
