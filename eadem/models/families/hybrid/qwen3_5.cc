// SPDX-License-Identifier: Apache-2.0
//
// Qwen3.5, text: the layers of Qwen3-Next, with projections in an order of their own, and a dense MLP or experts in
// every layer. Positions in texts are the same on all axes, so that sections of a rotation mean nothing. What predicts
// a further token is MtpModel's; what sees is not computed.
// Source: transformers, models/qwen3_5 and qwen3_5_moe; llama.cpp, conversion/qwen.py (facts only).
#include "eadem/models/decoders/dense_decoder.h"
#include "eadem/models/decoders/linear_decoder.h"
#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kQwen35Types[] = {{"qwen3_5_text", "qwen35", "Qwen3_5ForCausalLM", 32768, 4, 256},
                                      {"qwen3_5_moe_text", "qwen35moe", "Qwen3_5MoeForCausalLM", 32768, 2, 256}};

constexpr GgufName kQwen35Names[] = {{"post_attention_layernorm.", "post_attention_norm."}};

constexpr LinearNames kQwen35Linear = {.gguf_tiled = true};

bool is_moe(const ModelConfig& config) { return config.model_type == "qwen3_5_moe_text"; }

void read_qwen3_5_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  read_attention_bias(config, result, false, true);
  result.qk_norm = true;
  read_linear_attention(config, result);
  if (!result.linear_layers.empty()) require_silu(config, result, "layers of linear attention");
  if (!is_moe(result)) return;
  read_experts(config, {.count = 256, .per_token = 8, .ffn = 512}, result);
  result.norm_topk_prob = true;
  result.shared_expert_intermediate_size =
      config.optional_integer("shared_expert_intermediate_size", 1, kMaxExtent).value_or(512);
}

void write_qwen3_5_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("attention_bias", config.attention_bias);
  write_linear_attention(config, json);
  if (!is_moe(config)) return;
  write_experts(config, "num_experts", json);
  json.set("shared_expert_intermediate_size", config.shared_expert_intermediate_size);
}

void read_qwen3_5_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const auto integer = [&](const char* key) { return file.integer(prefix + key, 1, kMaxExtent); };
  result.qk_norm = true;
  // Layers behind the last one predict further tokens.
  result.num_hidden_layers -=
      file.optional_integer(prefix + "nextn_predict_layers", 0, result.num_hidden_layers - 1).value_or(0);
  result.layer_windows.resize(static_cast<size_t>(result.num_hidden_layers));
  read_linear_gguf(file, prefix, result);
  result.linear_heads_tiled = result.linear_key_heads > 1 && result.linear_key_heads < result.linear_value_heads;
  if (!is_moe(result)) return;
  result.num_experts = integer("expert_count");
  result.num_experts_per_tok = integer("expert_used_count");
  result.moe_intermediate_size = integer("expert_feed_forward_length");
  result.shared_expert_intermediate_size = integer("expert_shared_feed_forward_length");
  result.norm_topk_prob = true;
}

void write_qwen3_5_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  if (config.attention_bias)
    throw Unsupported("biases of attention, which GGUF's architectures of this family cannot state");
  write_linear_gguf(config, prefix, metadata);
  // Sections of the rotation, which other programs require: those of the published models, shortened to what rotates.
  const int64_t pairs = config.rotary_dim / 2, third = pairs / 3;
  const int32_t sections[] = {static_cast<int32_t>(pairs - 2 * third), static_cast<int32_t>(third),
                              static_cast<int32_t>(third), 0};
  metadata.emplace_back(prefix + "rope.dimension_sections", io::GgufValue::scalars(std::span<const int32_t>(sections)));
  if (!is_moe(config)) return;
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  add("expert_count", config.num_experts);
  add("expert_used_count", config.num_experts_per_tok);
  add("expert_feed_forward_length", config.moe_intermediate_size);
  add("expert_shared_feed_forward_length", config.shared_expert_intermediate_size);
}

// The order of heads in GGUF files is undone on the way to a config.json.
void prepare_qwen3_5_json(ModelConfig& config) { config.linear_heads_tiled = false; }

DecoderSpec qwen3_5_decoder(const ModelConfig& config) {
  DecoderSpec spec;
  if (is_moe(config)) {
    modules::MoeMlp::Config experts = experts_of(config);
    experts.shared = {.name = "shared_expert", .ffn = config.shared_expert_intermediate_size, .gated = true};
    spec = moe_decoder(config, experts);
  } else {
    spec = dense_decoder(config, {});
  }
  set_linear_layers(config, spec);
  return spec;
}

std::vector<WeightRecipe> qwen3_5_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                          CheckpointFormat format) {
  // GGUF files have the gate's one row as a vector.
  if (format == CheckpointFormat::gguf && parameter.name.ends_with("shared_expert_gate.weight"))
    return {WeightRecipe::stack({WeightRecipe::name(gguf_name(parameter.name, &config.family()))})};
  if (auto recipes = linear_recipes(config, parameter, format, kQwen35Linear); !recipes.empty()) return recipes;
  return expert_recipes(config, parameter, format);
}

}  // namespace

const ModelFamily& qwen3_5_family() {
  static const std::string kGgufKeys =
      "expert_count expert_used_count expert_feed_forward_length expert_shared_feed_forward_length "
      "rope.dimension_sections nextn_predict_layers " +
      std::string(kLinearGgufKeys);
  static const ModelFamily kFamily = {.name = "qwen3_5",
                                      .types = kQwen35Types,
                                      .rotated_share = 0.25,
                                      .rotates_shares = true,
                                      .ffn_per_hidden = 3,  // those of experts do not state it, and have none
                                      .gguf_keys = kGgufKeys,
                                      .router_aux_loss_coef = 0.001,
                                      .read_json = read_qwen3_5_json,
                                      .read_gguf = read_qwen3_5_gguf,
                                      .write_json = write_qwen3_5_json,
                                      .prepare_json = prepare_qwen3_5_json,
                                      .write_gguf = write_qwen3_5_gguf,
                                      .decoder = qwen3_5_decoder,
                                      .gguf_names = kQwen35Names,
                                      .ignored_module = "mtp.",
                                      .recipes = qwen3_5_recipes,
                                      .further_layers = true,
                                      .mtp = ModelFamily::Mtp::own_module,
                                      .mtp_names = kLinearMtpNames};
  return kFamily;
}

}  // namespace eadem::models
