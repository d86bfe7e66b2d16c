// SPDX-License-Identifier: Apache-2.0
//
// StarCoder2: layer norms with biases, biases of all matrices, an MLP without a gate.
// Source: transformers, models/starcoder2; llama.cpp, src/models/starcoder2.cpp (facts only).
#include "eadem/models/decoders/dense_decoder.h"

namespace eadem::models {

namespace {

using NormKind = modules::NormSpec::Kind;

constexpr ModelType kStarcoder2Types[] = {{"starcoder2", "starcoder2", "Starcoder2ForCausalLM", 4096, 2}};
constexpr OwnName kStarcoder2Keys[] = {{"rms_norm_eps", "norm_epsilon"}};
constexpr OwnName kStarcoder2Names[] = {{"mlp.up_proj.", "mlp.c_fc."}, {"mlp.down_proj.", "mlp.c_proj."}};

void read_starcoder2_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  const bool bias = config.optional_boolean("use_bias").value_or(true);
  result.attention_bias = result.attention_out_bias = result.mlp_bias = bias;
  read_windows(config, result, 0, 0);
}

void write_starcoder2_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  const int64_t window = largest_window(config.layer_windows);
  json.set("use_bias", config.mlp_bias);
  json.set("sliding_window", window > 0 ? io::JsonValue(window) : io::JsonValue(nullptr));
}

DecoderSpec starcoder2_decoder(const ModelConfig& config) {
  return dense_decoder(config, {.norm = NormKind::layer, .norm_bias = true, .gated = false});
}

}  // namespace

const ModelFamily& starcoder2_family() {
  static const ModelFamily kFamily = {.name = "starcoder2",
                                      .types = kStarcoder2Types,
                                      .activation = "gelu_pytorch_tanh",
                                      .tied = true,
                                      .eps = 1e-5,
                                      .json_names = kStarcoder2Keys,
                                      .gguf_eps = "attention.layer_norm_epsilon",
                                      .read_json = read_starcoder2_json,
                                      .read_gguf = read_biases,
                                      .write_json = write_starcoder2_json,
                                      .decoder = starcoder2_decoder,
                                      .tensor_names = kStarcoder2Names};
  return kFamily;
}

}  // namespace eadem::models
