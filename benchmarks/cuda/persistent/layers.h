// SPDX-License-Identifier: Apache-2.0
//
// Launches of the persistent kernel, and of what it is compared with. All pointers are device pointers, and every
// function returns the status of its launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "benchmarks/cuda/persistent/layout.h"

namespace eadem::persistent {

// Fills cache_map.
[[nodiscard]] cudaError_t describe_cache(Params& params, int layers);
// Before each launch of the layers.
[[nodiscard]] cudaError_t clear_counters(const Params& params, cudaStream_t stream);
// All layers. No two launches have an epoch in common.
[[nodiscard]] cudaError_t launch_layers(const Params& params, Mode mode, cudaStream_t stream);

// Room for the plain kernels.
struct PlainRoom {
  float *normed, *qkv, *attended, *middle, *gate, *up, *h;  // [kFfn] each
  float* terms;                                             // [kFfn * kChunks]
  float* scales;                                            // [kFfnChunks]
  int8_t* codes;                                            // [kFfn]
};
// Layer `layer` by plain kernels, one thread or a few for a value: x [kHidden], in place. The cache is only read, but
// for its last row, in whose stead the layer's own key and value are taken.
[[nodiscard]] cudaError_t launch_plain_layer(float* x, const Params& params, int layer, const PlainRoom& room,
                                             cudaStream_t stream);

// Pseudo-random weights of `layers` layers, codes of 1 to 15 whose values have a mean of 0.
[[nodiscard]] cudaError_t fill_weights(uint8_t* weights, int layers, cudaStream_t stream);
// Pseudo-random values in [mean - range, mean + range).
[[nodiscard]] cudaError_t fill_values(__nv_bfloat16* to, int64_t count, float mean, float range, uint64_t seed,
                                      cudaStream_t stream);

}  // namespace eadem::persistent
