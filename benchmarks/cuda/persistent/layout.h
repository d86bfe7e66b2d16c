// SPDX-License-Identifier: Apache-2.0
//
// The model that the persistent kernel computes, and the layout of its data: the shape of Llama-3.1-8B, weights in 4
// bits with a scale for each 128 columns, one token behind 511 keys.
//
// Weights are blocks of 16 rows and 256 columns, whose codes have the order of a FragmentLayout of 4 bits
// (eadem/kernels/cuda/linear/fragment_layout.h). Behind 2048 bytes of codes stand the scales, f16 [8 rows g][2 halves
// of columns][rows g and g + 8], so that a lane loads all that it needs as one word of 8 bytes. A weight is [rows /
// 16][columns / 256] such blocks, where gate and up take turns, 16 rows each. A code minus 8, times its scale, is the
// value.
//
// Activations are rounded to chunks of 256 columns (eadem/kernels/cuda/linear/int8_chunks.h). A term is what a chunk
// adds to a row of a product, before the chunk's own scale.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace eadem::persistent {

// --- The model.
inline constexpr int kMostLayers = 32;
inline constexpr int kHidden = 4096, kFfn = 14336, kHeads = 32, kKvHeads = 8, kHeadDim = 128, kKeys = 512;
inline constexpr int kQkvRows = (kHeads + 2 * kKvHeads) * kHeadDim;
inline constexpr float kEpsilon = 1e-5f;
inline constexpr int64_t kCacheOfLayer = int64_t{2} * kKvHeads * kKeys * kHeadDim;  // values, keys first

// --- Weights.
inline constexpr int kChunk = 256, kTileRows = 16;
inline constexpr int kCodeBytes = 2048, kBlockBytes = kCodeBytes + 64;
inline constexpr int kChunks = kHidden / kChunk, kFfnChunks = kFfn / kChunk;
// Tiles are 16 rows of a weight. Gate and up have pairs of tiles.
inline constexpr int kQkvTiles = kQkvRows / kTileRows, kTiles = kHidden / kTileRows, kPairs = kFfn / kTileRows;
inline constexpr int64_t kQkvBytes = int64_t{kQkvTiles} * kChunks * kBlockBytes;
inline constexpr int64_t kOutBytes = int64_t{kTiles} * kChunks * kBlockBytes;
inline constexpr int64_t kGateUpBytes = int64_t{kPairs} * 2 * kChunks * kBlockBytes;
inline constexpr int64_t kDownBytes = int64_t{kTiles} * kFfnChunks * kBlockBytes;
inline constexpr int64_t kLayerBytes = kQkvBytes + kOutBytes + kGateUpBytes + kDownBytes;
// Codes of a chunk whose magnitudes add up to more are rounded again, to 63 levels instead of 127.
inline constexpr int kMostCodeSum = (1 << 24) / (15 * 63);

// --- The launch: one block of threads on each multiprocessor, and roles of its warps, in this order.
inline constexpr int kSms = 132;
inline constexpr int kProductWarps = 8;  // multiply, and compute a split of attention
inline constexpr int kSumWarps = 3;      // add the terms of rows, and store them
inline constexpr int kRoundWarps = 4;    // round the activation of down; the first one merges splits of attention
inline constexpr int kThreads = (kProductWarps + kSumWarps + kRoundWarps + 1) * 32;  // the last warp copies

// The most tiles, or pairs of them, that a multiprocessor has (place.cuh says which).
inline constexpr int kMostQkvTiles = 3, kMostTiles = 2, kMostPairs = 7;
static_assert(kMostQkvTiles == (kQkvTiles + kSms - 1) / kSms && kMostTiles == (kTiles + kSms - 1) / kSms &&
              kMostPairs == (kPairs + kSms - 1) / kSms && kMostQkvTiles <= kSumWarps);

// Attention is cut as in the kernels that serve (eadem/kernels/cuda/attention/attention_tiles.cuh): into key heads,
// each with the query heads that share it, and splits of the keys. A few multiprocessors have one of each (place.cuh).
inline constexpr int kGroup = kHeads / kKvHeads, kSplitKeys = 256, kSplits = kKeys / kSplitKeys;
inline constexpr int kItems = kKvHeads * kSplits;
// Keys and values come in parts of 32, of which a warp has one.
inline constexpr int kPartKeys = kSplitKeys / kProductWarps, kPartRowsBytes = kPartKeys * kHeadDim * 2;
// Each of the first multiprocessors merges so many outputs of attention.
inline constexpr int kMergeOutputs = 32, kMergeSms = kHidden / kMergeOutputs;

