// SPDX-License-Identifier: Apache-2.0
#include "tests/fusions/fusion_cases.h"

#include <algorithm>

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/fusions/add_rms_norm.h"
#include "eadem/fusions/decoder_layers.h"
#include "eadem/fusions/gated_activation_quantize.h"
#include "eadem/fusions/gated_quantize.h"
#include "eadem/fusions/linear_add.h"
#include "eadem/fusions/linear_cross_entropy.h"
#include "eadem/fusions/linear_gated_activation.h"
#include "eadem/fusions/linear_qkv.h"
#include "eadem/fusions/rms_norm_quantize.h"
#include "eadem/fusions/rope_append_attention.h"
#include "eadem/fusions/rope_kv_append.h"
#include "eadem/fusions/rope_qk_append.h"
#include "eadem/kernels/cpu/linear/int8_rows.h"
#include "eadem/ops/all_ops.h"
#include "eadem/ops/quantize.h"
#include "tests/workloads/inputs.h"
#include "tests/workloads/quantized_types.h"

namespace eadem::test {

namespace {

using kernels::ActivationKind;
using kernels::RopeStyle;

constexpr DType kF32 = DType::f32, kBf16 = DType::bf16, kF16 = DType::f16;

SymbolValues tokens_of(int64_t tokens) {
  SymbolValues symbols;
  symbols[Symbol::tokens] = tokens;
  return symbols;
}

void add_rms_norm(std::vector<FusionCase>& cases) {
  for (const int64_t tokens : {0, 1, 5})
    for (const int64_t hidden : {1, 15, 16, 17, 64, 257}) {
      const kernels::RmsNormAttrs attrs{1e-5f};
      const TensorType x(kF32, {Symbol::tokens, hidden});
      cases.push_back({fmt::format("add_rms_norm {}x{}", tokens, hidden),
                       &fusions::add_rms_norm(),
                       std::make_shared<fusions::AddRmsNorm>(attrs),
                       {std::make_shared<ops::Add>(), std::make_shared<ops::RmsNorm>(attrs)},
                       {x, x, TensorType(kF32, {hidden})},
                       tokens_of(tokens)});
    }
}

void rms_norm_quantize(std::vector<FusionCase>& cases) {
  using kernels::cpu::Int8Rows;
  for (const Encoding* to : {static_cast<const Encoding*>(&Int8Rows::with_scale_per_step()),
                             static_cast<const Encoding*>(&Int8Rows::with_scale_per_chunk())})
    for (const int64_t tokens : {0, 1, 5, 40})
      for (const int64_t hidden : {32, 256, 288, 1056}) {
        const kernels::RmsNormQuantizeAttrs attrs{{1e-5f}, to};
        const auto quantize = std::make_shared<ops::Quantize>(kernels::QuantizeAttrs{to});
        const TensorType x(kF32, {Symbol::tokens, hidden}), weight(kF32, {hidden});
        cases.push_back({fmt::format("rms_norm_quantize {}x{} {}", tokens, hidden, to->name()),
                         &fusions::rms_norm_quantize(),
                         std::make_shared<fusions::RmsNormQuantize>(attrs),
                         {std::make_shared<ops::RmsNorm>(attrs.norm), quantize},
                         {x, weight},
                         tokens_of(tokens)});
        cases.push_back({fmt::format("add_rms_norm_quantize {}x{} {}", tokens, hidden, to->name()),
                         &fusions::add_rms_norm_quantize(),
                         std::make_shared<fusions::AddRmsNormQuantize>(attrs),
                         {std::make_shared<fusions::AddRmsNorm>(attrs.norm), quantize},
                         {x, x, weight},
                         tokens_of(tokens)});
      }
}

struct LinearShape {
  int64_t tokens, in, out;
};
constexpr LinearShape kLinearShapes[] = {{0, 8, 8},   {1, 1, 1},    {1, 64, 48},  {2, 17, 15},
                                         {5, 16, 16}, {13, 33, 65}, {64, 48, 130}};

void linear_gated_activation(std::vector<FusionCase>& cases) {
  for (const LinearShape& s : kLinearShapes)
    for (const DType weight : {kF32, kBf16})
      for (const ActivationKind kind : {ActivationKind::silu, ActivationKind::gelu, ActivationKind::gelu_tanh,
                                        ActivationKind::relu, ActivationKind::relu2, ActivationKind::sigmoid}) {
        if (kind != ActivationKind::silu && s.tokens != 5) continue;
        const auto linear = std::make_shared<ops::Linear>(kernels::LinearAttrs{});
        const TensorType w(weight, {s.out, s.in});
        cases.push_back(
            {fmt::format("linear_gated_activation {}x{}x{} {} weights {}", s.tokens, s.in, s.out, dtype_name(weight),
                         ops::activation_name(kind)),
             &fusions::linear_gated_activation(),
             std::make_shared<fusions::LinearGatedActivation>(kernels::LinearGatedActivationAttrs{kind, kF32}),
             {linear, linear, std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{kind})},
             {TensorType(kF32, {Symbol::tokens, s.in}), w, w},
             tokens_of(s.tokens)});
      }
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types())
    for (const MatmulInput input : {MatmulInput::int8, MatmulInput::f32})
      for (const int64_t tokens : {1, 5, 14}) {
        if (has_order) continue;  // each weight may have another
        const int64_t in = 2 * unit, out = 70;
        const auto linear = std::make_shared<ops::Linear>(kernels::LinearAttrs{.matmul_input = input});
        const TensorType w(kF32, {out, in}, encoding);
        cases.push_back(
            {fmt::format("linear_gated_activation {}x{}x{} {} weights, {}", tokens, in, out, encoding->name(),
                         matmul_input_name(input)),
             &fusions::linear_gated_activation(),
             std::make_shared<fusions::LinearGatedActivation>(
                 kernels::LinearGatedActivationAttrs{ActivationKind::silu, kF32, input}),
             {linear, linear, std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{ActivationKind::silu})},
             {TensorType(kF32, {Symbol::tokens, in}), w, w},
             tokens_of(tokens)});
      }
}

