// SPDX-License-Identifier: Apache-2.0
//
// MiniMax M2: experts in every layer, chosen by sigmoids and a correction, whose weights are divided by their sum;
// norms of q and k over all heads of a token together; a part of each head rotates.
// Source: transformers, models/minimax_m2; llama.cpp, conversion/minimax.py and src/models/minimax-m2.cpp (facts only).
#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kMinimaxTypes[] = {{"minimax_m2", "minimax-m2", "MiniMaxM2ForCausalLM", 196608, 8, 128}};
constexpr ExpertNames kMinimaxNames{"block_sparse_moe", "w1", "w3", "w2"};
constexpr OwnName kMinimaxTensorNames[] = {
    {"mlp.gate.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias"},
    {"mlp.gate.", "block_sparse_moe.gate."}};

// Published files have the number of rotated dimensions in a key of its own.
void read_minimax_json(const io::JsonReader& config, ModelConfig& result) {
  if (const auto rotated = config.optional_integer("rotary_dim", 2, 65536)) result.rotary_dim = *rotated;
  read_rope_or(config, 5e6, result);
  result.qk_norm = true;
  read_experts(config,
               {.count_key = "num_local_experts", .count = 256, .per_token = 8, .ffn = result.intermediate_size},
               result);
  result.norm_topk_prob = true;
}

void write_minimax_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("rotary_dim", config.rotary_dim);
  write_experts(config, "num_local_experts", json);
}

void read_minimax_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  result.qk_norm = true;
  read_experts(file, prefix, result);
  require_gating(file, prefix, 2);
  result.norm_topk_prob = true;
}

void write_minimax_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_experts(config, prefix, metadata);
  metadata.emplace_back(prefix + "expert_gating_func", io::GgufValue::scalar(uint32_t{2}));
}

DecoderSpec minimax_decoder(const ModelConfig& config) {
  modules::MoeMlp::Config experts = experts_of(config);
  experts.route.scoring = kernels::RouteAttrs::Scoring::sigmoid;
  experts.correction_bias = true;
  return with_whole_norms(moe_decoder(config, experts));
}

std::vector<WeightRecipe> minimax_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                          CheckpointFormat format) {
  return expert_recipes(config, parameter, format, kMinimaxNames);
}

}  // namespace

const ModelFamily& minimax_m2_family() {
  static const ModelFamily kFamily = {
      .name = "minimax_m2",
      .types = kMinimaxTypes,
      .rotates_shares = true,
      .gguf_keys = "expert_count expert_used_count expert_feed_forward_length expert_gating_func",
      .router_aux_loss_coef = 0.001,
      .read_json = read_minimax_json,
      .read_gguf = read_minimax_gguf,
      .write_json = write_minimax_json,
      .write_gguf = write_minimax_gguf,
      .decoder = minimax_decoder,
      .tensor_names = kMinimaxTensorNames,
      .recipes = minimax_recipes,
      .further_layers = true};
  return kFamily;
}

}  // namespace eadem::models
