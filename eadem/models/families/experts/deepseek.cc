// SPDX-License-Identifier: Apache-2.0
//
// DeepSeek V2, V3 and V3.2 and Mistral 4: latent attention, whose scale grows with yarn's, in V3.2 over the tokens that
// an indexer selects; after the first layers, which are dense, experts chosen by a softmax (V2, Mistral 4) or by
// sigmoids and a correction (V3), of the best groups, and one that computes every token. Queries of Mistral 4 grow with
// their positions. The layer that predicts a further token is MtpModel's.
// Source: transformers, models/deepseek_v2, deepseek_v3, deepseek_v32 and mistral4; llama.cpp, conversion/deepseek.py,
// conversion/mistral.py, conversion/mistral3.py and src/models/deepseek2.cpp (facts only).
#include <algorithm>
#include <cmath>
#include <numeric>

#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kDeepseekTypes[] = {
    {.name = "deepseek_v2",
     .gguf_architecture = "deepseek2",
     .python_class = "DeepseekV2ForCausalLM",
     .max_position_embeddings = 2048},
    {.name = "deepseek_v3",
     .gguf_architecture = "deepseek2",
     .python_class = "DeepseekV3ForCausalLM",
     .max_position_embeddings = 4096},
    {.name = "deepseek_v32",
     .gguf_architecture = "deepseek32",
     .python_class = "DeepseekV32ForCausalLM",
     .max_position_embeddings = 163840},
    {.name = "mistral4",
     .gguf_architecture = "mistral4",
     .python_class = "Mistral4ForCausalLM",
     .max_position_embeddings = 1048576},
};

constexpr GgufName kDeepseekNames[] = {{"self_attn.indexer.wq_b.", "indexer.attn_q_b."},
                                       {"self_attn.indexer.wk.", "indexer.attn_k."},
                                       {"self_attn.indexer.k_norm.", "indexer.k_norm."},
                                       {"self_attn.indexer.weights_proj.", "indexer.proj."}};

// The epsilon of the norms of latents. It does not depend on rms_norm_eps of the configuration.
constexpr double kLatentEps = 1e-6;

bool has_indexer(const ModelConfig& config) { return config.model_type == "deepseek_v32"; }
bool is_mistral(const ModelConfig& config) { return config.model_type == "mistral4"; }
bool is_v3(const ModelConfig& config) { return config.model_type == "deepseek_v3" || has_indexer(config); }

// transformers reads it of no other of these types.
bool may_have_mlp_biases(const ModelConfig& config) { return config.model_type == "deepseek_v2"; }

bool may_rotate_halves(const ModelConfig& config) { return config.model_type == "deepseek_v3" || is_mistral(config); }

// The layers before `first` have dense MLPs.
void set_first_expert_layer(ModelConfig& config, int64_t first) {
  config.mlp_only_layers.resize(static_cast<size_t>(std::min(first, config.num_hidden_layers)));
  std::iota(config.mlp_only_layers.begin(), config.mlp_only_layers.end(), int64_t{0});
}

// A choice that transformers' code does not have is refused; so is what a V2 model would not compute with.
void read_choice(const io::JsonReader& config, ModelConfig& result) {
  if (is_mistral(result)) {  // always of the best groups
    result.n_group = config.optional_integer("n_group", 1, kMaxExperts).value_or(1);
    result.topk_group = config.optional_integer("topk_group", 1, kMaxExperts).value_or(1);
    return;
  }
  const bool v3 = is_v3(result);
  const auto honour = [&](const char* key, std::string_view honoured) {
    if (const auto value = config.optional_string(key); value && *value != honoured)
      throw Unsupported("{}: '{}' is \"{}\"; models of type {} have \"{}\"", config.file(), key, *value,
                        result.model_type, honoured);
  };
  honour("scoring_func", v3 ? "sigmoid" : "softmax");
  if (v3) honour("topk_method", "noaux_tc");
  const std::string method = v3 ? "noaux_tc" : config.optional_string("topk_method").value_or("greedy");
  const int64_t groups = config.optional_integer("n_group", 1, kMaxExperts).value_or(v3 ? 8 : 1),
                top = config.optional_integer("topk_group", 1, kMaxExperts).value_or(v3 ? 4 : 1);
  if (method != "greedy") {
    result.n_group = groups;
    result.topk_group = top;
  }
  if (!v3 && method != "greedy" && method != "group_limited_greedy")
    throw Unsupported("{}: 'topk_method' is \"{}\"; known are greedy and group_limited_greedy", config.file(), method);
}