void linear_gated_activation_quantize(std::vector<FusionCase>& cases) {
  const Encoding& to = kernels::cpu::Int8Rows::with_scale_per_step();
  const auto add = [&](const TensorType& weight, ActivationKind kind, MatmulInput input, int64_t tokens) {
    kernels::LinearGatedActivationAttrs attrs{kind, kF32, input};
    const auto gated = std::make_shared<fusions::LinearGatedActivation>(attrs);
    attrs.round_to = &to;
    cases.push_back({fmt::format("linear_gated_activation_quantize {} tokens, {}, {} {}", tokens, to_string(weight),
                                 ops::activation_name(kind), matmul_input_name(input)),
                     &fusions::linear_gated_activation_quantize(),
                     std::make_shared<fusions::LinearGatedActivationQuantize>(attrs),
                     {gated, std::make_shared<ops::Quantize>(kernels::QuantizeAttrs{&to})},
                     {TensorType(kF32, {Symbol::tokens, weight.dim(1)}), weight, weight},
                     tokens_of(tokens)});
  };
  // Outputs around tasks of 64 and 256 columns, and chunks of 256; rows around tiles.
  for (const int64_t out : {32, 64, 96, 288, 544})
    for (const int64_t tokens : {0, 1, 5, 40, 200})
      add(TensorType(kF32, {out, 33}), ActivationKind::silu, MatmulInput::int8, tokens);
  for (const ActivationKind kind :
       {ActivationKind::gelu, ActivationKind::gelu_tanh, ActivationKind::relu, ActivationKind::relu2})
    add(TensorType(kBf16, {96, 48}), kind, MatmulInput::int8, 7);
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types())
    for (const MatmulInput input : {MatmulInput::int8, MatmulInput::f32})
      for (const int64_t tokens : {1, 14})
        if (!has_order) add(TensorType(kF32, {160, 2 * unit}, encoding), ActivationKind::silu, input, tokens);
}

