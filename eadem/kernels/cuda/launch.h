// SPDX-License-Identifier: Apache-2.0
//
// The interface between the host part of a kernel (can_handle and run, in .cc) and its device part (.cu): a params
// struct per kernel and the function that launches it. Pointers are device pointers to contiguous elements. Every
// function launches nothing for an empty output and returns the status of its launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "eadem/core/dtype.h"
#include "eadem/kernels/attention/attention.h"
#include "eadem/kernels/attention/rope.h"
#include "eadem/kernels/cuda/linear/fragment_layout.h"
#include "eadem/kernels/elementwise.h"
#include "eadem/kernels/sample.h"

namespace eadem::kernels::cuda {

// --- What can be launched (capability.h).

// Whether this program has the kernels for Hopper, which backend.cmake lists.
[[nodiscard]] bool has_hopper_kernels();
// The compute capability, as one number, that the generic kernels were compiled for which run on the current device; 0
// if the program has none for it. Thread-safe; after the first call for a device it takes nanoseconds.
[[nodiscard]] cudaError_t find_code_capability(int& capability);

// --- rows.cu

struct EmbeddingParams {
  const void* table;   // [vocab, hidden] table_dtype: the rows of ids [first, first + vocab)
  const int32_t* ids;  // [tokens]
  void* y;             // [tokens, hidden] y_dtype; zeros for ids whose row the table lacks
  int64_t tokens, hidden, vocab, first;
  float scale;
  DType table_dtype, y_dtype;
};
[[nodiscard]] cudaError_t launch_embedding(const EmbeddingParams& params, cudaStream_t stream);

struct EmbeddingBackwardParams {
  const int32_t* ids;  // [tokens]
  const void* dy;      // [tokens, hidden] dtype
  float* dtable;       // [vocab, hidden], added to: the rows of ids [first, first + vocab)
  int64_t tokens, hidden, vocab, first;
  float scale;
  DType dtype;
};
[[nodiscard]] cudaError_t launch_embedding_backward(const EmbeddingBackwardParams& params, cudaStream_t stream);

struct FeedTokensParams {
  const int32_t* ids;      // [tokens]
  const int32_t* sampled;  // every row that ids name
  int32_t* y;              // [tokens]
  int64_t tokens;
};
[[nodiscard]] cudaError_t launch_feed_tokens(const FeedTokensParams& params, cudaStream_t stream);

struct SelectRowsParams {
  const void* x;        // [tokens, hidden] dtype
  const int32_t* rows;  // [num_rows]
  void* y;              // [num_rows, hidden] dtype
  int64_t tokens, num_rows, hidden;
  DType dtype;
};
[[nodiscard]] cudaError_t launch_select_rows(const SelectRowsParams& params, cudaStream_t stream);

// --- elementwise.cu

struct BinaryParams {
  const void* a;  // [size] dtype
  const void* b;  // [size] dtype
  void* y;        // [size] dtype; may be a
  int64_t size;
  DType dtype;
};
[[nodiscard]] cudaError_t launch_add(const BinaryParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t launch_mul(const BinaryParams& params, cudaStream_t stream);
// y = f(a) * b
[[nodiscard]] cudaError_t launch_gated_activation(const BinaryParams& params, ActivationKind kind, cudaStream_t stream);

struct BinaryGradientParams {
  const void* a;   // [size] dtype
  const void* b;   // [size] dtype
  const void* dy;  // [size] dtype
  void* da;        // [size] dtype, or null
  void* db;        // [size] dtype, or null
  int64_t size;
  DType dtype;
};
// Of y = a * b.
[[nodiscard]] cudaError_t launch_mul_backward(const BinaryGradientParams& params, cudaStream_t stream);
// Of y = f(a) * b.
[[nodiscard]] cudaError_t launch_gated_activation_backward(const BinaryGradientParams& params, ActivationKind kind,
                                                           cudaStream_t stream);

struct UnaryParams {
  const void* x;  // [size] x_dtype
  void* y;        // [size] y_dtype; may be x
  int64_t size;
  DType x_dtype, y_dtype;
};
// y = factor * x, with the soft cap or the limit if there is one; x_dtype == y_dtype
[[nodiscard]] cudaError_t launch_scale(const UnaryParams& params, const ScaleAttrs& attrs, cudaStream_t stream);
// y = b times the derivative of that at a; y may be b
[[nodiscard]] cudaError_t launch_scale_backward(const BinaryParams& params, const ScaleAttrs& attrs,
                                                cudaStream_t stream);
// x_dtype == y_dtype
[[nodiscard]] cudaError_t launch_activation(const UnaryParams& params, ActivationKind kind, cudaStream_t stream);
// y = b * f'(a); y may be b
[[nodiscard]] cudaError_t launch_activation_backward(const BinaryParams& params, ActivationKind kind,
                                                     cudaStream_t stream);
[[nodiscard]] cudaError_t launch_cast(const UnaryParams& params, cudaStream_t stream);

// --- norm.cu

// The planes of rows in Int8Chunks (linear/int8_chunks.h).
struct Int8ChunkPlanes {
  int8_t* codes = nullptr;
  float* scales = nullptr;
  f16_t* halves = nullptr;
  f16_t* sums = nullptr;
  int64_t rows = 0, columns = 0;  // columns are a multiple of kIntegerChunk
};
inline constexpr int64_t kIntegerChunk = 256;
// launch_integer_stream multiplies up to so many rows, launch_integer_tiles more.
inline constexpr int64_t kIntegerStreamMaxTokens = 32;
inline constexpr int kMostCodeSum = (1 << 24) / (15 * 63);  // of the magnitudes of a chunk's codes

struct RmsNormParams {
  const void* x;       // [rows, hidden] dtype
  const void* add;     // [rows, hidden] dtype, or null: x is normalized as it is
  void* sum;           // [rows, hidden] dtype, x + add; may be x. Null without `add`
  const void* weight;  // [hidden] weight_dtype
  void* y;             // [rows, hidden] dtype; may be x
  float* inv_rms;      // [rows], or null
  int64_t rows, hidden;
  float eps;
  DType dtype, weight_dtype;
  // Not null: y is written in RowEncoding::fp8_e4m3, rounded to `dtype` before, and `y` is not used. hidden is a
  // multiple of 8, at most kMostQuantizedNormColumns.
  uint8_t* codes = nullptr;  // [rows, hidden]
  float* scales = nullptr;   // [rows]
  Int8ChunkPlanes chunks{};  // or, if it has codes, in Int8Chunks, likewise
};
inline constexpr int64_t kMostQuantizedNormColumns = 8192;
[[nodiscard]] cudaError_t launch_rms_norm(const RmsNormParams& params, cudaStream_t stream);

// --- quantize.cu

// Rows in RowEncoding::fp8_e4m3.
struct QuantizeRowsParams {
  const void* x;   // [rows, columns] dtype
  uint8_t* codes;  // [rows, columns]
  float* scales;   // [rows]
  int64_t rows, columns;
  DType dtype;
  // [rows], or null. Not null: the bits of the largest magnitude of each row as f32; becomes 0.
  unsigned* largest = nullptr;
};
[[nodiscard]] cudaError_t launch_quantize_rows(const QuantizeRowsParams& params, cudaStream_t stream);

// --- quantize_chunks.cu

// Rows in Int8Chunks.
struct QuantizeChunksParams {
  const void* x;  // [rows, columns] dtype
  Int8ChunkPlanes to;
  DType dtype;
  // [rows, columns] dtype, or null. Not null: activation(x) * factor, rounded to dtype, is what becomes codes.
  const void* factor = nullptr;
  ActivationKind activation = {};
};
[[nodiscard]] cudaError_t launch_quantize_chunks(const QuantizeChunksParams& params, cudaStream_t stream);

// --- linear/fp8_blocks.cu

// A matrix in Fp8Encoding's e4m3 with a scale for each block of 128 x 128.
struct QuantizeBlocksParams {
  const void* x;   // [rows, columns] dtype; columns are a multiple of 8
  uint8_t* codes;  // [rows, columns]
  float* scales;   // [ceil(rows / 128), ceil(columns / 128)]
  int64_t rows, columns;
  DType dtype;
};
[[nodiscard]] cudaError_t launch_quantize_blocks(const QuantizeBlocksParams& params, cudaStream_t stream);

struct TransposeBlocksParams {
  const uint8_t* codes;       // [rows, columns], both multiples of 4
  const float* scales;        // [ceil(rows / 128), ceil(columns / 128)]
  uint8_t* transposed_codes;  // [columns, rows]
  float* transposed_scales;   // [ceil(columns / 128), ceil(rows / 128)]
  int64_t rows, columns;
};
[[nodiscard]] cudaError_t launch_transpose_blocks(const TransposeBlocksParams& params, cudaStream_t stream);

// --- column_sums.cu

// dbias[n] += the sum of dy[:, n].
struct ColumnSumsParams {
  const void* dy;  // [tokens, out] dtype
  float* dbias;    // [out]
  float* parts;    // [ceil(tokens / kColumnSumRows), out]: scratch
  int64_t tokens, out;
  DType dtype;
};
inline constexpr int64_t kColumnSumRows = 256;
[[nodiscard]] cudaError_t launch_column_sums(const ColumnSumsParams& params, cudaStream_t stream);
// result[i] += the sum of parts[:, i] of [count, size], in order.
[[nodiscard]] cudaError_t launch_add_parts(float* result, const float* parts, int64_t size, int64_t count,
                                           cudaStream_t stream);

// --- norm_backward.cu

struct RmsNormBackwardParams {
  const void* x;         // [rows, hidden] dtype
  const void* weight;    // [hidden] weight_dtype
  const float* inv_rms;  // [rows]
  const void* dy;        // [rows, hidden] dtype
  const void* dsum;      // [rows, hidden] dtype, added to dx once that is rounded; or null
  void* dx;              // [rows, hidden] dtype, or null
  float* dweight;        // [hidden], added to; or null
  float* parts;          // [ceil(rows / kNormRowsOfPart), hidden]: scratch for dweight
  int64_t rows, hidden;
  DType dtype, weight_dtype;
};
inline constexpr int64_t kNormRowsOfPart = 128;
[[nodiscard]] cudaError_t launch_rms_norm_backward(const RmsNormBackwardParams& params, cudaStream_t stream);

// --- layer_norm.cu

struct LayerNormParams {
  const void* x;       // [rows, hidden] dtype
  const void* weight;  // [hidden] weight_dtype
  const void* bias;    // [hidden] weight_dtype, or null
  void* y;             // [rows, hidden] dtype; may be x
  float* mean;         // [rows], or null
  float* inv_std;      // [rows], or null
  int64_t rows, hidden;
  float eps;
  DType dtype, weight_dtype;
};
[[nodiscard]] cudaError_t launch_layer_norm(const LayerNormParams& params, cudaStream_t stream);

struct LayerNormBackwardParams {
  const void* x;         // [rows, hidden] dtype
  const void* weight;    // [hidden] weight_dtype
  const float* mean;     // [rows]
  const float* inv_std;  // [rows]
  const void* dy;        // [rows, hidden] dtype
  void* dx;              // [rows, hidden] dtype, or null
  float* dweight;        // [hidden], added to; or null
  float* dbias;          // likewise
  float* parts;          // [2, ceil(rows / kNormRowsOfPart), hidden]: scratch
  int64_t rows, hidden;
  DType dtype, weight_dtype;
};
[[nodiscard]] cudaError_t launch_layer_norm_backward(const LayerNormBackwardParams& params, cudaStream_t stream);

// --- softmax.cu

struct SoftmaxParams {
  const float* x;  // [rows, n]
  float* y;        // [rows, n]; may be x
  int64_t rows, n;
};
[[nodiscard]] cudaError_t launch_softmax(const SoftmaxParams& params, cudaStream_t stream);

// --- rope.cu

struct RopeTableParams {
  const int32_t* positions;  // [tokens]
  const float* inv_freq;     // [half]
  float* table;              // [tokens, 2 * half]
  int64_t tokens, half;
  float scale;
};
[[nodiscard]] cudaError_t launch_rope_table(const RopeTableParams& params, cudaStream_t stream);

struct RopeParams {
  const void* x;       // [tokens, heads, head_dim] dtype
  const float* table;  // [tokens, rotary_dim]
  void* y;             // like x; may be x
  int64_t tokens, heads, head_dim, rotary_dim;
  RopeStyle style;
  DType dtype;
  bool inverse = false;  // rotates back
};
[[nodiscard]] cudaError_t launch_rope(const RopeParams& params, cudaStream_t stream);

// The codes of a KV cache in a RowEncoding; none: it is plain.
enum class KvCode : uint8_t { none, int8, e4m3 };

struct KvAppendParams {
  const void* k;         // [tokens, kv_heads, head_dim] dtype
  const float* table;    // [tokens, rotary_dim], or null: k is appended as it is
  const void* v;         // [tokens, kv_heads, head_dim] dtype
  const int64_t* slots;  // [tokens]
  void* cache_k;         // [num_blocks, kv_heads, block_size, head_dim] cache_dtype, or codes
  void* cache_v;         // likewise
  int64_t tokens, kv_heads, head_dim, rotary_dim, block_size;
  RopeStyle style;
  DType dtype, cache_dtype;
  const void* q = nullptr;     // [tokens, heads, head_dim] dtype, with `table`: rotated into y; or null
  void* y = nullptr;           // like q
  int64_t heads = 0;           // of q
  KvCode code = KvCode::none;  // not none: head_dim is a multiple of 4, at most kMaxHeadDim
  float* k_scales = nullptr;   // [num_blocks, kv_heads, block_size], with a code
  float* v_scales = nullptr;   // likewise
};
[[nodiscard]] cudaError_t launch_kv_append(const KvAppendParams& params, cudaStream_t stream);

// --- attention.cu

inline constexpr int64_t kMaxHeadDim = 512;

// Keys and values of the tokens of a step that are not in the cache yet: the kernel rotates queries and keys by a table
// (rotate_half, all elements), and appends them. A token's slot is that of its position in the blocks of its sequence,
// or negative: then it is appended nowhere, and attention reads what the cache has.
struct NewRows {
  const float* table = nullptr;    // [tokens, head_dim], or null: the cache has the rows
  const void* k = nullptr;         // [tokens, kv_heads, head_dim] bf16
  const void* v = nullptr;         // likewise
  const int64_t* slots = nullptr;  // [tokens]
  void* cache_k = nullptr;         // k and v of the params
  void* cache_v = nullptr;
};

struct AttentionParams {
  const void* q;               // [tokens, heads, head_dim] dtype
  const void* k;               // direct [tokens, kv_heads, head_dim], cached
                               // [num_blocks, kv_heads, block_size, head_dim]; kv_dtype, or codes
  const void* v;               // like k
  const int32_t* query_start;  // [sequences + 1]
  const int32_t* kv_length;    // [sequences]
  const int32_t* block_table;  // [sequences, max_blocks]; null when direct
  void* y;                     // [tokens, heads, head_dim] dtype
  int64_t tokens, sequences, max_blocks, block_size;
  int32_t heads, kv_heads, head_dim;
  int32_t window;  // 0: unlimited
  float scale;
  DType dtype, kv_dtype;
  float* lse = nullptr;  // [tokens, heads], or null; direct only
  // launch_attention_backward and launch_attention_backward_wgmma take neither:
  float softcap = 0.0f;          // 0: none
  float scale_by_cap = 0.0f;     // scale / softcap, with a soft cap
  const float* sinks = nullptr;  // [heads], or null
  // Only the kernels for tensor cores take a cache in a RowEncoding:
  KvCode code = KvCode::none;
  const float* k_scales = nullptr;  // [num_blocks, kv_heads, block_size], with a code
  const float* v_scales = nullptr;  // likewise
  // Kernels that read a cache by tensor maps use the first; only launch_attention_decode uses those after it:
  int64_t cache_rows = 0;   // num_blocks * kv_heads * block_size
  float* states = nullptr;  // [max_splits, heads, padded_head_dim(head_dim) + 2]
  int64_t max_splits = 0;   // the most splits that all sequences of a step have together
  // [sequences, kv_heads, tiles of 16 rows of its query heads], zeros; they are zeros again afterwards.
  unsigned* arrivals = nullptr;
  int32_t multiprocessors = 1;
  NewRows new_rows = {};        // where takes_new_rows
  Int8ChunkPlanes chunks = {};  // where writes_chunks: if it has codes, y is rounded to it, and not written itself
};
[[nodiscard]] cudaError_t launch_attention(const AttentionParams& params, cudaStream_t stream);

// --- attention_prompt.cu and attention_decode.cu, for Hopper: bf16 queries; keys and values in bf16, or in a cache of
// 8-bit codes; head_dim a multiple of 8 up to 256, or with codes one of 16 up to 128; at most kAttentionMmaMaxGroup
// heads a key head. A step of one token per sequence has the same bits from both.

inline constexpr int64_t kAttentionSplitKeys = 256;
inline constexpr int64_t kAttentionMmaMaxGroup = 64;  // query heads of a key head
inline constexpr int64_t kAttentionMmaMaxSequences = 1024;
// How many elements these kernels compute with for a head: zeros follow those that it has.
constexpr int64_t padded_head_dim(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }
[[nodiscard]] cudaError_t launch_attention_prompt(const AttentionParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t launch_attention_decode(const AttentionParams& params, cudaStream_t stream);
// Whether launch_attention_decode takes new rows: for few sequences, a cache of bf16, and heads of 64 or 128.
[[nodiscard]] bool takes_new_rows(const AttentionParams& params);
// Whether it rounds its result: for few sequences whose key heads have whole chunks each.
[[nodiscard]] bool writes_chunks(const AttentionParams& params);
// launch_attention_decode calls this for many sequences.
[[nodiscard]] cudaError_t launch_attention_decode_many(const AttentionParams& params, cudaStream_t stream);

// --- decoder/shapes.cu, for Hopper: layers of a decoder for one token (kernels/decoder_layers.h).

// The shapes that the kernel is compiled for, which are those of Llama 3.1 8B and of Llama 3.2 1B, and the
// multiprocessors that it needs. Weights are FragmentBlocks: all of kGroupLayout, of kZeroGroupLayout, or of the same
// with scales in bf16; or each of kFourBitLayout or kSixBitLayout; or rows of e4m3, or, in layers of kLlama1b, of bf16.
struct DecoderShape {
  int hidden, ffn, heads, kv_heads, head_dim;
  friend constexpr bool operator==(const DecoderShape&, const DecoderShape&) = default;
};
inline constexpr DecoderShape kLlama8b{.hidden = 4096, .ffn = 14336, .heads = 32, .kv_heads = 8, .head_dim = 128},
    kLlama1b{.hidden = 2048, .ffn = 8192, .heads = 32, .kv_heads = 8, .head_dim = 64};
inline constexpr int kDecoderMultiprocessors = 132;
inline constexpr int kMostDecoderLayers = 32;
inline constexpr int64_t kDecoderBlockMultiple = 16;  // of the tokens of a block of the cache

struct DecoderWeight {
  const void* blocks;   // or rows [out, in]: codes of e4m3, or bf16
  const float* scales;  // [out]: of the rows of e4m3, else null
  IntegerCodes codes;   // none: rows
};
struct DecoderLayerParams {
  const float *norm, *mlp_norm;  // [hidden]
  DecoderWeight q, k, v, o, gate, up, down;
  void *cache_k, *cache_v;  // [num_blocks, kv_heads, block_size, head_dim] bf16
};
struct DecoderLayersParams {
  DecoderShape shape;  // one of the above
  DecoderLayerParams layers[kMostDecoderLayers];
  const void* x;               // [hidden] bf16
  void* y;                     // like x
  const float* table;          // [head_dim]: cosines, then sines
  const int64_t* slots;        // [1]
  const int32_t* kv_length;    // [1]
  const int32_t* block_table;  // [max_blocks]
  // A buffer of decoder_exchange_bytes(shape, max_splits) bytes. It has to hold zeros before its first launch, and all
  // its launches have the same num_layers and max_splits.
  void* exchange;
  int num_layers;
  int64_t block_size, cache_rows, max_splits;  // cache_rows as above; the most splits that the token's keys have
  float eps, mlp_eps, scale;                   // of the norms, of attention
  double bytes_per_second;                     // of the device's memory
  // Weights in groups have scales of this type, f16 or bf16, and zero points or none. K-quants do not read these two.
  FragmentLayout::Scale scale_type;
  bool has_zeros;
};
[[nodiscard]] int64_t decoder_exchange_bytes(const DecoderShape& shape, int64_t max_splits);
[[nodiscard]] cudaError_t launch_decoder_layers(const DecoderLayersParams& params, cudaStream_t stream);

// --- attention_backward.cu: direct keys and values

struct AttentionBackwardParams {
  AttentionParams forward;  // its y is the result of the forward pass; lse is set
  const void* dy;           // [tokens, heads, head_dim] dtype
  void* dq;                 // [tokens, heads, head_dim] dtype, or null
  void* dk;                 // [tokens, kv_heads, head_dim] dtype, or null
  void* dv;                 // likewise
  float* delta;             // [tokens, heads]: scratch
  // Scratch of launch_attention_backward_wgmma, with chunks = ceil(tokens / kGradientTokens):
  float* sums = nullptr;     // [chunks, heads, kGradientChunk, padded_head_dim(head_dim)], aligned to 16 bytes
  int32_t* turns = nullptr;  // [1 + chunks * heads]: how many blocks have begun; how many have added to each sum
};
// f32 or bf16, head_dim up to kMaxHeadDim, without tensor cores.
[[nodiscard]] cudaError_t launch_attention_backward(const AttentionBackwardParams& params, cudaStream_t stream);
// attention_backward_wgmma.cu, for Hopper: bf16, head_dim a multiple of 8 up to kGradientHeadDim. Of sequences with
// more than kGradientKeys tokens, sums of dq are made in chunks of kGradientChunk queries.
constexpr int kGradientChunk = 64, kGradientKeys = 128, kGradientHeadDim = 128;
// The fewest tokens of such a sequence for each of its chunks: the shortest has three chunks of its 129 tokens. So the
// sequence that begins at token t may have its chunks from ceil(t / kGradientTokens) on.
constexpr int kGradientTokens = (kGradientKeys + 1) / (kGradientKeys / kGradientChunk + 1);
[[nodiscard]] cudaError_t launch_attention_backward_wgmma(const AttentionBackwardParams& params, cudaStream_t stream);

// --- linear.cu

// The elements that share a scale in a weight [out, in] of 8-bit floats, and the shape of its f32 scales.
enum class WeightScaling : uint8_t {
  rows,    // a row; [out]
  matrix,  // all elements; [1]
  blocks,  // a block of 128 x 128; [ceil(out / 128), ceil(in / 128)]
};

struct LinearParams {
  const void* x;       // [tokens, in] x_dtype
  const void* weight;  // [out, in] weight_dtype
  const void* bias;    // [out] bias_dtype, or null
  void* y;             // [tokens, out] y_dtype
  int64_t tokens, in, out;
  DType x_dtype, weight_dtype, bias_dtype, y_dtype;
  const float* x_scales = nullptr;       // [tokens]: x are codes of e4m3; or null
  const float* weight_scales = nullptr;  // with x_scales
  Int8ChunkPlanes x_chunks{};            // x and x_scales are among them; or none
  WeightScaling weight_scaling = WeightScaling::rows;
};
[[nodiscard]] cudaError_t launch_linear_tiles(const LinearParams& params, cudaStream_t stream);

// --- linear_backward.cu

struct LinearBackwardParams {
  const void* x;       // [tokens, in] x_dtype
  const void* weight;  // [out, in] weight_dtype
  const void* dy;      // [tokens, out] dy_dtype
  void* dx;            // [tokens, in] dx_dtype, or null
  float* dweight;      // [out, in], added to; or null
  int64_t tokens, in, out;
  DType x_dtype, weight_dtype, dy_dtype, dx_dtype;
};
[[nodiscard]] cudaError_t launch_linear_backward(const LinearBackwardParams& params, cudaStream_t stream);

// --- linear_stream.cu, for Hopper

inline constexpr int64_t kLinearStreamMaxTokens = 64;
inline constexpr int64_t kLinearStreamLeast = 32;     // so many tokens or fewer are always streamed
inline constexpr int64_t kLinearStreamMultiple = 64;  // `in` is a multiple of this

// One product of a launch.
struct LinearStreamPart {
  const void* weight = nullptr;  // [out, in] bf16; rows begin at multiples of 16 bytes
  const void* bias = nullptr;    // [out] y_dtype, or null; not with `up`
  void* y = nullptr;             // [tokens, out] y_dtype, f32 or bf16
  int64_t out = 0;
  const float* scales = nullptr;  // of `weight`, for launch_fp8_stream
};
inline constexpr int kMostLinearStreamParts = 3;

struct LinearStreamParams {
  const void* x;  // [tokens, in] bf16; rows begin at multiples of 16 bytes
  // [out, in] bf16, or null. Not null: y = activation(x weight^T) * (x up^T) in bf16, of one part.
  const void* up;
  LinearStreamPart parts[kMostLinearStreamParts];  // the first have outputs
  int64_t tokens, in;
  int64_t multiprocessors;
  DType y_dtype;
  ActivationKind activation;
  // For launch_fp8_stream:
  const float* x_scales = nullptr;  // [tokens]
  const float* up_scales = nullptr;
  WeightScaling scaling = WeightScaling::rows;  // of all weights
  // With `up`, for launch_fp8_tiles: [tokens], or null. Becomes the bits of the largest magnitude of each row of y, if
  // it was 0.
  unsigned* y_largest = nullptr;
  Int8ChunkPlanes x_chunks{};  // for launch_integer_stream and launch_integer_tiles: x and x_scales are among them
};
[[nodiscard]] cudaError_t launch_linear_stream(const LinearStreamParams& params, cudaStream_t stream);

// --- fp8_stream.cu and, for any number of tokens, fp8_tiles.cu, for Hopper: x are codes of e4m3 with a scale for each
// row, weights codes with scales; `in` is a multiple of kFp8Multiple

inline constexpr int64_t kFp8Multiple = 128;
[[nodiscard]] cudaError_t launch_fp8_stream(const LinearStreamParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t launch_fp8_tiles(const LinearStreamParams& params, cudaStream_t stream);

// --- packed_stream.cu, for Hopper: weights are FragmentBlocks

// As LinearStreamParams; each weight in its own layout.
struct PackedStreamParams {
  LinearStreamParams product;
  FragmentLayout layouts[kMostLinearStreamParts];
  FragmentLayout up_layout;
  int num_tiles = 0;  // set by launch_integer_stream and launch_integer_turns
};
[[nodiscard]] cudaError_t launch_packed_stream(const PackedStreamParams& params, cudaStream_t stream);

// --- packed_rows.cu: the weight is FragmentBlocks

// y [rows, in] bf16 = weight [rows, in]; y begins at a multiple of 16 bytes.
[[nodiscard]] cudaError_t launch_unpack_blocks(const FragmentLayout& layout, const void* weight, void* y, int64_t rows,
                                               int64_t in, cudaStream_t stream);
// As launch_embedding; table_dtype does not count.
[[nodiscard]] cudaError_t launch_packed_embedding(const EmbeddingParams& params, const FragmentLayout& layout,
                                                  cudaStream_t stream);

// --- integer_stream.cu, for Hopper: weights are FragmentBlocks that integer_codes_of knows, all groups or all
// K-quants, x rows of Int8Chunks; `in` is a multiple of kIntegerChunk

// Up to kIntegerStreamMaxTokens rows.
[[nodiscard]] cudaError_t launch_integer_stream(const PackedStreamParams& params, cudaStream_t stream);
// integer_tiles.cu: the same bits for more rows, without `up`. Several parts, or few tiles, are left to
// launch_integer_turns.
[[nodiscard]] cudaError_t launch_integer_tiles(const PackedStreamParams& params, cudaStream_t stream);
// integer_turns.cu: the same for one part or several, by tiles of kIntegerTurnTile outputs and as many tokens.
// launch_integer_tiles calls it for several parts, and for one that has no more of these tiles than there are
// multiprocessors.
inline constexpr int64_t kIntegerTurnTile = 64;
[[nodiscard]] cudaError_t launch_integer_turns(const PackedStreamParams& params, cudaStream_t stream);
// integer_group_tiles.cu: what launch_integer_tiles calls for codes in groups.
[[nodiscard]] cudaError_t launch_integer_group_tiles(const PackedStreamParams& params, cudaStream_t stream);

// --- self_test.cu: kernels that test a library's algorithm before it is used.

// Fills `size` values with random signs, mantissas and exponents.
[[nodiscard]] cudaError_t launch_fill_test_values(void* values, DType dtype, int64_t size, uint64_t seed,
                                                  cudaStream_t stream);
// Fills `size` codes of 8-bit floats at random: the magnitudes are the integers from first to last.
struct TestCodes {
  uint8_t first, last;
};
inline constexpr TestCodes kE4m3TestCodes = {0x00, 0x7e}, kE5m2TestCodes = {0x1c, 0x5b};  // all; 2^-8 to 2^8
[[nodiscard]] cudaError_t launch_fill_test_codes(uint8_t* codes, int64_t size, TestCodes range, uint64_t seed,
                                                 cudaStream_t stream);
// Adds to *count, in device memory, how many of the 16-bit words of a and b differ. size_bytes is even.
[[nodiscard]] cudaError_t launch_count_unequal(const void* a, const void* b, int64_t size_bytes, uint32_t* count,
                                               cudaStream_t stream);

// --- cross_entropy.cu

struct CrossEntropyParams {
  const void* logits;     // [rows, vocab] dtype
  const int32_t* labels;  // [rows]
  float* loss;            // [rows], or null
  float* lse;             // [rows], or null
  int64_t rows, vocab;
  DType dtype;
  // The gradient too, unless null.
  const float* dloss = nullptr;  // [rows]
  void* dlogits = nullptr;       // [rows, vocab] result_dtype; may be logits if the dtypes are one
  DType result_dtype = DType::f32;
};
[[nodiscard]] cudaError_t launch_cross_entropy(const CrossEntropyParams& params, cudaStream_t stream);

struct CrossEntropyBackwardParams {
  const void* logits;     // [rows, vocab] dtype
  const int32_t* labels;  // [rows]
  const float* lse;       // [rows]
  const float* dloss;     // [rows]
  void* dlogits;          // [rows, vocab] result_dtype; may be logits if the dtypes are one
  int64_t rows, vocab;
  DType dtype, result_dtype;
};
[[nodiscard]] cudaError_t launch_cross_entropy_backward(const CrossEntropyBackwardParams& params, cudaStream_t stream);

// --- optimizer.cu

// sums[b] = the sum of the squares of block b of kGradNormBlock elements of x [size].
[[nodiscard]] cudaError_t launch_sum_squares(const float* x, int64_t size, double* sums, cudaStream_t stream);
// *norm = the root of the sum of sums [count].
[[nodiscard]] cudaError_t launch_norm(const double* sums, int64_t count, float* norm, cudaStream_t stream);

struct AdamWParams {
  const float* grad;   // [size]
  const float* norm;   // [1]
  const float* hyper;  // [8]
  float* master;       // [size]
  float* m;            // [size]
  float* v;            // [size]
  void* weight;        // [size] weight_dtype, or null
  int64_t size;
  bool decay;
  DType weight_dtype;  // bf16 or f16
};
[[nodiscard]] cudaError_t launch_adamw(const AdamWParams& params, cudaStream_t stream);

// --- sample.cu

inline constexpr int64_t kMaxSampleVocab = int64_t{1} << 24;

struct SampleParams {
  const float* logits;            // [rows, vocab]
  const SampleRow* row_settings;  // [rows]
  const int32_t* penalties;       // [penalties, 2]: token, count; masks
  float* replaced;                // [penalties]: scratch
  int32_t* token;                 // [rows]
  float* logprob;                 // [rows]
  int32_t* top_token;             // [rows, kMostTopLogprobs]
  float* top_logprob;             // [rows, kMostTopLogprobs]
  int64_t rows;
  int32_t vocab;
};
[[nodiscard]] cudaError_t launch_sample(const SampleParams& params, cudaStream_t stream);

}  // namespace eadem::kernels::cuda
