// SPDX-License-Identifier: Apache-2.0
//
// Stores what a warp of a wgmma product has: 16 tokens by some tiles of eight outputs.
#pragma once

#include <type_traits>

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

// By four lanes 4 g + q: lane q gives words[t] of tile t, its columns 2 q and 2 q + 1, and gets the words of tile q.
__device__ inline void exchange_tiles(uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if ((t & bit) != 0) continue;
      const bool upper = (lane & bit) != 0;
      const uint32_t given = upper ? words[t] : words[t + bit];
      const uint32_t got = __shfl_xor_sync(kAllLanes, given, bit);
      (upper ? words[t] : words[t + bit]) = got;
    }
}

// Stores final(sum, token, output) plus the bias, rounded once. Lane 4 g + q has tokens g and g + 8, outputs 2 q and
// 2 q + 1 of each tile. Tokens from `tokens` on and outputs beyond the part are not stored.
template <typename Y, int kRowTiles, typename Final>
__device__ inline void store_tile_rows(const LinearStreamPart& part, int64_t tokens, const float (&sum)[kRowTiles][4],
                                       int64_t first_token, int64_t first_output, int lane, Final&& final) {
  const auto value_of = [&](int t, int i, int64_t token, int64_t n) {
    float value = final(sum[t][i], token, n);
    if (part.bias != nullptr) value += load(static_cast<const Y*>(part.bias) + n);
    return value;
  };
  // Whether outputs can be stored eight at a time.
  const bool whole = first_output + kRowTiles * 8 <= part.out && part.out % 8 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t own = first_token + lane / 4 + half * 8;
    const bool wanted = own < tokens;
    const int64_t token = wanted ? own : 0;
    Y* const row = static_cast<Y*>(part.y) + token * part.out;
    if constexpr (std::is_same_v<Y, bf16_t>)
      if (whole) {
#pragma unroll
        for (int first = 0; first < kRowTiles; first += 4) {
          uint32_t words[4];
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            const int64_t n = first_output + (first + t) * 8 + lane % 4 * 2;
            words[t] =
                pack_bf16(value_of(first + t, half * 2, token, n), value_of(first + t, half * 2 + 1, token, n + 1));
          }
          exchange_tiles(words, lane);
          if (wanted)
            *reinterpret_cast<uint4*>(row + first_output + (first + lane % 4) * 8) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
        continue;
      }
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t n = first_output + t * 8 + lane % 4 * 2 + i;
        if (wanted && n < part.out) store(row + n, value_of(t, half * 2 + i, token, n));
      }
  }
}

}  // namespace eadem::kernels::cuda
