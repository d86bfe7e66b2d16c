// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/moe_decoder.h"

#include <cmath>

namespace eadem::models {

void read_experts(const io::JsonReader& config, const ExpertDefaults& defaults, ModelConfig& result) {
  const auto own = config.optional_integer(defaults.count_key, 1, kMaxExperts),
             local = config.optional_integer("num_local_experts", 1, kMaxExperts);
  if (own && local && *own != *local)
    throw DataCorrupted("{}: '{}' is {} and 'num_local_experts' {}", config.file(), defaults.count_key, *own, *local);
  result.num_experts = own ? *own : local.value_or(defaults.count);
  result.num_experts_per_tok =
      config.optional_integer("num_experts_per_tok", 1, kMaxExperts).value_or(defaults.per_token);
  result.moe_intermediate_size = config.optional_integer("moe_intermediate_size", 1, kMaxExtent).value_or(defaults.ffn);
}

void write_experts(const ModelConfig& config, std::string_view count_key, io::JsonValue& json) {
  json.set(std::string(count_key), config.num_experts).set("num_experts_per_tok", config.num_experts_per_tok);
  json.set("moe_intermediate_size", config.moe_intermediate_size);
}

void read_sparse_layers(const io::JsonReader& config, ModelConfig& result) {
  result.decoder_sparse_step = config.optional_integer("decoder_sparse_step", 1, kMaxLayers).value_or(1);
  if (config.has("mlp_only_layers"))
    result.mlp_only_layers = config.integers("mlp_only_layers", 0, kMaxLayers);
  else
    config.ignore("mlp_only_layers");  // null
}

void write_sparse_layers(const ModelConfig& config, io::JsonValue& json) {
  json.set("decoder_sparse_step", config.decoder_sparse_step);
  io::JsonValue dense = io::JsonValue::array();
  for (int64_t layer : config.mlp_only_layers) dense.push_back(layer);
  json.set("mlp_only_layers", std::move(dense));
}

void read_rope_or(const io::JsonReader& config, double theta, ModelConfig& result) {
  read_rope(config, result);
  const auto states = [](const std::optional<io::JsonReader>& object) { return object && object->has("rope_theta"); };
  if (!config.has("rope_theta") && !states(config.optional_object("rope_parameters")) &&
      !states(config.optional_object("rope_scaling")))
    result.rope_theta = theta;
}

modules::MoeMlp::Config experts_of(const ModelConfig& config) {
  return {.hidden = config.hidden_size,
          .ffn = config.moe_intermediate_size,
          .experts = config.num_experts,
          .route = {.top_k = config.num_experts_per_tok, .renormalize = config.norm_topk_prob},
          .activation = config.hidden_act};
}

DecoderSpec moe_decoder(const ModelConfig& config, const modules::MoeMlp::Config& experts,
                        kernels::RopeStyle rope_style) {
  const double eps = config.rms_norm_eps;
  const modules::RopeConfig rope{.theta = config.rope_theta,
                                 .rotary_dim = config.rotary_dim,
                                 .style = rope_style,
                                 .scaling = config.rope_scaling,
                                 .divisors = config.rope_divisors};
  DecoderSpec spec{.vocab = config.vocab_size,
                   .hidden = config.hidden_size,
                   .norm = {"norm", eps},
                   .tied = config.tie_word_embeddings};
  const modules::DenseMlp::Config dense{.hidden = config.hidden_size,
                                        .ffn = config.intermediate_size,
                                        .activation = config.hidden_act,
                                        .bias = config.mlp_bias};
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    modules::LayerSpec own{
        .hidden = config.hidden_size,
        .mixer = modules::CausalAttention::Config{.hidden = config.hidden_size,
                                                  .heads = config.num_attention_heads,
                                                  .kv_heads = config.num_key_value_heads,
                                                  .head_dim = config.head_dim,
                                                  .scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim)),
                                                  .qkv_bias = config.attention_bias,
                                                  .out_bias = config.attention_out_bias,
                                                  .qk_norm_eps = config.qk_norm ? std::optional(eps) : std::nullopt,
                                                  .window = config.layer_windows[static_cast<size_t>(layer)],
                                                  .rope = rope},
        .mlp = dense,
        .before_mixer = modules::NormSpec{"input_layernorm", eps},
        .before_mlp = modules::NormSpec{"post_attention_layernorm", eps}};
    if (config.has_experts(layer)) own.mlp = experts;
    spec.layers.push_back(std::move(own));
  }
  return spec;
}

std::vector<WeightRecipe> expert_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                         CheckpointFormat format, const ExpertNames& names) {
  constexpr std::string_view kExperts = ".mlp.experts.";
  const size_t at = parameter.name.find(kExperts);
  if (format == CheckpointFormat::gguf || at == std::string::npos) return {};
  const std::string layer = parameter.name.substr(0, at), fused = layer + std::string(kExperts);
  const std::string_view part = std::string_view(parameter.name).substr(fused.size());
  const bool is_down = part.starts_with("down_proj"), is_up = part.starts_with("up_proj");
  std::vector<WeightRecipe> experts;
  for (int64_t e = 0; e < config.num_experts; ++e)
    experts.push_back(WeightRecipe::name(fmt::format("{}.{}.experts.{}.{}.weight", layer, names.module, e,
                                                     is_down ? names.down
                                                     : is_up ? names.up
                                                             : names.gate)));
  const int64_t ffn = config.moe_intermediate_size;
  return {WeightRecipe::stack(std::move(experts)),
          is_down ? WeightRecipe::name(fused + "down_proj")
                  : WeightRecipe::slice(fused + "gate_up_proj", 1, is_up ? ffn : 0, ffn, 2 * ffn)};
}

}  // namespace eadem::models