// "dense" for the first layers, "sparse" for the others; it decides where it is there.
void read_mlp_layer_types(const io::JsonReader& config, ModelConfig& result) {
  if (!config.has("mlp_layer_types")) return config.ignore("mlp_layer_types");  // null
  const std::vector<std::string> types = config.strings("mlp_layer_types");
  const auto first = std::find(types.begin(), types.end(), "sparse");
  if (std::ssize(types) != result.num_hidden_layers ||
      std::any_of(types.begin(), first, [](const std::string& type) { return type != "dense"; }) ||
      std::any_of(first, types.end(), [](const std::string& type) { return type != "sparse"; }))
    config.fail("mlp_layer_types",
                fmt::format("{} entries, \"dense\" and from some layer on \"sparse\"", result.num_hidden_layers));
  set_first_expert_layer(result, first - types.begin());
}

// Every layer attends to what its indexer selects.
void read_indexer(const io::JsonReader& config, ModelConfig& result) {
  if (result.q_lora_rank == 0)
    throw Unsupported("{}: 'q_lora_rank' is null; the indexer of {} reads the latent of queries", config.file(),
                      result.model_type);
  result.index_n_heads = config.optional_integer("index_n_heads", 1, kMaxExtent).value_or(64);
  result.index_head_dim = config.optional_integer("index_head_dim", 1, kMaxExtent).value_or(128);
  result.index_topk = config.optional_integer("index_topk", 1, kMaxExtent).value_or(2048);
  if (!config.has("layer_types")) return config.ignore("layer_types");  // null
  const std::vector<std::string> types = config.strings("layer_types");
  const bool indexed = std::all_of(types.begin(), types.end(), [](const std::string& type) {
    return type == "indexed_attention" || type == "deepseek_sparse_attention";
  });
  if (!indexed || std::ssize(types) != result.num_hidden_layers)
    config.fail("layer_types", fmt::format("\"indexed_attention\" for each of {} layers", result.num_hidden_layers));
}

void read_deepseek_experts(const io::JsonReader& config, ModelConfig& result) {
  const bool v3 = is_v3(result), mistral = is_mistral(result);
  if (!v3 && !mistral && !config.has("num_experts_per_tok")) config.fail("num_experts_per_tok", "an integer");
  ExpertDefaults defaults{.count_key = "n_routed_experts", .count = v3 ? 256 : 64, .per_token = 8, .ffn = 1407};
  if (v3 || mistral) defaults.ffn = 2048;
  if (mistral) defaults.count = 128, defaults.per_token = 4;
  read_experts(config, defaults, result);
  const int64_t shared = config.optional_integer("n_shared_experts", 1, kMaxExperts).value_or(v3 || mistral ? 1 : 2);
  result.shared_expert_intermediate_size = shared * result.moe_intermediate_size;
  // transformers does not read it of V2, whose weights are never divided by their sum.
  const bool renormalizes = config.boolean_or("norm_topk_prob", v3 || mistral);
  result.norm_topk_prob = (v3 || mistral) && renormalizes;
  result.routed_scaling_factor = config.optional_number("routed_scaling_factor", 1e-6, 1e6).value_or(v3 ? 2.5 : 1.0);
  if (const int64_t every = config.optional_integer("moe_layer_freq", 1, kMaxLayers).value_or(1); every != 1)
    throw Unsupported("{}: 'moe_layer_freq' is {}; only 1 is honoured", config.file(), every);
  set_first_expert_layer(result, config.optional_integer("first_k_dense_replace", 0, kMaxLayers).value_or(v3 ? 3 : 0));
  if (has_indexer(result)) read_mlp_layer_types(config, result);
  read_choice(config, result);
}

