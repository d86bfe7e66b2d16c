// SPDX-License-Identifier: Apache-2.0
//
// What the kernels for the gradients of attention share. With s = q . k, p = exp(scale s - lse), dp = dy . v and
// delta = dy . y (which equals the sum of p dp over the keys),
//   ds = p (dp - delta)     dq = scale * sum over keys of ds k     dk = scale * sum over queries of ds q
//   dv = sum over queries of p dy
// Queries are those of all heads that share the key. Sums have an order that their rows alone decide.
//
// In a sequence, positions are counted from its first token in the step: query i sees key j if j <= i and, with a
// window, j > i - window.
// Source: Dao et al. 2022, algorithm 4.
#pragma once

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

// The rows that a block computes: keys or queries [row, row + rows) of a sequence of `tokens`.
struct GradientTile {
  int32_t first_token, tokens;
  int32_t row;
  int32_t first_chunk;  // of the sequence, see kGradientTokens
};

// The tile with this number, of tiles of `rows` tokens; false if there are fewer.
__device__ inline bool find_gradient_tile(GradientTile& found, const AttentionParams& p, int32_t rows, int32_t tile) {
  for (int32_t s = 0; s < p.sequences; ++s) {
    const int32_t first = p.query_start[s], tokens = p.query_start[s + 1] - first;
    const int32_t tiles = (tokens + rows - 1) / rows;
    if (tile < tiles) {
      found = {first, tokens, tile * rows, static_cast<int32_t>(ceil_div(first, kGradientTokens))};
      return true;
    }
    tile -= tiles;
  }
  return false;
}

// delta[token, head] = dy . y
[[nodiscard]] cudaError_t launch_attention_delta(const AttentionBackwardParams& params, cudaStream_t stream);

}  // namespace eadem::kernels::cuda
