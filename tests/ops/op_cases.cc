// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/op_cases.h"

#include <tuple>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/kernels/sample.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/device_groups.h"
#include "tests/ops/expert_cases.h"
#include "tests/ops/recurrent_cases.h"
#include "tests/ops/selected_cases.h"
#include "tests/ops/shard_cases.h"
#include "tests/ops/state_space_cases.h"
#include "tests/workloads/quantized_types.h"

namespace eadem::test {

namespace {

using kernels::ActivationKind;
using ops::Workload;

constexpr DType kF32 = DType::f32, kBf16 = DType::bf16, kF16 = DType::f16;
constexpr DType kActivationDtypes[] = {kF32, kBf16};
const WeightType kCacheTypes[] = {kF32, kBf16, kF16, {kF32, &RowEncoding::int8()}, {kF32, &RowEncoding::fp8_e4m3()}};

// Around the widths of vectors (4, 8, 16 and 32 elements), of weight panels (16 and 64 outputs) and of unrolled loops.
constexpr int64_t kEdges[] = {1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129};

std::string size_name(const std::vector<TensorType>& types, const SymbolValues& symbols) {
  std::string text;
  for (const TensorType& type : types) {
    if (kernels::is_unconnected(type)) {
      text += " absent";
      continue;
    }
    text += fmt::format(" {}{}", WeightType(type.dtype, type.encoding).name(), to_string(type.bind(symbols)));
  }
  return text;
}

class Cases {
 public:
  void add(ops::OpPtr op, std::vector<TensorType> types, SymbolValues symbols = {}) {
    cases_.push_back(named_case(std::move(op), std::move(types), symbols));
  }
  // With `tokens` bound.
  void add(ops::OpPtr op, std::vector<TensorType> types, int64_t tokens) {
    SymbolValues symbols;
    symbols[Symbol::tokens] = tokens;
    symbols[Symbol::logit_rows] = tokens;
    add(std::move(op), std::move(types), symbols);
  }
  std::vector<Workload> take() { return std::move(cases_); }

 private:
  std::vector<Workload> cases_;
};

std::vector<Workload> embedding() {
  Cases cases;
  for (DType table : {kF32, kBf16, kF16})
    for (DType out : {kF32, kBf16, kF16})
      for (int64_t hidden : {1, 5, 16, 33})
        for (int64_t tokens : {0, 1, 7})
          cases.add(std::make_shared<ops::Embedding>(kernels::EmbeddingAttrs{out, 11}),
                    {TensorType(table, {11, hidden}), TensorType(DType::i32, {Symbol::tokens})}, tokens);
  for (DType table : {kF32, kBf16})
    cases.add(std::make_shared<ops::Embedding>(kernels::EmbeddingAttrs{table, 11, 0, 6.928203f}),
              {TensorType(table, {11, 33}), TensorType(DType::i32, {Symbol::tokens})}, 7);
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types())
    cases.add(std::make_shared<ops::Embedding>(kernels::EmbeddingAttrs{kF32, 19, 0, 6.928203f}),
              {TensorType(kF32, {19, unit}, encoding), TensorType(DType::i32, {Symbol::tokens})}, 7);
  // A part of a table: ids 4 to 14, of which some are asked for, with others that the part does not have.
  for (DType table : {kF32, kBf16, kF16})
    cases.add(std::make_shared<ops::Embedding>(kernels::EmbeddingAttrs{kF32, 11, 4}),
              {TensorType(table, {11, 9}), TensorType(DType::i32, {Symbol::tokens})}, 17);
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types())
    for (int64_t units : {1, 3})
      for (int64_t tokens : {0, 1, 7})
        cases.add(std::make_shared<ops::Embedding>(kernels::EmbeddingAttrs{kF32, 19}),
                  {TensorType(kF32, {19, units * unit}, encoding), TensorType(DType::i32, {Symbol::tokens})}, tokens);
  return cases.take();
}

