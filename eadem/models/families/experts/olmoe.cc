// SPDX-License-Identifier: Apache-2.0
//
// OLMoE: experts in every layer; norms of q and k over all heads of a token together; q, k and v may have a limit.
// Source: transformers, models/olmoe; llama.cpp, conversion/olmo.py and src/models/olmoe.cpp (facts only).
#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kOlmoeTypes[] = {{"olmoe", "olmoe", "OlmoeForCausalLM", 4096}};

void read_olmoe_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  read_attention_bias(config, result, false, true);
  result.qk_norm = true;
  read_experts(config, {.count = 64, .per_token = 8, .ffn = result.intermediate_size}, result);
  result.norm_topk_prob = config.optional_boolean("norm_topk_prob").value_or(false);
  result.clip_qkv = config.optional_number("clip_qkv", 1e-9, 1e9).value_or(0);
}

void write_olmoe_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("attention_bias", config.attention_bias);
  write_experts(config, "num_experts", json);
  json.set("norm_topk_prob", config.norm_topk_prob);
  json.set("clip_qkv", config.clip_qkv > 0 ? io::JsonValue(config.clip_qkv) : io::JsonValue(nullptr));
}

// Other programs compute every file of this architecture without dividing the weights by their sum.
void read_olmoe_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
  result.qk_norm = true;
  read_experts(file, prefix, result);
}

void write_olmoe_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  if (config.clip_qkv > 0)
    throw Unsupported("limits of q, k and v (clip_qkv), which GGUF's olmoe architecture cannot state");
  if (config.norm_topk_prob)
    throw Unsupported(
        "weights of a token's experts that are divided by their sum (norm_topk_prob), which GGUF's olmoe architecture "
        "cannot state");
  write_experts(config, prefix, metadata);
}

DecoderSpec olmoe_decoder(const ModelConfig& config) {
  return with_whole_norms(moe_decoder(config, experts_of(config)));
}

std::vector<WeightRecipe> olmoe_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                        CheckpointFormat format) {
  return expert_recipes(config, parameter, format);
}

}  // namespace

const ModelFamily& olmoe_family() {
  static const ModelFamily kFamily = {.name = "olmoe",
                                      .types = kOlmoeTypes,
                                      .eps = 1e-5,
                                      .gguf_keys = kExpertGgufKeys,
                                      .router_aux_loss_coef = 0.01,
                                      .read_json = read_olmoe_json,
                                      .read_gguf = read_olmoe_gguf,
                                      .write_json = write_olmoe_json,
                                      .write_gguf = write_olmoe_gguf,
                                      .decoder = olmoe_decoder,
                                      .recipes = olmoe_recipes};
  return kFamily;
}

}  // namespace eadem::models
