// SPDX-License-Identifier: Apache-2.0
//
// The two products of a chunk of keys and values in bf16 with rows of f32, on the tiles of AMX (linear/amx.h): scores
// of queries, and sums of values by weights. Keys and values are read as they are stored. A number of f32 is multiplied
// as the sum of two of bf16, of which the first is the number rounded and the second what is left, rounded; the sum is
// within 2^-17 of the number. A result is the chain of amx.h over tiles of 32 dimensions or keys. Each tile is
// multiplied by the first parts and then by the second ones. So the bits of a row do not depend on the others.
//
// Functions are called only for Isa::amx. Rows are computed in groups of 16.
#pragma once

#include <cstdint>

#include "eadem/core/dtype.h"

namespace eadem::kernels::cpu {

inline constexpr int64_t kTiledGroup = 16;  // rows of queries
inline constexpr int64_t kTiledStep = 32;   // dimensions, or keys, of a tile
inline constexpr int64_t kTiledKeys = 64;   // keys of a chunk

// The keys or the values of a chunk, and rows of `later_dims` dimensions to prefetch meanwhile.
struct TiledChunk {
  const bf16_t* const* rows;   // [kTiledKeys], of which the first `count` are read
  int64_t count;               // at least 1
  const bf16_t* const* later;  // [later_count]
  int64_t later_count, later_dims;
};

// The bytes of the queries of `rows` rows of `dims` dimensions, a multiple of kTiledStep, as tiles.
constexpr int64_t tiled_query_bytes(int64_t rows, int64_t dims) {
  return (rows + kTiledGroup - 1) / kTiledGroup * kTiledGroup * dims * 4;
}
// Writes queries as tiles of tiled_query_bytes. `q` are rows `stride` floats apart.
void write_tiled_queries(void* to, const float* q, int64_t stride, int64_t rows, int64_t dims);

// While it lives, its thread's tiles have the shape that tiled_scores and tiled_values need. To give them one takes
// nearly half as long as the scores of 64 keys of a token.
class TiledShape {
 public:
  TiledShape();
  ~TiledShape();
  TiledShape(const TiledShape&) = delete;
  TiledShape& operator=(const TiledShape&) = delete;
};

// Computes scores [rows, kTiledKeys] of all `rows` queries that write_tiled_queries has written. `scores` has rows for
// whole groups; those beyond `rows`, and scores of keys beyond the chunk's, are undefined. `spare` has room for
// kTiledKeys rows of `dims` floats.
void tiled_scores(float* scores, const void* queries, int64_t rows, const TiledChunk& keys, int64_t dims, void* spare);

// out [rows, columns] += weights [rows, kTiledKeys] times the first `columns` dimensions of the values, a multiple of
// kTiledStep. out_stride: floats between rows of out, which has rows for whole groups; those beyond `rows` are
// undefined. Prefetches the later rows.
void tiled_values(float* out, int64_t out_stride, const float* weights, const TiledChunk& values, int64_t rows,
                  int64_t columns);

}  // namespace eadem::kernels::cpu