// So many experts are one in transformers' code.
int64_t shared_experts_of(const ModelConfig& config) {
  return config.shared_expert_intermediate_size / config.moe_intermediate_size;
}

void write_deepseek_experts(const ModelConfig& config, io::JsonValue& json) {
  const bool v3 = is_v3(config);
  write_experts(config, "n_routed_experts", json);
  json.set("n_shared_experts", shared_experts_of(config));
  json.set("norm_topk_prob", config.norm_topk_prob).set("routed_scaling_factor", config.routed_scaling_factor);
  json.set("first_k_dense_replace", static_cast<int64_t>(config.mlp_only_layers.size()));
  json.set("n_group", config.n_group).set("topk_group", config.topk_group);
  if (is_mistral(config)) return;
  json.set("scoring_func", v3 ? "sigmoid" : "softmax");
  json.set("topk_method", v3 ? "noaux_tc" : config.n_group > 1 ? "group_limited_greedy" : "greedy");
}

// transformers gives a configuration of Mistral 4 that has neither rope_parameters nor rope_scaling these parameters.
// It does not read such a configuration's own rope_theta.
constexpr double kMistralTheta = 10000;
constexpr std::string_view kMistralRope =
    R"({"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1})";

// Queries grow by a logarithm of their positions in the unit of yarn's original context. transformers needs both
// numbers of a configuration that has one of the objects.
void read_mistral_rope(const io::JsonReader& config, ModelConfig& result) {
  auto rope = config.optional_object("rope_parameters");
  if (!rope) rope = config.optional_object("rope_scaling");
  if (!rope) {
    if (result.rope_theta != kMistralTheta)
      throw Unsupported(
          "{}: 'rope_theta' is {}; without 'rope_parameters' only {} is honoured, which transformers takes",
          config.file(), result.rope_theta, kMistralTheta);
    rope = io::JsonReader::parse(kMistralRope, config.file());
    read_rope_object(*rope, result, result.rope_theta, result.rope_scaling);
  }
  if (result.rope_scaling.kind != modules::RopeScaling::Kind::yarn)
    rope->fail("rope_type", "\"yarn\", as all models of this type have");
  result.attn_scale = rope->number("llama_4_scaling_beta", 0, 1e6);
  result.floor_scale = rope->number("original_max_position_embeddings", 1, kMaxExtent);
  result.attn_temperature_tuning = true;
  rope->ignore("max_position_embeddings", "is not read");
  // It must say what qk_rope_head_dim says.
  const auto share = rope->optional_number("partial_rotary_factor", 1e-6, 1.0);
  const auto rotated = static_cast<int64_t>(static_cast<double>(result.head_dim) * share.value_or(0) + 1e-6);
  if (share && rotated != result.rotary_dim)
    rope->fail("partial_rotary_factor", fmt::format("{} of {}", result.rotary_dim, result.head_dim));
}

void read_deepseek_json(const io::JsonReader& config, ModelConfig& result) {
  const bool mistral = is_mistral(result);
  const auto integer = [&](const char* key, int64_t if_absent) {
    return config.optional_integer(key, 1, kMaxExtent).value_or(if_absent);
  };
  read_rope(config, result);
  result.kv_lora_rank = integer("kv_lora_rank", mistral ? 256 : 512);
  const bool says_rank = config.value().find("q_lora_rank") != nullptr;  // null: none
  result.q_lora_rank = integer("q_lora_rank", says_rank ? 0 : mistral ? 1024 : 1536);
  result.qk_nope_head_dim = integer("qk_nope_head_dim", mistral ? 64 : 128);
  result.v_head_dim = integer("v_head_dim", 128);
  result.rotary_dim = integer("qk_rope_head_dim", 64);
  result.head_dim = result.qk_nope_head_dim + result.rotary_dim;
  const bool interleaves = !may_rotate_halves(result) || config.boolean_or("rope_interleave", true);
  result.rope_style = interleaves ? kernels::RopeStyle::interleaved : kernels::RopeStyle::rotate_half;
  result.attention_bias = config.optional_boolean("attention_bias").value_or(false);
  result.attention_out_bias = result.attention_bias;
  if (may_have_mlp_biases(result)) result.mlp_bias = config.optional_boolean("mlp_bias").value_or(false);
  if (has_indexer(result) && config.optional_boolean("mlp_bias").value_or(false))
    throw Unsupported("{}: 'mlp_bias' is true; only false is honoured", config.file());
  read_deepseek_experts(config, result);
  if (has_indexer(result)) read_indexer(config, result);
  if (mistral) read_mistral_rope(config, result);
}

