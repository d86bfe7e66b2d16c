// SPDX-License-Identifier: Apache-2.0
//
// Kimi Linear: linear attention with the gated delta rule and a decay for each channel (KDA), whose gates have a low
// rank; in every fourth layer latent attention, which rotates nothing; after the first layers, which are dense, experts
// chosen by sigmoids and a correction, of the best groups, and one that computes every token.
// Source: transformers, models/kimi_linear; llama.cpp, conversion/kimi_linear.py and src/models/kimi-linear.cpp (facts
// only).
#include <algorithm>
#include <cmath>

#include "eadem/models/decoders/mamba_layers.h"
#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"
#include "eadem/models/recurrent_recipes.h"

namespace eadem::models {

namespace {

constexpr ModelType kKimiLinearTypes[] = {{.name = "kimi_linear",
                                           .gguf_architecture = "kimi-linear",
                                           .python_class = "KimiLinearForCausalLM",
                                           .max_position_embeddings = 1048576}};

constexpr OwnName kKimiLinearKeys[] = {{"max_position_embeddings", "model_max_length"}};

constexpr OwnName kKimiLinearTensors[] = {{"linear_attn.norm.", "self_attn.o_norm."},
                                          {"linear_attn.", "self_attn."},
                                          {"mlp.gate.", "block_sparse_moe.gate."},
                                          {"mlp.shared_experts.", "block_sparse_moe.shared_experts."}};

constexpr GgufName kKimiGgufNames[] = {{"linear_attn.q_proj.", "attn_q."},
                                       {"linear_attn.k_proj.", "attn_k."},
                                       {"linear_attn.v_proj.", "attn_v."},
                                       {"linear_attn.o_proj.", "attn_output."},
                                       {"linear_attn.q_conv1d.", "ssm_conv1d_q."},
                                       {"linear_attn.k_conv1d.", "ssm_conv1d_k."},
                                       {"linear_attn.v_conv1d.", "ssm_conv1d_v."},
                                       {"linear_attn.f_a_proj.", "ssm_f_a."},
                                       {"linear_attn.f_b_proj.", "ssm_f_b."},
                                       {"linear_attn.g_a_proj.", "ssm_g_a."},
                                       {"linear_attn.g_b_proj.", "ssm_g_b."},
                                       {"linear_attn.b_proj.", "ssm_beta."},
                                       {"linear_attn.A_log", "ssm_a"},
                                       {"linear_attn.dt_bias", "ssm_dt.bias"},
                                       {"linear_attn.norm.", "ssm_norm."}};

// The epsilon of the norms of latents. It does not depend on rms_norm_eps of the configuration.
constexpr double kKimiLatentEps = 1e-6;

// Published files have names of their own for keys that transformers also knows by the usual ones.
int64_t integer_of(const io::JsonReader& config, const char* own, const char* usual, int64_t max, int64_t if_absent) {
  const auto a = config.optional_integer(own, 1, max), b = config.optional_integer(usual, 1, max);
  if (a && b && *a != *b) throw DataCorrupted("{}: '{}' is {} and '{}' {}", config.file(), own, *a, usual, *b);
  return a ? *a : b.value_or(if_absent);
}

void read_kimi_experts(const io::JsonReader& config, ModelConfig& result) {
  const auto honour = [&](const char* key, bool is_honoured, std::string_view honoured) {
    if (!is_honoured) throw Unsupported("{}: '{}' is not {}; no other is honoured", config.file(), key, honoured);
  };
  result.num_experts = integer_of(config, "num_experts", "num_local_experts", kMaxExperts, 256);
  result.num_experts_per_tok = integer_of(config, "num_experts_per_token", "num_experts_per_tok", kMaxExperts, 8);
  result.moe_intermediate_size = config.optional_integer("moe_intermediate_size", 1, kMaxExtent).value_or(1024);
  result.shared_expert_intermediate_size =
      integer_of(config, "num_shared_experts", "n_shared_experts", kMaxExperts, 1) * result.moe_intermediate_size;
  result.n_group = integer_of(config, "num_expert_group", "n_group", kMaxExperts, 1);
  result.topk_group = config.optional_integer("topk_group", 1, kMaxExperts).value_or(1);
  const auto usual = config.optional_boolean("norm_topk_prob");
  result.norm_topk_prob = config.boolean_or("moe_renormalize", usual.value_or(true));
  if (usual && *usual != result.norm_topk_prob)
    throw DataCorrupted("{}: 'moe_renormalize' is {}, 'norm_topk_prob' is {}", config.file(), result.norm_topk_prob,
                        *usual);
  result.routed_scaling_factor = config.optional_number("routed_scaling_factor", 1e-6, 1e6).value_or(2.446);
  honour("moe_router_activation_func",
         config.optional_string("moe_router_activation_func").value_or("sigmoid") == "sigmoid", "\"sigmoid\"");
  honour("use_grouped_topk", config.optional_boolean("use_grouped_topk").value_or(true), "true");
  honour("moe_layer_freq", config.optional_integer("moe_layer_freq", 1, kMaxLayers).value_or(1) == 1, "1");
  const int64_t dense = config.optional_integer("first_k_dense_replace", 0, kMaxLayers).value_or(1);
  const bool stated = config.has("mlp_layer_types");
  const std::vector<std::string> types = stated ? config.strings("mlp_layer_types") : std::vector<std::string>();
  if (!stated) config.ignore("mlp_layer_types");  // null
  if (stated && std::ssize(types) != result.num_hidden_layers)
    config.fail("mlp_layer_types", fmt::format("{} entries, one per layer", result.num_hidden_layers));
  for (int64_t layer = 0; layer < result.num_hidden_layers; ++layer) {
    if (stated && types[static_cast<size_t>(layer)] != "dense" && types[static_cast<size_t>(layer)] != "sparse")
      config.fail("mlp_layer_types", "only \"dense\" and \"sparse\"");
    if (stated ? types[static_cast<size_t>(layer)] == "dense" : layer < dense) result.mlp_only_layers.push_back(layer);
  }
}

// Layers are counted from 1 in the lists of linear_attn_config, and given by layer_types, which wins.
void read_kda(const io::JsonReader& config, ModelConfig& result) {
  int64_t dim = config.optional_integer("linear_head_dim", 1, kMaxHeadDim).value_or(128),
          heads = config.optional_integer("linear_num_heads", 1, kMaxHeadDim).value_or(32);
  result.linear_taps = config.optional_integer("linear_conv_kernel_dim", 1, kMaxExtent).value_or(4);
  for (int64_t layer = 0; layer < result.num_hidden_layers; ++layer)
    if (layer == 0 || layer % 4 != 0) result.linear_layers.push_back(layer);
  if (const auto own = config.optional_object("linear_attn_config")) {
    dim = own->optional_integer("head_dim", 1, kMaxHeadDim).value_or(dim);
    heads = own->optional_integer("num_heads", 1, kMaxHeadDim).value_or(heads);
    result.linear_taps = own->optional_integer("short_conv_kernel_size", 1, kMaxExtent).value_or(result.linear_taps);
    if (own->has("kda_layers") != own->has("full_attn_layers"))
      own->fail("kda_layers", "where 'full_attn_layers' is, and nowhere else");
    if (own->has("kda_layers")) {
      result.linear_layers = own->integers("kda_layers", 1, result.num_hidden_layers);
      const size_t full = own->integers("full_attn_layers", 1, result.num_hidden_layers).size();
      if (static_cast<int64_t>(full + result.linear_layers.size()) != result.num_hidden_layers)
        own->fail("kda_layers", fmt::format("and 'full_attn_layers' the {} layers", result.num_hidden_layers));
      for (int64_t& layer : result.linear_layers) --layer;
      std::sort(result.linear_layers.begin(), result.linear_layers.end());
    }
  }
  result.linear_key_heads = result.linear_value_heads = heads;
  result.linear_key_dim = result.linear_value_dim = dim;
  if (!config.has("layer_types")) return config.ignore("layer_types");  // null
  const std::vector<std::string> types = config.strings("layer_types");
  if (std::ssize(types) != result.num_hidden_layers)
    config.fail("layer_types", fmt::format("{} entries, one per layer", result.num_hidden_layers));
  result.linear_layers.clear();
  for (size_t layer = 0; layer < types.size(); ++layer) {
    if (types[layer] != "linear_attention" && types[layer] != "full_attention")
      config.fail("layer_types", "only \"full_attention\" and \"linear_attention\"");
    if (types[layer] == "linear_attention") result.linear_layers.push_back(static_cast<int64_t>(layer));
  }
}

void read_kimi_linear_json(const io::JsonReader& config, ModelConfig& result) {
  const auto integer = [&](const char* key, int64_t if_absent) {
    return config.optional_integer(key, 1, kMaxExtent).value_or(if_absent);
  };
  for (const char* key : {"rope_theta", "rope_scaling", "rope_parameters"})
    config.ignore(key, "is of what nothing does");
  if (!config.optional_boolean("mla_use_nope").value_or(true))
    throw Unsupported("{}: 'mla_use_nope' is false; only true is honoured", config.file());
  result.kv_lora_rank = integer("kv_lora_rank", 512);
  result.q_lora_rank = integer("q_lora_rank", 0);
  result.qk_nope_head_dim = integer("qk_nope_head_dim", 128);
  result.v_head_dim = integer("v_head_dim", 128);
  result.rotary_dim = integer("qk_rope_head_dim", 64);
  result.head_dim = result.qk_nope_head_dim + result.rotary_dim;
  result.attention_bias = config.optional_boolean("attention_bias").value_or(false);
  result.attention_out_bias = result.attention_bias;
  read_kimi_experts(config, result);
  read_kda(config, result);
  if (!result.linear_layers.empty()) require_silu(config, result, "layers of linear attention");
}

void write_kimi_linear_json(const ModelConfig& config, io::JsonValue& json) {
  json.set("head_dim", config.rotary_dim).set("kv_lora_rank", config.kv_lora_rank);
  json.set("q_lora_rank", config.q_lora_rank > 0 ? io::JsonValue(config.q_lora_rank) : io::JsonValue(nullptr));
  json.set("qk_nope_head_dim", config.qk_nope_head_dim).set("qk_rope_head_dim", config.rotary_dim);
  json.set("v_head_dim", config.v_head_dim).set("attention_bias", config.attention_bias).set("mla_use_nope", true);
  json.set("num_experts", config.num_experts).set("num_experts_per_token", config.num_experts_per_tok);
  json.set("moe_intermediate_size", config.moe_intermediate_size);
  json.set("num_shared_experts", config.shared_expert_intermediate_size / config.moe_intermediate_size);
  json.set("num_expert_group", config.n_group).set("topk_group", config.topk_group);
  json.set("moe_renormalize", config.norm_topk_prob).set("routed_scaling_factor", config.routed_scaling_factor);
  io::JsonValue linear = io::JsonValue::array(), full = io::JsonValue::array(), mlps = io::JsonValue::array();
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    (config.is_linear(layer) ? linear : full).push_back(layer + 1);
    mlps.push_back(config.has_experts(layer) ? "sparse" : "dense");
  }
  json.set("mlp_layer_types", std::move(mlps));
  io::JsonValue own = io::JsonValue::object();
  own.set("head_dim", config.linear_key_dim).set("num_heads", config.linear_key_heads);
  own.set("short_conv_kernel_size", config.linear_taps).set("kda_layers", std::move(linear));
  json.set("linear_attn_config", own.set("full_attn_layers", std::move(full)));
}

constexpr std::string_view kKimiGgufKeys =
    "attention.kv_lora_rank attention.q_lora_rank attention.key_length_mla attention.value_length_mla ssm.conv_kernel "
    "kda.head_dim leading_dense_block_count expert_count expert_used_count expert_feed_forward_length "
    "expert_shared_count expert_weights_scale expert_weights_norm expert_gating_func expert_group_count "
    "expert_group_used_count";

// A layer without heads of keys has linear attention, of as many heads as attention has. Keys and values are those of
// one head, as attention over latents has them; the widths of heads have keys of their own.
void read_kimi_linear_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const auto integer = [&](const char* key, int64_t max = kMaxExtent) { return file.integer(prefix + key, 1, max); };
  const auto optional = [&](const char* key, int64_t least, int64_t if_absent) {
    return file.optional_integer(prefix + key, least, kMaxExtent).value_or(if_absent);
  };
  result.intermediate_size = integer("feed_forward_length");
  result.num_key_value_heads = result.num_attention_heads;
  result.kv_lora_rank = integer("attention.kv_lora_rank");
  result.q_lora_rank = optional("attention.q_lora_rank", 0, 0);
  result.head_dim = integer("attention.key_length_mla", kMaxHeadDim);
  result.v_head_dim = integer("attention.value_length_mla");
  result.rotary_dim = integer("rope.dimension_count");
  result.qk_nope_head_dim = result.head_dim - result.rotary_dim;
  const std::string key_heads = prefix + "attention.head_count_kv";
  const std::vector<int64_t> heads = file.integers(key_heads, 0, kMaxExtent);
  if (std::ssize(heads) != result.num_hidden_layers)
    throw DataCorrupted("{}: '{}' has {} entries for {} layers", file.path(), key_heads, heads.size(),
                        result.num_hidden_layers);
  for (int64_t layer = 0; layer < result.num_hidden_layers; ++layer)
    if (heads[static_cast<size_t>(layer)] == 0) result.linear_layers.push_back(layer);
  result.linear_key_heads = result.linear_value_heads = result.num_attention_heads;
  result.linear_key_dim = result.linear_value_dim = integer("kda.head_dim");
  result.linear_taps = integer("ssm.conv_kernel");
  require_gating(file, prefix, 2);
  read_experts(file, prefix, result);
  read_leading_layers(file, prefix, result);
  result.shared_expert_intermediate_size = integer("expert_shared_count") * result.moe_intermediate_size;
  result.routed_scaling_factor = file.optional_number(prefix + "expert_weights_scale").value_or(1.0);
  result.n_group = optional("expert_group_count", 1, 1);
  result.topk_group = optional("expert_group_used_count", 1, 1);
  result.norm_topk_prob = file.optional_boolean(prefix + "expert_weights_norm").value_or(true);
  if (!result.norm_topk_prob)
    throw Unsupported("{}: '{}expert_weights_norm' is false; only true is honoured", file.path(), prefix);
}

