// SPDX-License-Identifier: Apache-2.0
//
// Granite with experts, and Granite 4: Granite's multipliers; each layer mixes tokens by Mamba-2 or by attention, which
// may rotate nothing, and has experts, an expert that computes every token, or both.
// Source: transformers, models/granitemoe, granitemoeshared and granitemoehybrid; llama.cpp, conversion/granite.py and
// src/models/granite-hybrid.cpp (facts only).
#include <numeric>

#include "eadem/models/decoders/dense_decoder.h"
#include "eadem/models/decoders/mamba_layers.h"
#include "eadem/models/decoders/moe_decoder.h"

namespace eadem::models {

namespace {

constexpr ModelType kGraniteMoeTypes[] = {{.name = "granitemoehybrid",
                                           .gguf_architecture = "granitehybrid",
                                           .python_class = "GraniteMoeHybridForCausalLM",
                                           .max_position_embeddings = 2048,
                                           .gguf_interleaves = true},
                                          {.name = "granitemoe",
                                           .gguf_architecture = "granitemoe",
                                           .python_class = "GraniteMoeForCausalLM",
                                           .max_position_embeddings = 2048,
                                           .gguf_interleaves = true},
                                          {.name = "granitemoeshared",
                                           .gguf_architecture = "granitemoe",
                                           .python_class = "GraniteMoeSharedForCausalLM",
                                           .max_position_embeddings = 2048,
                                           .gguf_interleaves = true}};

constexpr ConfigKey kGraniteMoeKeys[] = {
    {"embedding_multiplier", "embedding_scale", &ModelConfig::embedding_multiplier, 1, 1e-9, 1e9},
    {"residual_multiplier", "residual_scale", &ModelConfig::residual_multiplier, 1, 1e-9, 1e9},
    {"attention_multiplier", "attention.scale", &ModelConfig::attention_multiplier, 1, 1e-9, 1e9},
    {"logits_scaling", "logit_scale", &ModelConfig::logits_scaling, 1, 1e-9, 1e9}};

constexpr const char* kShared = "shared_expert";  // the scope of the expert that computes every token

bool is_hybrid(const ModelConfig& config) { return config.model_type == "granitemoehybrid"; }

// Sizes of experts are those of a dense MLP.
void finish_experts(ModelConfig& config) {
  config.norm_topk_prob = true;
  config.moe_intermediate_size = config.num_experts > 0 ? config.intermediate_size : 0;
  if (config.num_experts == 0) config.num_experts_per_tok = 0;
}

void set_nope(ModelConfig& config, bool rotates) {
  config.nope_layers.resize(rotates ? 0 : static_cast<size_t>(config.num_hidden_layers));
  std::iota(config.nope_layers.begin(), config.nope_layers.end(), int64_t{0});
}

void read_hybrid_json(const io::JsonReader& config, ModelConfig& result) {
  const std::string positions = config.optional_string("position_embedding_type").value_or("nope");
  if (positions != "rope" && positions != "nope")
    throw Unsupported("{}: 'position_embedding_type' is \"{}\"; known are rope and nope", config.file(), positions);
  set_nope(result, positions == "rope");
  result.layer_pattern = read_layer_pattern(config).value_or(std::string(result.layer_windows.size(), 'M'));
  if (result.layer_pattern.find_first_not_of("M*") != std::string::npos)
    throw Unsupported("{}: 'layer_types' has other kinds than linear_attention and full_attention", config.file());
  if (result.layer_pattern.find('M') != std::string::npos) require_silu(config, result, "state-space layers");
  read_mamba(config, {}, result.mamba);
  read_mamba_head_dim(config, config.optional_integer("mamba_expand", 1, 1024).value_or(2) * result.hidden_size,
                      result.mamba);
  read_time_step_limit(config, result.mamba);
  result.mamba.in_bias = result.mamba.out_bias = config.optional_boolean("mamba_proj_bias").value_or(false);
}

void read_granite_moe_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  read_attention_bias(config, result, false, true);
  result.num_experts = config.optional_integer("num_local_experts", is_hybrid(result) ? 0 : 1, kMaxExperts).value_or(8);
  result.num_experts_per_tok = config.optional_integer("num_experts_per_tok", 0, kMaxExperts).value_or(2);
  finish_experts(result);
  if (result.model_type != "granitemoe")
    result.shared_expert_intermediate_size =
        config.optional_integer("shared_intermediate_size", is_hybrid(result) ? 1 : 0, kMaxExtent)
            .value_or(is_hybrid(result) ? 1024 : 0);
  if (is_hybrid(result)) read_hybrid_json(config, result);
}

void write_granite_moe_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("attention_bias", config.attention_bias).set("num_local_experts", config.num_experts);
  json.set("num_experts_per_tok", config.num_experts_per_tok);
  if (config.model_type != "granitemoe") json.set("shared_intermediate_size", config.shared_expert_intermediate_size);
  if (!is_hybrid(config)) return;
  json.set("position_embedding_type", config.nope_layers.empty() ? "rope" : "nope");
  json.set("layer_types", layer_kinds_of(config.layer_pattern));
  write_mamba(config.mamba, {}, json);
  json.set("mamba_d_head", config.mamba.head_dim).set("mamba_expand", config.mamba.inner() / config.hidden_size);
  json.set("mamba_proj_bias", config.mamba.in_bias).set("time_step_limit", time_step_limit_of(config.mamba));
}