void check_deepseek_json(const ModelConfig& config) {
  refuse_if(config, config.attention_out_bias != config.attention_bias, "biases of q and kv without one of o");
  refuse_if(config, config.mlp_bias && !may_have_mlp_biases(config), "biases of the MLP");
  refuse_if(config, config.qk_norm, "norms of q and k");
  refuse_if(config, largest_window(config.layer_windows) > 0, "attention windows");
  refuse_if(config, !may_rotate_halves(config) && config.rope_style != kernels::RopeStyle::interleaved,
            "rotation by halves");
  refuse_if(config, is_mistral(config) && config.floor_scale != config.rope_scaling.original_max_positions,
            fmt::format("queries that grow every {} positions, where yarn's original context has {}",
                        config.floor_scale, config.rope_scaling.original_max_positions));
}

void write_deepseek_json(const ModelConfig& config, io::JsonValue& json) {
  if (is_mistral(config)) {
    io::JsonValue rope = rope_object(config.rope_scaling);
    rope.set("rope_theta", config.rope_theta).set("llama_4_scaling_beta", config.attn_scale);
    rope.set("partial_rotary_factor", partial_rotary_factor_of(config));
    json.set("rope_parameters", std::move(rope));
  } else {
    json.set("rope_theta", config.rope_theta);
    if (config.rope_scaling.kind != modules::RopeScaling::Kind::none)
      json.set("rope_scaling", rope_object(config.rope_scaling));
    json.set("head_dim", config.rotary_dim);
  }
  json.set("kv_lora_rank", config.kv_lora_rank);
  json.set("q_lora_rank", config.q_lora_rank > 0 ? io::JsonValue(config.q_lora_rank) : io::JsonValue(nullptr));
  json.set("qk_nope_head_dim", config.qk_nope_head_dim).set("qk_rope_head_dim", config.rotary_dim);
  json.set("v_head_dim", config.v_head_dim).set("attention_bias", config.attention_bias);
  if (may_have_mlp_biases(config)) json.set("mlp_bias", config.mlp_bias);
  if (has_indexer(config))
    json.set("index_n_heads", config.index_n_heads)
        .set("index_head_dim", config.index_head_dim)
        .set("index_topk", config.index_topk);
  else if (may_rotate_halves(config))
    json.set("rope_interleave", config.rope_style == kernels::RopeStyle::interleaved);
  write_deepseek_experts(config, json);
}

// How queries of Mistral 4 grow. A file without the first key, such as llama.cpp's converter makes of a directory, has
// queries that do not.
constexpr const char* kTemperatureScale = "attention.temperature_scale";
constexpr const char* kTemperatureLength = "attention.temperature_length";

void read_gguf_temperature(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  if (!is_mistral(result)) {
    for (const std::string& key : {prefix + kTemperatureScale, prefix + kTemperatureLength})
      if (file.find_metadata(key) != nullptr) throw Unsupported("{}: metadata '{}' is not honoured", file.path(), key);
    return;
  }
  if (result.rope_scaling.kind != modules::RopeScaling::Kind::yarn)
    throw Unsupported("{}: '{}rope.scaling.type' is not \"yarn\", as all models of type mistral4 have", file.path(),
                      prefix);
  result.attn_temperature_tuning = true;
  const auto scale = file.optional_number(prefix + kTemperatureScale);
  result.attn_scale = scale.value_or(0);
  result.floor_scale = scale ? static_cast<double>(file.integer(prefix + kTemperatureLength, 1, kMaxExtent))
                             : result.rope_scaling.original_max_positions;
}

