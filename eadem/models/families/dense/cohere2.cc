// SPDX-License-Identifier: Apache-2.0
//
// Command R7B and Command A: attention and MLP side by side on one layer norm without a bias; layers with a window
// rotate pairs (2i, 2i + 1), the others, every fourth or all, nothing; logits are scaled.
// Source: transformers, models/cohere2; llama.cpp, src/models/cohere2.cpp (facts only).
#include "eadem/models/decoders/dense_decoder.h"

namespace eadem::models {

namespace {

using NormKind = modules::NormSpec::Kind;

constexpr ModelType kCohere2Types[] = {{"cohere2", "cohere2", "Cohere2ForCausalLM", 8192}};
constexpr OwnName kCohere2Keys[] = {{"rms_norm_eps", "layer_norm_eps"}};
constexpr ConfigKey kCohere2Numbers[] = {{"logit_scale", "logit_scale", &ModelConfig::logit_scale, 0.0625, 1e-9, 1e9}};
constexpr int64_t kCohere2Pattern = 4;

void read_cohere2_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  read_attention_bias(config, result, false, true);
  result.parallel_residual = true;
  const int64_t pattern = config.optional_integer("sliding_window_pattern", 1, kMaxLayers).value_or(kCohere2Pattern);
  read_windows(config, result, pattern, 4096);
  if (config.value().find("sliding_window") != nullptr && !config.has("sliding_window"))
    config.fail("sliding_window", "an integer, as transformers needs, though no layer may have it");
  config.ignore("order_of_interleaved_layers", "layer_types or sliding_window_pattern say it");
  config.ignore("rotary_pct", "is 1 in all models of this type");
}

void write_cohere2_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("attention_bias", config.attention_bias);
  write_windows(config, json);
}

void read_cohere2_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
  result.parallel_residual = true;
  file.integer(prefix + "attention.sliding_window", 1, kMaxExtent);  // must be there
  set_windows(result, result.layer_windows[0], kCohere2Pattern);
}

void write_cohere2_gguf(const ModelConfig& config, const std::string&, io::GgufMetadata&) {
  if (largest_window(config.layer_windows) == 0)
    throw Unsupported("layers that rotate nothing and no windows, which GGUF's cohere2 architecture cannot state");
  require_windows(config, kCohere2Pattern, "cohere2");
}

DecoderSpec cohere2_decoder(const ModelConfig& config) {
  return dense_decoder(
      config, {.before_mlp = "", .norm = NormKind::layer, .interleaved = true, .rotates_windowed_layers_only = true});
}

}  // namespace

const ModelFamily& cohere2_family() {
  static const ModelFamily kFamily = {.name = "cohere2",
                                      .types = kCohere2Types,
                                      .keys = kCohere2Numbers,
                                      .tied = true,
                                      .eps = 1e-5,
                                      .json_names = kCohere2Keys,
                                      .gguf_eps = "attention.layer_norm_epsilon",
                                      .read_json = read_cohere2_json,
                                      .read_gguf = read_cohere2_gguf,
                                      .write_json = write_cohere2_json,
                                      .write_gguf = write_cohere2_gguf,
                                      .decoder = cohere2_decoder};
  return kFamily;
}

}  // namespace eadem::models
