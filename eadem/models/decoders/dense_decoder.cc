// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/decoders/dense_decoder.h"

#include <algorithm>
#include <cmath>

namespace eadem::models {

namespace {

modules::RopeConfig rope_of(const ModelConfig& config, const DenseTraits& traits, int64_t layer) {
  const bool windowed = config.layer_windows[static_cast<size_t>(layer)] > 0;
  const auto& nope = config.nope_layers;
  if (traits.learned_positions || std::find(nope.begin(), nope.end(), layer) != nope.end() ||
      (traits.rotates_windowed_layers_only && !windowed))
    return {.rotary_dim = 0};
  modules::RopeConfig rope{.theta = config.rope_theta,
                           .rotary_dim = config.rotary_dim,
                           .style = traits.interleaved ? kernels::RopeStyle::interleaved : config.rope_style,
                           .scaling = config.rope_scaling,
                           .divisors = config.rope_divisors};
  if (windowed && (traits.scales_full_layers_only || config.local_rope_theta != 0)) {
    rope.name = "rotary_emb_local";
    rope.scaling = config.local_rope_scaling;
    rope.divisors.clear();  // they are the scaling of layers without a window
    if (config.local_rope_theta != 0) rope.theta = config.local_rope_theta;
  }
  return rope;
}

double score_scale(const ModelConfig& config) {
  if (config.attention_multiplier != 0) return config.attention_multiplier;
  return 1 / std::sqrt(config.query_pre_attn_scalar != 0 ? config.query_pre_attn_scalar
                                                         : static_cast<double>(config.head_dim));
}

}  // namespace

DecoderSpec dense_decoder(const ModelConfig& config, const DenseTraits& traits) {
  const double eps = config.rms_norm_eps;
  const auto norm = [&](std::string_view name) {
    return name.empty() ? std::nullopt
                        : std::optional(modules::NormSpec{std::string(name), eps, traits.norm, traits.norm_bias});
  };
  DecoderSpec spec{.vocab = config.vocab_size,
                   .hidden = config.hidden_size,
                   .embedding_scale = config.embedding_multiplier,
                   .norm = *norm("norm"),
                   .tied = config.tie_word_embeddings,
                   .positions = traits.learned_positions ? config.max_position_embeddings : 0,
                   .logit_scale = config.logit_scale / config.logits_scaling,
                   .logit_softcap = config.logit_softcap};
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    spec.layers.push_back(
        {.hidden = config.hidden_size,
         .mixer = modules::CausalAttention::Config{.hidden = config.hidden_size,
                                                   .heads = config.num_attention_heads,
                                                   .kv_heads = config.num_key_value_heads,
                                                   .head_dim = config.head_dim,
                                                   .scale = score_scale(config),
                                                   .qkv_bias = config.attention_bias,
                                                   .out_bias = config.attention_out_bias,
                                                   .qk_norm_eps = config.qk_norm ? std::optional(eps) : std::nullopt,
                                                   .qk_norm = traits.qk_norm,
                                                   .window = config.layer_windows[static_cast<size_t>(layer)],
                                                   .softcap = config.attention_softcap,
                                                   .rope = rope_of(config, traits, layer)},
         .mlp = modules::DenseMlp::Config{.hidden = config.hidden_size,
                                          .ffn = config.intermediate_size,
                                          .activation = config.hidden_act,
                                          .bias = config.mlp_bias,
                                          .gated = traits.gated},
         .before_mixer = norm(traits.before_mixer),
         .after_mixer = norm(traits.after_mixer),
         .before_mlp = norm(traits.before_mlp),
         .after_mlp = norm(traits.after_mlp),
         .parallel = config.parallel_residual,
         .residual_scale = config.residual_multiplier});
  return spec;
}

void write_rope(const ModelConfig& config, io::JsonValue& json, const char* theta_key) {
  json.set(theta_key, config.rope_theta);
  if (config.rope_scaling.kind != modules::RopeScaling::Kind::none)
    json.set("rope_scaling", rope_object(config.rope_scaling));
  if (config.rotary_dim != config.head_dim || config.family().rotated_share != 1)
    json.set(std::string(config.family().json_name("partial_rotary_factor")), partial_rotary_factor_of(config));
}

void read_attention_bias(const io::JsonReader& config, ModelConfig& result, bool if_absent, bool out_bias) {
  result.attention_bias = config.optional_boolean("attention_bias").value_or(if_absent);
  result.attention_out_bias = result.attention_bias && out_bias;
}

void set_windows(ModelConfig& config, int64_t window, int64_t pattern) {
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    config.layer_windows[static_cast<size_t>(layer)] = pattern > 0 && (layer + 1) % pattern == 0 ? 0 : window;
}

void read_windows(const io::JsonReader& config, ModelConfig& result, int64_t pattern, int64_t if_absent) {
  std::optional<int64_t> window = config.optional_integer("sliding_window", 1, kMaxExtent);
  if (config.value().find("sliding_window") == nullptr && if_absent > 0) window = if_absent;
  if (read_layer_types(config, result, window, "sliding_window")) return;
  if (window) set_windows(result, *window, pattern);
}

void require_windows(const ModelConfig& config, int64_t pattern, std::string_view architecture) {
  ModelConfig expected = config;
  set_windows(expected, largest_window(config.layer_windows), pattern);
  if (expected.layer_windows != config.layer_windows)
    throw Unsupported("attention windows not in all but every {}th layer, which GGUF's {} architecture cannot state",
                      pattern, architecture);
}

void write_windows(const ModelConfig& config, io::JsonValue& json) {
  const int64_t window = largest_window(config.layer_windows);
  json.set("sliding_window", window > 0 ? window : config.max_position_embeddings);
  json.set("layer_types", layer_types_of(config));
}

// Looks for biases in every layer, since some layers of hybrid models have no attention, and others no MLP.
void read_biases(const io::GgufFile& file, const std::string&, ModelConfig& result) {
  const auto has = [&](std::string_view name) {
    const auto& tensors = file.tensors();
    return std::any_of(tensors.begin(), tensors.end(), [&](const auto& tensor) { return tensor.name.ends_with(name); });
  };
  result.attention_bias = has(".attn_q.bias") || has(".attn_qkv.bias");
  result.attention_out_bias = has(".attn_output.bias");
  result.mlp_bias = has(".ffn_down.bias");
}

LayerName layer_name(const std::string& parameter) {
  constexpr std::string_view kLayers = "model.layers.";
  if (!parameter.starts_with(kLayers)) return {};
  const size_t dot = parameter.find('.', kLayers.size());
  return {parameter.substr(kLayers.size(), dot - kLayers.size()), parameter.substr(dot + 1)};
}

std::vector<WeightRecipe> fused_rows(const ModelConfig& config, const ParameterInfo& parameter, CheckpointFormat format,
                                     const FusedRows& fused) {
  const LayerName name = layer_name(parameter.name);
  const int64_t q = config.num_attention_heads * config.head_dim, kv = config.kv_dim(), ffn = config.intermediate_size;
  struct Rows {
    std::string_view part, huggingface, gguf;
    int64_t begin, size, whole;
  };
  const Rows rows[] = {{"self_attn.q_proj.", fused.qkv, "attn_qkv.", 0, q, q + 2 * kv},
                       {"self_attn.k_proj.", fused.qkv, "attn_qkv.", q, kv, q + 2 * kv},
                       {"self_attn.v_proj.", fused.qkv, "attn_qkv.", q + kv, kv, q + 2 * kv},
                       {"mlp.gate_proj.", fused.gate_up, "ffn_up.", 0, ffn, 2 * ffn},
                       {"mlp.up_proj.", fused.gate_up, "ffn_up.", ffn, ffn, 2 * ffn}};
  for (const Rows& row : rows) {
    if (row.huggingface.empty() || !name.rest.starts_with(row.part)) continue;
    const std::string kind = name.rest.substr(row.part.size());  // "weight" or "bias"
    const std::string tensor = format == CheckpointFormat::gguf
                                   ? fmt::format("blk.{}.{}{}", name.number, row.gguf, kind)
                                   : fmt::format("model.layers.{}.{}.{}", name.number, row.huggingface, kind);
    return {WeightRecipe::slice(tensor, 0, row.begin, row.size, row.whole)};
  }
  return {};
}

}  // namespace eadem::models