// Other programs divide the weights of a token's experts by their sum in every file of this architecture, and refuse a
// file without a matrix for logits.
void write_kimi_linear_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto refuse = [](bool condition, std::string_view what) {
    if (condition) throw Unsupported("{}, which GGUF's kimi-linear architecture cannot state", what);
  };
  refuse(config.attention_bias, "biases of attention");
  refuse(config.tie_word_embeddings, "one matrix for embeddings and logits");
  refuse(!config.norm_topk_prob, "weights of a token's experts that are not divided by their sum (moe_renormalize)");
  refuse(!config.linear_layers.empty() && config.linear_key_heads != config.num_attention_heads,
         fmt::format("linear attention of {} heads where attention has {}", config.linear_key_heads,
                     config.num_attention_heads));
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  add("feed_forward_length", config.intermediate_size);
  metadata.emplace_back(
      prefix + "attention.head_count_kv",
      layer_counts(config.num_hidden_layers, 1, [&](int64_t layer) { return !config.is_linear(layer); }));
  add("attention.key_length", config.kv_lora_rank + config.rotary_dim);
  add("attention.value_length", config.kv_lora_rank);
  add("attention.key_length_mla", config.head_dim);
  add("attention.value_length_mla", config.v_head_dim);
  add("attention.kv_lora_rank", config.kv_lora_rank);
  if (config.q_lora_rank > 0) add("attention.q_lora_rank", config.q_lora_rank);
  add("rope.dimension_count", config.rotary_dim);
  add("ssm.conv_kernel", config.linear_taps);
  add("kda.head_dim", config.linear_key_dim);
  write_experts(config, prefix, metadata);
  write_leading_layers(config, prefix, metadata);
  add("expert_shared_count", config.shared_expert_intermediate_size / config.moe_intermediate_size);
  add("expert_gating_func", 2);
  if (config.n_group > 1) {
    add("expert_group_count", config.n_group);
    add("expert_group_used_count", config.topk_group);
  }
  metadata.emplace_back(prefix + "expert_weights_scale",
                        io::GgufValue::scalar(static_cast<float>(config.routed_scaling_factor)));
}

