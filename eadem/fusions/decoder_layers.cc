// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/decoder_layers.h"

#include <utility>

#include "eadem/fusions/linear_gated_activation.h"
#include "eadem/fusions/rope_append_attention.h"
#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/linear.h"
#include "eadem/ops/reshape.h"
#include "eadem/ops/rms_norm.h"

namespace eadem::fusions {

namespace {

using Ports = kernels::DecoderLayerPorts;

// The values up to kDownWeight are the inputs, in port order.
enum Value {
  kAbsent = -1,
  kX,
  kTable,
  kSlots,
  kQueryStart,
  kKvLength,
  kBlockTable,
  kNorm,
  kQWeight,
  kKWeight,
  kVWeight,
  kCacheK,
  kCacheV,
  kOWeight,
  kMlpNorm,
  kGateWeight,
  kUpWeight,
  kDownWeight,
  kNormed,
  kFlatQ,
  kFlatK,
  kFlatV,
  kQ,
  kK,
  kV,
  kMixed,
  kNewCacheK,
  kNewCacheV,
  kFlatMixed,
  kAttended,
  kSum,
  kMlpIn,
  kGated,
  kDown,
  kY
};
static_assert(static_cast<size_t>(kNorm) == Ports::kSharedInputs &&
              static_cast<size_t>(kDownWeight) == Ports::input(0, Ports::kDownWeight));

// The nodes of the pattern.
enum Part : size_t {
  kNormPart,
  kQPart,
  kSplitQPart,
  kKPart,
  kSplitKPart,
  kVPart,
  kSplitVPart,
  kAttentionPart,
  kFlattenPart,
  kOPart,
  kAddPart,
  kMlpNormPart,
  kGatedPart,
  kDownPart,
  kAddMlpPart
};

ops::OpPtr make(std::span<const ops::Op* const> matched) {
  const auto linear = [&](Part part) { return matched[part]->attrs().get<kernels::LinearAttrs>(); };
  const kernels::DecoderLayerAttrs attrs{
      .norm = matched[kNormPart]->attrs().get<kernels::RmsNormAttrs>(),
      .mlp_norm = matched[kMlpNormPart]->attrs().get<kernels::RmsNormAttrs>(),
      .qkv = linear(kQPart),
      .o = linear(kOPart),
      .down = linear(kDownPart),
      .attention = matched[kAttentionPart]->attrs().get<kernels::RopeAppendAttentionAttrs>(),
      .gated = matched[kGatedPart]->attrs().get<kernels::LinearGatedActivationAttrs>()};
  if (linear(kKPart) != attrs.qkv || linear(kVPart) != attrs.qkv) return nullptr;
  if (attrs.qkv.has_bias || attrs.o.has_bias || attrs.down.has_bias) return nullptr;
  if (attrs.o.out_dtype != attrs.down.out_dtype) return nullptr;  // both are added to x
  if (attrs.attention.round_to != nullptr || attrs.gated.round_to != nullptr) return nullptr;
  return std::make_shared<DecoderLayer>(attrs);
}

std::vector<ops::OpPtr> parts_of(const kernels::DecoderLayerAttrs& attrs) {
  const kernels::AttentionAttrs& attention = attrs.attention.attention;
  const auto projection = std::make_shared<ops::Linear>(attrs.qkv);
  const auto reshape = [](std::vector<int64_t> trailing) {
    return std::make_shared<ops::Reshape>(std::move(trailing));
  };
  const auto add = std::make_shared<ops::Add>();
  return {std::make_shared<ops::RmsNorm>(attrs.norm),
          projection,
          reshape({attention.heads, attention.head_dim}),
          projection,
          reshape({attention.kv_heads, attention.head_dim}),
          projection,
          reshape({attention.kv_heads, attention.values()}),
          std::make_shared<RopeAppendAttention>(attrs.attention),
          reshape({attention.heads * attention.values()}),
          std::make_shared<ops::Linear>(attrs.o),
          add,
          std::make_shared<ops::RmsNorm>(attrs.mlp_norm),
          std::make_shared<LinearGatedActivation>(attrs.gated),
          std::make_shared<ops::Linear>(attrs.down),
          add};
}

size_t layers_of(const ops::Op& op) {
  if (op.name() == decoder_layer().name) return 1;
  const auto* several = dynamic_cast<const DecoderLayers*>(&op);
  return several == nullptr ? 0 : several->layers();
}

}  // namespace

const Fusion& decoder_layer() {
  static const Fusion fusion{
      .name = "decoder_layer",
      .nodes = {{"rms_norm", {kX, kNorm}, {kNormed}},
                {"linear", {kNormed, kQWeight, kAbsent}, {kFlatQ}},
                {"reshape", {kFlatQ}, {kQ}},
                {"linear", {kNormed, kKWeight, kAbsent}, {kFlatK}},
                {"reshape", {kFlatK}, {kK}},
                {"linear", {kNormed, kVWeight, kAbsent}, {kFlatV}},
                {"reshape", {kFlatV}, {kV}},
                {"rope_append_attention",
                 {kQ, kTable, kK, kV, kSlots, kCacheK, kCacheV, kQueryStart, kKvLength, kBlockTable},
                 {kMixed, kNewCacheK, kNewCacheV}},
                {"reshape", {kMixed}, {kFlatMixed}},
                {"linear", {kFlatMixed, kOWeight, kAbsent}, {kAttended}},
                {"add", {kX, kAttended}, {kSum}, /*commutative=*/true},
                {"rms_norm", {kSum, kMlpNorm}, {kMlpIn}},
                {"linear_gated_activation", {kMlpIn, kGateWeight, kUpWeight}, {kGated}},
                {"linear", {kGated, kDownWeight, kAbsent}, {kDown}},
                {"add", {kSum, kDown}, {kY}, /*commutative=*/true}},
      .inputs = {kX, kTable, kSlots, kQueryStart, kKvLength, kBlockTable, kNorm, kQWeight, kKWeight, kVWeight, kCacheK,
                 kCacheV, kOWeight, kMlpNorm, kGateWeight, kUpWeight, kDownWeight},
      .outputs = {kY, kNewCacheK, kNewCacheV},
      .make = make};
  return fusion;
}

DecoderLayer::DecoderLayer(const kernels::DecoderLayerAttrs& attrs)
    : FusedOp(decoder_layer(), parts_of(attrs)), attrs_(attrs) {}

std::vector<ops::Port> DecoderLayer::inputs() const {
  using Role = ops::Port::Role;
  return {{"x"},
          {"table", Role::constant},
          {"slots", Role::index},
          {"query_start", Role::index},
          {"kv_length", Role::index},
          {"block_table", Role::index},
          {"norm", Role::parameter},
          {"q_weight", Role::parameter},
          {"k_weight", Role::parameter},
          {"v_weight", Role::parameter},
          {"cache_k", Role::state},
          {"cache_v", Role::state},
          {"o_weight", Role::parameter},
          {"mlp_norm", Role::parameter},
          {"gate_weight", Role::parameter},
          {"up_weight", Role::parameter},
          {"down_weight", Role::parameter}};
}

std::vector<ops::Port> DecoderLayer::outputs() const {
  return part(kAttentionPart).outputs();  // y, then the caches
}

std::string DecoderLayer::attrs_text() const {
  return part(kAttentionPart).attrs_text() + " " + part(kGatedPart).attrs_text();
}

ops::Cost DecoderLayer::cost(ops::Pass /*pass*/, std::span<const TensorType> in, std::span<const TensorType> /*out*/,
                             const SymbolValues& symbols) const {
  ops::Cost cost = parts_cost(in, symbols);
  cost.bytes -= saved_bytes(in, symbols);
  return cost;
}

void DecoderLayer::reference(ops::Pass pass, std::span<const ops::RefTensor> in, std::span<ops::RefTensor> out) const {
  const kernels::AttentionAttrs& attention = attrs_.attention.attention;
  const int64_t tokens = in[kX].shape[0];
  const auto product = [&](Part linear, const ops::RefTensor& x, const ops::RefTensor& weight) {
    const ops::RefTensor operands[] = {x, weight, {}};
    ops::RefTensor y = ref_zeros(Shape{tokens, weight.shape[0]});
    part(linear).reference(pass, operands, {&y, 1});
    return y;
  };
  const auto heads = [&](ops::RefTensor flat, int64_t count, int64_t width) {
    flat.shape = Shape{tokens, count, width};
    return flat;
  };
  const auto like_x = [&](Part of, const ops::RefTensor& a, const ops::RefTensor& b) {
    const ops::RefTensor operands[] = {a, b};
    ops::RefTensor y = ref_zeros(in[kX].shape);
    part(of).reference(pass, operands, {&y, 1});
    return y;
  };

  const ops::RefTensor normed = like_x(kNormPart, in[kX], in[kNorm]);
  const ops::RefTensor operands[] = {
      heads(product(kQPart, normed, in[kQWeight]), attention.heads, attention.head_dim),
      in[kTable],
      heads(product(kKPart, normed, in[kKWeight]), attention.kv_heads, attention.head_dim),
      heads(product(kVPart, normed, in[kVWeight]), attention.kv_heads, attention.values()),
      in[kSlots],
      in[kCacheK],
      in[kCacheV],
      in[kQueryStart],
      in[kKvLength],
      in[kBlockTable]};
  ops::RefTensor attended[] = {ref_zeros(Shape{tokens, attention.heads, attention.values()}), std::move(out[1]),
                               std::move(out[2])};
  part(kAttentionPart).reference(pass, operands, attended);
  out[1] = std::move(attended[1]), out[2] = std::move(attended[2]);
  attended[0].shape = Shape{tokens, attention.heads * attention.values()};
  const ops::RefTensor sum = like_x(kAddPart, in[kX], product(kOPart, attended[0], in[kOWeight]));

  const ops::RefTensor gated[] = {like_x(kMlpNormPart, sum, in[kMlpNorm]), in[kGateWeight], in[kUpWeight]};
  ops::RefTensor hidden = ref_zeros(Shape{tokens, in[kGateWeight].shape[0]});
  part(kGatedPart).reference(pass, gated, {&hidden, 1});
  out[0] = like_x(kAddMlpPart, sum, product(kDownPart, hidden, in[kDownWeight]));
}

DecoderLayers::DecoderLayers(const kernels::DecoderLayerAttrs& attrs, size_t layers) : layer_(attrs), layers_(layers) {
  const std::vector<ops::Port> in = layer_.inputs(), out = layer_.outputs();
  for (size_t layer = 0; layer < layers; ++layer) {
    for (size_t port = Ports::kSharedInputs; port < in.size(); ++port)
      input_names_.push_back(fmt::format("{}.{}", in[port].name, layer));
    for (size_t port = 1; port < out.size(); ++port)
      output_names_.push_back(fmt::format("{}.{}", out[port].name, layer));
  }
}

std::vector<ops::Port> DecoderLayers::inputs() const {
  const std::vector<ops::Port> one = layer_.inputs();
  std::vector<ops::Port> ports(one.begin(), one.begin() + Ports::kSharedInputs);
  for (size_t i = 0; i < input_names_.size(); ++i)
    ports.push_back({input_names_[i], one[Ports::kSharedInputs + i % Ports::kLayerInputs].role});
  return ports;
}

std::vector<ops::Port> DecoderLayers::outputs() const {
  std::vector<ops::Port> ports = {layer_.outputs().front()};
  for (const std::string& name : output_names_) ports.push_back({name, ops::Port::Role::state});
  return ports;
}

std::string DecoderLayers::attrs_text() const { return fmt::format("layers={} {}", layers_, layer_.attrs_text()); }

std::vector<TensorType> DecoderLayers::types_of_layer(std::span<const TensorType> in, size_t layer) const {
  std::vector<TensorType> types(in.begin(), in.begin() + Ports::kSharedInputs);
  const auto own = in.subspan(Ports::kSharedInputs + layer * Ports::kLayerInputs, Ports::kLayerInputs);
  types.insert(types.end(), own.begin(), own.end());
  return types;
}

std::vector<TensorType> DecoderLayers::infer_types(std::span<const TensorType> in) const {
  std::vector<TensorType> result(1);
  for (size_t layer = 0; layer < layers_; ++layer) {
    const std::vector<TensorType> types = types_of_layer(in, layer), made = layer_.infer_types(types);
    result[0] = made[0];
    ops::expect_dtype(name(), "y", made[0], std::span(&types[0].dtype, 1));  // the x of the layer behind it
    result.insert(result.end(), made.begin() + 1, made.end());
  }
  return result;
}

DType DecoderLayers::wanted_dtype(std::span<const TensorType> in, int port) const {
  const auto index = static_cast<size_t>(port);
  if (index < Ports::kSharedInputs) return layer_.wanted_dtype(types_of_layer(in, 0), port);
  const size_t behind = index - Ports::kSharedInputs;
  return layer_.wanted_dtype(types_of_layer(in, behind / Ports::kLayerInputs),
                             static_cast<int>(Ports::kSharedInputs + behind % Ports::kLayerInputs));
}

std::vector<Sharding> DecoderLayers::infer_sharding(std::span<const TensorType> in) const {
  std::vector<Sharding> result(1);
  Sharding x = in[kX].sharding;
  for (size_t layer = 0; layer < layers_; ++layer) {
    std::vector<TensorType> types = types_of_layer(in, layer);
    types[kX].sharding = x;
    const std::vector<Sharding> made = layer_.infer_sharding(types);
    result[0] = x = made[0];
    result.insert(result.end(), made.begin() + 1, made.end());
  }
  return result;
}

ops::Cost DecoderLayers::cost(ops::Pass pass, std::span<const TensorType> in, std::span<const TensorType> /*out*/,
                              const SymbolValues& symbols) const {
  ops::Cost total;
  for (size_t layer = 0; layer < layers_; ++layer) {
    const std::vector<TensorType> types = types_of_layer(in, layer);
    total += layer_.cost(pass, types, layer_.infer_types(types), symbols);
  }
  // Each layer counts them: x twice, as y of the layer before it too.
  double shared = static_cast<double>(in[kX].size_bytes(symbols));
  for (size_t port = 0; port < Ports::kSharedInputs; ++port)
    shared += static_cast<double>(in[port].size_bytes(symbols));
  total.bytes -= static_cast<double>(layers_ - 1) * shared;
  return total;
}

void DecoderLayers::reference(ops::Pass pass, std::span<const ops::RefTensor> in, std::span<ops::RefTensor> out) const {
  std::vector<ops::RefTensor> inputs(in.begin(), in.begin() + Ports::kSharedInputs);
  for (size_t layer = 0; layer < layers_; ++layer) {
    inputs.resize(Ports::kSharedInputs);
    const auto own = in.subspan(Ports::input(layer, Ports::kNorm), Ports::kLayerInputs);
    inputs.insert(inputs.end(), own.begin(), own.end());
    ops::RefTensor& cache_k = out[Ports::output(layer, Ports::kCacheK)];
    ops::RefTensor& cache_v = out[Ports::output(layer, Ports::kCacheV)];
    ops::RefTensor made[] = {ref_zeros(in[kX].shape), std::move(cache_k), std::move(cache_v)};
    layer_.reference(pass, inputs, made);
    inputs[kX] = std::move(made[0]);
    cache_k = std::move(made[1]), cache_v = std::move(made[2]);
  }
  out[0] = std::move(inputs[kX]);
}

ops::OpPtr join_decoder_layers(const ops::Op& first, const ops::Op& second) {
  const size_t before = layers_of(first), behind = layers_of(second);
  if (before == 0 || behind == 0) return nullptr;
  const auto& attrs = first.attrs().get<kernels::DecoderLayerAttrs>();
  if (attrs != second.attrs().get<kernels::DecoderLayerAttrs>()) return nullptr;
  return std::make_shared<DecoderLayers>(attrs, before + behind);
}

}  // namespace eadem::fusions