void linear_qkv(std::vector<FusionCase>& cases) {
  for (const LinearShape& s : kLinearShapes)
    for (const DType dtype : {kF32, kBf16})
      for (const bool bias : {false, true}) {
        const kernels::LinearAttrs attrs{bias, dtype};
        const auto linear = std::make_shared<ops::Linear>(attrs);
        const auto weight = [&](int64_t out) { return TensorType(dtype, {out, s.in}); };
        const auto bias_of = [&](int64_t out) { return bias ? TensorType(dtype, {out}) : kernels::unconnected_port(); };
        const int64_t q = 2 * s.out, k = s.out;
        cases.push_back({fmt::format("linear_qkv {}x{}x{} {} bias={}", s.tokens, s.in, s.out, dtype_name(dtype), bias),
                         &fusions::linear_qkv(),
                         std::make_shared<fusions::LinearQkv>(attrs),
                         {linear, linear, linear},
                         {TensorType(dtype, {Symbol::tokens, s.in}), weight(q), bias_of(q), weight(k), bias_of(k),
                          weight(k), bias_of(k)},
                         tokens_of(s.tokens)});
      }
}

void linear_add(std::vector<FusionCase>& cases) {
  for (const LinearShape& s : kLinearShapes)
    for (const DType weight : {kF32, kBf16, kF16})
      for (const bool bias : {false, true}) {
        const kernels::LinearAttrs attrs{bias, kF32};
        cases.push_back(
            {fmt::format("linear_add {}x{}x{} {} weights bias={}", s.tokens, s.in, s.out, dtype_name(weight), bias),
             &fusions::linear_add(),
             std::make_shared<fusions::LinearAdd>(attrs),
             {std::make_shared<ops::Linear>(attrs), std::make_shared<ops::Add>()},
             {TensorType(kF32, {Symbol::tokens, s.in}), TensorType(weight, {s.out, s.in}),
              bias ? TensorType(weight, {s.out}) : kernels::unconnected_port(),
              TensorType(kF32, {Symbol::tokens, s.out})},
             tokens_of(s.tokens)});
      }
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types())
    for (const MatmulInput input : {MatmulInput::int8, MatmulInput::f32})
      for (const bool bias : {false, true}) {
        const int64_t in = 2 * unit, out = 35;
        const kernels::LinearAttrs attrs{bias, kF32, input};
        cases.push_back(
            {fmt::format("linear_add {}x{} {} weights bias={}, {}", in, out, encoding->name(), bias,
                         matmul_input_name(input)),
             &fusions::linear_add(),
             std::make_shared<fusions::LinearAdd>(attrs),
             {std::make_shared<ops::Linear>(attrs), std::make_shared<ops::Add>()},
             {TensorType(kF32, {Symbol::tokens, in}), TensorType(kF32, {out, in}, encoding),
              bias ? TensorType(kF32, {out}) : kernels::unconnected_port(), TensorType(kF32, {Symbol::tokens, out})},
             tokens_of(5)});
      }
}

void rope_kv_append(std::vector<FusionCase>& cases) {
  for (const RopeStyle style : {RopeStyle::rotate_half, RopeStyle::interleaved})
    for (const int64_t tokens : {0, 1, 9})
      for (const DType cache_dtype : {kF32, kBf16, kF16})
        for (const auto& [head_dim, rotary_dim] : {std::pair<int64_t, int64_t>{8, 8}, {18, 6}, {64, 64}, {80, 40}}) {
          const kernels::RopeAttrs attrs{style, rotary_dim};
          const int64_t value_dim = head_dim == 80 ? 33 : head_dim;
          const TensorType k(kF32, {Symbol::tokens, 2, head_dim}), v(kF32, {Symbol::tokens, 2, value_dim});
          const TensorType cache_k(cache_dtype, {3, 2, 4, head_dim}), cache_v(cache_dtype, {3, 2, 4, value_dim});
          cases.push_back({fmt::format("rope_kv_append {} {}x{}/{} {} cache",
                                       style == RopeStyle::rotate_half ? "rotate_half" : "interleaved", tokens,
                                       head_dim, rotary_dim, dtype_name(cache_dtype)),
                           &fusions::rope_kv_append(),
                           std::make_shared<fusions::RopeKvAppend>(kernels::RopeKvAppendAttrs{attrs}),
                           {std::make_shared<ops::Rope>(attrs), std::make_shared<ops::KvAppend>()},
                           {k, TensorType(kF32, {Symbol::tokens, rotary_dim}), v,
                            TensorType(DType::i64, {Symbol::tokens}), cache_k, cache_v},
                           tokens_of(tokens)});
          cases.push_back(
              {fmt::format("rope_qk_append {} {}x{}/{} {} cache",
                           style == RopeStyle::rotate_half ? "rotate_half" : "interleaved", tokens, head_dim,
                           rotary_dim, dtype_name(cache_dtype)),
               &fusions::rope_qk_append(),
               std::make_shared<fusions::RopeQkAppend>(kernels::RopeKvAppendAttrs{attrs}),
               {std::make_shared<ops::Rope>(attrs), std::make_shared<ops::Rope>(attrs),
                std::make_shared<ops::KvAppend>()},
               {TensorType(kF32, {Symbol::tokens, 6, head_dim}), TensorType(kF32, {Symbol::tokens, rotary_dim}), k, v,
                TensorType(DType::i64, {Symbol::tokens}), cache_k, cache_v},
               tokens_of(tokens)});
        }
}

