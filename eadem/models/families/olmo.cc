// SPDX-License-Identifier: Apache-2.0
//
// OLMo 2 and 3: norms after attention and MLP and none before; norms of q and k over all heads of a token together.
// OLMo 3 has windows in three of four layers, and rope scaling in the others only.
// Source: transformers, models/olmo2 and models/olmo3; llama.cpp, src/models/olmo2.cpp (facts only).
#include "eadem/models/dense_decoder.h"

namespace eadem::models {

namespace {

using QkNorm = modules::CausalAttention::Config::QkNorm;

constexpr ModelType kOlmoTypes[] = {{"olmo2", "olmo2", "Olmo2ForCausalLM", 2048},
                                    {"olmo3", "olmo2", "Olmo3ForCausalLM", 2048}};
constexpr GgufName kOlmoNames[] = {{"post_attention_layernorm.", "post_attention_norm."},
                                   {"post_feedforward_layernorm.", "post_ffw_norm."}};

// An object for each kind of layer, or the keys that were there before, which are those of layers without a window.
void read_olmo3_rope(const io::JsonReader& config, ModelConfig& result) {
  constexpr double kTheta = 500000;
  const auto rope = config.optional_object("rope_parameters");
  result.rope_theta = result.local_rope_theta = config.optional_number("rope_theta", 1.0, 1e12).value_or(kTheta);
  if (const auto scaling = config.optional_object("rope_scaling"))
    read_rope_object(*scaling, result, result.rope_theta, result.rope_scaling);
  if (!rope) return;
  if (const auto full = rope->optional_object("full_attention"))
    read_rope_object(*full, result, result.rope_theta, result.rope_scaling);
  modules::RopeScaling local;
  if (const auto sliding = rope->optional_object("sliding_attention"))
    read_rope_object(*sliding, result, result.local_rope_theta, local);
  if (local.kind != modules::RopeScaling::Kind::none)
    throw Unsupported("{}: layers with a window have rope scaling", config.file());
}

void read_olmo_json(const io::JsonReader& config, ModelConfig& result) {
  if (result.model_type == "olmo3") {
    read_olmo3_rope(config, result);
    read_windows(config, result, 4, 4096);
  } else {
    read_rope(config, result);
  }
  read_attention_bias(config, result, false, true);
  result.qk_norm = true;
}

void write_olmo_json(const ModelConfig& config, io::JsonValue& json) {
  json.set("attention_bias", config.attention_bias);
  if (config.model_type == "olmo2") return write_rope(config, json);
  const auto plain = rope_object({}, config.local_rope_theta);
  json.set("rope_parameters", io::JsonValue::object()
                                  .set("full_attention", rope_object(config.rope_scaling, config.rope_theta))
                                  .set("sliding_attention", plain));
  write_windows(config, json);
}

void read_olmo_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
  result.qk_norm = true;
  if (result.layer_windows[0] > 0)
    throw Unsupported("{}: '{}attention.sliding_window': windows of OLMo 3 are not read from GGUF files", file.path(),
                      prefix);
}

void write_olmo_gguf(const ModelConfig& config, const std::string&, io::GgufMetadata&) {
  if (config.model_type == "olmo3") throw Unsupported("models of type olmo3 are not written to GGUF files");
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
                                      .read_json = read_olmo_json,
                                      .read_gguf = read_olmo_gguf,
                                      .write_json = write_olmo_json,
                                      .write_gguf = write_olmo_gguf,
                                      .decoder = olmo_decoder,
                                      .gguf_names = kOlmoNames};
  return kFamily;
}

}  // namespace eadem::models