constexpr std::string_view kGraniteExpertKeys = "expert_count expert_used_count expert_shared_feed_forward_length";

void read_granite_moe_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
  const auto integer = [&](const char* key) { return file.optional_integer(prefix + key, 0, kMaxExtent).value_or(0); };
  result.num_experts = integer("expert_count");
  result.num_experts_per_tok = integer("expert_used_count");
  finish_experts(result);
  result.shared_expert_intermediate_size = integer("expert_shared_feed_forward_length");
  if (!is_hybrid(result)) {
    result.model_type = result.shared_expert_intermediate_size > 0 ? "granitemoeshared" : "granitemoe";
    return;
  }
  if (result.num_experts == 0 && result.shared_expert_intermediate_size == 0)
    result.shared_expert_intermediate_size = result.intermediate_size;
  set_nope(result, file.optional_boolean(prefix + "rope.scaling.finetuned").value_or(false));
  for (const int64_t heads : file.integers(prefix + "attention.head_count_kv", 0, 65536))
    result.layer_pattern += heads == 0 ? 'M' : '*';
  read_mamba_gguf(file, prefix, result.mamba);
}

void write_granite_moe_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  add("feed_forward_length", config.intermediate_size);
  add("expert_count", config.num_experts);
  add("expert_used_count", config.num_experts_per_tok);
  add("expert_shared_feed_forward_length", config.shared_expert_intermediate_size);
  if (!is_hybrid(config)) return add("attention.head_count_kv", config.num_key_value_heads);
  metadata.emplace_back(prefix + "attention.head_count_kv",
                        layer_counts(config.num_hidden_layers, config.num_key_value_heads,
                                     [&](int64_t layer) { return !config.has_mamba(layer); }));
  metadata.emplace_back(prefix + "rope.scaling.finetuned", io::GgufValue::boolean(config.nope_layers.empty()));
  write_mamba_gguf(config.mamba, prefix, metadata);
}

DecoderSpec granite_moe_decoder(const ModelConfig& config) {
  DecoderSpec spec = dense_decoder(config, {});
  for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
    modules::LayerSpec& own = spec.layers[layer];
    if (config.has_mamba(static_cast<int64_t>(layer))) own.mixer = mamba_of(config);
    const int64_t shared = config.shared_expert_intermediate_size;
    if (config.num_experts == 0) {
      std::get<modules::DenseMlp::Config>(own.mlp).ffn = shared;
      continue;
    }
    modules::MoeMlp::Config experts = experts_of(config);
    if (shared > 0) experts.shared = {.name = kShared, .ffn = shared};
    own.mlp = std::move(experts);
  }
  return spec;
}

// Gate and up of all experts in one tensor, and of the one that computes every token in another; this one is all of the
// MLP where there are no experts.
std::vector<WeightRecipe> granite_moe_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                              CheckpointFormat format) {
  if (std::vector<WeightRecipe> recipes = mamba_recipes(config, parameter, format); !recipes.empty()) return recipes;
  const LayerName name = layer_name(parameter.name);
  if (format == CheckpointFormat::gguf || !name.rest.starts_with("mlp.")) return {};
  const std::string layer = fmt::format("model.layers.{}.", name.number);
  const bool is_up = name.rest.ends_with("up_proj.weight");
  if (name.rest == "mlp.gate.weight") return {WeightRecipe::name(layer + "block_sparse_moe.router.layer.weight")};
  const bool all = name.rest.starts_with("mlp.experts.");
  const std::string module = layer + (all ? "block_sparse_moe." : "shared_mlp.");
  if (name.rest.ends_with("down_proj.weight")) return {WeightRecipe::name(module + "output_linear.weight")};
  const int64_t ffn = all ? config.moe_intermediate_size : config.shared_expert_intermediate_size;
  return {WeightRecipe::slice(module + "input_linear.weight", all ? 1 : 0, is_up ? ffn : 0, ffn, 2 * ffn)};
}

}  // namespace

const ModelFamily& granite_moe_family() {
  static const std::string kGgufKeys = fmt::format("{} {}", kGraniteExpertKeys, kMambaGgufKeys);
  static const ModelFamily kFamily = {.name = "granite_moe",
                                      .types = kGraniteMoeTypes,
                                      .keys = kGraniteMoeKeys,
                                      .gguf_keys = kGgufKeys,
                                      .gguf_counts_by_layer = true,
                                      .router_aux_loss_coef = 0.001,
                                      .read_json = read_granite_moe_json,
                                      .read_gguf = read_granite_moe_gguf,
                                      .write_json = write_granite_moe_json,
                                      .write_gguf = write_granite_moe_gguf,
                                      .decoder = granite_moe_decoder,
                                      .recipes = granite_moe_recipes};
  return kFamily;
}

}  // namespace eadem::models
