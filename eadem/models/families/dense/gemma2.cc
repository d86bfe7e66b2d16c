// SPDX-License-Identifier: Apache-2.0
//
// Gemma 2: norms before and after attention and MLP with weights 1 + w, embeddings scaled by the root of their width,
// windows in every other layer, soft caps of scores and of logits.
// Source: transformers, models/gemma2; llama.cpp, conversion/gemma.py and src/models/gemma2.cpp (facts only).
#include <cmath>

#include "eadem/models/decoders/dense_decoder.h"

namespace eadem::models {

namespace {

constexpr ModelType kGemma2Types[] = {{"gemma2", "gemma2", "Gemma2ForCausalLM", 8192, 4, 256}};
constexpr int64_t kGemma2Pattern = 2;

constexpr ConfigKey kGemma2Keys[] = {
    {"query_pre_attn_scalar", "", &ModelConfig::query_pre_attn_scalar, 256, 1e-6, 1e9, /*whole=*/true}};

constexpr GgufName kGemma2Names[] = {{"post_attention_layernorm.", "post_attention_norm."},
                                     {"pre_feedforward_layernorm.", "ffn_norm."},
                                     {"post_feedforward_layernorm.", "post_ffw_norm."}};

// null is none.
double read_cap(const io::JsonReader& config, const char* key, double if_absent) {
  if (config.value().find(key) == nullptr) return if_absent;
  return config.optional_number(key, 1e-6, 1e9).value_or(0);
}

void read_gemma2_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  read_attention_bias(config, result, false, true);
  result.attention_softcap = read_cap(config, "attn_logit_softcapping", 50);
  result.logit_softcap = read_cap(config, "final_logit_softcapping", 30);
  if (config.optional_boolean("use_bidirectional_attention").value_or(false))
    throw Unsupported("{}: 'use_bidirectional_attention' is true; only causal attention is honoured", config.file());
  config.ignore("hidden_act");  // hidden_activation decides
  read_windows(config, result, kGemma2Pattern, 4096);
}

void write_gemma2_json(const ModelConfig& config, io::JsonValue& json) {
  const auto cap = [](double value) { return value > 0 ? io::JsonValue(value) : io::JsonValue(nullptr); };
  write_rope(config, json);
  json.set("attention_bias", config.attention_bias);
  json.set("attn_logit_softcapping", cap(config.attention_softcap));
  json.set("final_logit_softcapping", cap(config.logit_softcap));
  write_windows(config, json);
}

// llama.cpp takes the scale of q . k from the number of layers: the 27B model, of 46, has another than the rest.
double gemma2_scalar(const ModelConfig& config) {
  return static_cast<double>(config.num_hidden_layers == 46 ? config.hidden_size / config.num_attention_heads
                                                            : config.head_dim);
}

void read_gemma2_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
  result.query_pre_attn_scalar = gemma2_scalar(result);
  result.attention_softcap = file.optional_number(prefix + "attn_logit_softcapping").value_or(50);
  result.logit_softcap = file.optional_number(prefix + "final_logit_softcapping").value_or(30);
  set_windows(result, result.layer_windows[0], kGemma2Pattern);
}

void write_gemma2_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  require_windows(config, kGemma2Pattern, "gemma2");
  if (config.query_pre_attn_scalar != gemma2_scalar(config))
    throw Unsupported("query_pre_attn_scalar is {}; GGUF's gemma2 architecture implies {}",
                      config.query_pre_attn_scalar, gemma2_scalar(config));
  metadata.emplace_back(prefix + "attn_logit_softcapping",
                        io::GgufValue::scalar(static_cast<float>(config.attention_softcap)));
  metadata.emplace_back(prefix + "final_logit_softcapping",
                        io::GgufValue::scalar(static_cast<float>(config.logit_softcap)));
}

DecoderSpec gemma2_decoder(const ModelConfig& config) {
  DecoderSpec spec = dense_decoder(config, {.after_mixer = "post_attention_layernorm",
                                            .before_mlp = "pre_feedforward_layernorm",
                                            .after_mlp = "post_feedforward_layernorm"});
  spec.embedding_scale = std::sqrt(static_cast<double>(config.hidden_size));
  return spec;
}

// Norms multiply by 1 + w. The model keeps the sum, as GGUF files do; Hugging Face checkpoints have w.
std::vector<WeightRecipe> gemma2_recipes(const ModelConfig&, const ParameterInfo& parameter, CheckpointFormat format) {
  if (format == CheckpointFormat::gguf || !parameter.name.ends_with("norm.weight")) return {};
  return {WeightRecipe::add(WeightRecipe::name(parameter.name), 1)};
}

}  // namespace

const ModelFamily& gemma2_family() {
  static const ModelFamily kFamily = {.name = "gemma2",
                                      .types = kGemma2Types,
                                      .keys = kGemma2Keys,
                                      .activation_key = "hidden_activation",
                                      .activation = "gelu_pytorch_tanh",
                                      .tied = true,
                                      .gguf_keys = "attn_logit_softcapping final_logit_softcapping",
                                      .read_json = read_gemma2_json,
                                      .read_gguf = read_gemma2_gguf,
                                      .write_json = write_gemma2_json,
                                      .write_gguf = write_gemma2_gguf,
                                      .decoder = gemma2_decoder,
                                      .gguf_names = kGemma2Names,
                                      .recipes = gemma2_recipes};
  return kFamily;
}

}  // namespace eadem::models