std::vector<Workload> linear() {
  Cases cases;
  const auto add = [&](DType x, DType weight, DType out, bool bias, int64_t tokens, int64_t width, int64_t outputs) {
    cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{bias, out}),
              {TensorType(x, {Symbol::tokens, width}), TensorType(weight, {outputs, width}),
               bias ? TensorType(weight, {outputs}) : kernels::unconnected_port()},
              tokens);
  };
  // Dtypes.
  for (DType x : kActivationDtypes)
    for (DType weight : {kF32, kBf16, kF16})
      for (DType out : kActivationDtypes)
        for (bool bias : {false, true})
          for (int64_t tokens : {0, 1, 5}) add(x, weight, out, bias, tokens, 33, 18);
  // Outputs: panels of 16, groups of panels. Rows: tiles of up to 6. Terms: blocks of 256.
  for (int64_t outputs : kEdges) add(kF32, kF32, kF32, outputs % 2 == 1, 3, 9, outputs);
  for (int64_t tokens : {2, 3, 4, 6, 7, 8, 11, 12, 13, 25, 191, 193})
    add(kF32, kF32, kF32, tokens % 2 == 1, tokens, 17, 35);
  for (int64_t width : {1, 2, 15, 16, 17, 64, 255, 256, 257, 513}) {
    add(kF32, kF32, kF32, width % 2 == 1, 2, width, 20);
    add(kBf16, kBf16, kBf16, width % 2 == 1, 7, width, 20);
  }
  // 8-bit floats with an x in bf16, which a GPU rounds to rows of such: chunks of 512 columns, tiles of 16 and 32 rows.
  for (const auto& [tokens, width, outputs] :
       {std::tuple(0, 128, 16), {1, 128, 18}, {5, 384, 40}, {13, 640, 33}, {70, 128, 64}})
    for (const DType out : kActivationDtypes)
      for (const bool bias : {false, true})
        cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{bias, out}),
                  {TensorType(kBf16, {Symbol::tokens, width}),
                   TensorType(kF32, {outputs, width}, Fp8Encoding::find("fp8_e4m3_channel")),
                   bias ? TensorType(out, {outputs}) : kernels::unconnected_port()},
                  tokens);
  // K-quants with an x in bf16, which a GPU rounds to 8-bit codes: few rows, and many in wide and narrow tiles.
  for (const char* type : {"q4_k", "q6_k"})
    for (const auto& [tokens, width, outputs] :
         {std::tuple(0, 256, 16), {1, 256, 18}, {7, 2304, 40}, {29, 512, 33}, {50, 256, 64}, {130, 512, 72}})
      for (const DType out : kActivationDtypes)
        for (const bool bias : {false, true})
          cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{bias, out}),
                    {TensorType(kBf16, {Symbol::tokens, width}),
                     TensorType(kF32, {outputs, width}, BlockEncoding::find(type)),
                     bias ? TensorType(out, {outputs}) : kernels::unconnected_port()},
                    tokens);
  // Weights that training rounds to blocks: of one, part of one, several.
  for (const auto& [x, tokens, width, outputs] : {std::tuple(kF32, 0, 128, 128),
                                                  {kF32, 1, 20, 33},
                                                  {kF32, 7, 300, 150},
                                                  {kBf16, 5, 128, 128},
                                                  {kBf16, 70, 256, 384},
                                                  {kBf16, 200, 384, 128}})
    for (const bool bias : {false, true})
      cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{bias, x}),
                {TensorType(x, {Symbol::tokens, width}),
                 TensorType(x, {outputs, width}, Fp8Encoding::find("fp8_e4m3_block128")),
                 bias ? TensorType(x, {outputs}) : kernels::unconnected_port()},
                tokens);
  // Weights with one scale, in f32 on the CPU; cuda_fp8_tensor_test has those of a GPU.
  for (const auto& [tokens, width, outputs] : {std::tuple(0, 16, 16), {1, 20, 33}, {7, 300, 150}, {40, 16, 5}})
    for (const bool bias : {false, true})
      cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{bias, kF32}),
                {TensorType(kF32, {Symbol::tokens, width}),
                 TensorType(kF32, {outputs, width}, &Fp8TensorEncoding::of(Fp8Format::Kind::e4m3, bias)),
                 bias ? TensorType(kF32, {outputs}) : kernels::unconnected_port()},
                tokens);
  // Quantized weights: panels of 16 in groups of 4, rows in tiles of up to 12, chunks of 256 terms.
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types()) {
    const auto add_quantized = [&, encoding = encoding, unit = unit](DType bias, int64_t tokens, int64_t units,
                                                                     int64_t outputs) {
      const bool has_bias = bias != DType::u8;
      cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{has_bias, kF32}),
                {TensorType(kF32, {Symbol::tokens, units * unit}), TensorType(kF32, {outputs, units * unit}, encoding),
                 has_bias ? TensorType(bias, {outputs}) : kernels::unconnected_port()},
                tokens);
    };
    for (int64_t tokens : {0, 1, 5}) add_quantized(DType::u8, tokens, 3, 18);
    for (DType bias : {kF32, kBf16, kF16}) add_quantized(bias, 2, 1, 17);
    for (int64_t outputs : {1, 16, 65, 100}) add_quantized(DType::u8, outputs % 2 + 1, 1, outputs);
    for (int64_t tokens : {4, 11, 13, 40, 193}) add_quantized(DType::u8, tokens, 1, 20);
    add_quantized(kF32, 3, 9, 5);
    // Weights are decoded for an x that is not rounded: groups of 4 panels, blocks of 256 terms.
    for (const auto& [tokens, units, outputs] :
         {std::tuple(0, 1, 16), {1, 3, 18}, {5, 3, 18}, {13, 1, 65}, {193, 1, 20}})
      cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{false, kF32, MatmulInput::f32}),
                {TensorType(kF32, {Symbol::tokens, units * unit}), TensorType(kF32, {outputs, units * unit}, encoding),
                 kernels::unconnected_port()},
                tokens);
  }
  // bf16 weights for an x that is not rounded: elsewhere than on AMX as ever.
  for (int64_t tokens : {1, 40})
    cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{false, kF32, MatmulInput::f32}),
              {TensorType(kF32, {Symbol::tokens, 300}), TensorType(kBf16, {40, 300}), kernels::unconnected_port()},
              tokens);
  return cases.take();
}

