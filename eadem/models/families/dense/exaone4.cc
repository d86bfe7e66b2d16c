// SPDX-License-Identifier: Apache-2.0
//
// EXAONE 4: norms after attention and MLP and none before, norms of q and k per head; where there are windows, only
// layers that have one rotate. Source: transformers, models/exaone4; llama.cpp, conversion/exaone.py and
// src/models/exaone4.cpp (facts only).
#include <numeric>

#include "eadem/models/decoders/dense_decoder.h"

namespace eadem::models {

namespace {

constexpr ModelType kExaone4Types[] = {{"exaone4", "exaone4", "Exaone4ForCausalLM", 2048, 32}};
constexpr GgufName kExaone4Names[] = {{"post_attention_layernorm.", "post_attention_norm."},
                                      {"post_feedforward_layernorm.", "post_ffw_norm."}};
constexpr int64_t kExaone4Pattern = 4;

// The pattern may be a word of L and G, beside which layer_types says the same.
void read_exaone4_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  result.qk_norm = true;
  const io::JsonValue* stated = config.value().find("sliding_window_pattern");
  int64_t pattern = kExaone4Pattern;
  if (stated != nullptr && stated->kind() == io::JsonValue::Kind::string) {
    if (!config.has("layer_types"))
      config.fail("layer_types", "a list, which a 'sliding_window_pattern' of letters needs");
    config.ignore("sliding_window_pattern", "layer_types says it");
  } else {
    pattern = config.optional_integer("sliding_window_pattern", 0, kMaxLayers).value_or(kExaone4Pattern);
  }
  read_windows(config, result, pattern, 4096);
  if (config.value().find("sliding_window") != nullptr && !config.has("sliding_window")) return;  // null
  // Layers without a window rotate nothing where a window is stated, though no layer may have it.
  if (largest_window(result.layer_windows) > 0) return;
  result.nope_layers.resize(static_cast<size_t>(result.num_hidden_layers));
  std::iota(result.nope_layers.begin(), result.nope_layers.end(), int64_t{0});
}

void write_exaone4_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  // Where a window is stated, only layers that have it rotate.
  if (largest_window(config.layer_windows) > 0 || !config.nope_layers.empty())
    write_windows(config, json);
  else
    json.set("sliding_window", nullptr);
}

void read_exaone4_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
  result.qk_norm = true;
  set_windows(result, result.layer_windows[0], kExaone4Pattern);
}

void write_exaone4_gguf(const ModelConfig& config, const std::string&, io::GgufMetadata&) {
  if (!config.nope_layers.empty())
    throw Unsupported("layers that rotate nothing and no windows, which GGUF's exaone4 architecture cannot state");
  if (largest_window(config.layer_windows) > 0) require_windows(config, kExaone4Pattern, "exaone4");
}

DecoderSpec exaone4_decoder(const ModelConfig& config) {
  return dense_decoder(config, {.before_mixer = "",
                                .after_mixer = "post_attention_layernorm",
                                .before_mlp = "",
                                .after_mlp = "post_feedforward_layernorm",
                                .rotates_windowed_layers_only = largest_window(config.layer_windows) > 0});
}

}  // namespace

const ModelFamily& exaone4_family() {
  static const ModelFamily kFamily = {.name = "exaone4",
                                      .types = kExaone4Types,
                                      .eps = 1e-5,
                                      .read_json = read_exaone4_json,
                                      .read_gguf = read_exaone4_gguf,
                                      .write_json = write_exaone4_json,
                                      .write_gguf = write_exaone4_gguf,
                                      .decoder = exaone4_decoder,
                                      .gguf_names = kExaone4Names};
  return kFamily;
}

}  // namespace eadem::models
