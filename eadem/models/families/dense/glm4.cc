// SPDX-License-Identifier: Apache-2.0
//
// GLM-4 (0414): norms before and after attention and MLP, half of each head rotates in pairs (2i, 2i + 1), gate and up
// are rows of one matrix.
// Source: transformers, models/glm4; llama.cpp, conversion/glm.py and src/models/glm4.cpp (facts only).
#include "eadem/models/decoders/dense_decoder.h"

namespace eadem::models {

namespace {

constexpr ModelType kGlm4Types[] = {{"glm4", "glm4", "Glm4ForCausalLM", 131072, 2, 128, /*out_bias=*/false}};
constexpr GgufName kGlm4Names[] = {{"post_self_attn_layernorm.", "post_attention_norm."},
                                   {"post_mlp_layernorm.", "post_ffw_norm."}};

void read_glm4_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  read_attention_bias(config, result, true, false);
}

void write_glm4_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("attention_bias", config.attention_bias);
}

DecoderSpec glm4_decoder(const ModelConfig& config) {
  return dense_decoder(
      config, {.after_mixer = "post_self_attn_layernorm", .after_mlp = "post_mlp_layernorm", .interleaved = true});
}

std::vector<WeightRecipe> glm4_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                       CheckpointFormat format) {
  return fused_rows(config, parameter, format, {"", "mlp.gate_up_proj"});
}

}  // namespace

const ModelFamily& glm4_family() {
  static const ModelFamily kFamily = {.name = "glm4",
                                      .types = kGlm4Types,
                                      .eps = 1.5625e-7,
                                      .rotated_share = 0.5,
                                      .rotates_shares = true,
                                      .read_json = read_glm4_json,
                                      .read_gguf = read_biases,
                                      .write_json = write_glm4_json,
                                      .decoder = glm4_decoder,
                                      .gguf_names = kGlm4Names,
                                      .recipes = glm4_recipes};
  return kFamily;
}

}  // namespace eadem::models