std::vector<Workload> rms_norm() {
  Cases cases;
  const auto op = std::make_shared<ops::RmsNorm>(kernels::RmsNormAttrs{1e-5f});
  for (DType x : kActivationDtypes)
    for (DType weight : {kF32, kBf16}) {
      if (weight == kBf16 && x == kF32) continue;
      for (int64_t hidden : kEdges)
        cases.add(op, {TensorType(x, {Symbol::tokens, hidden}), TensorType(weight, {hidden})}, 3);
      for (int64_t tokens : {0, 1, 65})
        cases.add(op, {TensorType(x, {Symbol::tokens, 20}), TensorType(weight, {20})}, tokens);
      cases.add(op, {TensorType(x, {Symbol::tokens, 3, 8}), TensorType(weight, {8})}, 5);  // per head
      for (int64_t hidden : {1, 9, 40})
        cases.add(op, {TensorType(x, {Symbol::tokens, 3, hidden}), TensorType(weight, {3, hidden})}, 5);  // per group
    }
  return cases.take();
}

std::vector<Workload> layer_norm() {
  Cases cases;
  const auto op = std::make_shared<ops::LayerNorm>(kernels::LayerNormAttrs{1e-5f});
  for (DType x : kActivationDtypes)
    for (DType weight : {kF32, kBf16}) {
      if (weight == kBf16 && x == kF32) continue;
      for (int64_t hidden : kEdges)
        cases.add(op,
                  {TensorType(x, {Symbol::tokens, hidden}), TensorType(weight, {hidden}),
                   hidden % 2 == 0 ? kernels::unconnected_port() : TensorType(weight, {hidden})},
                  3);
      for (int64_t tokens : {0, 1, 65})
        cases.add(op, {TensorType(x, {Symbol::tokens, 20}), TensorType(weight, {20}), TensorType(weight, {20})},
                  tokens);
    }
  return cases.take();
}

std::vector<Workload> elementwise(const ops::OpPtr& op) {
  Cases cases;
  const size_t operands = op->inputs().size();
  for (DType dtype : kActivationDtypes) {
    for (int64_t width : kEdges)
      cases.add(op, std::vector<TensorType>(operands, TensorType(dtype, {Symbol::tokens, width})), 2);
    for (int64_t tokens : {0, 1, 300})
      cases.add(op, std::vector<TensorType>(operands, TensorType(dtype, {Symbol::tokens, 5, 13})), tokens);
  }
  return cases.take();
}

std::vector<Workload> scale() {
  std::vector<Workload> all = elementwise(std::make_shared<ops::Scale>(kernels::ScaleAttrs{-0.22f}));
  for (Workload& row : elementwise(std::make_shared<ops::Scale>(kernels::ScaleAttrs{1.5f, 0.7f})))
    all.push_back(std::move(row));
  return all;
}

