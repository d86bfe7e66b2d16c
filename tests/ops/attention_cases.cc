// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/attention_cases.h"

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/case_list.h"
#include "tests/ops/device_groups.h"
#include "tests/workloads/quantized_types.h"

namespace eadem::test {

namespace {

using ops::Workload;

const WeightType kCacheTypes[] = {kF32, kBf16, kF16, {kF32, &RowEncoding::int8()}, {kF32, &RowEncoding::fp8_e4m3()}};

std::vector<Workload> attention() {
  Cases cases;
  const TensorType query_start(DType::i32, {Dim(Symbol::sequences, 1)}), kv_length(DType::i32, {Symbol::sequences});
  struct Shape {
    int64_t heads, kv_heads, head_dim, value_dim = head_dim;
    float softcap = 0.0f;
    bool sinks = false;
    int64_t value_row = value_dim;
    int64_t chunk = 0;
    MatmulInput backward_input = MatmulInput::f32;
  };
  const auto attrs_of = [](const Shape& shape, int64_t window, kernels::KvSource source) {
    return std::make_shared<ops::Attention>(kernels::AttentionAttrs{
        shape.heads, shape.kv_heads, shape.head_dim, 1.0f / static_cast<float>(shape.head_dim), window, source,
        shape.value_dim, shape.softcap, shape.sinks, shape.chunk, shape.backward_input});
  };
  const auto add = [&](const Shape& shape, ops::OpPtr op, std::vector<TensorType> types, const SymbolValues& symbols) {
    if (shape.sinks) types.emplace_back(kF32, std::initializer_list<Dim>{shape.heads});
    cases.add(std::move(op), std::move(types), symbols);
  };
  const auto direct = [&](DType dtype, const Shape& shape, int64_t tokens, int64_t sequences, int64_t window) {
    SymbolValues symbols;
    symbols[Symbol::tokens] = tokens;
    symbols[Symbol::sequences] = sequences;
    add(shape, attrs_of(shape, window, kernels::KvSource::direct),
        {TensorType(dtype, {Symbol::tokens, shape.heads, shape.head_dim}),
         TensorType(dtype, {Symbol::tokens, shape.kv_heads, shape.head_dim}),
         TensorType(dtype, {Symbol::tokens, shape.kv_heads, shape.value_row}), query_start, kv_length,
         kernels::unconnected_port()},
        symbols);
  };
  const auto cached = [&](DType q, const WeightType& kv, const Shape& shape, int64_t tokens, int64_t sequences,
                          int64_t window, int64_t block_size, int64_t max_blocks) {
    SymbolValues symbols;
    symbols[Symbol::tokens] = tokens;
    symbols[Symbol::sequences] = sequences;
    symbols[Symbol::max_blocks] = max_blocks;
    const auto cache = [&](int64_t dim) {
      return TensorType(kv.dtype, {sequences * max_blocks + 2, shape.kv_heads, block_size, dim}, kv.encoding);
    };
    add(shape, attrs_of(shape, window, kernels::KvSource::cached),
        {TensorType(q, {Symbol::tokens, shape.heads, shape.head_dim}), cache(shape.head_dim), cache(shape.value_row),
         query_start, kv_length, TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})},
        symbols);
  };
  const auto by_chunks = [](Shape shape, int64_t chunk) {
    shape.chunk = chunk;
    return shape;
  };
  const auto in_bf16 = [](Shape shape) {
    shape.backward_input = MatmulInput::bf16;
    return shape;
  };
  constexpr Shape kGrouped{4, 2, 8}, kSingle{1, 1, 16}, kMany{6, 2, 5};
  // Gradients by products of bf16: lengths around chunks of 64 keys, blocks of 384 rows and tiles of 32, a group of
  // more rows than a block, and every attribute.
  for (int64_t tokens : {1, 2, 31, 64, 65, 97, 130}) direct(kF32, in_bf16({4, 2, 64}), tokens, 1, 0);
  direct(kF32, in_bf16({2, 1, 64}), 200, 1, 0);
  for (int64_t window : {1, 5, 64, 70}) direct(kF32, in_bf16({4, 2, 32}), 135, 2, window);
  for (int64_t head_dim : {1, 7, 16, 33, 48, 80, 128}) direct(kF32, in_bf16({3, 1, head_dim}), 75, 5, 0);
  for (const Shape& shape :
       {Shape{2, 1, 48, 32}, Shape{4, 2, 64, 128}, Shape{4, 2, 33, 7, 0, false, 33}, Shape{4, 2, 64, 64, 0.05f},
        Shape{6, 2, 24, 24, 0, true}, by_chunks({6, 2, 24, 9, 0.5f, true}, 40)})
    direct(kF32, in_bf16(shape), 135, 2, 0);
  direct(kF32, in_bf16({400, 1, 8}), 3, 2, 0);
  direct(kF32, in_bf16(kGrouped), 0, 0, 0);
  for (DType dtype : kActivationDtypes) {
    // Lengths around the chunk of 64 keys and around small tiles of queries.
    for (int64_t tokens : {1, 2, 3, 7, 8, 9, 63, 64, 65, 130}) direct(dtype, kGrouped, tokens, 1, 0);
    for (int64_t window : {1, 5, 64, 70, 1000}) direct(dtype, kGrouped, 135, 2, window);
    direct(dtype, kMany, 75, 5, 0);
    direct(dtype, kGrouped, 0, 0, 0);
    for (int64_t head_dim : {1, 3, 4, 7, 16, 17, 32, 33, 64, 80, 128}) direct(dtype, {2, 1, head_dim}, 11, 2, 0);
    // Values narrower and wider than keys; 72 and 64 as in latent attention.
    for (const Shape& shape : {Shape{2, 1, 48, 32}, Shape{4, 2, 64, 128}, Shape{3, 1, 72, 64}, Shape{2, 2, 5, 1}})
      for (int64_t window : {0, 40}) direct(dtype, shape, 75, 2, window);
    // Soft caps that scores reach, and sinks; on GPUs more tokens than tiles of prompts have.
    const int64_t capped_tokens = device_name() == "cpu" ? 135 : 300;
    for (const Shape& shape : {Shape{4, 2, 64, 64, 0.05f}, Shape{3, 1, 128, 128, 0, true}})
      for (int64_t window : {0, 40}) direct(dtype, shape, capped_tokens, 2, window);
    for (const Shape& shape : {Shape{4, 2, 8, 8, 0.5f}, Shape{6, 2, 24, 24, 0, true}, Shape{3, 1, 7, 9, 2.0f, true}})
      for (int64_t window : {0, 40}) direct(dtype, shape, 135, 2, window);
    for (const Shape& shape : {Shape{3, 1, 28, 20, 0, false, 28}, Shape{4, 2, 33, 7, 0, false, 33}})
      direct(dtype, shape, 75, 2, 0);
    // Chunks of positions: of one, of some, beside the chunks of 64 keys, and longer than the sequence.
    for (int64_t chunk : {1, 7, 63, 64, 65, 1000}) direct(dtype, by_chunks({4, 2, 8}, chunk), 135, 2, 0);
    direct(dtype, by_chunks({6, 2, 24, 9, 0.5f, true}, 40), 135, 2, 0);
    for (const WeightType& kv : kCacheTypes) {
      for (const Shape& shape : {Shape{4, 2, 16, 16, 0.5f}, Shape{8, 1, 16, 16, 0, true}}) {
        cached(dtype, kv, shape, 3, 3, 0, 16, 9);    // decode
        cached(dtype, kv, shape, 70, 2, 33, 16, 9);  // prefill and decode, a window
        cached(dtype, kv, shape, 1, 1, 0, 16, 71);   // splits
      }
      // Shapes that the tensor-core kernels of GPUs take: decode of few and of many sequences, keys of several splits,
      // and prompts beside decode. The CPU has no kernels of their own for them.
      if (device_name() != "cpu" && dtype == kBf16 && (kv.encoding != nullptr || kv.dtype == kBf16))
        for (const Shape& shape : {Shape{4, 2, 64}, Shape{4, 2, 128, 128, 0.05f}, Shape{10, 1, 64, 64, 0, true},
                                   Shape{3, 1, 128, 128, 0.1f, true}, Shape{2, 1, 256, 256, 0.05f}, Shape{3, 3, 96},
                                   Shape{10, 1, 80, 80, 0.1f, true}, Shape{4, 2, 120}, Shape{2, 1, 160}}) {
          if (kv.encoding != nullptr && (shape.head_dim > 128 || shape.head_dim % 16 != 0)) continue;
          const int64_t many = 140 / shape.kv_heads;
          cached(dtype, kv, shape, 3, 3, 0, 16, 40);
          cached(dtype, kv, shape, 2, 2, 100, 48, 9);
          cached(dtype, kv, shape, many, many, 0, 32, 9);
          cached(dtype, kv, shape, many, many, 70, 16, 9);
          cached(dtype, kv, shape, 150, 3, 0, 64, 5);
          cached(dtype, kv, shape, 150, 3, 90, 16, 20);
        }
      cached(dtype, kv, by_chunks({4, 2, 16}, 33), 3, 3, 0, 16, 9);      // decode by chunks
      cached(dtype, kv, by_chunks({4, 2, 16}, 33), 70, 2, 0, 7, 20);     // prefill and decode by chunks
      cached(dtype, kv, by_chunks({8, 1, 16}, 700), 1, 1, 0, 16, 71);    // splits, of which a chunk begins in one
      cached(dtype, kv, by_chunks({4, 2, 16}, 130), 300, 1, 0, 500, 1);  // contiguous, some chunks at once
      cached(dtype, kv, {4, 2, 48, 32}, 3, 3, 0, 16, 9);                 // decode
      cached(dtype, kv, {2, 1, 64, 128}, 20, 3, 33, 16, 5);              // prefill and decode, a window
      cached(dtype, kv, {16, 1, 72, 64}, 2, 2, 0, 16, 4);                // many rows
      cached(dtype, kv, {2, 1, 72, 64}, 1, 1, 0, 16, 71);                // splits
      cached(dtype, kv, {3, 1, 7, 33}, 17, 1, 0, 200, 1);                // contiguous, ragged panels
      cached(dtype, kv, kGrouped, 3, 3, 0, 16, 9);                       // decode
      cached(dtype, kv, kGrouped, 20, 3, 0, 16, 5);                      // chunked prefill and decode together
      cached(dtype, kv, kMany, 17, 2, 33, 7, 20);     // a block size that does not divide the chunk, and a window
      cached(dtype, kv, kSingle, 70, 1, 0, 200, 1);   // contiguous
      cached(dtype, kv, {2, 2, 64}, 4, 4, 0, 1, 66);  // blocks of one position
      cached(dtype, kv, kGrouped, 0, 0, 0, 16, 4);
      cached(dtype, kv, {7, 1, 40}, 2, 2, 0, 16, 71);     // spans; whole groups of keys, a ragged panel
      cached(dtype, kv, {4, 2, 64}, 1, 1, 700, 1500, 1);  // spans, a window, contiguous
      cached(dtype, kv, {34, 2, 16}, 1, 1, 0, 16, 40);    // more rows than a tile
      if (dtype == DType::f32) cached(dtype, kv, {2, 1, 16}, 1, 1, 0, 256, 128);  // 32k positions
      // Values in the first columns of keys: decode in place and through scratch, splits, chunked prefill.
      cached(dtype, kv, {3, 1, 28, 20, 0, false, 28}, 2, 2, 0, 16, 4);
      cached(dtype, kv, {16, 1, 72, 64, 0, false, 72}, 2, 2, 0, 16, 4);
      cached(dtype, kv, {5, 1, 72, 64, 0, false, 72}, 1, 1, 0, 16, 71);
      cached(dtype, kv, {3, 1, 33, 7, 0, false, 33}, 20, 3, 0, 7, 12);
    }
    // Keys and values that tiles multiply (kernels/cpu/attention/tiled_rows.h): fewer rows than a tile has, as many and
    // more, widths that differ, splits, blocks of a cache shorter than a tile, and every attribute.
    cached(dtype, kBf16, {8, 1, 64}, 1, 1, 0, 16, 71);
    cached(dtype, kBf16, {32, 2, 32}, 3, 3, 0, 16, 9);
    cached(dtype, kBf16, {16, 2, 128, 64}, 20, 3, 0, 7, 12);
    cached(dtype, kBf16, {18, 2, 32, 96, 0.5f, true}, 150, 2, 33, 16, 20);
    cached(dtype, kBf16, {8, 1, 64, 64, 0, true}, 1, 1, 700, 1, 1200);
    cached(dtype, kBf16, by_chunks({18, 2, 64}, 40), 70, 2, 0, 200, 1);
    // Latents that they multiply: one row and as many as a tile has, rows that
    // are no multiple of these, more than a block has; splits, blocks of a cache that are shorter than a tile and that
    // do not divide it, and every attribute.
    cached(dtype, kBf16, {1, 1, 64, 32, 0, false, 64}, 1, 1, 0, 16, 4);
    cached(dtype, kBf16, {16, 1, 576, 512, 0, false, 576}, 1, 1, 0, 16, 71);
    cached(dtype, kBf16, {5, 1, 96, 64, 0, false, 96}, 20, 3, 0, 7, 12);
    cached(dtype, kBf16, {3, 1, 96, 32, 0, false, 96}, 150, 2, 0, 200, 1);
    cached(dtype, kBf16, {16, 1, 96, 64, 0, false, 96}, 70, 2, 0, 1, 66);
    cached(dtype, kBf16, {200, 1, 64, 32, 0, false, 64}, 5, 2, 0, 16, 9);
    cached(dtype, kBf16, {6, 2, 96, 64, 0.5f, true, 96}, 70, 2, 33, 16, 9);
    cached(dtype, kBf16, {4, 2, 160, 128, 0, true, 160}, 1, 1, 700, 16, 71);
    cached(dtype, kBf16, by_chunks({6, 1, 64, 32, 0, false, 64}, 40), 70, 2, 0, 16, 9);
  }
  return cases.take();
}

