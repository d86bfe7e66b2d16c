// SPDX-License-Identifier: Apache-2.0
//
// GLM-4.5 and its successors: attention that rotates half of each head, with biases and norms of q and k in some of
// them; after the first layers, which are dense, experts chosen by sigmoids and a correction, of the best groups, and
// one that computes every token. The layer that predicts a further token is MtpModel's.
// Source: transformers, models/glm4_moe; llama.cpp, conversion/glm.py and src/models/glm4-moe.cpp (facts only).
#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kGlm4MoeTypes[] = {{"glm4_moe", "glm4moe", "Glm4MoeForCausalLM", 131072, 8, 0, /*out_bias=*/false}};

constexpr GgufName kGlm4MoeNames[] = {{"post_attention_layernorm.", "post_attention_norm."}};

bool states_partial_rotation(const io::JsonReader& config) {
  bool states = config.has("partial_rotary_factor");
  for (const char* key : {"rope_parameters", "rope_scaling"})
    if (const auto rope = config.optional_object(key)) states = states || rope->has("partial_rotary_factor");
  return states;
}

void read_glm4_moe_json(const io::JsonReader& config, ModelConfig& result) {
  result.rms_norm_eps = config.optional_number("rms_norm_eps", 0.0, 1.0).value_or(1e-5);
  if (!states_partial_rotation(config)) result.rotary_dim = result.head_dim / 2;
  read_rope(config, result);
  result.attention_bias = config.optional_boolean("attention_bias").value_or(false);
  result.qk_norm = config.optional_boolean("use_qk_norm").value_or(false);
  read_experts(config, {.count_key = "n_routed_experts", .count = 128, .per_token = 8, .ffn = 1408}, result);
  result.norm_topk_prob = config.optional_boolean("norm_topk_prob").value_or(true);
  result.n_group = config.optional_integer("n_group", 1, kMaxExperts).value_or(1);
  result.topk_group = config.optional_integer("topk_group", 1, kMaxExperts).value_or(1);
  result.routed_scaling_factor = config.optional_number("routed_scaling_factor", -1e6, 1e6).value_or(1);
  result.shared_expert_intermediate_size =
      config.optional_integer("n_shared_experts", 1, kMaxExperts).value_or(1) * result.moe_intermediate_size;
  const int64_t dense = config.optional_integer("first_k_dense_replace", 0, kMaxLayers).value_or(1);
  for (int64_t layer = 0; layer < dense; ++layer) result.mlp_only_layers.push_back(layer);
}

void check_glm4_moe_json(const ModelConfig& config) {
  refuse_if(config, config.attention_out_bias || config.mlp_bias, "biases of o and of the MLP");
  refuse_if(config, largest_window(config.layer_windows) > 0, "an attention window");
}

void write_glm4_moe_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("partial_rotary_factor", partial_rotary_factor_of(config));
  json.set("attention_bias", config.attention_bias).set("use_qk_norm", config.qk_norm);
  write_experts(config, "n_routed_experts", json);
  json.set("norm_topk_prob", config.norm_topk_prob).set("n_group", config.n_group);
  json.set("topk_group", config.topk_group).set("routed_scaling_factor", config.routed_scaling_factor);
  json.set("n_shared_experts", config.shared_expert_intermediate_size / config.moe_intermediate_size);
  json.set("first_k_dense_replace", static_cast<int64_t>(config.mlp_only_layers.size()));
}

void read_glm4_moe_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const auto further = file.optional_integer(prefix + "nextn_predict_layers", 0, kMaxLayers).value_or(0);
  if (further >= result.num_hidden_layers)
    throw DataCorrupted("{}: {} of {} layers predict further tokens", file.path(), further, result.num_hidden_layers);
  result.num_hidden_layers -= further;
  result.layer_windows.resize(static_cast<size_t>(result.num_hidden_layers));
  result.attention_bias = file.find("blk.0.attn_q.bias") != nullptr;
  result.qk_norm = file.find("blk.0.attn_q_norm.weight") != nullptr;
  read_experts(file, prefix, result);
  read_leading_layers(file, prefix, result);
  read_shared_experts(file, result);
  if (result.shared_expert_intermediate_size == 0)  // no layer has experts, whose tensors would say it
    result.shared_expert_intermediate_size =
        file.optional_integer(prefix + "expert_shared_count", 0, kMaxExperts).value_or(0) *
        result.moe_intermediate_size;
  require_gating(file, prefix, 2);
  result.norm_topk_prob = file.optional_boolean(prefix + "expert_weights_norm").value_or(true);
  result.routed_scaling_factor = file.optional_number(prefix + "expert_weights_scale").value_or(1.0);
}

void write_glm4_moe_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  if (config.n_group > 1) throw Unsupported("groups of experts, which GGUF's glm4moe architecture cannot state");
  write_experts(config, prefix, metadata);
  write_leading_layers(config, prefix, metadata);
  const auto add = [&](const char* key, io::GgufValue value) { metadata.emplace_back(prefix + key, std::move(value)); };
  add("expert_shared_count", io::GgufValue::scalar(static_cast<uint32_t>(config.shared_expert_intermediate_size /
                                                                         config.moe_intermediate_size)));
  add("expert_gating_func", io::GgufValue::scalar(uint32_t{2}));
  add("expert_weights_scale", io::GgufValue::scalar(static_cast<float>(config.routed_scaling_factor)));
  add("expert_weights_norm", io::GgufValue::boolean(config.norm_topk_prob));
}

DecoderSpec glm4_moe_decoder(const ModelConfig& config) {
  modules::MoeMlp::Config experts = experts_of(config);
  experts.route.scoring = kernels::RouteAttrs::Scoring::sigmoid;
  experts.route.epsilon = 1e-20f;
  experts.route.scale = static_cast<float>(config.routed_scaling_factor);
  experts.route.groups = config.n_group;
  experts.route.top_groups = config.topk_group;
  experts.route.group_best = config.n_group > 1 ? 2 : 1;
  experts.correction_bias = true;
  experts.shared = {.name = "shared_experts", .ffn = config.shared_expert_intermediate_size};
  return moe_decoder(config, experts);
}

std::vector<WeightRecipe> glm4_moe_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                           CheckpointFormat format) {
  return expert_recipes(config, parameter, format);
}

}  // namespace

const ModelFamily& glm4_moe_family() {
  static const ModelFamily kFamily = {.name = "glm4_moe",
                                      .types = kGlm4MoeTypes,
                                      .rotates_shares = true,
                                      .gguf_keys =
                                          "expert_count expert_used_count expert_feed_forward_length "
                                          "leading_dense_block_count expert_shared_count expert_gating_func "
                                          "expert_weights_scale expert_weights_norm nextn_predict_layers",
                                      .read_json = read_glm4_moe_json,
                                      .read_gguf = read_glm4_moe_gguf,
                                      .write_json = write_glm4_moe_json,
                                      .check_json = check_glm4_moe_json,
                                      .write_gguf = write_glm4_moe_gguf,
                                      .decoder = glm4_moe_decoder,
                                      .gguf_names = kGlm4MoeNames,
                                      .recipes = glm4_moe_recipes,
                                      .further_layers = true,
                                      .mtp = ModelFamily::Mtp::further_layer};
  return kFamily;
}

}  // namespace eadem::models
