// SPDX-License-Identifier: Apache-2.0
//
// SmolLM3: the Llama model with layers, usually every fourth, that rotate nothing.
// Source: transformers, models/smollm3; llama.cpp, src/models/smollm3.cpp (facts only).
#include "eadem/models/decoders/dense_decoder.h"

namespace eadem::models {

namespace {

constexpr ModelType kSmollm3Types[] = {
    {"smollm3", "smollm3", "SmolLM3ForCausalLM", 32768, 4, 0, /*out_bias=*/true, /*gguf_interleaves=*/true}};
constexpr int64_t kNopeInterval = 4;

void set_nope_layers(ModelConfig& config, int64_t interval) {
  config.nope_layers.clear();
  for (int64_t layer = interval - 1; layer < config.num_hidden_layers; layer += interval)
    config.nope_layers.push_back(layer);
}

// `no_rope_layers` has 1 for each layer that rotates.
void read_smollm3_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope_or(config, 2000000, result);
  read_attention_bias(config, result, false, true);
  result.mlp_bias = config.optional_boolean("mlp_bias").value_or(false);
  const int64_t interval = config.optional_integer("no_rope_layer_interval", 1, kMaxLayers).value_or(kNopeInterval);
  if (config.has("no_rope_layers")) {
    const std::vector<int64_t> rotates = config.integers("no_rope_layers", 0, 1);
    if (static_cast<int64_t>(rotates.size()) != result.num_hidden_layers)
      config.fail("no_rope_layers", fmt::format("{} entries, one per layer", result.num_hidden_layers));
    for (size_t layer = 0; layer < rotates.size(); ++layer)
      if (rotates[layer] == 0) result.nope_layers.push_back(static_cast<int64_t>(layer));
  } else {
    config.ignore("no_rope_layers");  // null
    set_nope_layers(result, interval);
  }
  if (!config.optional_boolean("use_sliding_window").value_or(false)) {
    config.ignore("sliding_window", "is not used while use_sliding_window is false");
    read_layer_types(config, result, std::nullopt, "use_sliding_window");
    return;
  }
  // Layers that rotate nothing have the window, unless layer_types names others.
  const auto window = config.optional_integer("sliding_window", 1, kMaxExtent);
  if (!read_layer_types(config, result, window, "sliding_window") && window)
    for (const int64_t layer : result.nope_layers) result.layer_windows[static_cast<size_t>(layer)] = *window;
}

void write_smollm3_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  io::JsonValue rotates = io::JsonValue::array();
  size_t next = 0;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const bool nope = next < config.nope_layers.size() && config.nope_layers[next] == layer;
    next += nope;
    rotates.push_back(nope ? 0 : 1);
  }
  json.set("no_rope_layers", rotates).set("attention_bias", config.attention_bias).set("mlp_bias", config.mlp_bias);
  if (const int64_t window = largest_window(config.layer_windows); window > 0)
    json.set("use_sliding_window", true).set("sliding_window", window).set("layer_types", layer_types_of(config));
}

// Other programs know which layers rotate.
void read_smollm3_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
  set_nope_layers(result, kNopeInterval);
}

void write_smollm3_gguf(const ModelConfig& config, const std::string&, io::GgufMetadata&) {
  if (largest_window(config.layer_windows) > 0)
    throw Unsupported("attention windows, which GGUF's smollm3 architecture cannot state");
  ModelConfig expected = config;
  set_nope_layers(expected, kNopeInterval);
  if (expected.nope_layers != config.nope_layers)
    throw Unsupported("other layers than every fourth rotate nothing, which GGUF's smollm3 architecture cannot state");
}

DecoderSpec smollm3_decoder(const ModelConfig& config) { return dense_decoder(config, {}); }

}  // namespace

const ModelFamily& smollm3_family() {
  static const ModelFamily kFamily = {.name = "smollm3",
                                      .types = kSmollm3Types,
                                      .tied = true,
                                      .read_json = read_smollm3_json,
                                      .read_gguf = read_smollm3_gguf,
                                      .write_json = write_smollm3_json,
                                      .write_gguf = write_smollm3_gguf,
                                      .decoder = smollm3_decoder};
  return kFamily;
}

}  // namespace eadem::models
