// SPDX-License-Identifier: Apache-2.0
//
// Granite 3: the Llama model with multipliers of embeddings, of what layers add, of scores and of logits.
// Source: transformers, models/granite; llama.cpp, conversion/granite.py and src/models/granite.cpp (facts only).
#include "eadem/models/decoders/dense_decoder.h"

namespace eadem::models {

namespace {

constexpr ModelType kGraniteTypes[] = {
    {"granite", "granite", "GraniteForCausalLM", 2048, 0, 0, /*out_bias=*/true, /*gguf_interleaves=*/true}};

constexpr ConfigKey kGraniteKeys[] = {
    {"embedding_multiplier", "embedding_scale", &ModelConfig::embedding_multiplier, 1, 1e-9, 1e9},
    {"residual_multiplier", "residual_scale", &ModelConfig::residual_multiplier, 1, 1e-9, 1e9},
    {"attention_multiplier", "attention.scale", &ModelConfig::attention_multiplier, 1, 1e-9, 1e9},
    {"logits_scaling", "logit_scale", &ModelConfig::logits_scaling, 1, 1e-9, 1e9}};

void read_granite_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  read_attention_bias(config, result, false, true);
  result.mlp_bias = config.optional_boolean("mlp_bias").value_or(false);
}

void write_granite_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("attention_bias", config.attention_bias).set("mlp_bias", config.mlp_bias);
}

DecoderSpec granite_decoder(const ModelConfig& config) { return dense_decoder(config, {}); }

}  // namespace

const ModelFamily& granite_family() {
  static const ModelFamily kFamily = {.name = "granite",
                                      .types = kGraniteTypes,
                                      .keys = kGraniteKeys,
                                      .read_json = read_granite_json,
                                      .read_gguf = read_biases,
                                      .write_json = write_granite_json,
                                      .decoder = granite_decoder};
  return kFamily;
}

}  // namespace eadem::models
