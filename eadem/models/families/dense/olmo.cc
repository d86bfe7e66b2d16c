// SPDX-License-Identifier: Apache-2.0
//
// OLMo 2 and 3: norms after attention and MLP and none before; norms of q and k over all heads of a token together.
// OLMo 3 has windows in three of four layers, and rope scaling in the others only.
// Source: transformers, models/olmo2 and models/olmo3; llama.cpp, conversion/olmo.py and src/models/olmo2.cpp (facts
// only).
#include "eadem/models/decoders/dense_decoder.h"

namespace eadem::models {

namespace {

using QkNorm = modules::CausalAttention::Config::QkNorm;

constexpr ModelType kOlmoTypes[] = {{"olmo2", "olmo2", "Olmo2ForCausalLM", 2048},
                                    {"olmo3", "olmo2", "Olmo3ForCausalLM", 2048}};
constexpr int64_t kOlmo3Pattern = 4;
constexpr std::string_view kOlmo3PatternKey = "attention.sliding_window_pattern";
constexpr GgufName kOlmoNames[] = {{"post_attention_layernorm.", "post_attention_norm."},
                                   {"post_feedforward_layernorm.", "post_ffw_norm."}};

// An object for each kind of layer, or the keys that were there before, which are those of layers without a window.
void read_olmo3_rope(const io::JsonReader& config, ModelConfig& result) {
  constexpr double kTheta = 500000;
  result.rope_theta = result.local_rope_theta = config.optional_number("rope_theta", 1.0, 1e12).value_or(kTheta);
  read_ropes_of_layers(config, result);
}

void read_olmo_json(const io::JsonReader& config, ModelConfig& result) {
  if (result.model_type == "olmo3") {
    read_olmo3_rope(config, result);
    read_windows(config, result, kOlmo3Pattern, 4096);
  } else {
    read_rope(config, result);
  }
  read_attention_bias(config, result, false, true);
  result.qk_norm = true;
}

void write_olmo_json(const ModelConfig& config, io::JsonValue& json) {
  json.set("attention_bias", config.attention_bias);
  if (config.model_type == "olmo2") return write_rope(config, json);
  json.set("rope_parameters",
           io::JsonValue::object()
               .set("full_attention", rope_object(config.rope_scaling, config.rope_theta))
               .set("sliding_attention", rope_object(config.local_rope_scaling, config.local_rope_theta)));
  write_windows(config, json);
}

// Whether each layer has a window, as converters state it.
io::GgufValue window_pattern_of(const ModelConfig& config) {
  io::GgufArray layers{.element_type = io::GgufType::boolean, .scalars = {}, .strings = {}, .arrays = {}};
  for (int64_t window : config.layer_windows) layers.scalars.push_back(window > 0 ? 1 : 0);
  return {io::GgufType::array, std::move(layers)};
}

// A file with a window is an OLMo 3 model. Other programs compute every such file with this pattern.
void read_olmo_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
  result.qk_norm = true;
  const int64_t window = result.layer_windows[0];
  if (window == 0) return;
  result.model_type = "olmo3";
  result.local_rope_theta = result.rope_theta;
  set_windows(result, window, kOlmo3Pattern);
  const std::string key = prefix + std::string(kOlmo3PatternKey);
  if (const io::GgufValue* stated = file.find_metadata(key);
      stated != nullptr && !(*stated == window_pattern_of(result)))
    throw Unsupported("{}: '{}' is not a window in all but every {}th layer", file.path(), key, kOlmo3Pattern);
}

void write_olmo_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  if (config.model_type == "olmo2") return;
  require_windows(config, kOlmo3Pattern, "olmo2");
  if (largest_window(config.layer_windows) == 0)
    throw Unsupported("a model of type olmo3 without windows, which GGUF's olmo2 architecture cannot state");
  if (config.local_rope_theta != config.rope_theta)
    throw Unsupported("rope_theta {} and, of layers with a window, {}, which GGUF's olmo2 architecture cannot state",
                      config.rope_theta, config.local_rope_theta);
  if (config.local_rope_scaling.kind != modules::RopeScaling::Kind::none)
    throw Unsupported("rope scaling of layers with a window, which GGUF's olmo2 architecture cannot state");
  metadata.emplace_back(prefix + std::string(kOlmo3PatternKey), window_pattern_of(config));
}

DecoderSpec olmo_decoder(const ModelConfig& config) {
  return dense_decoder(config, {.before_mixer = "",
                                .after_mixer = "post_attention_layernorm",
                                .before_mlp = "",
                                .after_mlp = "post_feedforward_layernorm",
                                .qk_norm = QkNorm::whole,
                                .scales_full_layers_only = true});
}

}  // namespace

const ModelFamily& olmo_family() {
  static const ModelFamily kFamily = {.name = "olmo",
                                      .types = kOlmoTypes,
                                      .eps = 1e-5,
                                      .gguf_keys = kOlmo3PatternKey,
                                      .read_json = read_olmo_json,
                                      .read_gguf = read_olmo_gguf,
                                      .write_json = write_olmo_json,
                                      .write_gguf = write_olmo_gguf,
                                      .decoder = olmo_decoder,
                                      .gguf_names = kOlmoNames};
  return kFamily;
}

}  // namespace eadem::models
