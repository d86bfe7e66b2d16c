// SPDX-License-Identifier: Apache-2.0
#include "tests/fusions/decoder_layer_rows.h"

#include <cmath>

#include <fmt/ranges.h>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/fusions/decoder_layers.h"

namespace eadem::test {

namespace {

struct LayerSizes {
  const char* model;
  int64_t hidden, ffn, heads, kv_heads, head_dim;
};
constexpr LayerSizes kSmall{"small", 256, 512, 4, 2, 64}, kLlama{"llama-3.1-8b", 4096, 14336, 32, 8, 128},
    kLlama1b{"llama-3.2-1b", 2048, 8192, 32, 8, 64};

// A sequence of `blocks` blocks of `block_size` tokens, which the step's token fills.
struct Sequence {
  int64_t blocks, block_size;
};

// Weights of layers take turns with the types `weights`.
DecoderLayerRow row_of(const LayerSizes& s, const Sequence& sequence, const std::vector<TensorType>& weights, DType x,
                       size_t layers) {
  const kernels::LinearAttrs product{.out_dtype = x};
  const kernels::DecoderLayerAttrs attrs{
      .norm = {1e-5f},
      .mlp_norm = {1e-5f},
      .qkv = product,
      .o = product,
      .down = product,
      .attention = {.rope = {kernels::RopeStyle::rotate_half, s.head_dim},
                    .attention = {.heads = s.heads,
                                  .kv_heads = s.kv_heads,
                                  .head_dim = s.head_dim,
                                  .scale = 1 / std::sqrt(static_cast<float>(s.head_dim)),
                                  .source = kernels::KvSource::cached}},
      .gated = {.kind = kernels::ActivationKind::silu, .out_dtype = x}};
  size_t next = 0;
  const auto matrix = [&](int64_t out, int64_t in) {
    const TensorType& weight = weights[next++ % weights.size()];
    return TensorType(weight.dtype, {out, in}, weight.encoding);
  };
  const TensorType norm(DType::f32, {s.hidden}),
      cache(x, {sequence.blocks + 2, s.kv_heads, sequence.block_size, s.head_dim});
  std::vector<TensorType> types = {
      TensorType(x, {Symbol::tokens, s.hidden}),   TensorType(DType::f32, {Symbol::tokens, s.head_dim}),
      TensorType(DType::i64, {Symbol::tokens}),    TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
      TensorType(DType::i32, {Symbol::sequences}), TensorType(DType::i32, {Symbol::sequences, sequence.blocks})};
  const int64_t width = s.heads * s.head_dim, kv_width = s.kv_heads * s.head_dim;
  for (size_t layer = 0; layer < layers; ++layer)
    types.insert(types.end(), {norm, matrix(width, s.hidden), matrix(kv_width, s.hidden), matrix(kv_width, s.hidden),
                               cache, cache, matrix(s.hidden, width), norm, matrix(s.ffn, s.hidden),
                               matrix(s.ffn, s.hidden), matrix(s.hidden, s.ffn)});
  ops::OpPtr op;
  if (layers == 1)
    op = std::make_shared<fusions::DecoderLayer>(attrs);
  else
    op = std::make_shared<fusions::DecoderLayers>(attrs, layers);
  SymbolValues symbols;
  symbols[Symbol::tokens] = 1;
  symbols[Symbol::sequences] = 1;
  std::vector<std::string_view> stored;
  for (const TensorType& weight : weights) stored.push_back(WeightType(weight.dtype, weight.encoding).name());
  return {{fmt::format("{} decode-{} {} layer{} {}", s.model, sequence.blocks * sequence.block_size, layers,
                       layers == 1 ? "" : "s", fmt::join(stored, " and ")),
           std::move(op), std::move(types), symbols},
          layers,
          s.hidden == kSmall.hidden,
          Fp8Encoding::of(weights[0].encoding) != nullptr};
}

}  // namespace

std::vector<DecoderLayerRow> decoder_layer_rows(DType activations) {
  const std::vector<TensorType> bf16 = {TensorType(DType::bf16, {})},
                                groups_of_128 = {TensorType(DType::f32, {}, GroupEncoding::find("int4_g128_f16"))},
                                k_quants = {TensorType(DType::f32, {}, BlockEncoding::find("q4_k")),
                                            TensorType(DType::f32, {}, BlockEncoding::find("q6_k"))},
                                floats = {TensorType(DType::f32, {}, Fp8Encoding::find("fp8_e4m3_channel"))};
  std::vector<DecoderLayerRow> rows;
  for (const std::vector<TensorType>& weights : {bf16, groups_of_128, k_quants, floats})
    for (const Sequence& sequence : {Sequence{1, 1}, {3, 16}, {1, 70}})
      for (const size_t layers : {1, 3}) rows.push_back(row_of(kSmall, sequence, weights, activations, layers));
  rows.push_back(row_of(kLlama, {19, 16}, k_quants, activations, 1));
  for (const Sequence& sequence : {Sequence{19, 16}, {1, 301}, {257, 16}})
    rows.push_back(row_of(kLlama, sequence, groups_of_128, activations, 1));
  for (const auto& weights : {groups_of_128, floats}) rows.push_back(row_of(kLlama, {19, 16}, weights, activations, 3));
  for (const auto& weights : {bf16, groups_of_128, k_quants, floats})
    rows.push_back(row_of(kLlama1b, {37, 16}, weights, activations, 3));
  return rows;
}

}  // namespace eadem::test