std::vector<Workload> scale_by() {
  Cases cases;
  const auto one = std::make_shared<ops::ScaleBy>(kernels::ScaleByAttrs{}),
             chosen = std::make_shared<ops::ScaleBy>(kernels::ScaleByAttrs{.indexed = true});
  for (DType dtype : kActivationDtypes) {
    for (int64_t width : kEdges)
      cases.add(one, {TensorType(dtype, {Symbol::tokens, width}), TensorType(DType::f32, {1})}, 2);
    for (int64_t tokens : {0, 1, 300})
      cases.add(one, {TensorType(dtype, {Symbol::tokens, 5, 13}), TensorType(DType::f32, {1})}, tokens);
    for (int64_t scales : {1, 3, 64})
      for (int64_t tokens : {0, 1, 9}) {
        const TensorType x(dtype, {Symbol::tokens, 4}), index(DType::i32, {Symbol::tokens, 4});
        cases.add(chosen, {x, TensorType(DType::f32, {scales}), index}, tokens);
      }
  }
  return cases.take();
}

std::vector<Workload> activations(bool gated) {
  std::vector<Workload> all;
  for (ActivationKind kind : {ActivationKind::silu, ActivationKind::gelu, ActivationKind::gelu_tanh,
                              ActivationKind::relu, ActivationKind::relu2, ActivationKind::sigmoid}) {
    const kernels::ActivationAttrs attrs{kind};
    std::vector<Workload> cases = elementwise(gated ? ops::OpPtr(std::make_shared<ops::GatedActivation>(attrs))
                                                    : ops::OpPtr(std::make_shared<ops::Activation>(attrs)));
    all.insert(all.end(), std::make_move_iterator(cases.begin()), std::make_move_iterator(cases.end()));
  }
  return all;
}

std::vector<Workload> cast() {
  Cases cases;
  for (DType from : {kF32, kBf16, kF16})
    for (DType to : {kF32, kBf16, kF16}) {
      const auto op = std::make_shared<ops::Cast>(kernels::CastAttrs{to});
      for (int64_t width : kEdges) cases.add(op, {TensorType(from, {Symbol::tokens, width})}, 2);
      cases.add(op, {TensorType(from, {Symbol::tokens, 7})}, 0);
    }
  return cases.take();
}

std::vector<Workload> rope_table() {
  Cases cases;
  for (float scale : {1.0f, 1.3f})
    for (int64_t half : {1, 3, 4, 8, 17, 64})
      for (int64_t tokens : {0, 1, 6})
        for (int64_t stride : {1, 4})
          cases.add(std::make_shared<ops::RopeTable>(kernels::RopeTableAttrs{scale, stride}),
                    {TensorType(DType::i32, {Symbol::tokens}), TensorType(kF32, {half})}, tokens);
  return cases.take();
}

std::vector<Workload> rope() {
  Cases cases;
  for (DType dtype : kActivationDtypes)
    for (kernels::RopeStyle style : {kernels::RopeStyle::rotate_half, kernels::RopeStyle::interleaved})
      for (int64_t rotary : {2, 6, 8, 16, 34, 64})
        for (int64_t rest : {0, 1, 16})  // partial rotation
          for (int64_t tokens : {0, 1, 3})
            for (bool last : {false, true})
              cases.add(
                  std::make_shared<ops::Rope>(kernels::RopeAttrs{style, rotary, last}),
                  {TensorType(dtype, {Symbol::tokens, 3, rotary + rest}), TensorType(kF32, {Symbol::tokens, rotary})},
                  tokens);
  return cases.take();
}

std::vector<Workload> scale_by_position() {
  Cases cases;
  for (DType dtype : kActivationDtypes)
    for (const kernels::ScaleByPositionAttrs& attrs :
         {kernels::ScaleByPositionAttrs{}, {-0.7f, 1, true}, {0.4f, 5, false}})
      for (int64_t head_dim : {1, 7, 16, 33})
        for (int64_t tokens : {0, 1, 9})
          cases.add(std::make_shared<ops::ScaleByPosition>(attrs),
                    {TensorType(dtype, {Symbol::tokens, 3, head_dim}), TensorType(DType::i32, {Symbol::tokens})},
                    tokens);
  return cases.take();
}

