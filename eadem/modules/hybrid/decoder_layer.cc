// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/decoder_layer.h"

#include <functional>

#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/elementwise/scale_by.h"

namespace eadem::modules {

namespace {

// The hyper-connections around the mixer and the MLP.
constexpr const char *kMixerStreams = "attn_hc", *kMlpStreams = "ffn_hc";

// The scope of a mixer or an MLP, and the module.
struct Part {
  const char* scope;
  std::function<ValueId(BuildContext&, ValueId)> build;
};

Part layer_part_of(const CausalAttention::Config& config, int layer) {
  return {"self_attn", [&config, layer](BuildContext& context, ValueId x) {
            return CausalAttention(config, layer).build(context, x);
          }};
}

Part layer_part_of(const MlaAttention::Config& config, int layer) {
  return {"self_attn",
          [&config, layer](BuildContext& context, ValueId x) { return MlaAttention(config, layer).build(context, x); }};
}

Part layer_part_of(const Mamba2::Config& config, int layer) {
  return {"mamba",
          [&config, layer](BuildContext& context, ValueId x) { return Mamba2(config, layer).build(context, x); }};
}

Part layer_part_of(const ParallelMixers::Config& config, int layer) {
  return {"", [&config, layer](BuildContext& context, ValueId x) {
            return ParallelMixers(config, layer).build(context, x);
          }};
}

Part layer_part_of(const GatedConvolution::Config& config, int layer) {
  return {"conv", [&config, layer](BuildContext& context, ValueId x) {
            return GatedConvolution(config, layer).build(context, x);
          }};
}

Part layer_part_of(const PooledAttention::Config& config, int layer) {
  return {"self_attn", [&config, layer](BuildContext& context, ValueId x) {
            return PooledAttention(config, layer).build(context, x);
          }};
}

Part layer_part_of(std::monostate, int /*layer*/) { return {}; }

Part layer_part_of(const GatedDeltaNet::Config& config, int layer) {
  return {"linear_attn", [&config, layer](BuildContext& context, ValueId x) {
            return GatedDeltaNet(config, layer).build(context, x);
          }};
}

Part layer_part_of(const DenseMlp::Config& config, int layer) {
  return {"mlp",
          [&config, layer](BuildContext& context, ValueId x) { return DenseMlp(config, layer).build(context, x); }};
}

Part layer_part_of(const DenseAndExperts::Config& config, int layer) {
  return {"", [&config, layer](BuildContext& context, ValueId x) {
            return DenseAndExperts(config, layer).build(context, x);
          }};
}

Part layer_part_of(const MoeMlp::Config& config, int layer) {
  return {"mlp",
          [&config, layer](BuildContext& context, ValueId x) { return MoeMlp(config, layer).build(context, x); }};
}

void list_parameters(const CausalAttention::Config& config, const std::string& prefix,
                     std::vector<ParameterInfo>& list) {
  const int64_t q = config.heads * config.head_dim, kv = config.kv_heads * config.head_dim;
  const auto add = [&](const char* name, int64_t out, int64_t in, bool bias) {
    list.push_back({prefix + "self_attn." + name + ".weight", Shape{out, in}});
    if (bias) list.push_back({prefix + "self_attn." + name + ".bias", Shape{out}});
  };
  add("q_proj", q, config.hidden, config.qkv_bias);
  if (!config.kv_layer) add("k_proj", kv, config.hidden, config.qkv_bias);
  if (!config.kv_layer && !config.keys_are_values) add("v_proj", kv, config.hidden, config.qkv_bias);
  const auto add_norm = [&](const char* name, int64_t width) {
    const bool whole = config.qk_norm == CausalAttention::Config::QkNorm::whole;
    list.push_back({prefix + "self_attn." + name + ".weight", Shape{whole ? width : config.head_dim}});
  };
  const bool has_norms = config.qk_norm_eps && config.qk_norm != CausalAttention::Config::QkNorm::weightless_after_rope;
  if (has_norms) add_norm("q_norm", q);
  if (has_norms && !config.kv_layer) add_norm("k_norm", kv);
  if (config.sinks) list.push_back({prefix + "self_attn.sinks", Shape{config.heads}});
  if (config.gated) add("g_proj", q, config.hidden, config.qkv_bias);
  add("o_proj", config.hidden, q, config.out_bias);
}

void list_parameters(const MlaAttention::Config& config, const std::string& prefix, std::vector<ParameterInfo>& list) {
  const auto add = [&](const char* name, const Shape& shape, bool bias = false) {
    list.push_back({prefix + "self_attn." + name + ".weight", shape});
    if (bias) list.push_back({prefix + "self_attn." + name + ".bias", Shape{shape[0]}});
  };
  const int64_t q = config.heads * config.query_dim();
  if (config.query_rank == 0) {
    add("q_proj", {q, config.hidden});
  } else {
    add("q_a_proj", {config.query_rank, config.hidden}, config.bias);
    add("q_a_layernorm", {config.query_rank});
    add("q_b_proj", {q, config.query_rank});
  }
  add("k_b_proj", {config.heads, config.latent_dim, config.nope_dim});
  add("kv_a_proj_with_mqa", {config.row_dim(), config.hidden}, config.bias);
  add("kv_a_layernorm", {config.latent_dim});
  add("v_b_proj", {config.heads, config.value_dim, config.latent_dim});
  add("o_proj", {config.hidden, config.heads * config.value_dim}, config.bias);
  if (const KeyIndexer::Config& indexer = config.indexer; indexer.heads > 0)
    for (const auto& [name, shape] : indexer.parameters(config.hidden, config.query_rank))
      list.push_back({prefix + "self_attn.indexer." + name, shape, /*trainable=*/false});
}

void list_parameters(const Mamba2::Config& config, const std::string& prefix, std::vector<ParameterInfo>& list) {
  const std::string mamba = prefix + "mamba.";
  const auto add = [&](const std::string& name, const Shape& weight, bool bias) {
    list.push_back({mamba + name + ".weight", weight});
    if (bias) list.push_back({mamba + name + ".bias", Shape{weight[weight.rank() == 2 && name.ends_with("_conv")]}});
  };
  for (const auto& [name, size] : config.parts())
    add(std::string(name) + "_proj", {size, config.hidden}, config.in_bias);
  for (size_t i = 1; i < 4; ++i)  // x, b, c
    add(std::string(config.parts()[i].name) + "_conv", {config.taps, config.parts()[i].size}, config.conv_bias);
  for (const char* name : {"dt_bias", "A_log", "D"}) list.push_back({mamba + name, Shape{config.heads}});
  if (config.norm_eps) add("norm", {config.groups, config.inner() / config.groups}, false);
  add("out_proj", {config.hidden, config.inner()}, config.out_bias);
}

void list_parameters(const ParallelMixers::Config& config, const std::string& prefix,
                     std::vector<ParameterInfo>& list) {
  list_parameters(config.mamba, prefix, list);
  list_parameters(config.attention, prefix, list);
}

void list_parameters(const GatedConvolution::Config& config, const std::string& prefix,
                     std::vector<ParameterInfo>& list) {
  for (const auto& [name, shape] : config.parameters()) list.push_back({prefix + "conv." + name, shape});
}

void list_parameters(const PooledAttention::Config& config, const std::string& prefix,
                     std::vector<ParameterInfo>& list) {
  for (const auto& [name, shape] : config.parameters())
    list.push_back({prefix + "self_attn." + name, shape, !PooledAttention::Config::is_of_indexer(name)});
}

void list_parameters(std::monostate, const std::string& /*prefix*/, std::vector<ParameterInfo>& /*list*/) {}

void list_parameters(const GatedDeltaNet::Config& config, const std::string& prefix, std::vector<ParameterInfo>& list) {
  for (const auto& [name, shape] : config.parameters()) list.push_back({prefix + "linear_attn." + name, shape});
}

void list_dense(const DenseMlp::Config& config, const std::string& prefix, std::vector<ParameterInfo>& list) {
  const auto add = [&](const char* name, int64_t out, int64_t in) {
    list.push_back({prefix + name + ".weight", Shape{out, in}});
    if (config.bias) list.push_back({prefix + name + ".bias", Shape{out}});
  };
  if (config.gated) add("gate_proj", config.ffn, config.hidden);
  add("up_proj", config.ffn, config.hidden);
  add("down_proj", config.hidden, config.ffn);
}

void list_parameters(const DenseMlp::Config& config, const std::string& prefix, std::vector<ParameterInfo>& list) {
  list_dense(config, prefix + "mlp.", list);
}

void list_experts(const MoeMlp::Config& config, const std::string& mlp, std::vector<ParameterInfo>& list) {
  if (config.router_norm_eps) list.push_back({mlp + "gate.scale", Shape{config.hidden}});
  list.push_back({mlp + "gate.weight", Shape{config.choices(), config.hidden}});
  if (config.router_bias) list.push_back({mlp + "gate.bias", Shape{config.choices()}});
  if (config.correction_bias)
    list.push_back({mlp + "gate.e_score_correction_bias", Shape{config.choices()}, /*trainable=*/false});
  if (config.route.by_token)
    list.push_back({mlp + "gate.tid2eid", Shape{config.token_table, config.route.top_k}, /*trainable=*/false});
  if (config.expert_scales) list.push_back({mlp + "per_expert_scale", Shape{config.choices()}});
  const auto add = [&](const char* name, int64_t out, int64_t in) {
    list.push_back({mlp + "experts." + name + ".weight", Shape{config.experts, out, in}});
    if (config.expert_bias) list.push_back({mlp + "experts." + name + ".bias", Shape{config.experts, out}});
  };
  const int64_t width = config.expert_width();
  const auto add_latent = [&](const char* name, int64_t out, int64_t in) {
    if (config.latent > 0) list.push_back({mlp + name + ".weight", Shape{out, in}});
    if (config.latent > 0 && config.latent_bias) list.push_back({mlp + name + ".bias", Shape{out}});
  };
  add_latent("fc1_latent_proj", config.latent, config.hidden);
  if (config.gated) add("gate_proj", config.ffn, width);
  add("up_proj", config.ffn, width);
  add("down_proj", width, config.ffn);
  add_latent("fc2_latent_proj", config.hidden, config.latent);
  if (!config.shared) return;
  list_dense({.hidden = config.hidden, .ffn = config.shared->ffn, .bias = config.shared->bias, .gated = config.gated},
             mlp + config.shared->name + ".", list);
  if (config.shared->gated) list.push_back({mlp + "shared_expert_gate.weight", Shape{1, config.hidden}});
}

void list_parameters(const MoeMlp::Config& config, const std::string& prefix, std::vector<ParameterInfo>& list) {
  list_experts(config, prefix + "mlp.", list);
}

void list_parameters(const DenseAndExperts::Config& config, const std::string& prefix,
                     std::vector<ParameterInfo>& list) {
  const int64_t hidden = config.dense.hidden;
  list_parameters(config.before_dense, hidden, prefix, list);
  list_dense(config.dense, prefix + "mlp.", list);
  list_parameters(config.after_dense, hidden, prefix, list);
  list_parameters(config.before_experts, hidden, prefix, list);
  list_experts(config.experts, prefix + "moe.", list);
  list_parameters(config.after_experts, hidden, prefix, list);
}

void list_parameters(const LayerInputReader::Config& config, const std::string& prefix,
                     std::vector<ParameterInfo>& list) {
  list.push_back({prefix + "per_layer_input_gate.weight", Shape{config.width, config.hidden}});
  list.push_back({prefix + "per_layer_projection.weight", Shape{config.hidden, config.width}});
  list_parameters(config.norm, config.hidden, prefix, list);
}

}  // namespace

void list_parameters(const LayerInputs::Config& config, const std::string& prefix, std::vector<ParameterInfo>& list) {
  const int64_t all = config.layers * config.width;
  list.push_back({prefix + "embed_tokens_per_layer.weight", Shape{config.vocab, all}});
  list.push_back({prefix + "per_layer_model_projection.weight", Shape{all, config.hidden}});
  list.push_back({prefix + "per_layer_projection_norm.weight", Shape{config.width}});
}

void list_parameters(const HyperConnections::Config& config, bool merges, const std::string& prefix,
                     std::vector<ParameterInfo>& list) {
  for (const auto& [name, shape] : config.parameters(merges)) list.push_back({prefix + name, shape});
}

void list_parameters(const NormSpec& norm, int64_t size, const std::string& prefix, std::vector<ParameterInfo>& list) {
  list.push_back({prefix + norm.name + ".weight", Shape{size}});
  if (norm.bias) list.push_back({prefix + norm.name + ".bias", Shape{size}});
}

void list_parameters(const LayerSpec& spec, const std::string& prefix, std::vector<ParameterInfo>& list) {
  const auto add_norm = [&](const std::optional<NormSpec>& norm) {
    if (norm) list_parameters(*norm, spec.hidden, prefix, list);
  };
  const auto add = [&](const auto& config) { list_parameters(config, prefix, list); };
  for (size_t part = 0; part < spec.parts.size(); ++part) {
    list_parameters(spec.parts[part], fmt::format("{}{}.", prefix, part), list);
    if (part == 0 && spec.shortcut) add(*spec.shortcut);
  }
  const auto add_streams = [&](const char* name) {
    if (spec.streams.streams > 0) list_parameters(spec.streams, false, prefix + name + ".", list);
  };
  if (spec.parts.empty()) {
    add_streams(kMixerStreams);
    add_norm(spec.before_mixer);
    std::visit(add, spec.mixer);
    add_norm(spec.after_mixer);
    add_streams(kMlpStreams);
    add_norm(spec.before_mlp);
    std::visit(add, spec.mlp);
    add_norm(spec.after_mlp);
  }
  if (spec.reads_input) list_parameters(*spec.reads_input, prefix, list);
  if (spec.scaled) list.push_back({prefix + "layer_scalar", Shape{1}, /*trainable=*/false});
}

ValueId DecoderLayer::build_streams(BuildContext& context, ValueId x) const {
  EADEM_CHECK(!spec_.after_mixer && !spec_.after_mlp && !spec_.parallel && spec_.residual_scale == 1,
              "layer {} has streams and norms behind its parts, parallel parts or a scale", layer_);
  const HyperConnections streams(spec_.streams);
  const auto pass_through = [&](const char* name, const std::optional<NormSpec>& norm, const auto& kind) {
    const HyperConnections::Reading reading = streams.read(context, name, x);
    const ValueId in = norm ? Norm(*norm, spec_.hidden).build(context, reading.x, layer_) : reading.x;
    const Part part = std::visit([&](const auto& config) { return layer_part_of(config, layer_); }, kind);
    const auto built = [&] {
      const Graph::Scope scope(context.graph, part.scope);
      return part.build(context, in);
    };
    x = streams.write(context, name, x, built(), reading.weights);
  };
  pass_through(kMixerStreams, spec_.before_mixer, spec_.mixer);
  pass_through(kMlpStreams, spec_.before_mlp, spec_.mlp);
  return x;
}

DecoderLayer::Built DecoderLayer::build_kind(BuildContext& context, ValueId x) const {
  if (spec_.streams.streams > 0) return {.out = build_streams(context, x), .mlp_in = pipeline::kNoValue};
  return spec_.parts.empty() ? build_mixed(context, x) : build_parts(context, x);
}

DecoderLayer::Built DecoderLayer::build_with_input(BuildContext& context, ValueId x) const {
  Built y = build_kind(context, x);
  if (spec_.reads_input) y.out = LayerInputReader(*spec_.reads_input, layer_).build(context, y.out);
  if (!spec_.scaled) return y;
  Graph& graph = context.graph;
  const ValueId scalar = graph.add_parameter(graph.scoped_name("layer_scalar"), TensorType(DType::f32, {int64_t{1}}));
  y.out = graph.add1(std::make_shared<ops::ScaleBy>(kernels::ScaleByAttrs{}), {y.out, scalar});
  return y;
}

DecoderLayer::Built DecoderLayer::build_parts(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  Built y{.out = x, .mlp_in = x};
  ValueId shortcut = pipeline::kNoValue;
  for (size_t part = 0; part < spec_.parts.size(); ++part) {
    Built own{};
    {
      const Graph::Scope scope(graph, std::to_string(part), layer_);
      own = DecoderLayer(spec_.parts[part], layer_).build_with_input(context, y.out);
    }
    y.out = own.out;
    if (part > 0) continue;
    y.mlp_in = own.mlp_in;
    if (!spec_.shortcut) continue;
    const Graph::Scope scope(graph, "mlp");
    shortcut = MoeMlp(*spec_.shortcut, layer_).build(context, y.mlp_in);
  }
  if (spec_.shortcut) y.out = graph.add1(std::make_shared<ops::Add>(), {y.out, shortcut});
  return y;
}

DecoderLayer::Built DecoderLayer::build_mixed(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const auto normalized = [&](const std::optional<NormSpec>& norm, ValueId value) {
    return norm ? Norm(*norm, spec_.hidden).build(context, value, layer_) : value;
  };
  // r * after(the part of `in`), added to `to`.
  const auto add_branch = [&](ValueId to, const auto& kind, ValueId in, const std::optional<NormSpec>& after) {
    const Part part = std::visit([&](const auto& config) { return layer_part_of(config, layer_); }, kind);
    const auto built = [&] {
      const Graph::Scope scope(graph, part.scope);
      return part.build(context, in);
    };
    ValueId value = normalized(after, built());
    if (spec_.residual_scale != 1) {
      const Graph::Scope scope(graph, part.scope);
      const kernels::ScaleAttrs attrs{.factor = static_cast<float>(spec_.residual_scale)};
      value = graph.add1(std::make_shared<ops::Scale>(attrs), {value});
    }
    return graph.add1(std::make_shared<ops::Add>(), {to, value});
  };

  ValueId in = x, mixed = x;
  if (!std::holds_alternative<std::monostate>(spec_.mixer)) {
    in = normalized(spec_.before_mixer, x);
    mixed = add_branch(x, spec_.mixer, in, spec_.after_mixer);
  }
  if (std::holds_alternative<std::monostate>(spec_.mlp)) return {mixed, mixed};
  const ValueId mlp_in = !spec_.parallel    ? normalized(spec_.before_mlp, mixed)
                         : spec_.before_mlp ? normalized(spec_.before_mlp, x)
                                            : in;
  return {add_branch(mixed, spec_.mlp, mlp_in, spec_.after_mlp), mlp_in};
}

}  // namespace eadem::modules