void rope_append_attention(std::vector<FusionCase>& cases) {
  for (const int64_t tokens : {0, 1, 9})
    for (const DType cache_dtype : {kF32, kBf16})
      for (const int64_t rotary_dim : {16, 6}) {
        constexpr int64_t kSequences = 3, kHeadDim = 16;  // rows of 96
        const kernels::RopeAttrs rope{RopeStyle::rotate_half, rotary_dim};
        const kernels::AttentionAttrs attention{.heads = 6,
                                                .kv_heads = 2,
                                                .head_dim = kHeadDim,
                                                .scale = 0.3f,
                                                .window = 5,
                                                .source = kernels::KvSource::cached};
        const TensorType k(kF32, {Symbol::tokens, 2, kHeadDim}), cache(cache_dtype, {9, 2, 4, kHeadDim});
        const std::vector<TensorType> inputs = {TensorType(kF32, {Symbol::tokens, 6, kHeadDim}),
                                                TensorType(kF32, {Symbol::tokens, rotary_dim}),
                                                k,
                                                k,
                                                TensorType(DType::i64, {Symbol::tokens}),
                                                cache,
                                                cache,
                                                TensorType(DType::i32, {kSequences + 1}),
                                                TensorType(DType::i32, {kSequences}),
                                                TensorType(DType::i32, {kSequences, 3})};
        kernels::RopeAppendAttentionAttrs attrs{rope, attention};
        const auto name = [&](const fusions::Fusion& fusion) {
          return fmt::format("{} {}x{}/{} {} cache", fusion.name, tokens, kHeadDim, rotary_dim,
                             dtype_name(cache_dtype));
        };
        const auto fused = std::make_shared<fusions::RopeAppendAttention>(attrs);
        const FusionCase& plain = cases.emplace_back(
            FusionCase{name(fusions::rope_append_attention()),
                       &fusions::rope_append_attention(),
                       fused,
                       {std::make_shared<ops::Rope>(rope), std::make_shared<ops::Rope>(rope),
                        std::make_shared<ops::KvAppend>(), std::make_shared<ops::Attention>(attention)},
                       inputs,
                       tokens_of(tokens)});
        const auto inputs_like = std::make_shared<const FusionCase>(plain);
        attrs.round_to = &kernels::cpu::Int8Rows::with_scale_per_step();
        cases.push_back({name(fusions::rope_append_attention_quantize()),
                         &fusions::rope_append_attention_quantize(),
                         std::make_shared<fusions::RopeAppendAttentionQuantize>(attrs),
                         {fused, std::make_shared<ops::Reshape>(std::vector<int64_t>{6 * kHeadDim}),
                          std::make_shared<ops::Quantize>(kernels::QuantizeAttrs{attrs.round_to})},
                         inputs,
                         tokens_of(tokens),
                         inputs_like});
      }
}