std::vector<Workload> attention() {
  Cases cases;
  const TensorType query_start(DType::i32, {Dim(Symbol::sequences, 1)}), kv_length(DType::i32, {Symbol::sequences});
  struct Shape {
    int64_t heads, kv_heads, head_dim, value_dim = head_dim;
    float softcap = 0.0f;
    bool sinks = false;
    int64_t value_row = value_dim;
    int64_t chunk = 0;
  };
  const auto attrs_of = [](const Shape& shape, int64_t window, kernels::KvSource source) {
    return std::make_shared<ops::Attention>(
        kernels::AttentionAttrs{shape.heads, shape.kv_heads, shape.head_dim, 1.0f / static_cast<float>(shape.head_dim),
                                window, source, shape.value_dim, shape.softcap, shape.sinks, shape.chunk});
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
  constexpr Shape kGrouped{4, 2, 8}, kSingle{1, 1, 16}, kMany{6, 2, 5};
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
    // Soft caps that scores reach, and sinks.
    for (const Shape& shape : {Shape{4, 2, 64, 64, 0.05f}, Shape{3, 1, 128, 128, 0, true}})
      for (int64_t window : {0, 40}) direct(dtype, shape, 300, 2, window);
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
                                   Shape{3, 1, 128, 128, 0.1f, true}, Shape{2, 1, 256, 256, 0.05f}}) {
          if (shape.head_dim > 128 && kv.encoding != nullptr) continue;
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
      cached(dtype, kv, {3, 1, 28, 20, 28}, 2, 2, 0, 16, 4);
      cached(dtype, kv, {16, 1, 72, 64, 72}, 2, 2, 0, 16, 4);
      cached(dtype, kv, {5, 1, 72, 64, 72}, 1, 1, 0, 16, 71);
      cached(dtype, kv, {3, 1, 33, 7, 33}, 20, 3, 0, 7, 12);
    }
  }
  return cases.take();
}

std::vector<Workload> softmax() {
  Cases cases;
  const auto op = std::make_shared<ops::Softmax>();
  for (int64_t n : kEdges) cases.add(op, {TensorType(kF32, {Symbol::tokens, n})}, 3);
  for (int64_t tokens : {0, 1, 70}) cases.add(op, {TensorType(kF32, {Symbol::tokens, 2, 10})}, tokens);
  cases.add(op, {TensorType(kF32, {Symbol::tokens, 1000})}, 2);
  return cases.take();
}

std::vector<Workload> cross_entropy() {
  Cases cases;
  const auto op = std::make_shared<ops::CrossEntropy>();
  for (DType dtype : kActivationDtypes) {
    for (int64_t vocab : kEdges)
      cases.add(op, {TensorType(dtype, {Symbol::tokens, vocab}), TensorType(DType::i32, {Symbol::tokens})}, 6);
    for (int64_t tokens : {0, 1, 70})
      cases.add(op, {TensorType(dtype, {Symbol::tokens, 21}), TensorType(DType::i32, {Symbol::tokens})}, tokens);
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

std::vector<Workload> columns(bool split) {
  Cases cases;
  for (DType dtype : kActivationDtypes)
    for (const auto& [first, second] : {std::pair<int64_t, int64_t>{1, 1}, {20, 8}, {3, 130}, {64, 5}})
      for (int64_t tokens : {0, 1, 70}) {
        const auto rows = [&](int64_t width) { return TensorType(dtype, {Symbol::tokens, 3, width}); };
        const kernels::ColumnsAttrs attrs{first};
        if (split)
          cases.add(std::make_shared<ops::SplitColumns>(attrs), {rows(first + second)}, tokens);
        else
          cases.add(std::make_shared<ops::ConcatColumns>(attrs), {rows(first), rows(second)}, tokens);
      }
  return cases.take();
}

std::vector<Workload> head_linear() {
  Cases cases;
  const auto add = [&](DType x, const TensorType& weight, DType out, int64_t tokens,
                       MatmulInput input = MatmulInput::int8) {
    cases.add(std::make_shared<ops::HeadLinear>(kernels::HeadLinearAttrs{out, input}),
              {TensorType(x, {Symbol::tokens, weight.dim(0), weight.dim(2)}), weight}, tokens);
  };
  for (DType x : kActivationDtypes)
    for (DType weight : {kF32, kBf16, kF16})
      for (DType out : kActivationDtypes)
        for (int64_t tokens : {0, 1, 6}) add(x, TensorType(weight, {3, 18, 33}), out, tokens);
  // One head; more heads than threads; around the rows from which products run one after another.
  add(kF32, TensorType(kF32, {1, 17, 16}), kF32, 4);
  add(kF32, TensorType(kF32, {40, 7, 9}), kF32, 2);
  for (int64_t tokens : {12, 32, 33, 100}) add(kF32, TensorType(kF32, {3, 35, 17}), kF32, tokens);
  for (int64_t outputs : {1, 15, 16, 65}) add(kF32, TensorType(kBf16, {2, outputs, 31}), kF32, 5);
  for (int64_t width : {1, 257, 513}) add(kF32, TensorType(kF32, {2, 20, width}), kF32, 5);
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types())
    for (int64_t tokens : {0, 1, 9, 40})
      for (MatmulInput input : {MatmulInput::int8, MatmulInput::f32})
        add(kF32, TensorType(kF32, {3, 20, 2 * unit}, stack_encoding(encoding)), kF32, tokens, input);
  add(kF32, TensorType(kBf16, {3, 20, 70}), kF32, 9, MatmulInput::f32);
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
  // Several blocks of queries, and splits of keys.
  add({300, 2, 16, 70}, {2, 24, 8, 8, 8}, kF32, kF32);
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types())
    add({9, 2, 16, 3}, {2, 2 * unit, unit, 8, 20}, kF32, {kF32, encoding}, MatmulInput::f32);
  return cases;
}