std::string kimi_linear_gguf_notice(const ModelConfig& config) {
  if (config.rms_norm_eps == kKimiLatentEps) return "";
  return fmt::format(
      "norms of latents have the epsilon {}, which GGUF cannot state: other programs take that of all norms, {}",
      kKimiLatentEps, config.rms_norm_eps);
}

DecoderSpec kimi_linear_decoder(const ModelConfig& config) {
  const double eps = config.rms_norm_eps;
  DecoderSpec spec{.vocab = config.vocab_size,
                   .hidden = config.hidden_size,
                   .norm = {"norm", eps},
                   .tied = config.tie_word_embeddings};
  const modules::MlaAttention::Config latent{.hidden = config.hidden_size,
                                             .heads = config.num_attention_heads,
                                             .query_rank = config.q_lora_rank,
                                             .latent_dim = config.kv_lora_rank,
                                             .nope_dim = config.qk_nope_head_dim,
                                             .value_dim = config.v_head_dim,
                                             .scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim)),
                                             .bias = config.attention_bias,
                                             .norm_eps = kKimiLatentEps,
                                             .rope = {.rotary_dim = config.rotary_dim},
                                             .rotated = false};
  const modules::GatedDeltaNet::Config linear{.hidden = config.hidden_size,
                                              .key_heads = config.linear_key_heads,
                                              .value_heads = config.linear_value_heads,
                                              .key_dim = config.linear_key_dim,
                                              .value_dim = config.linear_value_dim,
                                              .taps = config.linear_taps,
                                              .channel_decay = true,
                                              .gate_rank = config.linear_value_dim,
                                              .gate = kernels::ActivationKind::sigmoid,
                                              .norm_eps = eps};
  const modules::DenseMlp::Config dense{
      .hidden = config.hidden_size, .ffn = config.intermediate_size, .activation = config.hidden_act};
  modules::MoeMlp::Config experts = experts_of(config);
  experts.route.scoring = kernels::RouteAttrs::Scoring::sigmoid;
  experts.route.epsilon = 1e-20f;
  experts.route.scale = static_cast<float>(config.routed_scaling_factor);
  experts.route.groups = config.n_group;
  experts.route.top_groups = config.topk_group;
  experts.route.group_best = config.n_group > 1 ? 2 : 1;
  experts.correction_bias = true;
  experts.shared = {.name = "shared_experts", .ffn = config.shared_expert_intermediate_size};
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    modules::LayerSpec own{.hidden = config.hidden_size,
                           .mixer = latent,
                           .mlp = dense,
                           .before_mixer = modules::NormSpec{"input_layernorm", eps},
                           .before_mlp = modules::NormSpec{"post_attention_layernorm", eps}};
    if (config.is_linear(layer)) own.mixer = linear;
    if (config.has_experts(layer)) own.mlp = experts;
    spec.layers.push_back(std::move(own));
  }
  return spec;
}