// Softmax and no groups in a file that states neither: a V2 model.
void read_gguf_experts(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const auto optional = [&](const char* key, int64_t least, int64_t if_absent) {
    return file.optional_integer(prefix + key, least, kMaxExtent).value_or(if_absent);
  };
  const int64_t scoring = optional("expert_gating_func", 0, has_indexer(result) ? 2 : 1);
  if (scoring != 1 && scoring != 2)
    throw Unsupported("{}: '{}expert_gating_func' is {}; known are 1 (softmax) and 2 (sigmoid)", file.path(), prefix,
                      scoring);
  if (scoring == 2 && is_mistral(result))
    throw Unsupported("{}: '{}expert_gating_func' is 2 (sigmoid); models of type mistral4 have 1 (softmax)",
                      file.path(), prefix);
  if (scoring == 2 && !has_indexer(result)) result.model_type = "deepseek_v3";
  if (scoring == 1 && has_indexer(result))
    throw Unsupported("{}: '{}expert_gating_func' is 1 (softmax); models of type {} have 2 (sigmoid)", file.path(),
                      prefix, result.model_type);
  result.num_experts = optional("expert_count", 1, 64);
  result.num_experts_per_tok = optional("expert_used_count", 1, 6);
  result.moe_intermediate_size = optional("expert_feed_forward_length", 1, result.intermediate_size);
  result.shared_expert_intermediate_size = optional("expert_shared_count", 1, 1) * result.moe_intermediate_size;
  result.norm_topk_prob = file.optional_boolean(prefix + "expert_weights_norm").value_or(false);
  result.routed_scaling_factor = file.optional_number(prefix + "expert_weights_scale").value_or(1.0);
  result.n_group = optional("expert_group_count", 1, 1);
  result.topk_group = optional("expert_group_used_count", 1, 1);
  set_first_expert_layer(result, optional("leading_dense_block_count", 0, 0));
}

void write_gguf_experts(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  add("leading_dense_block_count", static_cast<int64_t>(config.mlp_only_layers.size()));
  add("expert_count", config.num_experts);
  add("expert_used_count", config.num_experts_per_tok);
  add("expert_feed_forward_length", config.moe_intermediate_size);
  add("expert_shared_count", shared_experts_of(config));
  add("expert_gating_func", is_v3(config) ? 2 : 1);
  if (config.n_group > 1) {
    add("expert_group_count", config.n_group);
    add("expert_group_used_count", config.topk_group);
  }
  metadata.emplace_back(prefix + "expert_weights_scale",
                        io::GgufValue::scalar(static_cast<float>(config.routed_scaling_factor)));
  metadata.emplace_back(prefix + "expert_weights_norm", io::GgufValue::boolean(config.norm_topk_prob));
}

// Keys and values are those of one head, as attention over latents has them; the widths of heads have keys of their
// own. Before April 2025 files stated the widths of heads, and kv_b_proj was one tensor.
void read_deepseek_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const auto integer = [&](const char* key) { return file.integer(prefix + key, 1, kMaxExtent); };
  const auto optional = [&](const char* key) { return file.optional_integer(prefix + key, 0, kMaxExtent); };
  result.kv_lora_rank = integer("attention.kv_lora_rank");
  result.q_lora_rank = optional("attention.q_lora_rank").value_or(0);
  result.head_dim = optional("attention.key_length_mla").value_or(result.head_dim);
  result.v_head_dim = optional("attention.value_length_mla").value_or(integer("attention.value_length"));
  result.qk_nope_head_dim = result.head_dim - result.rotary_dim;
  result.num_key_value_heads = result.num_attention_heads;
  result.rope_style = kernels::RopeStyle::interleaved;
  if (static_cast<float>(result.rms_norm_eps) != static_cast<float>(kLatentEps))
    throw Unsupported("{}: norms have the epsilon {}; only {} is honoured", file.path(), result.rms_norm_eps,
                      kLatentEps);
  if (modules::RopeScaling& s = result.rope_scaling; s.kind == modules::RopeScaling::Kind::yarn) {
    // A tenth of mscale_all_dim. It scales q . k alone: the rotation has no factor.
    const double stored = file.optional_number(prefix + "rope.scaling.yarn_log_multiplier").value_or(0);
    if (stored > 0)
      s.mscale = s.mscale_all_dim = std::round(stored * 1e7) / 1e6;
    else
      s.attention_factor = 1;
  }
  read_gguf_temperature(file, prefix, result);
  read_gguf_experts(file, prefix, result);
  if (!has_indexer(result)) return;
  result.index_n_heads = integer("attention.indexer.head_count");
  result.index_head_dim = integer("attention.indexer.key_length");
  result.index_topk = integer("attention.indexer.top_k");
}

