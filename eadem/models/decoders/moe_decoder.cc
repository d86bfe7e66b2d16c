// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/decoders/moe_decoder.h"

#include <algorithm>
#include <cmath>

#include "eadem/models/family.h"

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

void read_experts(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  result.num_experts = file.integer(prefix + "expert_count", 1, kMaxExperts);
  result.num_experts_per_tok = file.integer(prefix + "expert_used_count", 1, kMaxExperts);
  result.moe_intermediate_size =
      file.optional_integer(prefix + "expert_feed_forward_length", 1, kMaxExtent).value_or(result.intermediate_size);
}

void write_experts(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  for (const auto& [key, value] : {std::pair<const char*, int64_t>{"expert_count", config.num_experts},
                                   {"expert_used_count", config.num_experts_per_tok},
                                   {"expert_feed_forward_length", config.moe_intermediate_size}})
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
}

void require_gating(const io::GgufFile& file, const std::string& prefix, int64_t honoured) {
  const std::string key = prefix + "expert_gating_func";
  if (const int64_t stated = file.optional_integer(key, 0, kMaxExtent).value_or(honoured); stated != honoured)
    throw Unsupported("{}: '{}' is {}; only {} is honoured", file.path(), key, stated, honoured);
}

void read_leading_layers(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const int64_t first = file.optional_integer(prefix + "leading_dense_block_count", 0, kMaxLayers).value_or(0);
  for (int64_t layer = 0; layer < std::min(first, result.num_hidden_layers); ++layer)
    result.mlp_only_layers.push_back(layer);
}

void write_leading_layers(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto first = static_cast<int64_t>(config.mlp_only_layers.size());
  for (int64_t layer = 0; layer < first; ++layer)
    if (config.mlp_only_layers[static_cast<size_t>(layer)] != layer)
      throw Unsupported("layer {} without experts behind one that has them, which GGUF cannot state here",
                        config.mlp_only_layers[static_cast<size_t>(layer)]);
  metadata.emplace_back(prefix + "leading_dense_block_count", io::GgufValue::scalar(static_cast<uint32_t>(first)));
}

void read_shared_experts(const io::GgufFile& file, ModelConfig& result) {
  const auto& tensors = file.tensors();
  const auto gate = std::find_if(tensors.begin(), tensors.end(), [](const io::WeightInfo& tensor) {
    return tensor.name.ends_with(".ffn_gate_shexp.weight");
  });
  result.shared_expert_intermediate_size = gate != tensors.end() && gate->shape.rank() == 2 ? gate->shape[0] : 0;
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

modules::MoeMlp::Config experts_of(const ModelConfig& config) {
  return {.hidden = config.hidden_size,
          .ffn = config.moe_intermediate_size,
          .experts = config.num_experts,
          .identities = config.identity_experts,
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
        .mixer =
            modules::CausalAttention::Config{
                .hidden = config.hidden_size,
                .heads = config.num_attention_heads,
                .kv_heads = config.num_key_value_heads,
                .head_dim = config.head_dim,
                .scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim)),
                .qkv_bias = config.attention_bias,
                .out_bias = config.attention_out_bias,
                .qk_norm_eps = config.qk_norm ? std::optional(eps) : std::nullopt,
                .window = config.layer_windows[static_cast<size_t>(layer)],
                .chunk = config.layer_chunks.empty() ? 0 : config.layer_chunks[static_cast<size_t>(layer)],
                .clip = config.clip_qkv,
                .rope = rope},
        .mlp = dense,
        .before_mixer = modules::NormSpec{"input_layernorm", eps},
        .before_mlp = modules::NormSpec{"post_attention_layernorm", eps}};
    if (config.has_experts(layer)) own.mlp = experts;
    spec.layers.push_back(std::move(own));
  }
  return spec;
}

DecoderSpec with_whole_norms(DecoderSpec spec) {
  using Attention = modules::CausalAttention::Config;
  for (modules::LayerSpec& layer : spec.layers) std::get<Attention>(layer.mixer).qk_norm = Attention::QkNorm::whole;
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

double latent_scale_of(const ModelConfig& config) {
  const modules::RopeScaling& s = config.rope_scaling;
  const double scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim));
  if (s.kind == modules::RopeScaling::Kind::none || s.factor <= 1) return scale;
  const double mscale = 0.1 * s.mscale_all_dim.value_or(0) * std::log(s.factor) + 1.0;
  return scale * mscale * mscale;
}

namespace {

WeightRecipe latent_heads(const ModelConfig& config, const std::string& tensor, bool is_key) {
  const int64_t nope = config.qk_nope_head_dim, value = config.v_head_dim, rows = nope + value,
                all = config.num_attention_heads * rows;
  std::vector<WeightRecipe> heads;
  for (int64_t h = 0; h < config.num_attention_heads; ++h)
    heads.push_back(is_key ? WeightRecipe::transpose(WeightRecipe::slice(tensor, 0, h * rows, nope, all))
                           : WeightRecipe::slice(tensor, 0, h * rows + nope, value, all));
  return WeightRecipe::stack(std::move(heads));
}

}  // namespace

std::vector<WeightRecipe> latent_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                         CheckpointFormat format) {
  for (const std::string_view part : {".k_b_proj.", ".v_b_proj."}) {
    const size_t at = parameter.name.find(part);
    if (at == std::string::npos) continue;
    const std::string whole = parameter.name.substr(0, at) + ".kv_b_proj.weight";
    const bool is_key = part[1] == 'k';
    if (format == CheckpointFormat::huggingface) return {latent_heads(config, whole, is_key)};
    return {WeightRecipe::name(gguf_name(parameter.name)), latent_heads(config, gguf_name(whole), is_key)};
  }
  return {};
}

}  // namespace eadem::models