std::vector<Workload> select_rows() {
  Cases cases;
  const auto op = std::make_shared<ops::SelectRows>();
  for (DType dtype : kActivationDtypes)
    for (int64_t hidden : {1, 5, 16, 33})
      for (int64_t rows : {0, 1, 4})
        cases.add(op, {TensorType(dtype, {6, hidden}), TensorType(DType::i32, {Symbol::logit_rows})}, rows);
  return cases.take();
}

std::vector<Workload> feed_tokens() {
  Cases cases;
  const auto op = std::make_shared<ops::FeedTokens>();
  for (int64_t tokens : {0, 1, 5, 300})
    cases.add(op, {TensorType(DType::i32, {Symbol::tokens}), TensorType(DType::i32, {4})}, tokens);
  return cases.take();
}

std::vector<Workload> sample() {
  Cases cases;
  const auto op = std::make_shared<ops::Sample>();
  const Dim n = Symbol::logit_rows;
  for (int64_t rows : {0, 1, 48})
    for (int64_t vocab : {1, 2, 7, 33, 300})
      for (int64_t penalties : {int64_t{0}, rows / 2 * std::min<int64_t>(vocab, 40)}) {
        SymbolValues symbols;
        symbols[Symbol::logit_rows] = rows;
        symbols[Symbol::penalties] = penalties;
        cases.add(op,
                  {TensorType(kF32, {n, vocab}), TensorType(DType::i32, {n, kernels::kSampleRowWords}),
                   TensorType(DType::i32, {Symbol::penalties, 2})},
                  symbols);
      }
  return cases.take();
}

std::vector<Workload> add_bias() {
  Cases cases;
  const auto op = std::make_shared<ops::AddBias>();
  for (DType x : kActivationDtypes)
    for (DType bias : {kF32, kBf16, kF16}) {
      for (int64_t n : kEdges) cases.add(op, {TensorType(x, {Symbol::tokens, n}), TensorType(bias, {n})}, 3);
      for (int64_t tokens : {0, 1, 70})
        cases.add(op, {TensorType(x, {Symbol::tokens, 9}), TensorType(bias, {9})}, tokens);
    }
  return cases.take();
}

std::vector<Workload> select_heads() {
  Cases cases;
  for (DType dtype : kActivationDtypes)
    for (const kernels::SelectHeadsAttrs& attrs :
         {kernels::SelectHeadsAttrs{.heads = 2, .own_heads = 1, .first_query = 3, .run = 3, .group = 3},
          kernels::SelectHeadsAttrs{.heads = 2, .own_heads = 4, .first_query = 1, .run = 1, .group = 3},
          kernels::SelectHeadsAttrs{.heads = 1, .own_heads = 1, .first_query = 0, .run = 1, .group = 1}})
      for (int64_t tokens : {0, 1, 70})
        for (int64_t width : {1, 24, 33})
          cases.add(std::make_shared<ops::SelectHeads>(attrs),
                    {TensorType(dtype, {Symbol::tokens, attrs.heads, width})}, tokens);
  return cases.take();
}

