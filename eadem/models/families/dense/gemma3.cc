// SPDX-License-Identifier: Apache-2.0
//
// Gemma 3, text: norms before and after attention and MLP, norms of q and k, all with weights 1 + w; embeddings scaled
// by the root of their width; windows in all but every sixth layer, which rotate by a theta of their own.
// Source: transformers, models/gemma3; llama.cpp, conversion/gemma.py and src/models/gemma3.cpp (facts only).
#include <algorithm>
#include <cmath>

#include "eadem/models/config/config_text.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kGemma3Types[] = {{"gemma3_text", "gemma3", "Gemma3ForCausalLM", 131072, 4, 256}};
// The values that a GGUF file of this architecture implies where it states none.
constexpr double kLocalTheta = 10000, kGlobalTheta = 1e6;
constexpr int64_t kPattern = 6;

constexpr ConfigKey kGemma3Keys[] = {
    {"query_pre_attn_scalar", "", &ModelConfig::query_pre_attn_scalar, 256, 1e-6, 1e9, /*whole=*/true}};

constexpr GgufName kGemma3Names[] = {{"post_attention_layernorm.", "post_attention_norm."},
                                     {"pre_feedforward_layernorm.", "ffn_norm."},
                                     {"post_feedforward_layernorm.", "post_ffw_norm."}};

void set_pattern(ModelConfig& config, int64_t window, int64_t pattern) {
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    config.layer_windows[static_cast<size_t>(layer)] = (layer + 1) % pattern == 0 ? 0 : window;
}

// rope_parameters has an object for each kind of layer; before transformers 5, keys of the config said the same.
void read_gemma3_rope(const io::JsonReader& config, ModelConfig& result) {
  result.rope_theta = config.optional_number("rope_theta", 1.0, 1e12).value_or(kGlobalTheta);
  result.local_rope_theta = config.optional_number("rope_local_base_freq", 1.0, 1e12).value_or(kLocalTheta);
  read_ropes_of_layers(config, result);
}

void read_gemma3_json(const io::JsonReader& config, ModelConfig& result) {
  read_gemma3_rope(config, result);
  result.attention_bias = config.optional_boolean("attention_bias").value_or(false);
  result.attention_out_bias = result.attention_bias;
  result.qk_norm = true;
  if (const auto cap = config.optional_number("attn_logit_softcapping"))  // which transformers does not read
    throw Unsupported("{}: 'attn_logit_softcapping' is {}; only null is honoured", config.file(), *cap);
  result.logit_softcap = config.optional_number("final_logit_softcapping", 1e-6, 1e9).value_or(0);
  if (config.optional_boolean("use_bidirectional_attention").value_or(false))
    throw Unsupported("{}: 'use_bidirectional_attention' is true; only causal attention is honoured", config.file());
  // A null window is none: all layers see everything, though those of the pattern keep their own theta.
  const bool absent = config.value().find("sliding_window") == nullptr;
  const auto window = config.optional_integer("sliding_window", 1, kMaxExtent);
  if (!absent && !window) config.fail("sliding_window", "an integer");
  std::optional<int64_t> pattern = config.optional_integer("sliding_window_pattern", 1, kMaxLayers);
  if (const auto saved = config.optional_integer("_sliding_window_pattern", 1, kMaxLayers); saved && !pattern)
    pattern = saved;
  if (!read_layer_types(config, result, window.value_or(4096), "sliding_window"))
    set_pattern(result, window.value_or(4096), pattern.value_or(kPattern));
}

void check_gemma3_json(const ModelConfig& config) {
  refuse_if(config, config.attention_out_bias != config.attention_bias, "biases of q, k and v without one of o");
  refuse_if(config, config.mlp_bias, "biases of the MLP");
  refuse_if(config, !config.qk_norm, "q and k without norms");
  refuse_if(config, config.rotary_dim != config.head_dim, "heads that are rotated in part");
  refuse_several_windows(config);
}

void write_gemma3_json(const ModelConfig& config, io::JsonValue& json) {
  using Kind = modules::RopeScaling::Kind;
  json.set("rope_theta", config.rope_theta).set("rope_local_base_freq", config.local_rope_theta);
  if (config.local_rope_scaling.kind != Kind::none)  // which the older key cannot say
    json.set("rope_parameters", io::JsonValue::object()
                                    .set("full_attention", rope_object(config.rope_scaling))
                                    .set("sliding_attention", rope_object(config.local_rope_scaling)));
  else if (config.rope_scaling.kind != Kind::none)
    json.set("rope_scaling", rope_object(config.rope_scaling));
  json.set("attention_bias", config.attention_bias);
  if (config.logit_softcap > 0) json.set("final_logit_softcapping", config.logit_softcap);
  if (const int64_t window = largest_window(config.layer_windows); window > 0) json.set("sliding_window", window);
  json.set("layer_types", layer_types_of(config));
}

// The file states the window, and other programs know the rest.
void read_gemma3_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  if (file.find_metadata(prefix + "rope.freq_base") == nullptr) result.rope_theta = kGlobalTheta;
  result.local_rope_theta = file.optional_number(prefix + "rope.freq_base_swa").value_or(kLocalTheta);
  result.qk_norm = true;
  const int64_t pattern =
      file.optional_integer(prefix + "attention.sliding_window_pattern", 1, kMaxLayers).value_or(kPattern);
  const int64_t window = result.layer_windows[0];
  if (window == 0) throw Unsupported("{}: '{}attention.sliding_window' is 0 or absent", file.path(), prefix);
  set_pattern(result, window, pattern);
  // llama.cpp takes the scale of q . k from the number of layers: the 27B model, of 62, has another than the rest.
  result.query_pre_attn_scalar = static_cast<double>(
      result.num_hidden_layers == 62 ? result.hidden_size / result.num_attention_heads : result.head_dim);
  if (file.optional_number(prefix + "final_logit_softcapping").value_or(0) != 0)
    throw Unsupported("{}: '{}final_logit_softcapping' is not 0; no other is honoured", file.path(), prefix);
}

