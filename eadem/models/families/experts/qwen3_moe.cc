// SPDX-License-Identifier: Apache-2.0
//
// Qwen3 with mixtures of experts: attention with norms of q and k; in the place of the MLP experts of which a softmax
// chooses some for each token. Single layers may keep a dense MLP.
// Source: transformers, models/qwen3_moe; llama.cpp, conversion/qwen.py and src/models/qwen3moe.cpp (facts only).
#include <algorithm>

#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kQwen3MoeTypes[] = {{"qwen3_moe", "qwen3moe", "Qwen3MoeForCausalLM", 32768, 4}};

// Keys of GGUF files that say what the architecture has not: a shared expert, or another score than a softmax (1).
constexpr std::pair<const char*, int64_t> kInertGgufKeys[] = {
    {"expert_shared_count", 0}, {"expert_shared_feed_forward_length", 0}, {"expert_gating_func", 1}};

// A window is that of every layer. Null means none; transformers' default for an absent key is 4096.
void read_qwen3_moe_window(const io::JsonReader& config, ModelConfig& result) {
  const bool absent = config.value().find("sliding_window") == nullptr;
  const auto stated = config.optional_integer("sliding_window", 1, kMaxExtent);
  if (!config.optional_boolean("use_sliding_window").value_or(false)) return;
  const int64_t window = absent ? 4096 : stated.value_or(0);
  std::fill(result.layer_windows.begin(), result.layer_windows.end(), window);
}

void read_qwen3_moe_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  result.attention_bias = config.optional_boolean("attention_bias").value_or(false);
  result.attention_out_bias = result.attention_bias;
  result.qk_norm = true;
  read_qwen3_moe_window(config, result);
  read_experts(config, {.count = 128, .per_token = 8, .ffn = 768}, result);
  result.norm_topk_prob = config.optional_boolean("norm_topk_prob").value_or(false);
  read_sparse_layers(config, result);
}

void check_qwen3_moe_json(const ModelConfig& config) {
  refuse_if(config, config.attention_out_bias != config.attention_bias, "biases of q, k and v without one of o");
  refuse_if(config, config.mlp_bias, "biases of the MLP");
  refuse_if(config, !config.qk_norm, "q and k without norms");
  for (int64_t window : config.layer_windows)
    refuse_if(config, window != config.layer_windows[0], "attention windows of several lengths");
}

void write_qwen3_moe_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("attention_bias", config.attention_bias);
  const int64_t window = largest_window(config.layer_windows);
  json.set("use_sliding_window", window > 0);
  json.set("sliding_window", window > 0 ? io::JsonValue(window) : io::JsonValue(nullptr));
  write_experts(config, "num_experts", json);
  json.set("norm_topk_prob", config.norm_topk_prob);
  write_sparse_layers(config, json);
}

// Other programs compute every file of this architecture with a softmax and divide the weights by their sum.
void read_qwen3_moe_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  result.attention_bias = file.find("blk.0.attn_q.bias") != nullptr;
  result.attention_out_bias = file.find("blk.0.attn_output.bias") != nullptr;
  result.qk_norm = file.find("blk.0.attn_q_norm.weight") != nullptr;
  result.num_experts = file.integer(prefix + "expert_count", 1, kMaxExperts);
  result.num_experts_per_tok = file.integer(prefix + "expert_used_count", 1, kMaxExperts);
  result.moe_intermediate_size = file.optional_integer(prefix + "expert_feed_forward_length", 1, kMaxExtent)
                                     .value_or(result.intermediate_size / result.num_experts_per_tok);
  result.norm_topk_prob = true;
  for (const auto& [key, honoured] : kInertGgufKeys)
    if (const int64_t value = file.optional_integer(prefix + key, 0, kMaxExtent).value_or(honoured); value != honoured)
      throw Unsupported("{}: '{}{}' is {}; only {} is honoured", file.path(), prefix, key, value, honoured);
}

void write_qwen3_moe_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto refuse = [](bool condition, std::string_view what) {
    if (condition) throw Unsupported("{}, which GGUF's qwen3moe architecture cannot state", what);
  };
  refuse(!config.norm_topk_prob, "weights of a token's experts that are not divided by their sum (norm_topk_prob)");
  refuse(largest_window(config.layer_windows) > 0, "an attention window");
  refuse(config.attention_bias, "biases of attention");
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    refuse(!config.has_experts(layer), fmt::format("layer {} without experts", layer));
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  add("expert_count", config.num_experts);
  add("expert_used_count", config.num_experts_per_tok);
  add("expert_feed_forward_length", config.moe_intermediate_size);
}

DecoderSpec qwen3_moe_decoder(const ModelConfig& config) { return moe_decoder(config, experts_of(config)); }

std::vector<WeightRecipe> qwen3_moe_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                            CheckpointFormat format) {
  return expert_recipes(config, parameter, format);
}

}  // namespace

const ModelFamily& qwen3_moe_family() {
  static const ModelFamily kFamily = {.name = "qwen3_moe",
                                      .types = kQwen3MoeTypes,
                                      .gguf_keys =
                                          "expert_count expert_used_count expert_feed_forward_length "
                                          "expert_shared_count expert_shared_feed_forward_length expert_gating_func",
                                      .router_aux_loss_coef = 0.001,
                                      .read_json = read_qwen3_moe_json,
                                      .read_gguf = read_qwen3_moe_gguf,
                                      .write_json = write_qwen3_moe_json,
                                      .check_json = check_qwen3_moe_json,
                                      .write_gguf = write_qwen3_moe_gguf,
                                      .decoder = qwen3_moe_decoder,
                                      .recipes = qwen3_moe_recipes};
  return kFamily;
}

}  // namespace eadem::models