void write_deepseek_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto refuse = [](bool condition, std::string_view what) {
    if (condition) throw Unsupported("{}, which GGUF's architectures of this family cannot state", what);
  };
  refuse(config.rope_style != kernels::RopeStyle::interleaved, "rotation by halves");
  refuse(config.attention_bias, "biases of attention");
  refuse(config.mlp_bias, "biases of MLPs");
  refuse(config.rms_norm_eps != kLatentEps, fmt::format("rms_norm_eps of {}, not {}", config.rms_norm_eps, kLatentEps));
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  add("attention.head_count_kv", 1);
  add("attention.key_length", config.kv_lora_rank + config.rotary_dim);
  add("attention.value_length", config.kv_lora_rank);
  add("attention.key_length_mla", config.head_dim);
  add("attention.value_length_mla", config.v_head_dim);
  add("attention.kv_lora_rank", config.kv_lora_rank);
  if (config.q_lora_rank > 0) add("attention.q_lora_rank", config.q_lora_rank);
  if (has_indexer(config)) {
    add("attention.indexer.head_count", config.index_n_heads);
    add("attention.indexer.key_length", config.index_head_dim);
    add("attention.indexer.top_k", config.index_topk);
  }
  if (const modules::RopeScaling& s = config.rope_scaling; s.kind == modules::RopeScaling::Kind::yarn) {
    refuse(!s.mscale || !s.mscale_all_dim || *s.mscale != *s.mscale_all_dim || *s.mscale == 0,
           "yarn whose mscale and mscale_all_dim are not one number");
    metadata.emplace_back(prefix + "rope.scaling.yarn_log_multiplier",
                          io::GgufValue::scalar(static_cast<float>(0.1 * *s.mscale_all_dim)));
  }
  if (is_mistral(config)) {
    metadata.emplace_back(prefix + kTemperatureScale, io::GgufValue::scalar(static_cast<float>(config.attn_scale)));
    add(kTemperatureLength, static_cast<int64_t>(config.floor_scale));
  }
  write_gguf_experts(config, prefix, metadata);
}

// Groups are worth their best expert (V2), or their best two.
modules::MoeMlp::Config deepseek_experts_of(const ModelConfig& config) {
  modules::MoeMlp::Config experts = experts_of(config);
  kernels::RouteAttrs& route = experts.route;
  route.scale = static_cast<float>(config.routed_scaling_factor);
  route.groups = config.n_group;
  route.top_groups = config.topk_group;
  if (is_v3(config) || is_mistral(config)) {
    route.epsilon = 1e-20f;
    route.group_best = config.n_group > 1 ? 2 : 1;
  }
  if (is_v3(config)) {
    route.scoring = kernels::RouteAttrs::Scoring::sigmoid;
    experts.correction_bias = true;
  }
  experts.shared = {.name = "shared_experts", .ffn = config.shared_expert_intermediate_size, .bias = config.mlp_bias};
  return experts;
}