void decoder_layer(std::vector<FusionCase>& cases) {
  constexpr int64_t kSequences = 3, kHidden = 24, kHeads = 4, kKvHeads = 2, kHeadDim = 8, kFfn = 40;
  for (const int64_t tokens : {0, 1, 9})
    for (const DType weight : {kF32, kBf16})
      for (const DType cache_dtype : {kF32, kBf16}) {
        const kernels::DecoderLayerAttrs attrs{.norm = {1e-5f},
                                               .mlp_norm = {1e-6f},
                                               .attention = {.rope = {RopeStyle::rotate_half, kHeadDim},
                                                             .attention = {.heads = kHeads,
                                                                           .kv_heads = kKvHeads,
                                                                           .head_dim = kHeadDim,
                                                                           .scale = 0.3f,
                                                                           .source = kernels::KvSource::cached}},
                                               .gated = {ActivationKind::gelu_tanh, kF32}};
        const auto linear = std::make_shared<ops::Linear>(attrs.qkv);
        const auto reshape = [](std::vector<int64_t> trailing) {
          return std::make_shared<ops::Reshape>(std::move(trailing));
        };
        const auto add = std::make_shared<ops::Add>();
        const auto matrix = [&](int64_t out, int64_t in) { return TensorType(weight, {out, in}); };
        const TensorType norm(kF32, {kHidden}), cache(cache_dtype, {9, kKvHeads, 4, kHeadDim});
        cases.push_back({fmt::format("decoder_layer {} tokens {} weights {} cache", tokens, dtype_name(weight),
                                     dtype_name(cache_dtype)),
                         &fusions::decoder_layer(),
                         std::make_shared<fusions::DecoderLayer>(attrs),
                         {std::make_shared<ops::RmsNorm>(attrs.norm), linear, reshape({kHeads, kHeadDim}), linear,
                          reshape({kKvHeads, kHeadDim}), linear, reshape({kKvHeads, kHeadDim}),
                          std::make_shared<fusions::RopeAppendAttention>(attrs.attention), reshape({kHeads * kHeadDim}),
                          linear, add, std::make_shared<ops::RmsNorm>(attrs.mlp_norm),
                          std::make_shared<fusions::LinearGatedActivation>(attrs.gated), linear, add},
                         {TensorType(kF32, {Symbol::tokens, kHidden}), TensorType(kF32, {Symbol::tokens, kHeadDim}),
                          TensorType(DType::i64, {Symbol::tokens}), TensorType(DType::i32, {kSequences + 1}),
                          TensorType(DType::i32, {kSequences}), TensorType(DType::i32, {kSequences, 3}), norm,
                          matrix(kHeads * kHeadDim, kHidden), matrix(kKvHeads * kHeadDim, kHidden),
                          matrix(kKvHeads * kHeadDim, kHidden), cache, cache, matrix(kHidden, kHeads * kHeadDim), norm,
                          matrix(kFfn, kHidden), matrix(kFfn, kHidden), matrix(kHidden, kFfn)},
                         tokens_of(tokens)});
      }
}

void linear_cross_entropy(std::vector<FusionCase>& cases) {
  // 500 rows are more than any chunk of logits.
  for (const LinearShape& s : {LinearShape{0, 8, 8}, {1, 1, 1}, {1, 16, 33}, {7, 17, 65}, {50, 24, 300}, {500, 8, 20}})
    for (const DType weight : {kF32, kBf16})
      cases.push_back(
          {fmt::format("linear_cross_entropy {}x{}x{} {} weights", s.tokens, s.in, s.out, dtype_name(weight)),
           &fusions::linear_cross_entropy(),
           std::make_shared<fusions::LinearCrossEntropy>(),
           {std::make_shared<ops::Linear>(kernels::LinearAttrs{}), std::make_shared<ops::CrossEntropy>()},
           {TensorType(kF32, {Symbol::tokens, s.in}), TensorType(weight, {s.out, s.in}),
            TensorType(DType::i32, {Symbol::tokens})},
           tokens_of(s.tokens)});
  // In 8-bit floats; gradients: fp8_head_test.cc.
  const Encoding& e4m3 = Fp8TensorEncoding::of(Fp8Format::Kind::e4m3, false);
  for (const LinearShape& s : {LinearShape{1, 16, 33}, {7, 17, 65}, {500, 8, 20}})
    cases.push_back({fmt::format("linear_cross_entropy {}x{}x{} {}", s.tokens, s.in, s.out, e4m3.name()),
                     &fusions::linear_cross_entropy(),
                     std::make_shared<fusions::LinearCrossEntropy>(),
                     {std::make_shared<ops::Linear>(kernels::LinearAttrs{}), std::make_shared<ops::CrossEntropy>()},
                     {TensorType(kF32, {Symbol::tokens, s.in}, &e4m3), TensorType(kF32, {s.out, s.in}, &e4m3),
                      TensorType(DType::i32, {Symbol::tokens})},
                     tokens_of(s.tokens)});
}