// The part of the vocabulary begins at 5: some labels are words of another rank.
std::vector<Workload> softmax_state() {
  Cases cases;
  const auto op = std::make_shared<ops::SoftmaxState>(kernels::VocabularyPart{5});
  for (int64_t part : kEdges)
    cases.add(op, {TensorType(kF32, {Symbol::tokens, part}), TensorType(DType::i32, {Symbol::tokens})}, 6);
  for (int64_t tokens : {0, 1, 70})
    cases.add(op, {TensorType(kF32, {Symbol::tokens, 21}), TensorType(DType::i32, {Symbol::tokens})}, tokens);
  return cases.take();
}

std::vector<Workload> parallel_cross_entropy() {
  Cases cases;
  for (int ranks : {1, 2, 3}) {
    const auto op = std::make_shared<ops::ParallelCrossEntropy>(kernels::VocabularyPart{5}, ranks);
    const auto add = [&](int64_t part, int64_t tokens) {
      cases.add(op,
                {TensorType(kF32, {Symbol::tokens, part}), TensorType(DType::i32, {Symbol::tokens}),
                 TensorType(kF32, {Symbol::tokens, 3 * ranks})},
                tokens);
    };
    for (int64_t part : kEdges) add(part, 6);
    for (int64_t tokens : {0, 1, 70}) add(21, tokens);
  }
  return cases.take();
}

std::vector<Workload> all_gather() {
  Cases cases;
  for (DType dtype : kActivationDtypes)
    for (int dim : {0, 1})
      cases.add(std::make_shared<ops::AllGather>(kernels::CollectiveAttrs{.dim = dim, .whole = 7}),
                {TensorType(dtype, {7, 7, 3})});
  return cases.take();
}

std::vector<Workload> grad_norm() {
  Cases cases;
  for (int64_t size : {1, 7, 4095, 4096, 4097, 9000})
    for (int inputs : {1, 3}) {
      std::vector<TensorType> types(static_cast<size_t>(inputs), TensorType(kF32, {size}));
      types[0] = TensorType(kF32, {3, 5});
      cases.add(std::make_shared<ops::GradNorm>(inputs), types);
    }
  return cases.take();
}

std::vector<Workload> adamw() {
  Cases cases;
  for (bool decay : {false, true})
    for (int64_t size : kEdges)
      for (std::optional<DType> weight : {std::optional<DType>(), std::optional(kBf16), std::optional(kF16)}) {
        const TensorType f32(kF32, {3, size});
        cases.add(std::make_shared<ops::AdamW>(kernels::AdamWAttrs{decay}),
                  {f32, TensorType(kF32, {1}), TensorType(kF32, {8}), f32, f32, f32,
                   weight ? f32.with_dtype(*weight) : kernels::unconnected_port()});
      }
  return cases.take();
}

// A few divisions of rows and columns: the bound of their gradients doubles with each.
std::vector<Workload> stream_weights() {
  Cases cases;
  for (const bool merges : {false, true})
    for (const int64_t streams : {1, 2, 4, 5})
      for (const int64_t iterations : {1, 2, 3})
        for (const float eps : {0.0f, 1e-6f, 0.1f})
          for (const int64_t tokens : {0, 1, 3, 70}) {
            if (merges && iterations > 1) continue;
            const kernels::StreamWeightsAttrs attrs{streams, iterations, eps, merges};
            cases.add(std::make_shared<ops::StreamWeights>(attrs),
                      {TensorType(kF32, {Symbol::tokens, attrs.width()}), TensorType(kF32, {attrs.width()}),
                       TensorType(kF32, {attrs.scales()})},
                      tokens);
          }
  return cases.take();
}

std::vector<Workload> mixed_streams(bool expand) {
  Cases cases;
  for (const DType dtype : kActivationDtypes)
    for (const int64_t streams : {1, 2, 4, 5})
      for (const int64_t hidden : {1, 7, 16, 33, 130})
        for (const int64_t tokens : {0, 1, 9}) {
          const TensorType x(dtype, {Symbol::tokens, streams, hidden}),
              weights(kF32, {Symbol::tokens, streams * (streams + 2)});
          if (expand)
            cases.add(std::make_shared<ops::ExpandStreams>(), {x, TensorType(dtype, {Symbol::tokens, hidden}), weights},
                      tokens);
          else
            cases.add(std::make_shared<ops::CollapseStreams>(), {x, weights}, tokens);
        }
  // What ends the streams has no more weights than they are.
  cases.add(
      expand ? ops::OpPtr(std::make_shared<ops::ExpandStreams>()) : std::make_shared<ops::CollapseStreams>(),
      expand
          ? std::vector<TensorType>{TensorType(kF32, {Symbol::tokens, 3, 20}), TensorType(kF32, {Symbol::tokens, 20}),
                                    TensorType(kF32, {Symbol::tokens, 15})}
          : std::vector<TensorType>{TensorType(kF32, {Symbol::tokens, 3, 20}), TensorType(kF32, {Symbol::tokens, 3})},
      5);
  return cases.take();
}

}  // namespace

