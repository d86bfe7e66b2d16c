// SPDX-License-Identifier: Apache-2.0
//
// ERNIE 4.5 with mixtures of experts: pairs of neighbours rotate; a softmax with a correction chooses the experts,
// whose scores are divided by their sum or a least value; further ones, side by side as one MLP, compute every token.
// With use_bias all projections but the router and the experts have biases, and the head has one.
// Source: transformers, models/ernie4_5_moe; llama.cpp, conversion/ernie.py and src/models/ernie4-5-moe.cpp (facts
// only).
#include <algorithm>

#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kErnieTypes[] = {{"ernie4_5_moe", "ernie4_5-moe", "Ernie4_5_MoeForCausalLM", 131072, 4}};

void read_ernie_json(const io::JsonReader& config, ModelConfig& result) {
  result.rms_norm_eps = config.optional_number("rms_norm_eps", 0.0, 1.0).value_or(1e-5);
  read_rope_or(config, 500000.0, result);
  result.mlp_bias = config.optional_boolean("use_bias").value_or(false);
  result.attention_bias = result.attention_out_bias = result.mlp_bias;
  result.num_experts = config.optional_integer("moe_num_experts", 1, kMaxExperts).value_or(64);
  result.num_experts_per_tok = config.optional_integer("moe_k", 1, kMaxExperts).value_or(6);
  result.moe_intermediate_size = config.optional_integer("moe_intermediate_size", 1, kMaxExtent).value_or(1536);
  result.norm_topk_prob = true;
  result.moe_norm_min = config.optional_number("moe_norm_min", 0.0, 1e6).value_or(1e-12);
  result.shared_expert_intermediate_size =
      config.optional_integer("moe_num_shared_experts", 0, kMaxExperts).value_or(2) * result.moe_intermediate_size;
  result.decoder_sparse_step = config.optional_integer("moe_layer_interval", 1, kMaxLayers).value_or(1);
  const int64_t first = config.optional_integer("moe_layer_start_index", 0, kMaxLayers).value_or(1),
                stated = config.optional_integer("moe_layer_end_index", -1, kMaxLayers).value_or(-1),
                last = stated == -1 ? result.num_hidden_layers - 1 : stated;
  for (int64_t layer = 0; layer < result.num_hidden_layers; ++layer)
    if (layer < first || layer > last) result.mlp_only_layers.push_back(layer);
}

void check_ernie_json(const ModelConfig& config) {
  refuse_if(config, config.attention_bias != config.mlp_bias || config.attention_out_bias != config.mlp_bias,
            "biases of some projections and not of others");
  refuse_if(config, config.qk_norm, "norms of q and k");
  refuse_if(config, largest_window(config.layer_windows) > 0, "an attention window");
}

// The range of layers outside mlp_only_layers; where that is empty, one that begins behind the last layer.
void write_ernie_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  const std::vector<int64_t>& dense = config.mlp_only_layers;
  int64_t first = 0, last = config.num_hidden_layers - 1;
  const auto is_dense = [&](int64_t layer) { return std::find(dense.begin(), dense.end(), layer) != dense.end(); };
  while (first <= last && is_dense(first)) ++first;
  while (last > first && is_dense(last)) --last;
  json.set("use_bias", config.mlp_bias)
      .set("moe_num_experts", config.num_experts)
      .set("moe_k", config.num_experts_per_tok);
  json.set("moe_intermediate_size", config.moe_intermediate_size).set("moe_norm_min", config.moe_norm_min);
  json.set("moe_num_shared_experts", config.shared_expert_intermediate_size / config.moe_intermediate_size);
  json.set("moe_layer_interval", config.decoder_sparse_step);
  json.set("moe_layer_start_index", first).set("moe_layer_end_index", last);
}

void read_ernie_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_experts(file, prefix, result);
  read_leading_layers(file, prefix, result);
  read_shared_experts(file, result);
  result.decoder_sparse_step = file.optional_integer(prefix + "interleave_moe_layer_step", 1, kMaxLayers).value_or(1);
  result.norm_topk_prob = true;
  result.moe_norm_min = 1e-12;
}

void write_ernie_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  if (config.mlp_bias) throw Unsupported("biases, which GGUF's ernie4_5-moe architecture cannot state");
  if (config.moe_norm_min != 1e-12)
    throw Unsupported("moe_norm_min {}, which GGUF's ernie4_5-moe architecture cannot state", config.moe_norm_min);
  write_experts(config, prefix, metadata);
  write_leading_layers(config, prefix, metadata);
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  add("interleave_moe_layer_step", config.decoder_sparse_step);
  add("expert_shared_count", config.shared_expert_intermediate_size / config.moe_intermediate_size);
}

DecoderSpec ernie_decoder(const ModelConfig& config) {
  modules::MoeMlp::Config experts = experts_of(config);
  experts.route.least_sum = static_cast<float>(config.moe_norm_min);
  experts.correction_bias = true;
  if (config.shared_expert_intermediate_size > 0)
    experts.shared = {.name = "shared_experts", .ffn = config.shared_expert_intermediate_size, .bias = config.mlp_bias};
  DecoderSpec spec = moe_decoder(config, experts, kernels::RopeStyle::interleaved);
  spec.head_bias = config.mlp_bias;
  return spec;
}

std::vector<WeightRecipe> ernie_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                        CheckpointFormat format) {
  constexpr std::string_view kCorrection = "gate.e_score_correction_bias";
  if (parameter.name.ends_with(kCorrection) && format == CheckpointFormat::huggingface) {  // in a matrix of one row
    const std::string mlp = parameter.name.substr(0, parameter.name.size() - kCorrection.size());
    return {WeightRecipe::only(WeightRecipe::name(mlp + "moe_statics.e_score_correction_bias")),
            WeightRecipe::only(WeightRecipe::name(mlp + "gate.moe_statics.e_score_correction_bias"))};
  }
  return expert_recipes(config, parameter, format);
}

}  // namespace

const ModelFamily& ernie4_5_moe_family() {
  static const ModelFamily kFamily = {.name = "ernie4_5_moe",
                                      .types = kErnieTypes,
                                      .tied = true,
                                      .gguf_keys =
                                          "expert_count expert_used_count expert_feed_forward_length "
                                          "leading_dense_block_count interleave_moe_layer_step expert_shared_count "
                                          "expert_shared_feed_forward_length",
                                      .router_aux_loss_coef = 0.001,
                                      .read_json = read_ernie_json,
                                      .read_gguf = read_ernie_gguf,
                                      .write_json = write_ernie_json,
                                      .check_json = check_ernie_json,
                                      .write_gguf = write_ernie_gguf,
                                      .decoder = ernie_decoder,
                                      .recipes = ernie_recipes};
  return kFamily;
}

}  // namespace eadem::models
