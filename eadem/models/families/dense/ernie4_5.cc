// SPDX-License-Identifier: Apache-2.0
//
// ERNIE 4.5, dense: the Llama model with rotation of pairs (2i, 2i + 1) and biases of all matrices or none.
// Source: transformers, models/ernie4_5; llama.cpp, src/models/ernie4-5.cpp (facts only).
#include "eadem/models/decoders/dense_decoder.h"

namespace eadem::models {

namespace {

constexpr ModelType kErnie45Types[] = {{"ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", 131072, 2, 128}};

void read_ernie4_5_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope_or(config, 500000, result);
  const bool bias = config.optional_boolean("use_bias").value_or(false);
  result.attention_bias = result.attention_out_bias = result.mlp_bias = bias;
}

void write_ernie4_5_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("use_bias", config.mlp_bias);
}

DecoderSpec ernie4_5_decoder(const ModelConfig& config) { return dense_decoder(config, {.interleaved = true}); }

}  // namespace

const ModelFamily& ernie4_5_family() {
  static const ModelFamily kFamily = {.name = "ernie4_5",
                                      .types = kErnie45Types,
                                      .tied = true,
                                      .eps = 1e-5,
                                      .read_json = read_ernie4_5_json,
                                      .read_gguf = read_biases,
                                      .write_json = write_ernie4_5_json,
                                      .decoder = ernie4_5_decoder};
  return kFamily;
}

}  // namespace eadem::models