Workload named_case(ops::OpPtr op, std::vector<TensorType> types, const SymbolValues& symbols) {
  std::string name = fmt::format("{}({}){}", op->name(), op->attrs_text(), size_name(types, symbols));
  return {std::move(name), std::move(op), std::move(types), symbols};
}

std::vector<std::string_view> op_names() {
  return {"embedding",
          "linear",
          "rms_norm",
          "layer_norm",
          "add",
          "scale",
          "mul",
          "rope_table",
          "rope",
          "attention",
          "activation",
          "softmax",
          "cross_entropy",
          "cast",
          "kv_append",
          "select_rows",
          "feed_tokens",
          "sample",
          "gated_activation",
          "all_reduce",
          "grad_norm",
          "adamw",
          "add_bias",
          "select_heads",
          "softmax_state",
          "parallel_cross_entropy",
          "all_gather",
          "cut_columns",
          "shard_sum",
          "route",
          "expert_order",
          "permute",
          "grouped_linear",
          "unpermute",
          "expert_dispatch",
          "expert_combine",
          "clamped_swiglu",
          "gate_rows",
          "identity_experts",
          "load_balancing_loss",
          "latent_append",
          "head_linear",
          "latent_attention",
          "split_columns",
          "concat_columns",
          "short_convolution",
          "state_space_scan",
          "gated_delta_rule",
          "select_keys",
          "selected_attention",
          "compress_keys",
          "compressed_attention",
          "select_blocks",
          "pool_keys",
          "pooled_attention",
          "scale_by_position",
          "scale_by",
          "stream_weights",
          "collapse_streams",
          "expand_streams"};
}

std::vector<Workload> op_cases(std::string_view op) {
  if (op == "embedding") return embedding();
  if (op == "linear") return linear();
  if (op == "rms_norm") return rms_norm();
  if (op == "layer_norm") return layer_norm();
  if (op == "scale") return scale();
  if (op == "scale_by") return scale_by();
  if (op == "add") return elementwise(std::make_shared<ops::Add>());
  if (op == "mul") return elementwise(std::make_shared<ops::Mul>());
  if (op == "rope_table") return rope_table();
  if (op == "rope") return rope();
  if (op == "scale_by_position") return scale_by_position();
  if (op == "attention") return attention();
  if (op == "activation") return activations(false);
  if (op == "gated_activation") return activations(true);
  if (op == "softmax") return softmax();
  if (op == "cross_entropy") return cross_entropy();
  if (op == "cast") return cast();
  if (op == "kv_append") return kv_append();
  if (op == "latent_append") return latent_append();
  if (op == "head_linear") return head_linear();
  if (op == "latent_attention") return latent_attention();
  if (op == "split_columns") return columns(true);
  if (op == "concat_columns") return columns(false);
  if (op == "select_rows") return select_rows();
  if (op == "feed_tokens") return feed_tokens();
  if (op == "sample") return sample();
  if (op == "all_reduce") return elementwise(std::make_shared<ops::AllReduce>());
  if (op == "add_bias") return add_bias();
  if (op == "select_heads") return select_heads();
  if (op == "softmax_state") return softmax_state();
  if (op == "parallel_cross_entropy") return parallel_cross_entropy();
  if (op == "all_gather") return all_gather();
  if (op == "grad_norm") return grad_norm();
  if (op == "adamw") return adamw();
  if (op == "stream_weights") return stream_weights();
  if (op == "collapse_streams") return mixed_streams(false);
  if (op == "expand_streams") return mixed_streams(true);
  if (op == "state_space_scan") return state_space_cases();
  if (std::vector<Workload> cases = expert_cases(op); !cases.empty()) return cases;
  if (std::vector<Workload> cases = recurrent_cases(op); !cases.empty()) return cases;
  if (std::vector<Workload> cases = selected_cases(op); !cases.empty()) return cases;
  if (std::vector<Workload> cases = shard_cases(op); !cases.empty()) return cases;
  EADEM_UNREACHABLE("no cases for op '{}'", op);
}

}  // namespace eadem::test
