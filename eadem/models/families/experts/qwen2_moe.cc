// SPDX-License-Identifier: Apache-2.0
//
// Qwen2 with mixtures of experts: biases of q, k and v; beside the experts of a softmax one that computes every token,
// times a gate of its own. Single layers may keep a dense MLP.
// Source: transformers, models/qwen2_moe.
#include <algorithm>

#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kQwen2MoeTypes[] = {{"qwen2_moe", "qwen2moe", "Qwen2MoeForCausalLM", 32768, 16}};

// Layers 0, 2, 4 and so on below max_window_layers attend within the window, as transformers derives where layer_types
// is not stated.
void read_qwen2_moe_windows(const io::JsonReader& config, ModelConfig& result) {
  if (!config.optional_boolean("use_sliding_window").value_or(false)) {
    for (const char* key : {"sliding_window", "max_window_layers"}) config.ignore(key, "is for windows, which are off");
    read_layer_types(config, result, std::nullopt, "use_sliding_window");
    return;
  }
  const bool stated = config.value().find("sliding_window") != nullptr;
  const auto window = config.optional_integer("sliding_window", 1, kMaxExtent);
  if (stated && !window) config.fail("sliding_window", "an integer, because 'use_sliding_window' is true");
  const int64_t end = config.optional_integer("max_window_layers", 0, kMaxExtent).value_or(28);
  if (read_layer_types(config, result, window.value_or(4096), "sliding_window")) return;
  for (int64_t layer = 0; layer < std::min(end, result.num_hidden_layers); layer += 2)
    result.layer_windows[static_cast<size_t>(layer)] = window.value_or(4096);
}

void read_qwen2_moe_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  result.attention_bias = config.optional_boolean("qkv_bias").value_or(true);
  read_qwen2_moe_windows(config, result);
  read_experts(config, {.count = 60, .per_token = 4, .ffn = 1408}, result);
  result.norm_topk_prob = config.optional_boolean("norm_topk_prob").value_or(false);
  result.shared_expert_intermediate_size =
      config.optional_integer("shared_expert_intermediate_size", 1, kMaxExtent).value_or(5632);
  read_sparse_layers(config, result);
}

void check_qwen2_moe_json(const ModelConfig& config) {
  refuse_if(config, config.attention_out_bias || config.mlp_bias, "biases of o and of the MLP");
  refuse_if(config, config.qk_norm, "norms of q and k");
  refuse_several_windows(config);
}

void write_qwen2_moe_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  const int64_t window = largest_window(config.layer_windows);
  json.set("qkv_bias", config.attention_bias).set("use_sliding_window", window > 0);
  if (window > 0) json.set("sliding_window", window).set("layer_types", layer_types_of(config));
  write_experts(config, "num_experts", json);
  json.set("norm_topk_prob", config.norm_topk_prob);
  json.set("shared_expert_intermediate_size", config.shared_expert_intermediate_size);
  write_sparse_layers(config, json);
}

// Other programs compute every file of this architecture without dividing the weights by their sum.
void read_qwen2_moe_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  result.attention_bias = file.find("blk.0.attn_q.bias") != nullptr;
  result.num_experts = file.integer(prefix + "expert_count", 1, kMaxExperts);
  result.num_experts_per_tok = file.integer(prefix + "expert_used_count", 1, kMaxExperts);
  result.moe_intermediate_size = file.integer(prefix + "expert_feed_forward_length", 1, kMaxExtent);
  result.shared_expert_intermediate_size = file.integer(prefix + "expert_shared_feed_forward_length", 1, kMaxExtent);
}

void write_qwen2_moe_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto refuse = [](bool condition, std::string_view what) {
    if (condition) throw Unsupported("{}, which GGUF's qwen2moe architecture cannot state", what);
  };
  refuse(config.norm_topk_prob, "weights of a token's experts that are divided by their sum (norm_topk_prob)");
  refuse(!config.attention_bias, "q, k and v without biases");
  refuse(largest_window(config.layer_windows) > 0, "attention windows");
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    refuse(!config.has_experts(layer), fmt::format("layer {} without experts", layer));
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  add("expert_count", config.num_experts);
  add("expert_used_count", config.num_experts_per_tok);
  add("expert_feed_forward_length", config.moe_intermediate_size);
  add("expert_shared_feed_forward_length", config.shared_expert_intermediate_size);
}

DecoderSpec qwen2_moe_decoder(const ModelConfig& config) {
  modules::MoeMlp::Config experts = experts_of(config);
  experts.shared = {.name = "shared_expert", .ffn = config.shared_expert_intermediate_size, .gated = true};
  return moe_decoder(config, experts);
}

std::vector<WeightRecipe> qwen2_moe_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                            CheckpointFormat format) {
  // GGUF files have the gate's one row as a vector.
  if (format == CheckpointFormat::gguf && parameter.name.ends_with("shared_expert_gate.weight"))
    return {WeightRecipe::stack({WeightRecipe::name(gguf_name(parameter.name, &config.family()))})};
  return expert_recipes(config, parameter, format);
}

}  // namespace

const ModelFamily& qwen2_moe_family() {
  static const ModelFamily kFamily = {.name = "qwen2_moe",
                                      .types = kQwen2MoeTypes,
                                      .gguf_keys =
                                          "expert_count expert_used_count expert_feed_forward_length "
                                          "expert_shared_feed_forward_length",
                                      .router_aux_loss_coef = 0.001,
                                      .read_json = read_qwen2_moe_json,
                                      .read_gguf = read_qwen2_moe_gguf,
                                      .write_json = write_qwen2_moe_json,
                                      .check_json = check_qwen2_moe_json,
                                      .write_gguf = write_qwen2_moe_gguf,
                                      .decoder = qwen2_moe_decoder,
                                      .recipes = qwen2_moe_recipes};
  return kFamily;
}

}  // namespace eadem::models