void gated_quantize(std::vector<FusionCase>& cases) {
  const TensorType scaling = ops::Quantize::scaling_type();
  for (const ActivationKind kind : {ActivationKind::silu, ActivationKind::gelu_tanh})
    for (const int64_t tokens : {0, 1, 5, 130})
      for (const int64_t width : {16, 272}) {
        const TensorType values(kF32, {Symbol::tokens, width});
        const auto quantize_to = [](Fp8Format::Kind to) {
          return std::make_shared<ops::Quantize>(kernels::QuantizeAttrs{&Fp8TensorEncoding::of(to, true)});
        };
        const auto name = [&](const fusions::Fusion& fusion) {
          return fmt::format("{} {}x{} {}", fusion.name, tokens, width, ops::activation_name(kind));
        };
        const Encoding *e4m3 = &Fp8TensorEncoding::of(Fp8Format::Kind::e4m3, true),
                       *e5m2 = &Fp8TensorEncoding::of(Fp8Format::Kind::e5m2, true);
        cases.push_back({name(fusions::gated_activation_quantize()),
                         &fusions::gated_activation_quantize(),
                         std::make_shared<fusions::GatedActivationQuantize>(kernels::GatedQuantizeAttrs{kind, e4m3}),
                         {std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{kind}),
                          quantize_to(Fp8Format::Kind::e4m3)},
                         {values, values, scaling},
                         tokens_of(tokens)});
        cases.push_back(
            {name(fusions::gated_gradients_quantize()),
             &fusions::gated_gradients_quantize(),
             std::make_shared<fusions::GatedGradientsQuantize>(kernels::GatedQuantizeAttrs{kind, e5m2}),
             {fusions::gated_gradients(kind), quantize_to(Fp8Format::Kind::e5m2), quantize_to(Fp8Format::Kind::e5m2)},
             {values, values, values, scaling, scaling},
             tokens_of(tokens)});
      }
}

}  // namespace

std::vector<FusionCase> fusion_cases() {
  std::vector<FusionCase> cases;
  add_rms_norm(cases);
  rms_norm_quantize(cases);
  linear_gated_activation_quantize(cases);
  linear_gated_activation(cases);
  linear_add(cases);
  linear_qkv(cases);
  rope_kv_append(cases);
  rope_append_attention(cases);
  decoder_layer(cases);
  linear_cross_entropy(cases);
  gated_quantize(cases);
  return cases;
}

size_t num_values(const fusions::Fusion& fusion) {
  int most = -1;
  for (const fusions::PatternNode& node : fusion.nodes)
    for (const std::vector<int>& ids : {node.inputs, node.outputs})
      for (int id : ids) most = std::max(most, id);
  return static_cast<size_t>(most + 1);
}

void for_each_part(const FusionCase& c, const std::function<void(const PartPorts&)>& visit) {
  std::vector<TensorType> values(num_values(*c.fusion), kernels::unconnected_port());
  for (size_t i = 0; i < c.inputs.size(); ++i) values[static_cast<size_t>(c.fusion->inputs[i])] = c.inputs[i];
  for (size_t n = 0; n < c.parts.size(); ++n) {
    const fusions::PatternNode& node = c.fusion->nodes[n];
    PartPorts ports{n, *c.parts[n], node.inputs, node.outputs, {}, {}};
    for (int id : node.inputs)
      ports.inputs.push_back(id < 0 ? kernels::unconnected_port() : values[static_cast<size_t>(id)]);
    ports.outputs = c.parts[n]->infer_types(ports.inputs);
    for (size_t i = 0; i < node.outputs.size(); ++i) values[static_cast<size_t>(node.outputs[i])] = ports.outputs[i];
    visit(ports);
  }
}

std::vector<Tensor> make_inputs(const FusionCase& c, uint64_t seed) {
  if (c.inputs_like != nullptr) return make_inputs(*c.inputs_like, seed);
  std::vector<Tensor> inputs(c.inputs.size());
  for_each_part(c, [&](const PartPorts& part) {
    const std::vector<Tensor> made = workloads::make_inputs(part.op, part.inputs, c.symbols, seed + part.node);
    for (size_t i = 0; i < part.input_values.size(); ++i)
      for (size_t port = 0; port < inputs.size(); ++port)
        if (c.fusion->inputs[port] == part.input_values[i] && !inputs[port].defined()) inputs[port] = made[i];
  });
  return inputs;
}

}  // namespace eadem::test
