// SPDX-License-Identifier: Apache-2.0
//
// Which keys and queries a block of attention_backward_wgmma.cu has, when it begins, and in which order blocks add to
// the sums of dq.
#pragma once

#include "eadem/kernels/cuda/attention/attention_gradients.cuh"

namespace eadem::kernels::cuda {

// A head's rows of a matrix [tokens, heads, width].
struct HeadRows {
  const __nv_bfloat16* first;  // the first token of the sequence
  int64_t stride;              // elements
  int32_t tokens;              // of the sequence
  int32_t width;
};

// How many of a sequence's tiles of keys are its first half. Their blocks add to the sums of dq before those of the
// second half. In the first half the block of the last keys is the first to add: if all begin together, it is the first
// that comes to a chunk. In the second half it is the block of the first keys.
__device__ inline int32_t first_half(int32_t tiles) { return (tiles + 1) / 2; }

// The work of a block, in shared memory: its keys, of one head, and the queries that see them, in chunks, one head of
// the group after the other.
struct Work {
  GradientTile tile;
  int32_t head, group;  // of keys; heads of queries for each
  int32_t end_chunk;    // where the queries end, rounded up to chunks
  int32_t steps;        // chunks of all heads of the group

  __device__ void set(const AttentionParams& p, const GradientTile& found, int32_t key_head) {
    tile = found, head = key_head, group = p.heads / p.kv_heads;
    const int32_t end_key = min(tile.row + kGradientKeys, tile.tokens);
    const int32_t end = p.window > 0 ? min(end_key - 1 + p.window, tile.tokens) : tile.tokens;
    end_chunk = tile.row + (end - tile.row + kGradientChunk - 1) / kGradientChunk * kGradientChunk;
    steps = (end_chunk - tile.row) / kGradientChunk * group;
  }

  // Whether all of 64 rows belong to the sequence.
  __device__ bool fills(int32_t row) const { return row + kGradientChunk <= tile.tokens; }
  // The rows of a head of a matrix.
  __device__ HeadRows rows_of(const AttentionParams& p, const void* matrix, int32_t heads, int32_t of) const {
    return {static_cast<const __nv_bfloat16*>(matrix) + (int64_t{tile.first_token} * heads + of) * p.head_dim,
            int64_t{heads} * p.head_dim, tile.tokens, p.head_dim};
  }
  // Where the sums of a chunk are, counted in chunks.
  __device__ int64_t chunk_at(const AttentionParams& p, int32_t query, int32_t of) const {
    return int64_t{tile.first_chunk + query / kGradientChunk} * p.heads + of;
  }
  // How many blocks add to a chunk before this one.
  __device__ int32_t turn_at(const AttentionParams& p, int32_t query) const {
    const int32_t own = tile.row / kGradientKeys, half = first_half((tile.tokens + kGradientKeys - 1) / kGradientKeys);
    if (own < half) return min(query / kGradientKeys, half - 1) - own;
    const int32_t first_key = p.window > 0 ? max(query + 1 - p.window, 0) : 0;
    return own - first_key / kGradientKeys;
  }
};

// The sequences, 32 at most, and the heads of keys that blocks take at once.
struct AtOnce {
  int32_t sequences, heads;
};

// The head and the tile of kGradientKeys tokens that the block with this ticket takes: of the heads at once a tile of
// each of the sequences at once, then the next one of each, in the order of additions. So a block begins before those
// that wait for it, the second half of a sequence begins when much of the first is done, and blocks that run together
// add to sums that the L2 cache still has. All threads of a warp call it. False if there is none.
__device__ inline bool find_keys(GradientTile& found, int32_t& head, const AttentionParams& p, AtOnce at_once,
                                 int32_t ticket) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int32_t first = 0; first < p.sequences; first += at_once.sequences) {
    const bool is_sequence = lane < at_once.sequences && first + lane < p.sequences;
    const int32_t own_first = is_sequence ? p.query_start[first + lane] : 0;
    const int32_t own_tokens = is_sequence ? p.query_start[first + lane + 1] - own_first : 0;
    const int32_t tiles = (own_tokens + kGradientKeys - 1) / kGradientKeys, half = first_half(tiles);
    const int32_t all_tiles = __reduce_add_sync(kAllLanes, tiles);
    if (ticket >= all_tiles * p.kv_heads) {
      ticket -= all_tiles * p.kv_heads;
      continue;
    }
    const int32_t first_head = ticket / (all_tiles * at_once.heads) * at_once.heads;
    const int32_t heads = min(at_once.heads, p.kv_heads - first_head);
    ticket -= first_head * all_tiles;
    head = first_head + ticket % heads;
    int32_t tile = ticket / heads;
    for (const bool is_first : {true, false})
      for (int32_t i = 0;; ++i) {
        const unsigned having = __ballot_sync(kAllLanes, (is_first ? half : tiles - half) > i);
        if (having == 0) break;
        if (tile < __popc(having)) {
          const auto s = static_cast<int>(__fns(having, 0, tile + 1));
          const int32_t first_token = __shfl_sync(kAllLanes, own_first, s);
          found = {first_token, __shfl_sync(kAllLanes, own_tokens, s),
                   __shfl_sync(kAllLanes, is_first ? half - 1 - i : half + i, s) * kGradientKeys,
                   static_cast<int32_t>(ceil_div(first_token, kGradientTokens))};
          return true;
        }
        tile -= __popc(having);
      }
  }
  return false;
}

// Where a block is among its chunks: the first query of a chunk, and its head.
struct Chunk {
  int32_t query, head;

  __device__ Chunk(const Work& work, int32_t step) : query(work.tile.row), head(work.head * work.group) {
    advance(work, step);
  }
  __device__ void advance(const Work& work, int32_t steps) {
    query += steps * kGradientChunk;
    while (query >= work.end_chunk) query -= work.end_chunk - work.tile.row, ++head;
  }
};

}  // namespace eadem::kernels::cuda