std::vector<Workload> kv_append() {
  Cases cases;
  const auto op = std::make_shared<ops::KvAppend>();
  for (DType dtype : kActivationDtypes)
    for (const WeightType& stored : kCacheTypes)
      for (int64_t head_dim : {1, 5, 16, 33})
        for (int64_t tokens : {0, 1, 9}) {
          for (int64_t value_dim : {head_dim, int64_t{7}}) {
            const auto rows = [&](int64_t dim) { return TensorType(dtype, {Symbol::tokens, 2, dim}); };
            const auto cache = [&](int64_t dim) { return TensorType(stored.dtype, {4, 2, 3, dim}, stored.encoding); };
            cases.add(op,
                      {rows(head_dim), rows(value_dim), TensorType(DType::i64, {Symbol::tokens}), cache(head_dim),
                       cache(value_dim)},
                      tokens);
          }
        }
  return cases.take();
}

std::vector<Workload> latent_append() {
  Cases cases;
  for (DType dtype : kActivationDtypes)
    for (const WeightType& stored : kCacheTypes)
      for (int64_t width : {1, 28, 33})
        for (int64_t tokens : {0, 1, 9})
          cases.add(std::make_shared<ops::LatentAppend>(),
                    {TensorType(dtype, {Symbol::tokens, 1, width}), TensorType(DType::i64, {Symbol::tokens}),
                     TensorType(stored.dtype, {4, 1, 3, width}, stored.encoding)},
                    tokens);
  // A row for each four tokens, in blocks of 8 and of a number that is no multiple.
  for (const WeightType& stored : kCacheTypes)
    for (const auto& [positions, rows] : {std::pair<int64_t, int64_t>{8, 2}, {9, 3}})
      for (int64_t tokens : {0, 1, 9})
        cases.add(std::make_shared<ops::LatentAppend>(kernels::LatentAppendAttrs{4, positions}),
                  {TensorType(kF32, {Symbol::tokens, 1, 17}), TensorType(DType::i64, {Symbol::tokens}),
                   TensorType(stored.dtype, {4, 1, rows, 17}, stored.encoding)},
                  tokens);
  return cases.take();
}

