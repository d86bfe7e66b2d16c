// SPDX-License-Identifier: Apache-2.0
//
// The two products of a chunk of latents in bf16 with rows of f32, on the tiles of AMX (linear/amx.h): scores of
// queries, and sums of values by weights. The latents are read as they are stored. A number of f32 is multiplied as the
// sum of two of bf16, of which the first is the number rounded and the second what is left, rounded; the sum is within
// 2^-17 of the number. A result is the chain of amx.h over tiles of 32 dimensions or keys. Each tile is multiplied by
// the first parts and then by the second ones. So the bits of a row do not depend on the others.
//
// Functions are called only for Isa::amx. Rows are computed in groups of 16; the last group may have fewer.
#pragma once

#include <cstdint>

#include "eadem/core/dtype.h"

namespace eadem::kernels::cpu {

inline constexpr int64_t kLatentGroup = 16;  // rows of queries
inline constexpr int64_t kLatentStep = 32;   // dimensions, or keys, of a tile
inline constexpr int64_t kLatentKeys = 64;   // keys of a chunk

// The rows of a chunk, keys or values, and later rows, which are prefetched meanwhile.
struct LatentChunk {
  const bf16_t* const* keys;   // [kLatentKeys]: rows, of which the first `count` are read
  int64_t count;               // at least 1
  const bf16_t* const* later;  // [later_count]: rows to prefetch
  int64_t later_count;
};

// The bytes of the queries of `rows` rows of `dims` dimensions, a multiple of kLatentStep, as tiles.
constexpr int64_t latent_query_bytes(int64_t rows, int64_t dims) {
  return (rows + kLatentGroup - 1) / kLatentGroup * kLatentGroup * dims * 4;
}
// Writes queries as tiles of latent_query_bytes. `q` are rows `stride` floats apart.
void write_latent_queries(void* to, const float* q, int64_t stride, int64_t rows, int64_t dims);

// Computes by_key [kLatentKeys, kLatentGroup], the scores of the chunk's keys with group `group` of `groups` of rows;
// those of keys beyond `count` are undefined. All groups together prefetch half of the later rows. `spare` has room for
// kLatentKeys rows of `dims`.
void latent_scores(float* by_key, const void* queries, int64_t group, int64_t groups, const LatentChunk& chunk,
                   int64_t dims, bf16_t* spare);

// out [rows, columns] += weights [rows, kLatentKeys] times the first `columns` dimensions of the keys, a multiple of
// kLatentStep. out_stride: floats between rows of out. Prefetches the other half of the later rows, which have `dims`
// dimensions.
void latent_values(float* out, int64_t out_stride, const float* weights, const LatentChunk& chunk, int64_t rows,
                   int64_t columns, int64_t dims);

}  // namespace eadem::kernels::cpu
