// SPDX-License-Identifier: Apache-2.0
//
// The layout of the data of the persistent kernel, which computes layers of one shape for one token. Who includes it
// defines that shape before, as `kShape` in the unnamed namespace in which all of the kernel is: sources of several
// shapes are parts of one program (llama_8b.cu).
//
// Weights are FragmentBlocks (linear/fragment_layout.h), beside which activations are rounded to Int8Chunks, chunks of
// 256 columns (linear/int8_chunks.h); or e4m3 with a scale for each row, beside which activations are rounded to rows
// of e4m3 (fp8_rows.cuh); or bf16, as activations are. A term is what 256 columns, or 128 of e4m3, add to a row of a
// product, before the scales of what was rounded; with weights in bf16 it is the row of the product.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "eadem/kernels/cuda/instructions/tensor_map.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda::decoder {
namespace {

// --- The model.
inline constexpr int kHidden = kShape.hidden, kFfn = kShape.ffn, kHeads = kShape.heads, kKvHeads = kShape.kv_heads,
                     kHeadDim = kShape.head_dim;
inline constexpr int kQRows = kHeads * kHeadDim, kKvRows = kKvHeads * kHeadDim, kQkvRows = kQRows + 2 * kKvRows;

// --- Weights.
inline constexpr int kColumns = static_cast<int>(kIntegerChunk), kTileRows = kFragmentBlockRows;
inline constexpr int kChunks = kHidden / kColumns, kFfnChunks = kFfn / kColumns;
// Tiles are 16 rows of a weight. Gate and up have pairs of tiles.
inline constexpr int kQTiles = kQRows / kTileRows, kKvTiles = kKvRows / kTileRows, kQkvTiles = kQTiles + 2 * kKvTiles,
                     kTiles = kHidden / kTileRows, kPairs = kFfn / kTileRows;

// --- The launch: one block of threads on each multiprocessor, and roles of its warps, in this order.
inline constexpr int kSms = kDecoderMultiprocessors;
inline constexpr int kProductWarps = 8;  // multiply, and compute splits of attention
inline constexpr int kSumWarps = 3;      // add the terms of rows, and store them
inline constexpr int kRoundWarps = 4;    // round the activation of down, and merge splits of attention
inline constexpr int kThreads = (kProductWarps + kSumWarps + kRoundWarps + 1) * 32;  // the last warp copies

// How many chunks of a row of kHidden a warp that multiplies has.
inline constexpr int kRowChunks = kChunks / kProductWarps;
static_assert(kChunks % kProductWarps == 0 && (kRowChunks == 1 || kRowChunks == 2));

// The most tiles, or pairs of them, that a multiprocessor has (place.cuh says which).
inline constexpr int kMostQkvTiles = (kQkvTiles + kSms - 1) / kSms, kMostTiles = (kTiles + kSms - 1) / kSms,
                     kMostPairs = (kPairs + kSms - 1) / kSms;
static_assert(kMostQkvTiles <= kSumWarps && kMostTiles <= 2);
// Weights in bf16: a warp has a tile at most.
inline constexpr bool kTakesBf16 = kMostTiles == 1 && 2 * kMostPairs <= kProductWarps;

// Attention is cut as in attention_tiles.cuh: into key heads, each with the query heads that share it, and splits of
// the keys. An item is one of each.
inline constexpr int kGroup = kHeads / kKvHeads, kSplitKeys = static_cast<int>(kAttentionSplitKeys);
// Keys and values come in parts of 32, of which a warp has one.
inline constexpr int kPartKeys = kSplitKeys / kProductWarps, kRowBytes = kHeadDim * 2,
                     kPartRowsBytes = kPartKeys * kRowBytes;
// A tensor map brings the keys or values of so many tokens at once.
inline constexpr int kBoxKeys = static_cast<int>(kDecoderBlockMultiple), kBoxBytes = kBoxKeys * kRowBytes,
                     kSplitBoxes = kSplitKeys / kBoxKeys;
// Each of the first multiprocessors merges so many outputs of attention.
inline constexpr int kMergeOutputs = 32, kMergeSms = kHidden / kMergeOutputs;
static_assert(kQRows == kHidden);

// --- The ring: a slot has blocks of 8 chunks, one for each warp that multiplies, or two boxes of rows, or two parts of
// the keys or values of a split, from its first multiple of 1024 bytes on. It is copied in two parts, each with a
// barrier of its own. How many slots there are, and of what size, depends on the type of the weights (weights.cuh).
inline constexpr int kMostSlots = 12, kSlotParts = 2;
inline constexpr int kPartBlocks = kProductWarps / kSlotParts;
inline constexpr int kDownSteps = kFfnChunks / kProductWarps;   // a step has a slot of each tile
inline constexpr int kSplitSlots = kProductWarps / kSlotParts;  // of keys, and as many of values
static_assert(kFfnChunks % kProductWarps == 0);

// --- Weights as rows, in e4m3 or bf16. A tensor map brings 128 bytes of each of the 16 rows of a tile, four times: the
// next 512 bytes.
inline constexpr int kRowBoxPanels = 4, kRowBoxBytes = kTileRows * kRowBoxPanels * static_cast<int>(kPanelRowBytes),
                     kRowSlotBytes = kSlotParts * kRowBoxPanels * static_cast<int>(kPanelRowBytes);  // of a row
// e4m3: how many columns a term has, and how many slots a tile of kHidden columns and a step of down.
inline constexpr int kFloatTermColumns = static_cast<int>(kFp8Multiple), kFloatSlotColumns = kRowSlotBytes,
                     kFloatTileSlots = kHidden / kFloatSlotColumns,
                     kFloatStepSlots = kProductWarps * kColumns / kFloatSlotColumns;
static_assert(kFloatSlotColumns == kProductWarps * kFloatTermColumns && kFfn % kFloatSlotColumns == 0);
// bf16: how many slots a tile of kHidden columns and a step of down have.
inline constexpr int kBf16TileSlots = 2 * kHidden / kRowSlotBytes,
                     kBf16StepSlots = 2 * kProductWarps * kColumns / kRowSlotBytes;

struct Layer {
  DecoderLayerParams of;
  CUtensorMap k_map, v_map;  // boxes of kBoxKeys rows of the caches
};

// All weights whose rows have the same number of bytes, as one matrix of such rows that begins at `base`. So a weight
// begins anywhere in a row.
struct WeightRows {
  CUtensorMap map;
  const uint8_t* base;
};

struct Params {
  Layer layers[kMostDecoderLayers];
  WeightRows rows, down_rows;  // of kHidden columns, and of kFfn
  const __nv_bfloat16* x;      // [kHidden]
  __nv_bfloat16* y;            // [kHidden]
  const float* table;          // [2 cosines, sines][kHeadDim / 2] of the token's position
  const int64_t* slot;         // negative: the token's key and value are in the cache already
  const int32_t* kv_length;
  const int32_t* block_table;
  int num_layers, block_size;
  // Parts that may be on their way at once: while others wait for small loads, and while most wait for weights.
  uint32_t narrow, wide;
  float eps, mlp_eps, score_factor;
  // Memory through which blocks of threads exchange values (exchange.cuh). Words of x, qkv, attended and h have two
  // values of bf16 each, those of parts and maxima one of f32.
  uint32_t* launches;  // how many there were
  uint32_t* counters;  // [2][kCounters][kCounterStride], of which a launch finds half to be zeros
  uint64_t* x_words;   // [kHidden / 2]: behind a layer
  uint64_t* x_middle;  // [kHidden / 2]: behind attention
  uint64_t* qkv;       // [kQkvRows / 2], before rotation
  uint64_t* attended;  // [kHidden / 2]
  uint64_t* h;         // [kFfn / 2]
  uint64_t* maxima;    // [splits][kKvHeads][kGroup][2]: what probabilities are relative to, and their sum
  uint64_t* parts;     // [splits][kKvHeads][kGroup][kHeadDim]: values times probabilities
};

// How many words the buffers of Params have.
inline constexpr int64_t kRowWords = kHidden / 2, kQkvWords = kQkvRows / 2, kFfnWords = kFfn / 2,
                         kMaximaWords = kKvHeads * kGroup * 2, kPartWords = kKvHeads * kGroup * kHeadDim;
// Counters (exchange.cuh) are so far apart that each is in a line of memory of its own.
inline constexpr int kCounterStride = 32, kCounters = 3 * kChunks + kHeads / 2 + 3 * kKvHeads + kFfnChunks;
static_assert(kCounters <= kThreads);

// Words that hold what products need of the sums of a chunk's codes.
inline constexpr int kSumWords = 8;

// Terms of a multiprocessor's tiles.
template <int kTilesOfSm, int kNum>
using Terms = float[kTilesOfSm][kNum][kTileRows];

// A block of threads has this in shared memory behind the ring, whatever its weights are.
struct Shared {
  // Scales of the inputs of q, k and v, of output, of gate and up, and of down (h). A row of e4m3 has one scale, and
  // behind it the largest magnitude that each warp found.
  float scales[3][kChunks], h_scales[kFfnChunks];
  uint32_t h_sums[kFfnChunks][kSumWords];
  alignas(16) float squares[2][kChunks];  // of each norm
  float4 merged[kMergeOutputs / 2];       // all splits up to a group (merge_splits)
  int position;                           // of the token
  uint32_t window;                        // the parts that may be on their way now
  // Barriers: parts of the ring that are there, slots that are free, terms that are complete, codes of h by step.
  uint64_t full[kMostSlots][kSlotParts], empty[kMostSlots];
  uint64_t qkv_ready[kMostQkvTiles], out_ready[kMostTiles], gate_up_ready[kMostPairs], down_ready;
  uint64_t h_ready[kDownSteps];
};

// Shared memory for weights W. Members of a union are never in use at once: one is written only when all
// multiprocessors have given results for which the other one was read.
template <typename W>
struct SharedOf : Shared {
  static constexpr int kTerms = W::terms_of(kHidden), kFfnTerms = W::terms_of(kFfn);
  // Codes of the inputs of products, or these themselves. Codes in e4m3 are in the order in which wgmma reads them
  // (float_products.cuh), values in bf16 in that of bf16_products.cuh.
  alignas(128) uint8_t codes[kHidden * W::kInputBytes];
  alignas(128) uint8_t h_codes[kFfn * W::kInputBytes];
  union {
    float gate_up_terms[kMostPairs][2][kTerms][kTileRows];
    struct {  // of attention; rows have 16 bytes more, against bank conflicts
      alignas(16) __nv_bfloat16 q[kGroup][kHeadDim + 8];
      alignas(16) __nv_bfloat16 probabilities[kGroup][kSplitKeys + 8];
      float part_max[kProductWarps][kGroup];
      float chunk_sums[kSplitKeys / 64][kGroup][4];
    };
  };
  union {
    struct {
      Terms<kMostQkvTiles, kTerms> qkv_terms;
      Terms<kMostTiles, kTerms> out_terms;
    };
    Terms<kMostTiles, kFfnTerms> down_terms;
  };
};

}  // namespace
}  // namespace eadem::kernels::cuda::decoder