// --- The ring: a slot has blocks of 8 chunks, one for each warp that multiplies, or two parts of the keys or values of
// a split, from its first multiple of 1024 bytes on. It is copied in two parts, each with a barrier of its own.
inline constexpr int kSlots = 11, kSlotParts = 2;
inline constexpr int kSlotBytes = kProductWarps * kBlockBytes, kPartBytes = kSlotBytes / kSlotParts;
inline constexpr int kDownSteps = kFfnChunks / kProductWarps;   // a step has a slot of each tile
inline constexpr int kSplitSlots = kProductWarps / kSlotParts;  // of keys, and as many of values
static_assert(kSlotBytes % 512 == 0 && kSlotParts * kPartRowsBytes + 512 <= kSlotBytes);
static_assert(kChunks == 2 * kProductWarps);

enum class Mode : uint8_t {
  whole,
  weights_alone,  // weights are copied, nothing is computed
  chain_alone,    // the ring is filled once, and all products and attention read that
};

struct Params {
  const uint8_t* weights;      // [layers] q, k, v; output; gate and up; down
  const __nv_bfloat16* norms;  // [layers][2][kHidden]
  __nv_bfloat16* cache;        // [layers][2 keys, values][kKvHeads][kKeys][kHeadDim]; the last row is written
  CUtensorMap cache_map;       // boxes of kPartKeys of its rows
  const float2* rope;          // [kHeadDim / 2] cosine and sine of the token's position
  const __nv_bfloat16* x0;     // [kHidden]
  __nv_bfloat16* x_out;        // [kHidden]
  // Words (exchange.cuh). Those of x, qkv, attended and h have two values of bf16 each, those of parts and maxima f32.
  uint64_t* x;         // [kHidden / 2]: behind a layer
  uint64_t* x_middle;  // [kHidden / 2]: behind attention
  uint64_t* qkv;       // [kQkvRows / 2], before rotation
  uint64_t* parts;     // [kItems][kGroup][kHeadDim]: values of a split, times its probabilities
  uint64_t* maxima;    // [kItems][kGroup][2]: what the probabilities of a split are relative to, and their sum
  uint64_t* attended;  // [kHidden / 2]
  uint64_t* h;         // [kFfn / 2]
  uint32_t* counters;  // [kCounters][kCounterStride], zeros before a launch
  int layers;
  // Parts that may be on their way at once: while others wait for small loads, and while most wait for weights.
  int narrow, wide;
  uint32_t epoch;  // of the words of x0; layer l has epoch + l + 1
};

// How many words the buffers of Params have.
inline constexpr int kRowWords = kHidden / 2, kQkvWords = kQkvRows / 2, kPartWords = kItems * kGroup * kHeadDim,
                     kMaximaWords = kItems * kGroup * 2, kFfnWords = kFfn / 2;
inline constexpr int kWords = 3 * kRowWords + kQkvWords + kPartWords + kMaximaWords + kFfnWords;
// Counters (exchange.cuh) are so far apart that each is in a line of memory of its own.
inline constexpr int kCounterStride = 32, kCounters = 3 * kChunks + kHeads / 2 + 3 * kKvHeads + kFfnChunks;

// Terms of a multiprocessor's tiles.
template <int kTilesOfSm, int kNum>
using Terms = float[kTilesOfSm][kNum][kTileRows];

// Members of a union are never in use at once: one is written only when all multiprocessors have given results for
// which the other one was read.
struct Shared {
  uint8_t ring[kSlots][kSlotBytes];
  union {
    float gate_up_terms[kMostPairs][2][kChunks][kTileRows];
    struct {  // of attention; rows have 16 bytes more, against bank conflicts
      alignas(16) __nv_bfloat16 q[kGroup][kHeadDim + 8];
      alignas(16) __nv_bfloat16 probabilities[kGroup][kSplitKeys + 8];
      float part_max[kProductWarps][kGroup];
      float chunk_sums[kSplitKeys / 64][kGroup][4];
    };
  };
  uint8_t h_codes[kFfn];
  union {
    struct {
      Terms<kMostQkvTiles, kChunks> qkv_terms;
      Terms<kMostTiles, kChunks> out_terms;
    };
    Terms<kMostTiles, kFfnChunks> down_terms;
  };
  uint8_t codes[kHidden];
  float scales[3][kChunks], h_scales[kFfnChunks];  // of q, k and v; output; gate and up
  int2 h_sums[kFfnChunks];
  float squares[2][kProductWarps];  // of each norm
  float2 rope[kHeadDim / 2];
  uint32_t window;  // the parts that may be on their way now
  // Barriers: parts of the ring that are there, slots that are free, terms that are complete, codes of h by step.
  uint64_t full[kSlots][kSlotParts], empty[kSlots];
  uint64_t qkv_ready[kMostQkvTiles], out_ready[kMostTiles], gate_up_ready[kMostPairs], down_ready;
  uint64_t h_ready[kDownSteps];
};

}  // namespace eadem::persistent