DecoderSpec deepseek_decoder(const ModelConfig& config) {
  const double eps = config.rms_norm_eps;
  DecoderSpec spec{.vocab = config.vocab_size,
                   .hidden = config.hidden_size,
                   .norm = {"norm", eps},
                   .tied = config.tie_word_embeddings};
  modules::MlaAttention::Config attention{
      .hidden = config.hidden_size,
      .heads = config.num_attention_heads,
      .query_rank = config.q_lora_rank,
      .latent_dim = config.kv_lora_rank,
      .nope_dim = config.qk_nope_head_dim,
      .value_dim = config.v_head_dim,
      .scale = latent_scale_of(config),
      .bias = config.attention_bias,
      .norm_eps = kLatentEps,
      .rope = {.theta = config.rope_theta,
               .rotary_dim = config.rotary_dim,
               .style = config.rope_style,
               .scaling = config.rope_scaling,
               .divisors = config.rope_divisors},
      .indexer = {.heads = config.index_n_heads, .head_dim = config.index_head_dim, .top_k = config.index_topk}};
  if (config.attn_temperature_tuning)
    attention.temperature = {static_cast<float>(config.attn_scale), static_cast<int64_t>(config.floor_scale),
                             /*plus_one=*/false};
  const modules::DenseMlp::Config dense{.hidden = config.hidden_size,
                                        .ffn = config.intermediate_size,
                                        .activation = config.hidden_act,
                                        .bias = config.mlp_bias};
  const modules::MoeMlp::Config experts = deepseek_experts_of(config);
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    modules::LayerSpec own{.hidden = config.hidden_size,
                           .mixer = attention,
                           .mlp = dense,
                           .before_mixer = modules::NormSpec{"input_layernorm", eps},
                           .before_mlp = modules::NormSpec{"post_attention_layernorm", eps}};
    if (config.has_experts(layer)) own.mlp = experts;
    spec.layers.push_back(std::move(own));
  }
  return spec;
}

// Gate and up of all experts are one tensor, or one each.
std::vector<WeightRecipe> fused_expert_recipes(const ModelConfig& config, const ParameterInfo& parameter) {
  const LayerName layer = layer_name(parameter.name);
  const bool is_up = layer.rest.starts_with("mlp.experts.up_proj.");
  if (!is_up && !layer.rest.starts_with("mlp.experts.gate_proj.")) return {};
  const int64_t ffn = config.moe_intermediate_size;
  return {WeightRecipe::slice(fmt::format("blk.{}.ffn_gate_up_exps.weight", layer.number), 1, is_up ? ffn : 0, ffn,
                              2 * ffn),
          WeightRecipe::name(gguf_name(parameter.name))};
}

std::vector<WeightRecipe> deepseek_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                           CheckpointFormat format) {
  if (auto latent = latent_recipes(config, parameter, format); !latent.empty()) return latent;
  std::vector<WeightRecipe> recipes = expert_recipes(config, parameter, format);
  if (!is_mistral(config)) return recipes;
  // transformers keeps Mistral 4's experts in one tensor, and takes those of the others apart; GGUF files have them as
  // transformers does.
  if (format == CheckpointFormat::gguf) return fused_expert_recipes(config, parameter);
  std::reverse(recipes.begin(), recipes.end());
  return recipes;
}

}  // namespace

const ModelFamily& deepseek_family() {
  static const ModelFamily kFamily = {
      .name = "deepseek",
      .types = kDeepseekTypes,
      .latent_attention = true,
      .rotates_shares = true,
      .gguf_keys =
          "attention.kv_lora_rank attention.q_lora_rank attention.key_length_mla attention.value_length_mla "
          "attention.indexer.head_count attention.indexer.key_length attention.indexer.top_k "
          "attention.temperature_scale attention.temperature_length "
          "rope.scaling.yarn_log_multiplier leading_dense_block_count expert_count expert_used_count "
          "expert_feed_forward_length expert_shared_count expert_weights_scale expert_weights_norm "
          "expert_gating_func expert_group_count expert_group_used_count",
      .read_json = read_deepseek_json,
      .read_gguf = read_deepseek_gguf,
      .write_json = write_deepseek_json,
      .check_json = check_deepseek_json,
      .write_gguf = write_deepseek_gguf,
      .decoder = deepseek_decoder,
      .gguf_names = kDeepseekNames,
      .recipes = deepseek_recipes,
      .further_layers = true,
      .mtp = ModelFamily::Mtp::further_layer};
  return kFamily;
}

}  // namespace eadem::models
