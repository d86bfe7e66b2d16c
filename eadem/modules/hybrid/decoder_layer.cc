// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/decoder_layer.h"

#include <functional>

#include "eadem/ops/elementwise.h"

namespace eadem::modules {

namespace {

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

Part layer_part_of(const DenseMlp::Config& config, int layer) {
  return {"mlp",
          [&config, layer](BuildContext& context, ValueId x) { return DenseMlp(config, layer).build(context, x); }};
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
  add("k_proj", kv, config.hidden, config.qkv_bias);
  add("v_proj", kv, config.hidden, config.qkv_bias);
  if (config.qk_norm_eps)
    for (const auto& [name, width] : {std::pair<const char*, int64_t>{"q_norm", q}, {"k_norm", kv}}) {
      const bool whole = config.qk_norm == CausalAttention::Config::QkNorm::whole;
      list.push_back({prefix + "self_attn." + name + ".weight", Shape{whole ? width : config.head_dim}});
    }
  if (config.sinks) list.push_back({prefix + "self_attn.sinks", Shape{config.heads}});
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

void list_parameters(const MoeMlp::Config& config, const std::string& prefix, std::vector<ParameterInfo>& list) {
  const std::string mlp = prefix + "mlp.";
  list.push_back({mlp + "gate.weight", Shape{config.experts, config.hidden}});
  if (config.router_bias) list.push_back({mlp + "gate.bias", Shape{config.experts}});
  if (config.correction_bias)
    list.push_back({mlp + "gate.e_score_correction_bias", Shape{config.experts}, /*trainable=*/false});
  const auto add = [&](const char* name, int64_t out, int64_t in) {
    list.push_back({mlp + "experts." + name + ".weight", Shape{config.experts, out, in}});
    if (config.expert_bias) list.push_back({mlp + "experts." + name + ".bias", Shape{config.experts, out}});
  };
  add("gate_proj", config.ffn, config.hidden);
  add("up_proj", config.ffn, config.hidden);
  add("down_proj", config.hidden, config.ffn);
  if (!config.shared) return;
  list_dense({.hidden = config.hidden, .ffn = config.shared->ffn}, mlp + config.shared->name + ".", list);
  if (config.shared->gated) list.push_back({mlp + "shared_expert_gate.weight", Shape{1, config.hidden}});
}

}  // namespace

void list_parameters(const NormSpec& norm, int64_t size, const std::string& prefix, std::vector<ParameterInfo>& list) {
  list.push_back({prefix + norm.name + ".weight", Shape{size}});
  if (norm.bias) list.push_back({prefix + norm.name + ".bias", Shape{size}});
}

void list_parameters(const LayerSpec& spec, const std::string& prefix, std::vector<ParameterInfo>& list) {
  const auto add_norm = [&](const std::optional<NormSpec>& norm) {
    if (norm) list_parameters(*norm, spec.hidden, prefix, list);
  };
  const auto add = [&](const auto& config) { list_parameters(config, prefix, list); };
  add_norm(spec.before_mixer);
  std::visit(add, spec.mixer);
  add_norm(spec.after_mixer);
  add_norm(spec.before_mlp);
  std::visit(add, spec.mlp);
  add_norm(spec.after_mlp);
}

ValueId DecoderLayer::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const auto normalized = [&](const std::optional<NormSpec>& norm, ValueId value) {
    return norm ? Norm(*norm, spec_.hidden).build(context, value, layer_) : value;
  };
  const auto branch = [&](const auto& kind, ValueId in, const std::optional<NormSpec>& after) {
    const Part part = std::visit([&](const auto& config) { return layer_part_of(config, layer_); }, kind);
    const auto built = [&] {
      const Graph::Scope scope(graph, part.scope);
      return part.build(context, in);
    };
    const ValueId value = normalized(after, built());
    if (spec_.residual_scale == 1) return value;
    const Graph::Scope scope(graph, part.scope);
    return graph.add1(
        std::make_shared<ops::Scale>(kernels::ScaleAttrs{.factor = static_cast<float>(spec_.residual_scale)}), {value});
  };
  const auto sum = [&](ValueId a, ValueId b) { return graph.add1(std::make_shared<ops::Add>(), {a, b}); };

  const ValueId in = normalized(spec_.before_mixer, x);
  const ValueId mixed = sum(x, branch(spec_.mixer, in, spec_.after_mixer));
  const ValueId mlp_in = !spec_.parallel    ? normalized(spec_.before_mlp, mixed)
                         : spec_.before_mlp ? normalized(spec_.before_mlp, x)
                                            : in;
  return sum(mixed, branch(spec_.mlp, mlp_in, spec_.after_mlp));
}

}  // namespace eadem::modules