std::vector<Workload> latent_attention() {
  struct Step {
    int64_t tokens, sequences, block_size, max_blocks;
  };
  struct Heads {
    int64_t heads, latent, nope, rope, value;
  };
  std::vector<Workload> cases;
  const auto add = [&](const Step& step, const Heads& z, const WeightType& stored, const WeightType& weight,
                       MatmulInput input = MatmulInput::int8) {
    SymbolValues symbols;
    symbols[Symbol::tokens] = step.tokens;
    symbols[Symbol::sequences] = step.sequences;
    symbols[Symbol::max_blocks] = step.max_blocks;
    const kernels::LatentAttentionAttrs attrs{.heads = z.heads,
                                              .latent_dim = z.latent,
                                              .nope_dim = z.nope,
                                              .rope_dim = z.rope,
                                              .value_dim = z.value,
                                              .scale = 0.25f,
                                              .matmul_input = input};
    const Encoding* stack = weight.encoding == nullptr ? nullptr : stack_encoding(weight.encoding);
    cases.push_back(named_case(
        std::make_shared<ops::LatentAttention>(attrs),
        {TensorType(kF32, {Symbol::tokens, z.heads, z.nope + z.rope}),
         TensorType(stored.dtype, {step.sequences * step.max_blocks + 2, 1, step.block_size, z.latent + z.rope},
                    stored.encoding),
         TensorType(weight.dtype, {z.heads, z.latent, z.nope}, stack),
         TensorType(weight.dtype, {z.heads, z.value, z.latent}, stack),
         TensorType(DType::i32, {Dim(Symbol::sequences, 1)}), TensorType(DType::i32, {Symbol::sequences}),
         TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks}), TensorType(DType::i32, {Symbol::sequences})},
        symbols));
  };
  // Decode; prompts of several blocks of a cache, of one, of blocks of one position.
  constexpr Step kSteps[] = {{0, 0, 16, 4},  {1, 1, 16, 30}, {3, 3, 16, 9},
                             {20, 3, 7, 12}, {9, 1, 200, 1}, {2, 2, 1, 66}};
  constexpr Heads kHeads[] = {{2, 20, 5, 4, 7}, {1, 16, 16, 16, 16}, {5, 64, 17, 8, 33}};
  for (const WeightType& stored : {WeightType(kF32), WeightType(kBf16), WeightType(kF16),
                                   WeightType{kF32, &RowEncoding::int8()}, WeightType{kF32, &RowEncoding::fp8_e4m3()}})
    for (const Step& step : kSteps)
      for (const Heads& heads : kHeads) add(step, heads, stored, kF32);
  for (const DType weight : {kBf16, kF16})
    for (const MatmulInput input : {MatmulInput::int8, MatmulInput::f32})
      for (const Heads& heads : kHeads) add({20, 3, 7, 12}, heads, kF32, weight, input);
  // Latents that tiles multiply in the absorbed form, those of DeepSeek among them.
  for (const Step& step : kSteps) add(step, {5, 64, 17, 32, 33}, kBf16, kF32);
  add({3, 3, 16, 9}, {16, 512, 128, 64, 128}, kBf16, kBf16);
  // Several blocks of queries, and splits of keys.
  add({300, 2, 16, 70}, {2, 24, 8, 8, 8}, kF32, kF32);
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types())
    add({9, 2, 16, 3}, {2, 2 * unit, unit, 8, 20}, kF32, {kF32, encoding}, MatmulInput::f32);
  return cases;
}

}  // namespace

std::vector<Workload> attention_cases(std::string_view op) {
  if (op == "attention") return attention();
  if (op == "kv_append") return kv_append();
  if (op == "latent_append") return latent_append();
  if (op == "latent_attention") return latent_attention();
  return {};
}

}  // namespace eadem::test