std::vector<WeightRecipe> kimi_linear_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                              CheckpointFormat format) {
  const bool gguf = format == CheckpointFormat::gguf;
  const LayerName layer = layer_name(parameter.name);
  const auto file_tensor = [&] {
    return WeightRecipe::name(gguf ? gguf_name(parameter.name, &config.family())
                                   : huggingface_name(parameter.name, config.family()));
  };
  const bool linear = layer.rest.starts_with("linear_attn.");
  if (linear && layer.rest.ends_with("_conv1d.weight")) {
    const int64_t taps = parameter.shape[0], channels = parameter.shape[1];
    WeightRecipe rows = file_tensor();
    if (gguf) rows = WeightRecipe::reshape(std::move(rows), {1, channels, 1, taps}, {channels, taps});
    return {convolution_recipe(std::move(rows), channels, taps, format)};
  }
  if (linear && layer.rest.ends_with(".A_log")) {
    const Shape four_axes{1, 1, parameter.shape[0], 1};
    return {gguf ? decay_recipe(file_tensor(), parameter.shape, format, four_axes)
                 : WeightRecipe::reshape(file_tensor(), four_axes, parameter.shape)};
  }
  if (auto latent = latent_recipes(config, parameter, format); !latent.empty()) return latent;
  if (gguf) return {};
  // transformers saves the dense layers under the name of the module that the others have.
  for (const char* part : {"mlp.gate_proj.", "mlp.up_proj.", "mlp.down_proj."})
    if (layer.rest.starts_with(part))
      return {WeightRecipe::name(parameter.name),
              WeightRecipe::name(fmt::format("model.layers.{}.block_sparse_moe.{}", layer.number,
                                             layer.rest.substr(std::string_view("mlp.").size())))};
  return expert_recipes(config, parameter, format, {"block_sparse_moe", "w1", "w3", "w2"});
}

}  // namespace

const ModelFamily& kimi_linear_family() {
  static const ModelFamily kFamily = {.name = "kimi_linear",
                                      .types = kKimiLinearTypes,
                                      .latent_attention = true,
                                      .eps = 1e-5,
                                      .json_names = kKimiLinearKeys,
                                      .rotates = false,
                                      .gguf_keys = kKimiGgufKeys,
                                      .gguf_counts_by_layer = true,
                                      .read_json = read_kimi_linear_json,
                                      .read_gguf = read_kimi_linear_gguf,
                                      .write_json = write_kimi_linear_json,
                                      .write_gguf = write_kimi_linear_gguf,
                                      .gguf_notice = kimi_linear_gguf_notice,
                                      .decoder = kimi_linear_decoder,
                                      .gguf_names = kKimiGgufNames,
                                      .tensor_names = kKimiLinearTensors,
                                      .recipes = kimi_linear_recipes,
                                      .further_layers = true};
  return kFamily;
}

}  // namespace eadem::models
