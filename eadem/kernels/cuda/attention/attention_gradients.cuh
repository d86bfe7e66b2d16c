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

// The tile with this number, of tiles of `rows` tokens; false if there are fewer. All threads of a warp call it for the
// same tile.
__device__ inline bool find_gradient_tile(GradientTile& found, const AttentionParams& p, int32_t rows, int32_t tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int32_t begin = 0; begin < p.sequences; begin += kWarp) {
    // A lane has a sequence.
    const bool is_sequence = begin + lane < p.sequences;
    const int32_t own_first = is_sequence ? p.query_start[begin + lane] : 0;
    const int32_t own_tokens = is_sequence ? p.query_start[begin + lane + 1] - own_first : 0;
    const int32_t own_tiles = (own_tokens + rows - 1) / rows;
    int32_t end = own_tiles;  // of the tiles of this sequence, counted from those of the warp's first
    for (int lanes = 1; lanes < kWarp; lanes *= 2) {
      const int32_t before = __shfl_up_sync(kAllLanes, end, lanes);
      if (lane >= lanes) end += before;
    }
    const uint32_t ends_behind = __ballot_sync(kAllLanes, tile < end);
    if (ends_behind != 0) {
      const int owner = __ffs(static_cast<int>(ends_behind)) - 1;
      const int32_t first = __shfl_sync(kAllLanes, own_first, owner);
      found = {first, __shfl_sync(kAllLanes, own_tokens, owner),
               (tile - __shfl_sync(kAllLanes, end - own_tiles, owner)) * rows,
               static_cast<int32_t>(ceil_div(first, kGradientTokens))};
      return true;
    }
    tile -= __shfl_sync(kAllLanes, end, kWarp - 1);
  }
  return false;
}

// delta[token, head] = dy . y. Sets the first `turns` elements of params.turns to zero.
[[nodiscard]] cudaError_t launch_attention_delta(const AttentionBackwardParams& params, int64_t turns,
                                                 cudaStream_t stream);

}  // namespace eadem::kernels::cuda
