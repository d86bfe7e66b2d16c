// SPDX-License-Identifier: Apache-2.0
//
// Qwen3 with mixtures of experts: attention with norms of q and k; in the place of the MLP experts of which a softmax
// chooses some for each token. Single layers may keep a dense MLP.
// Source: transformers, models/qwen3_moe; llama.cpp, conversion/qwen.py and src/models/qwen3moe.cpp (facts only).
#include <algorithm>
#include <cmath>

#include "eadem/models/config/config_text.h"
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

// transformers 5 writes num_local_experts, where its class and earlier files say num_experts.
int64_t read_num_experts(const io::JsonReader& config) {
  const auto own = config.optional_integer("num_experts", 1, kMaxExperts),
             local = config.optional_integer("num_local_experts", 1, kMaxExperts);
  if (own && local && *own != *local)
    throw DataCorrupted("{}: 'num_experts' is {} and 'num_local_experts' {}", config.file(), *own, *local);
  return own ? *own : local.value_or(128);
}

void read_qwen3_moe_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  result.attention_bias = config.optional_boolean("attention_bias").value_or(false);
  result.attention_out_bias = result.attention_bias;
  result.qk_norm = true;
  read_qwen3_moe_window(config, result);
  result.num_experts = read_num_experts(config);
  result.num_experts_per_tok = config.optional_integer("num_experts_per_tok", 1, kMaxExperts).value_or(8);
  result.moe_intermediate_size = config.optional_integer("moe_intermediate_size", 1, kMaxExtent).value_or(768);
  result.norm_topk_prob = config.optional_boolean("norm_topk_prob").value_or(false);
  result.decoder_sparse_step = config.optional_integer("decoder_sparse_step", 1, kMaxLayers).value_or(1);
  if (config.has("mlp_only_layers"))
    result.mlp_only_layers = config.integers("mlp_only_layers", 0, kMaxLayers);
  else
    config.ignore("mlp_only_layers");  // null
}

void check_qwen3_moe_json(const ModelConfig& config) {
  refuse_if(config, config.attention_out_bias != config.attention_bias, "biases of q, k and v without one of o");
  refuse_if(config, config.mlp_bias, "biases of the MLP");
  refuse_if(config, !config.qk_norm, "q and k without norms");
  for (int64_t window : config.layer_windows)
    refuse_if(config, window != config.layer_windows[0], "attention windows of several lengths");
}

void write_qwen3_moe_json(const ModelConfig& config, io::JsonValue& json) {
  json.set("rope_theta", config.rope_theta);
  if (config.rope_scaling.kind != modules::RopeScaling::Kind::none)
    json.set("rope_scaling", rope_object(config.rope_scaling));
  if (config.rotary_dim != config.head_dim) json.set("partial_rotary_factor", partial_rotary_factor_of(config));
  json.set("attention_bias", config.attention_bias);
  const int64_t window = largest_window(config.layer_windows);
  json.set("use_sliding_window", window > 0);
  json.set("sliding_window", window > 0 ? io::JsonValue(window) : io::JsonValue(nullptr));
  json.set("num_experts", config.num_experts).set("num_experts_per_tok", config.num_experts_per_tok);
  json.set("moe_intermediate_size", config.moe_intermediate_size).set("norm_topk_prob", config.norm_topk_prob);
  json.set("decoder_sparse_step", config.decoder_sparse_step);
  io::JsonValue dense = io::JsonValue::array();
  for (int64_t layer : config.mlp_only_layers) dense.push_back(layer);
  json.set("mlp_only_layers", std::move(dense));
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

DecoderSpec qwen3_moe_decoder(const ModelConfig& config) {
  const double eps = config.rms_norm_eps;
  const modules::RopeConfig rope{.theta = config.rope_theta,
                                 .rotary_dim = config.rotary_dim,
                                 .scaling = config.rope_scaling,
                                 .divisors = config.rope_divisors};
  DecoderSpec spec{.vocab = config.vocab_size,
                   .hidden = config.hidden_size,
                   .norm = {"norm", eps},
                   .tied = config.tie_word_embeddings};
  const modules::DenseMlp::Config dense{
      .hidden = config.hidden_size, .ffn = config.intermediate_size, .activation = config.hidden_act};
  const modules::MoeMlp::Config experts{
      .hidden = config.hidden_size,
      .ffn = config.moe_intermediate_size,
      .experts = config.num_experts,
      .route = {.top_k = config.num_experts_per_tok, .renormalize = config.norm_topk_prob},
      .activation = config.hidden_act};
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    modules::LayerSpec own{
        .hidden = config.hidden_size,
        .mixer = modules::CausalAttention::Config{.hidden = config.hidden_size,
                                                  .heads = config.num_attention_heads,
                                                  .kv_heads = config.num_key_value_heads,
                                                  .head_dim = config.head_dim,
                                                  .scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim)),
                                                  .qkv_bias = config.attention_bias,
                                                  .out_bias = config.attention_out_bias,
                                                  .qk_norm_eps = config.qk_norm ? std::optional(eps) : std::nullopt,
                                                  .window = config.layer_windows[static_cast<size_t>(layer)],
                                                  .rope = rope},
        .mlp = dense,
        .before_mixer = modules::NormSpec{"input_layernorm", eps},
        .before_mlp = modules::NormSpec{"post_attention_layernorm", eps}};
    if (config.has_experts(layer)) own.mlp = experts;
    spec.layers.push_back(std::move(own));
  }
  return spec;
}

// Hugging Face files have a matrix for each expert, or what transformers 5 computes with: gate and up of all experts in
// one tensor [experts, 2 ffn, hidden], down in another. GGUF files have the parameters as they are.
std::vector<WeightRecipe> qwen3_moe_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                            CheckpointFormat format) {
  constexpr std::string_view kExperts = ".mlp.experts.";
  const size_t at = parameter.name.find(kExperts);
  if (format == CheckpointFormat::gguf || at == std::string::npos) return {};
  const std::string prefix = parameter.name.substr(0, at + kExperts.size()),
                    rest = parameter.name.substr(prefix.size());
  std::vector<WeightRecipe> experts;
  for (int64_t e = 0; e < config.num_experts; ++e)
    experts.push_back(WeightRecipe::name(fmt::format("{}{}.{}", prefix, e, rest)));
  const int64_t ffn = config.moe_intermediate_size;
  const WeightRecipe fused =
      rest.starts_with("down_proj")
          ? WeightRecipe::name(prefix + "down_proj")
          : WeightRecipe::slice(prefix + "gate_up_proj", 1, rest.starts_with("up_proj") ? ffn : 0, ffn, 2 * ffn);
  return {WeightRecipe::stack(std::move(experts)), fused};
}

}  // namespace

const ModelFamily& qwen3_moe_family() {
  static const ModelFamily kFamily = {.name = "qwen3_moe",
                                      .types = kQwen3MoeTypes,
                                      .gguf_keys =
                                          "expert_count expert_used_count expert_feed_forward_length "
                                          "expert_shared_count expert_shared_feed_forward_length expert_gating_func",
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
