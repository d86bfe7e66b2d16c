// SPDX-License-Identifier: Apache-2.0
//
// Mixtral: a Mistral decoder with experts in every layer. The softmax over all experts is divided by the sum over the
// chosen ones. Its GGUF files are of the llama architecture and state a number of experts.
// Source: transformers, models/mixtral; llama.cpp, conversion/llama.py and src/models/llama.cpp (facts only).
#include <algorithm>

#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kMixtralTypes[] = {{.name = "mixtral",
                                        .gguf_architecture = "llama",
                                        .python_class = "MixtralForCausalLM",
                                        .max_position_embeddings = 131072,
                                        .num_key_value_heads = 8,
                                        .gguf_interleaves = true,
                                        .gguf_experts = true}};
constexpr ExpertNames kMixtralNames{"block_sparse_moe", "w1", "w3", "w2"};

void read_mixtral_json(const io::JsonReader& config, ModelConfig& result) {
  result.rms_norm_eps = config.optional_number("rms_norm_eps", 0.0, 1.0).value_or(1e-5);
  read_rope_or(config, 1e6, result);
  if (const auto window = config.optional_integer("sliding_window", 1, kMaxExtent))
    std::fill(result.layer_windows.begin(), result.layer_windows.end(), *window);
  read_experts(config, {.count = 8, .per_token = 2, .ffn = result.intermediate_size}, result);
  result.norm_topk_prob = true;
}

void check_mixtral_json(const ModelConfig& config) {
  refuse_if(config, config.attention_bias || config.attention_out_bias || config.mlp_bias, "biases");
  refuse_if(config, config.qk_norm, "norms of q and k");
  for (int64_t window : config.layer_windows)
    refuse_if(config, window != config.layer_windows[0], "attention windows of several lengths");
}

void write_mixtral_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  const int64_t window = largest_window(config.layer_windows);
  json.set("sliding_window", window > 0 ? io::JsonValue(window) : io::JsonValue(nullptr));
  json.set("num_local_experts", config.num_experts).set("num_experts_per_tok", config.num_experts_per_tok);
}

void read_mixtral_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_experts(file, prefix, result);
  result.norm_topk_prob = true;
}

void write_mixtral_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_experts(config, prefix, metadata);
}

std::string mixtral_gguf_notice(const ModelConfig& config) {
  const int64_t window = largest_window(config.layer_windows);
  if (window == 0) return "";
  return fmt::format("the attention window of {} tokens is written, but other programs ignore it in Mixtral files",
                     window);
}

DecoderSpec mixtral_decoder(const ModelConfig& config) {
  return moe_decoder(config, experts_of(config), config.rope_style);
}

std::vector<WeightRecipe> mixtral_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                          CheckpointFormat format) {
  if (format == CheckpointFormat::huggingface && parameter.name.ends_with(".mlp.gate.weight")) {
    const std::string layer = parameter.name.substr(0, parameter.name.size() - std::string("mlp.gate.weight").size());
    return {WeightRecipe::name(layer + "block_sparse_moe.gate.weight"), WeightRecipe::name(parameter.name)};
  }
  return expert_recipes(config, parameter, format, kMixtralNames);
}

}  // namespace

const ModelFamily& mixtral_family() {
  static const ModelFamily kFamily = {.name = "mixtral",
                                      .types = kMixtralTypes,
                                      .gguf_keys = kExpertGgufKeys,
                                      .router_aux_loss_coef = 0.001,
                                      .read_json = read_mixtral_json,
                                      .read_gguf = read_mixtral_gguf,
                                      .write_json = write_mixtral_json,
                                      .check_json = check_mixtral_json,
                                      .write_gguf = write_mixtral_gguf,
                                      .gguf_notice = mixtral_gguf_notice,
                                      .decoder = mixtral_decoder,
                                      .recipes = mixtral_recipes};
  return kFamily;
}

}  // namespace eadem::models