void write_gemma3_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  if (config.logit_softcap > 0)
    throw Unsupported("a soft cap of logits, which GGUF's gemma3 architecture cannot state");
  const int64_t window = largest_window(config.layer_windows);
  if (window == 0) throw Unsupported("no layer has an attention window, which GGUF's gemma3 architecture cannot state");
  // The pattern that gives these windows.
  const auto first_full = std::find(config.layer_windows.begin(), config.layer_windows.end(), 0);
  const int64_t pattern =
      first_full == config.layer_windows.end() ? kPattern : first_full - config.layer_windows.begin() + 1;
  ModelConfig expected = config;
  set_pattern(expected, window, pattern);
  if (expected.layer_windows != config.layer_windows)
    throw Unsupported("attention windows follow no pattern, which GGUF's gemma3 architecture cannot state");
  const double scalar = static_cast<double>(
      config.num_hidden_layers == 62 ? config.hidden_size / config.num_attention_heads : config.head_dim);
  if (config.query_pre_attn_scalar != scalar)
    throw Unsupported("query_pre_attn_scalar is {}; GGUF's gemma3 architecture implies {}",
                      config.query_pre_attn_scalar, scalar);
  if (config.attention_bias) throw Unsupported("biases of attention, which GGUF's gemma3 architecture cannot state");
  if (config.local_rope_scaling.kind != modules::RopeScaling::Kind::none)
    throw Unsupported("rope scaling of layers with a window, which GGUF's gemma3 architecture cannot state");
  if (pattern != kPattern)
    metadata.emplace_back(prefix + "attention.sliding_window_pattern",
                          io::GgufValue::scalar(static_cast<uint32_t>(pattern)));
  if (config.local_rope_theta != kLocalTheta)
    metadata.emplace_back(prefix + "rope.freq_base_swa",
                          io::GgufValue::scalar(static_cast<float>(config.local_rope_theta)));
}

DecoderSpec gemma3_decoder(const ModelConfig& config) {
  const double eps = config.rms_norm_eps;
  DecoderSpec spec{.vocab = config.vocab_size,
                   .hidden = config.hidden_size,
                   .embedding_scale = std::sqrt(static_cast<double>(config.hidden_size)),
                   .norm = {"norm", eps},
                   .tied = config.tie_word_embeddings,
                   .logit_softcap = config.logit_softcap};
  const modules::RopeConfig global{.theta = config.rope_theta,
                                   .rotary_dim = config.rotary_dim,
                                   .scaling = config.rope_scaling,
                                   .divisors = config.rope_divisors};
  const modules::RopeConfig local{.name = "rotary_emb_local",
                                  .theta = config.local_rope_theta,
                                  .rotary_dim = config.rotary_dim,
                                  .scaling = config.local_rope_scaling};
  for (int64_t window : config.layer_windows)
    spec.layers.push_back(
        {.hidden = config.hidden_size,
         .mixer = modules::CausalAttention::Config{.hidden = config.hidden_size,
                                                   .heads = config.num_attention_heads,
                                                   .kv_heads = config.num_key_value_heads,
                                                   .head_dim = config.head_dim,
                                                   .scale = 1.0 / std::sqrt(config.query_pre_attn_scalar),
                                                   .qkv_bias = config.attention_bias,
                                                   .out_bias = config.attention_out_bias,
                                                   .qk_norm_eps = eps,
                                                   .window = window,
                                                   .rope = window > 0 ? local : global},
         .mlp =
             modules::DenseMlp::Config{
                 .hidden = config.hidden_size, .ffn = config.intermediate_size, .activation = config.hidden_act},
         .before_mixer = modules::NormSpec{"input_layernorm", eps},
         .after_mixer = modules::NormSpec{"post_attention_layernorm", eps},
         .before_mlp = modules::NormSpec{"pre_feedforward_layernorm", eps},
         .after_mlp = modules::NormSpec{"post_feedforward_layernorm", eps}});
  return spec;
}

// Norms multiply by 1 + w. The model keeps the sum, as GGUF files do; Hugging Face checkpoints have w.
std::vector<WeightRecipe> gemma3_recipes(const ModelConfig&, const ParameterInfo& parameter, CheckpointFormat format) {
  if (format == CheckpointFormat::gguf || !parameter.name.ends_with("norm.weight")) return {};
  return {WeightRecipe::add(WeightRecipe::name(parameter.name), 1)};
}

}  // namespace

const ModelFamily& gemma3_family() {
  static const ModelFamily kFamily = {
      .name = "gemma3",
      .types = kGemma3Types,
      .keys = kGemma3Keys,
      .activation_key = "hidden_activation",
      .activation = "gelu_pytorch_tanh",
      .tied = true,
      .gguf_keys = "rope.freq_base_swa attention.sliding_window_pattern final_logit_softcapping",
      .read_json = read_gemma3_json,
      .read_gguf = read_gemma3_gguf,
      .write_json = write_gemma3_json,
      .check_json = check_gemma3_json,
      .write_gguf = write_gemma3_gguf,
      .decoder = gemma3_decoder,
      .gguf_names = kGemma3Names,
      .recipes = gemma3_recipes};
  return kFamily;
}

}  // namespace eadem::models
