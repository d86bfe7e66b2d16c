// SPDX-License-Identifier: Apache-2.0
//
// Qwen3-Next: linear attention with the gated delta rule in all but every fourth layer, which has attention with norms
// of q and k, a gate, and a rotation of a quarter of each head; norms with weights 1 + w; beside the experts of a
// softmax one that computes every token, times a gate of its own. What predicts a further token is MtpModel's.
// Source: transformers, models/qwen3_next; llama.cpp, conversion/qwen.py and src/models/qwen3next.cpp (facts only).
#include "eadem/models/decoders/linear_decoder.h"
#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kQwen3NextTypes[] = {{"qwen3_next", "qwen3next", "Qwen3NextForCausalLM", 32768, 2, 256}};

constexpr GgufName kQwen3NextNames[] = {{"post_attention_layernorm.", "post_attention_norm."}};

constexpr LinearNames kQwen3NextLinear = {.grouped = true, .gguf_grouped = true};

void read_qwen3_next_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  read_attention_bias(config, result, false, true);
  result.qk_norm = true;
  read_experts(config, {.count = 512, .per_token = 10, .ffn = 512}, result);
  result.norm_topk_prob = config.optional_boolean("norm_topk_prob").value_or(true);
  result.shared_expert_intermediate_size =
      config.optional_integer("shared_expert_intermediate_size", 1, kMaxExtent).value_or(512);
  read_sparse_layers(config, result);
  read_linear_attention(config, result);
  if (!result.linear_layers.empty()) require_silu(config, result, "layers of linear attention");
}

void write_qwen3_next_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("attention_bias", config.attention_bias);
  write_experts(config, "num_experts", json);
  json.set("norm_topk_prob", config.norm_topk_prob);
  json.set("shared_expert_intermediate_size", config.shared_expert_intermediate_size);
  write_sparse_layers(config, json);
  write_linear_attention(config, json);
}

// Other programs compute every file of this architecture with weights that are divided by their sum.
void read_qwen3_next_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const auto integer = [&](const char* key) { return file.integer(prefix + key, 1, kMaxExtent); };
  result.qk_norm = true;
  result.num_experts = integer("expert_count");
  result.num_experts_per_tok = integer("expert_used_count");
  result.moe_intermediate_size = integer("expert_feed_forward_length");
  result.shared_expert_intermediate_size = integer("expert_shared_feed_forward_length");
  result.norm_topk_prob = true;
  read_linear_gguf(file, prefix, result);
}

void write_qwen3_next_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto refuse = [](bool condition, std::string_view what) {
    if (condition) throw Unsupported("{}, which GGUF's qwen3next architecture cannot state", what);
  };
  refuse(!config.norm_topk_prob, "weights of a token's experts that are not divided by their sum (norm_topk_prob)");
  refuse(config.attention_bias, "biases of attention");
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    refuse(!config.has_experts(layer), fmt::format("layer {} without experts", layer));
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  add("expert_count", config.num_experts);
  add("expert_used_count", config.num_experts_per_tok);
  add("expert_feed_forward_length", config.moe_intermediate_size);
  add("expert_shared_feed_forward_length", config.shared_expert_intermediate_size);
  write_linear_gguf(config, prefix, metadata);
}

DecoderSpec qwen3_next_decoder(const ModelConfig& config) {
  modules::MoeMlp::Config experts = experts_of(config);
  experts.shared = {.name = "shared_expert", .ffn = config.shared_expert_intermediate_size, .gated = true};
  DecoderSpec spec = moe_decoder(config, experts);
  set_linear_layers(config, spec);
  return spec;
}

std::vector<WeightRecipe> qwen3_next_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                             CheckpointFormat format) {
  // GGUF files have the gate's one row as a vector.
  if (format == CheckpointFormat::gguf && parameter.name.ends_with("shared_expert_gate.weight"))
    return {WeightRecipe::stack({WeightRecipe::name(gguf_name(parameter.name, &config.family()))})};
  if (auto recipes = linear_recipes(config, parameter, format, kQwen3NextLinear); !recipes.empty()) return recipes;
  return expert_recipes(config, parameter, format);
}

}  // namespace

const ModelFamily& qwen3_next_family() {
  static const std::string kGgufKeys =
      "expert_count expert_used_count expert_feed_forward_length expert_shared_feed_forward_length " +
      std::string(kLinearGgufKeys);
  static const ModelFamily kFamily = {.name = "qwen3_next",
                                      .types = kQwen3NextTypes,
                                      .rotated_share = 0.25,
                                      .rotates_shares = true,
                                      .gguf_keys = kGgufKeys,
                                      .router_aux_loss_coef = 0.001,
                                      .read_json = read_qwen3_next_json,
                                      .read_gguf = read_qwen3_next_gguf,
                                      .write_json = write_qwen3_next_json,
                                      .write_gguf = write_qwen3_next_gguf,
                                      .decoder = qwen3_next_decoder,
                                      .gguf_names = kQwen3NextNames,
                                      .ignored_module = "mtp.",
                                      .recipes = qwen3_next_recipes,
                                      .mtp = ModelFamily::Mtp::own_module,
                                      .mtp_names = kLinearMtpNames};
  return kFamily;
}

}  // namespace eadem::models
