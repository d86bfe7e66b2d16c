// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/decoder_layer.h"

#include <functional>

#include "eadem/modules/base/rms_norm.h"
#include "eadem/ops/elementwise.h"

namespace eadem::modules {

namespace {

// The scope of a mixer or an MLP, and the module.
struct Part {
  const char* scope;
  std::function<ValueId(BuildContext&, ValueId)> build;
};

Part part_of(const CausalAttention::Config& config, int layer) {
  return {"self_attn", [&config, layer](BuildContext& context, ValueId x) {
            return CausalAttention(config, layer).build(context, x);
          }};
}

Part part_of(const MlaAttention::Config& config, int layer) {
  return {"self_attn",
          [&config, layer](BuildContext& context, ValueId x) { return MlaAttention(config, layer).build(context, x); }};
}

Part part_of(const DenseMlp::Config& config, int layer) {
  return {"mlp",
          [&config, layer](BuildContext& context, ValueId x) { return DenseMlp(config, layer).build(context, x); }};
}

Part part_of(const MoeMlp::Config& config, int layer) {
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
    for (const char* name : {"q_norm", "k_norm"})
      list.push_back({prefix + "self_attn." + name + ".weight", Shape{config.head_dim}});
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
  add("gate_proj", config.ffn, config.hidden);
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

void list_parameters(const LayerSpec& spec, const std::string& prefix, std::vector<ParameterInfo>& list) {
  const auto add_norm = [&](const std::optional<NormSpec>& norm) {
    if (norm) list.push_back({prefix + norm->name + ".weight", Shape{spec.hidden}});
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
    if (!norm) return value;
    const Graph::Scope scope(graph, norm->name);
    return RmsNorm(spec_.hidden, norm->eps).build(context, value, layer_);
  };
  const auto add_branch = [&](const auto& kind, const std::optional<NormSpec>& before,
                              const std::optional<NormSpec>& after, ValueId residual) {
    const Part part = std::visit([&](const auto& config) { return part_of(config, layer_); }, kind);
    ValueId value = normalized(before, residual);
    {
      const Graph::Scope scope(graph, part.scope);
      value = part.build(context, value);
    }
    return graph.add1(std::make_shared<ops::Add>(), {residual, normalized(after, value)});
  };
  const ValueId mixed = add_branch(spec_.mixer, spec_.before_mixer, spec_.after_mixer, x);
  return add_branch(spec_.mlp, spec_.before_mlp, spec_.after_mlp, mixed);
}

}  // namespace eadem::modules
