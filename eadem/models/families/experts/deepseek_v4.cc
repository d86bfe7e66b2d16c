// SPDX-License-Identifier: Apache-2.0
//
// DeepSeek V4: four streams of hidden states under hyper-connections; attention with one head of keys that are their
// own values, over a window and over pooled rows of all tokens, which in every other layer an indexer chooses; experts
// in all layers, in the first ones by the number of the token, and one that computes every token, all with a limited
// SwiGLU. The module that predicts a further token reads the streams, and has a layer with a window alone.
// Source: transformers, models/deepseek_v4 and conversion_mapping.py; of that module vLLM,
// models/deepseek_v4_mtp.py, and SGLang, models/deepseek_v4_nextn.py; llama.cpp, conversion/deepseek.py,
// gguf-py/gguf/constants.py and src/models/deepseek4.cpp (facts only).
#include <algorithm>
#include <cmath>
#include <tuple>

#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kDeepseekV4Types[] = {{.name = "deepseek_v4",
                                           .gguf_architecture = "deepseek4",
                                           .python_class = "DeepseekV4ForCausalLM",
                                           .max_position_embeddings = 1048576,
                                           .num_key_value_heads = 1,
                                           .head_dim = 512}};

constexpr OwnName kDeepseekV4Keys[] = {{"intermediate_size", "moe_intermediate_size"}};
constexpr ConfigKey kDeepseekV4Numbers[] = {
    {"swiglu_limit", "", &ModelConfig::swiglu_limit, 10, 1e-6, 1e6},
    {"hc_eps", "hyper_connection.epsilon", &ModelConfig::stream_eps, 1e-6, 0, 1}};

// Names of transformers' files. The published ones differ in few (published_name).
constexpr OwnName kDeepseekV4Tensors[] = {{"lm_head.weight", "head.weight"},
                                          {"model.hc_head.fn", "model.hc_head.hc_fn"},
                                          {"model.hc_head.base", "model.hc_head.hc_base"},
                                          {"model.hc_head.scale", "model.hc_head.hc_scale"},
                                          {"input_layernorm.", "attn_norm."},
                                          {"post_attention_layernorm.", "ffn_norm."},
                                          {"attn_hc.", "hc_attn_"},
                                          {"ffn_hc.", "hc_ffn_"},
                                          {"self_attn.q_a_proj.", "attn.wq_a."},
                                          {"self_attn.q_a_norm.", "attn.q_norm."},
                                          {"self_attn.q_b_proj.", "attn.wq_b."},
                                          {"self_attn.kv_proj.", "attn.wkv."},
                                          {"self_attn.kv_norm.", "attn.norm."},
                                          {"self_attn.o_a_proj.", "attn.wo_a."},
                                          {"self_attn.o_b_proj.", "attn.wo_b."},
                                          {"self_attn.sinks", "attn.attn_sink"},
                                          {"self_attn.compressor.indexer.q_b_proj.", "attn.indexer.wq_b."},
                                          {"self_attn.compressor.indexer.weights_proj.", "attn.indexer.weights_proj."},
                                          {"self_attn.compressor.indexer.kv_proj.", "attn.indexer.compressor.wkv."},
                                          {"self_attn.compressor.indexer.gate_proj.", "attn.indexer.compressor.wgate."},
                                          {"self_attn.compressor.indexer.position_bias", "attn.indexer.compressor.ape"},
                                          {"self_attn.compressor.indexer.kv_norm.", "attn.indexer.compressor.norm."},
                                          {"self_attn.compressor.kv_proj.", "attn.compressor.wkv."},
                                          {"self_attn.compressor.gate_proj.", "attn.compressor.wgate."},
                                          {"self_attn.compressor.position_bias", "attn.compressor.ape"},
                                          {"self_attn.compressor.kv_norm.", "attn.compressor.norm."},
                                          {"mlp.gate.e_score_correction_bias", "ffn.gate.bias"},
                                          {"mlp.gate.", "ffn.gate."},
                                          {"mlp.shared_experts.gate_proj.", "ffn.shared_experts.w1."},
                                          {"mlp.shared_experts.down_proj.", "ffn.shared_experts.w2."},
                                          {"mlp.shared_experts.up_proj.", "ffn.shared_experts.w3."}};

// The module's tensors have the published names alone, since transformers leaves them out.
constexpr OwnName kDeepseekV4MtpNames[] = {
    {"attn.norm.", "attn.kv_norm."}, {"hc_head.", "hc_head_"}, {"shared_head.norm.", "norm."}, {"", ""}};

constexpr GgufName kDeepseekV4GgufNames[] = {
    {"attn_hc.fn", "hc_attn_fn.weight"},
    {"attn_hc.base", "hc_attn_base.weight"},
    {"attn_hc.scale", "hc_attn_scale.weight"},
    {"ffn_hc.fn", "hc_ffn_fn.weight"},
    {"ffn_hc.base", "hc_ffn_base.weight"},
    {"ffn_hc.scale", "hc_ffn_scale.weight"},
    {"self_attn.q_a_norm.", "attn_q_a_norm."},
    {"self_attn.kv_proj.", "attn_kv."},
    {"self_attn.kv_norm.", "attn_kv_a_norm."},
    {"self_attn.o_a_proj.", "attn_output_a."},
    {"self_attn.o_b_proj.", "attn_output_b."},
    {"self_attn.sinks", "attn_sinks.weight"},
    {"self_attn.compressor.indexer.q_b_proj.", "indexer.attn_q_b."},
    {"self_attn.compressor.indexer.weights_proj.", "indexer.proj."},
    {"self_attn.compressor.indexer.kv_proj.", "indexer_compressor_kv."},
    {"self_attn.compressor.indexer.gate_proj.", "indexer_compressor_gate."},
    {"self_attn.compressor.indexer.position_bias", "indexer_compressor_ape.weight"},
    {"self_attn.compressor.indexer.kv_norm.", "indexer_compressor_norm."},
    {"self_attn.compressor.kv_proj.", "attn_compressor_kv."},
    {"self_attn.compressor.gate_proj.", "attn_compressor_gate."},
    {"self_attn.compressor.position_bias", "attn_compressor_ape.weight"},
    {"self_attn.compressor.kv_norm.", "attn_compressor_norm."},
    {"mlp.gate.tid2eid", "ffn_gate_tid2eid.weight"}};

// The published name of a tensor of transformers' files.
std::string published_name(std::string name) {
  constexpr std::string_view kModel = "model.", kNorm = ".attn.norm.", kHead = "hc_head.hc_";
  if (name.starts_with(kModel)) name.erase(0, kModel.size());
  if (name == "embed_tokens.weight") return "embed.weight";
  if (name.starts_with(kHead)) return "hc_head_" + name.substr(kHead.size());
  if (const size_t at = name.find(kNorm); at != std::string::npos) name.replace(at, kNorm.size(), ".attn.kv_norm.");
  return name;
}

constexpr const char *kWindowOnly = "sliding_attention", *kIndexed = "compressed_sparse_attention",
                     *kPooled = "heavily_compressed_attention";

// A letter for each layer, of layer_types or, before, of compress_ratios, which may go on with layers that predict
// further tokens. Neither: two layers with all rows, and then these and chosen ones in turn.
constexpr int64_t kIndexedStride = 4, kPooledStride = 128;  // of published models, and of all GGUF files

char kind_of_ratio(int64_t ratio) { return ratio == 0 ? 'W' : ratio == kIndexedStride ? 'I' : 'H'; }

bool is_known_ratio(int64_t ratio) { return ratio == 0 || ratio == kIndexedStride || ratio == kPooledStride; }

void read_attention_kinds(const io::JsonReader& config, ModelConfig& result) {
  const auto layers = static_cast<size_t>(result.num_hidden_layers);
  if (config.has("layer_types")) {
    config.ignore("compress_ratios", "is not read beside layer_types, as in transformers");
    const std::vector<std::string> types = config.strings("layer_types");
    if (types.size() < layers)
      config.fail("layer_types", fmt::format("{} entries, one per layer", result.num_hidden_layers));
    for (size_t layer = 0; layer < layers; ++layer) {
      const std::string& type = types[layer];
      if (type != kWindowOnly && type != kIndexed && type != kPooled)
        config.fail("layer_types", fmt::format("only \"{}\", \"{}\" and \"{}\"", kWindowOnly, kIndexed, kPooled));
      result.layer_pattern += type == kWindowOnly ? 'W' : type == kIndexed ? 'I' : 'H';
    }
    return;
  }
  config.ignore("layer_types");  // null
  if (config.has("compress_ratios")) {
    const std::vector<int64_t> ratios = config.integers("compress_ratios", 0, kMaxExtent);
    if (ratios.size() < layers)
      config.fail("compress_ratios", fmt::format("{} entries, one per layer", result.num_hidden_layers));
    for (size_t layer = 0; layer < layers; ++layer) {
      if (!is_known_ratio(ratios[layer])) config.fail("compress_ratios", "only 0, 4 and 128");
      result.layer_pattern += kind_of_ratio(ratios[layer]);
    }
    return;
  }
  config.ignore("compress_ratios");  // null
  for (size_t layer = 0; layer < layers; ++layer) result.layer_pattern += layer >= 2 && layer % 2 == 1 ? 'I' : 'H';
}

void read_strides(const io::JsonReader& config, ModelConfig& result) {
  result.indexed_stride = kIndexedStride;
  result.pooled_stride = kPooledStride;
  const auto read = [](const io::JsonReader& object, const char* key, int64_t& stride) {
    stride = object.optional_integer(key, 1, kMaxExtent).value_or(stride);
  };
  if (const auto rates = config.optional_object("compress_rates")) {
    read(*rates, kIndexed, result.indexed_stride);
    read(*rates, kPooled, result.pooled_stride);
  }
  read(config, "compress_rate_csa", result.indexed_stride);
  read(config, "compress_rate_hca", result.pooled_stride);
}

void read_hash_layers(const io::JsonReader& config, ModelConfig& result) {
  if (!config.has("mlp_layer_types")) {
    config.ignore("mlp_layer_types");  // null
    const int64_t first = config.optional_integer("num_hash_layers", 0, kMaxLayers).value_or(3);
    for (int64_t layer = 0; layer < std::min(first, result.num_hidden_layers); ++layer)
      result.hash_layers.push_back(layer);
    return;
  }
  config.ignore("num_hash_layers", "is not read beside mlp_layer_types, as in transformers");
  const std::vector<std::string> types = config.strings("mlp_layer_types");
  if (std::ssize(types) < result.num_hidden_layers)
    config.fail("mlp_layer_types", fmt::format("{} entries, one per layer", result.num_hidden_layers));
  for (int64_t layer = 0; layer < result.num_hidden_layers; ++layer) {
    const std::string& type = types[static_cast<size_t>(layer)];
    if (type != "hash_moe" && type != "moe") config.fail("mlp_layer_types", "only \"hash_moe\" and \"moe\"");
    if (type == "hash_moe") result.hash_layers.push_back(layer);
  }
}

// The columns that rotate, of a share or, before, a number.
void read_rotary_dim(const io::JsonReader& config, ModelConfig& result) {
  const auto stated = config.optional_integer("qk_rope_head_dim", 2, kMaxHeadDim);
  if (!stated) return;
  if (config.has("partial_rotary_factor") && *stated != result.rotary_dim)
    throw DataCorrupted("{}: 'qk_rope_head_dim' is {}; 'partial_rotary_factor' of 'head_dim' {} is {}", config.file(),
                        *stated, result.head_dim, result.rotary_dim);
  result.rotary_dim = *stated;
}

// Layers without rows rotate by `main`, which has no scaling, and those with rows by `compress`. Before, one object had
// the scaling of the latter, and keys of the config the thetas; yarn has the factor 1 there.
void read_v4_ropes(const io::JsonReader& config, ModelConfig& result) {
  result.rope_theta = config.optional_number("rope_theta", 1.0, 1e12).value_or(10000);
  result.pooled_rope_theta = config.optional_number("compress_rope_theta", 1.0, 1e12).value_or(160000);
  const int64_t rotated = result.rotary_dim;
  const double top_theta = result.rope_theta;
  const auto require_one_share = [&](const io::JsonReader& object) {
    if (result.rotary_dim != rotated)
      object.fail("partial_rotary_factor", fmt::format("that of all layers, {} of {}", rotated, result.head_dim));
  };
  std::optional<io::JsonReader> rope = config.optional_object("rope_parameters");
  const auto scaling = config.optional_object("rope_scaling");
  if (rope && scaling && !(rope->value() == scaling->value()))
    throw DataCorrupted("{}: 'rope_parameters' and 'rope_scaling' disagree", config.file());
  if (rope) config.ignore("rope_scaling");  // says the same
  if (!rope) rope = scaling;
  if (!rope) return;
  const auto main = rope->optional_object("main"), pooled = rope->optional_object("compress");
  if (!main || !pooled) {
    const double theta = result.pooled_rope_theta;
    read_rope_object(*rope, result, result.pooled_rope_theta, result.rope_scaling);
    result.pooled_rope_theta = theta;
    require_one_share(*rope);
    require_truncated(config, result.rope_scaling);
    if (result.rope_scaling.kind == modules::RopeScaling::Kind::yarn && !result.rope_scaling.attention_factor)
      result.rope_scaling.attention_factor = 1;
    return;
  }
  modules::RopeScaling of_main;
  read_rope_object(*main, result, result.rope_theta, of_main);
  require_one_share(*main);
  if (of_main.kind != modules::RopeScaling::Kind::none)
    main->fail("rope_type", "\"default\", as all models of this type have");
  if (!pooled->has("rope_theta")) result.pooled_rope_theta = top_theta;  // as in transformers
  read_rope_object(*pooled, result, result.pooled_rope_theta, result.rope_scaling);
  require_one_share(*pooled);
  require_truncated(config, result.rope_scaling);
}

void read_v4_experts(const io::JsonReader& config, ModelConfig& result) {
  read_experts(config, {.count_key = "n_routed_experts", .count = 256, .per_token = 6, .ffn = 2048}, result);
  const auto honour = [&](const char* key, std::string_view honoured) {
    if (const auto value = config.optional_string(key); value && *value != honoured)
      throw Unsupported("{}: '{}' is \"{}\"; only \"{}\" is honoured", config.file(), key, *value, honoured);
  };
  honour("scoring_func", "sqrtsoftplus");
  honour("topk_method", "noaux_tc");
  if (const int64_t shared = config.optional_integer("n_shared_experts", 0, kMaxExperts).value_or(1); shared != 1)
    throw Unsupported("{}: 'n_shared_experts' is {}; models of type {} have 1", config.file(), shared,
                      result.model_type);
  if (!config.optional_boolean("norm_topk_prob").value_or(true))
    throw Unsupported("{}: 'norm_topk_prob' is false; only true is honoured", config.file());
  result.shared_expert_intermediate_size = result.moe_intermediate_size;
  result.norm_topk_prob = true;
  result.routed_scaling_factor = config.optional_number("routed_scaling_factor", 1e-6, 1e6).value_or(1.5);
  read_hash_layers(config, result);
}

void read_deepseek_v4_json(const io::JsonReader& config, ModelConfig& result) {
  const auto integer = [&](const char* key, int64_t if_absent) {
    return config.optional_integer(key, 1, kMaxExtent).value_or(if_absent);
  };
  if (result.num_key_value_heads != 1)
    throw Unsupported("{}: 'num_key_value_heads' is {}; models of type {} have 1", config.file(),
                      result.num_key_value_heads, result.model_type);
  for (const char* key : {"attention_bias", "mlp_bias"})
    if (config.optional_boolean(key).value_or(false))
      throw Unsupported("{}: '{}' is true; only false is honoured", config.file(), key);
  require_silu(config, result, "limited MLPs");
  result.rope_style = kernels::RopeStyle::interleaved;
  read_rotary_dim(config, result);
  read_v4_ropes(config, result);
  result.q_lora_rank = integer("q_lora_rank", 1024);
  result.output_groups = integer("o_groups", 8);
  result.output_rank = integer("o_lora_rank", 1024);
  result.index_n_heads = integer("index_n_heads", 64);
  result.index_head_dim = integer("index_head_dim", 128);
  result.index_topk = integer("index_topk", 512);
  result.streams = integer("hc_mult", 4);
  result.stream_iterations = integer("hc_sinkhorn_iters", 20);
  std::fill(result.layer_windows.begin(), result.layer_windows.end(), integer("sliding_window", 128));
  read_strides(config, result);
  read_attention_kinds(config, result);
  read_v4_experts(config, result);
}

void write_deepseek_v4_json(const ModelConfig& config, io::JsonValue& json) {
  const double share = partial_rotary_factor_of(config);
  io::JsonValue kinds = io::JsonValue::array(), mlps = io::JsonValue::array();
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const char kind = config.layer_pattern[static_cast<size_t>(layer)];
    kinds.push_back(kind == 'W' ? kWindowOnly : kind == 'I' ? kIndexed : kPooled);
    mlps.push_back(config.is_hashed(layer) ? "hash_moe" : "moe");
  }
  io::JsonValue rates = io::JsonValue::object(), ropes = io::JsonValue::object();
  rates.set(kIndexed, config.indexed_stride).set(kPooled, config.pooled_stride);
  ropes.set("main", rope_object({}, config.rope_theta).set("partial_rotary_factor", share));
  ropes.set("compress", rope_object(config.rope_scaling, config.pooled_rope_theta).set("partial_rotary_factor", share));
  json.set("layer_types", std::move(kinds)).set("compress_rates", std::move(rates));
  json.set("rope_theta", config.rope_theta).set("compress_rope_theta", config.pooled_rope_theta);
  json.set("rope_parameters", std::move(ropes)).set("partial_rotary_factor", share);
  json.set("sliding_window", largest_window(config.layer_windows));
  json.set("q_lora_rank", config.q_lora_rank);
  json.set("o_groups", config.output_groups).set("o_lora_rank", config.output_rank);
  json.set("index_n_heads", config.index_n_heads).set("index_head_dim", config.index_head_dim);
  json.set("index_topk", config.index_topk);
  json.set("hc_mult", config.streams).set("hc_sinkhorn_iters", config.stream_iterations);
  write_experts(config, "n_routed_experts", json);
  json.set("n_shared_experts", 1).set("scoring_func", "sqrtsoftplus").set("norm_topk_prob", true);
  json.set("routed_scaling_factor", config.routed_scaling_factor).set("mlp_layer_types", std::move(mlps));
}

constexpr std::string_view kDeepseekV4GgufKeys =
    "attention.q_lora_rank attention.output_group_count attention.output_lora_rank attention.compress_ratios "
    "attention.compress_rope_freq_base attention.indexer.head_count attention.indexer.key_length "
    "attention.indexer.top_k expert_count expert_used_count expert_feed_forward_length expert_shared_count "
    "expert_weights_scale expert_weights_norm expert_gating_func swiglu_clamp_exp swiglu_clamp_shexp hash_layer_count "
    "hyper_connection.count hyper_connection.sinkhorn_iterations nextn_predict_layers embedding_length_out";
constexpr int64_t kSqrtSoftplus = 4;  // of expert_gating_func

// Layers behind the last one predict further tokens. Files from before August 2026 may count them and have none.
void leave_further_layers_out(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const int64_t further =
      file.optional_integer(prefix + "nextn_predict_layers", 0, result.num_hidden_layers).value_or(0);
  const int64_t main = result.num_hidden_layers - further;
  if (further == 0 || main == 0 || file.find(fmt::format("blk.{}.nextn.eh_proj.weight", main)) == nullptr) return;
  result.num_hidden_layers = main;
  result.layer_windows.resize(static_cast<size_t>(main));
}

// The one limit of all layers, of experts and of the one that computes every token.
double swiglu_limit_of(const io::GgufFile& file, const std::string& prefix) {
  std::optional<double> limit;
  for (const std::string& key : {prefix + "swiglu_clamp_exp", prefix + "swiglu_clamp_shexp"}) {
    const io::GgufValue* value = file.find_metadata(key);
    if (value == nullptr && limit) continue;  // as experts have
    std::vector<double> stated;
    if (value != nullptr && value->type == io::GgufType::array)
      for (const float number : file.numbers(key)) stated.push_back(number);
    else
      stated.push_back(file.number(key));
    if (stated.empty()) throw DataCorrupted("{}: '{}' is empty; expected a limit for each layer", file.path(), key);
    for (const double number : stated) {
      if (!limit) limit = number;
      if (!(number > 0) || !std::isfinite(number) || number != *limit)
        throw Unsupported("{}: '{}' has {}; only one limit above 0, of all layers and experts, is honoured: here {}",
                          file.path(), key, number, *limit);
    }
  }
  return *limit;
}

void require_gguf(const io::GgufFile& file, const std::string& key, int64_t value, int64_t honoured) {
  if (value != honoured) throw Unsupported("{}: '{}' is {}; only {} is honoured", file.path(), key, value, honoured);
}

void read_v4_gguf_experts(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  result.num_experts = file.integer(prefix + "expert_count", 1, kMaxExperts);
  result.num_experts_per_tok = file.integer(prefix + "expert_used_count", 1, kMaxExperts);
  result.moe_intermediate_size = file.integer(prefix + "expert_feed_forward_length", 1, kMaxExtent);
  result.intermediate_size = result.shared_expert_intermediate_size = result.moe_intermediate_size;
  const std::string shared = prefix + "expert_shared_count", norm = prefix + "expert_weights_norm",
                    scale = prefix + "expert_weights_scale";
  require_gguf(file, shared, file.integer(shared, 0, kMaxExperts), 1);
  require_gating(file, prefix, kSqrtSoftplus);
  if (!file.boolean(norm)) throw Unsupported("{}: '{}' is false; only true is honoured", file.path(), norm);
  result.norm_topk_prob = true;
  result.routed_scaling_factor = file.number(scale);
  if (!(result.routed_scaling_factor > 0) || !std::isfinite(result.routed_scaling_factor))
    throw DataCorrupted("{}: '{}' is {}; expected a number above 0", file.path(), scale, result.routed_scaling_factor);
  result.swiglu_limit = swiglu_limit_of(file, prefix);
  const int64_t hashed = file.integer(prefix + "hash_layer_count", 0, kMaxLayers);
  for (int64_t layer = 0; layer < std::min(hashed, result.num_hidden_layers); ++layer)
    result.hash_layers.push_back(layer);
}

// The scaling of the rotation is that of layers with rows, and has no factor. Ratios go on with those of layers that
// predict further tokens, whether the file has these or not.
void read_deepseek_v4_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const auto integer = [&](const char* key, int64_t max = kMaxExtent) { return file.integer(prefix + key, 1, max); };
  leave_further_layers_out(file, prefix, result);
  require_gguf(file, prefix + "attention.head_count_kv", result.num_key_value_heads, 1);
  require_gguf(file, prefix + "attention.value_length",
               file.optional_integer(prefix + "attention.value_length", 1, kMaxExtent).value_or(result.head_dim),
               result.head_dim);
  result.rope_style = kernels::RopeStyle::interleaved;
  if (modules::RopeScaling& scaling = result.rope_scaling; scaling.kind == modules::RopeScaling::Kind::yarn) {
    if (scaling.attention_factor.value_or(1) != 1)
      throw Unsupported("{}: '{}rope.scaling.attn_factor' is {}; only 1 is honoured", file.path(), prefix,
                        *scaling.attention_factor);
    scaling.attention_factor = 1;
  }
  if (!result.rope_divisors.empty())
    throw Unsupported("{}: 'rope_freqs.weight' divides frequencies, which models of type {} do not", file.path(),
                      result.model_type);
  result.pooled_rope_theta = file.number(prefix + "attention.compress_rope_freq_base");
  result.q_lora_rank = integer("attention.q_lora_rank");
  result.output_groups = integer("attention.output_group_count");
  result.output_rank = integer("attention.output_lora_rank");
  result.index_n_heads = integer("attention.indexer.head_count");
  result.index_head_dim = integer("attention.indexer.key_length");
  result.index_topk = integer("attention.indexer.top_k");
  result.streams = integer("hyper_connection.count");
  result.stream_iterations = integer("hyper_connection.sinkhorn_iterations");
  const std::string streams = prefix + "embedding_length_out";
  if (const auto width = file.optional_integer(streams, 1, kMaxExtent))
    require_gguf(file, streams, *width, result.streams * result.hidden_size);
  std::fill(result.layer_windows.begin(), result.layer_windows.end(), integer("attention.sliding_window"));
  result.indexed_stride = kIndexedStride;
  result.pooled_stride = kPooledStride;
  const std::string key = prefix + "attention.compress_ratios";
  const std::vector<int64_t> ratios = file.integers(key, 0, kMaxExtent);
  if (std::ssize(ratios) < result.num_hidden_layers)
    throw DataCorrupted("{}: '{}' has {} entries for {} layers", file.path(), key, ratios.size(),
                        result.num_hidden_layers);
  for (int64_t layer = 0; layer < result.num_hidden_layers; ++layer) {
    const int64_t ratio = ratios[static_cast<size_t>(layer)];
    if (!is_known_ratio(ratio))
      throw Unsupported("{}: '{}' has {} for layer {}; known are 0, {} and {}", file.path(), key, ratio, layer,
                        kIndexedStride, kPooledStride);
    result.layer_pattern += kind_of_ratio(ratio);
  }
  read_v4_gguf_experts(file, prefix, result);
}

void refuse_what_deepseek4_cannot_state(const ModelConfig& config) {
  const auto refuse = [](bool condition, const std::string& what) {
    if (condition) throw Unsupported("{}, which GGUF's deepseek4 architecture cannot state", what);
  };
  refuse(config.tie_word_embeddings, "one matrix for embeddings and logits");
  for (const auto& [kind, stride, stated] :
       {std::tuple{'I', config.indexed_stride, kIndexedStride}, {'H', config.pooled_stride, kPooledStride}})
    refuse(
        config.layer_pattern.find(kind) != std::string::npos && stride != stated,
        fmt::format("{} of {} tokens, not {}", kind == 'I' ? "rows that an indexer chooses" : "rows", stride, stated));
  for (size_t i = 0; i < config.hash_layers.size(); ++i)
    refuse(config.hash_layers[i] != static_cast<int64_t>(i),
           fmt::format("experts by token in layer {} and not in all layers before it", config.hash_layers[i]));
}

void write_deepseek_v4_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  refuse_what_deepseek4_cannot_state(config);
  const auto set = [&](const char* key, io::GgufValue value) { metadata.emplace_back(prefix + key, std::move(value)); };
  const auto add = [&](const char* key, int64_t value) {
    set(key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  const auto number = [&](const char* key, double value) {
    set(key, io::GgufValue::scalar(static_cast<float>(value)));
  };
  add("attention.head_count_kv", 1);
  add("attention.key_length", config.head_dim);
  add("attention.value_length", config.head_dim);
  add("attention.q_lora_rank", config.q_lora_rank);
  add("attention.output_group_count", config.output_groups);
  add("attention.output_lora_rank", config.output_rank);
  add("attention.indexer.head_count", config.index_n_heads);
  add("attention.indexer.key_length", config.index_head_dim);
  add("attention.indexer.top_k", config.index_topk);
  std::vector<int32_t> ratios;
  for (const char kind : config.layer_pattern)
    ratios.push_back(static_cast<int32_t>(kind == 'W' ? 0 : kind == 'I' ? kIndexedStride : kPooledStride));
  set("attention.compress_ratios", io::GgufValue::scalars(std::span<const int32_t>(ratios)));
  number("attention.compress_rope_freq_base", config.pooled_rope_theta);
  add("hyper_connection.count", config.streams);
  add("hyper_connection.sinkhorn_iterations", config.stream_iterations);
  write_experts(config, prefix, metadata);
  add("expert_shared_count", 1);
  add("expert_gating_func", kSqrtSoftplus);
  number("expert_weights_scale", config.routed_scaling_factor);
  set("expert_weights_norm", io::GgufValue::boolean(true));
  add("hash_layer_count", static_cast<int64_t>(config.hash_layers.size()));
  const std::vector<float> limits(static_cast<size_t>(config.num_hidden_layers),
                                  static_cast<float>(config.swiglu_limit));
  for (const char* key : {"swiglu_clamp_exp", "swiglu_clamp_shexp"})
    set(key, io::GgufValue::scalars(std::span<const float>(limits)));
}

std::string deepseek_v4_gguf_notice(const ModelConfig& config) {
  constexpr int64_t kStreams = 4;
  if (config.streams == kStreams) return "";
  return fmt::format("there are {} streams of hidden states; llama.cpp computes only models with {}", config.streams,
                     kStreams);
}

modules::PooledAttention::Config v4_attention_of(const ModelConfig& config, char kind) {
  modules::PooledAttention::Config attention{
      .hidden = config.hidden_size,
      .heads = config.num_attention_heads,
      .head_dim = config.head_dim,
      .query_rank = config.q_lora_rank,
      .groups = config.output_groups,
      .output_rank = config.output_rank,
      .window = largest_window(config.layer_windows),
      .scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim)),
      .norm_eps = config.rms_norm_eps,
      .rope = {.theta = config.rope_theta, .rotary_dim = config.rotary_dim, .style = config.rope_style, .last = true},
      .indexer = {}};
  if (kind == 'W') return attention;
  attention.rope.name = "rotary_emb_compress";
  attention.rope.theta = config.pooled_rope_theta;
  attention.rope.scaling = config.rope_scaling;
  attention.stride = kind == 'I' ? config.indexed_stride : config.pooled_stride;
  if (kind != 'I') return attention;
  attention.parts = 2;
  attention.indexer = {config.index_n_heads, config.index_head_dim, config.index_topk};
  return attention;
}

modules::MoeMlp::Config v4_experts_of(const ModelConfig& config, bool hashed) {
  modules::MoeMlp::Config experts = experts_of(config);
  experts.route.scoring = kernels::RouteAttrs::Scoring::sqrt_softplus;
  experts.route.epsilon = 1e-20f;
  experts.route.scale = static_cast<float>(config.routed_scaling_factor);
  experts.route.by_token = hashed;
  experts.token_table = hashed ? config.vocab_size : 0;
  experts.correction_bias = !hashed;
  experts.clamped =
      kernels::ClampedSwigluAttrs{.limit = static_cast<float>(config.swiglu_limit), .alpha = 1, .offset = 0};
  experts.shared = {.name = "shared_experts", .ffn = config.shared_expert_intermediate_size};
  return experts;
}

DecoderSpec deepseek_v4_decoder(const ModelConfig& config) {
  const double eps = config.rms_norm_eps;
  DecoderSpec spec{.vocab = config.vocab_size,
                   .hidden = config.hidden_size,
                   .norm = {"norm", eps},
                   .tied = config.tie_word_embeddings,
                   .streams = {.streams = config.streams,
                               .hidden = config.hidden_size,
                               .iterations = config.stream_iterations,
                               .eps = config.stream_eps,
                               .norm_eps = eps}};
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    spec.layers.push_back({.hidden = config.hidden_size,
                           .mixer = v4_attention_of(config, config.layer_pattern[static_cast<size_t>(layer)]),
                           .mlp = v4_experts_of(config, config.is_hashed(layer)),
                           .before_mixer = modules::NormSpec{"input_layernorm", eps},
                           .before_mlp = modules::NormSpec{"post_attention_layernorm", eps},
                           .streams = spec.streams});
  return spec;
}

// A layer whose experts are chosen, with neither pooled rows nor an indexer.
void add_v4_mtp_layer(ModelConfig& config) {
  config.layer_pattern += 'W';
  config.layer_windows.push_back(largest_window(config.layer_windows));
  ++config.num_hidden_layers;
}

// Makes a parameter from the tensor that holds it: the matrices of all output groups are one tensor there, and the
// table of experts by token has integers.
WeightRecipe v4_parameter_of(WeightRecipe tensor, const ModelConfig& config, const ParameterInfo& parameter,
                             DType integers) {
  const LayerName layer = layer_name(parameter.name);
  const Shape& shape = parameter.shape;
  if (layer.rest.starts_with("self_attn.o_a_proj."))
    return WeightRecipe::reshape(std::move(tensor), Shape{shape[0] * shape[1], shape[2]}, shape);
  if (layer.rest == "mlp.gate.tid2eid")
    return WeightRecipe::whole_numbers(std::move(tensor), config.num_experts, integers);
  return tensor;
}

// transformers' names, and the published ones, with single matrices of experts; those of GGUF files are stacks.
std::vector<WeightRecipe> deepseek_v4_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                              CheckpointFormat format) {
  constexpr std::string_view kExperts = "mlp.experts.";
  if (format == CheckpointFormat::gguf)
    return {v4_parameter_of(WeightRecipe::name(gguf_name(parameter.name, &config.family())), config, parameter,
                            DType::i32)};
  const LayerName layer = layer_name(parameter.name);
  std::vector<WeightRecipe> recipes;
  for (const bool published : {false, true}) {
    const auto tensor = [&](const std::string& name) {
      return WeightRecipe::name(published ? published_name(name) : name);
    };
    if (layer.rest.starts_with(kExperts)) {
      const std::string part(layer.rest.substr(kExperts.size()));
      const char* matrix = part.starts_with("gate_proj") ? "w1" : part.starts_with("down_proj") ? "w2" : "w3";
      std::vector<WeightRecipe> experts;
      for (int64_t e = 0; e < config.num_experts; ++e)
        experts.push_back(tensor(fmt::format("model.layers.{}.ffn.experts.{}.{}.weight", layer.number, e, matrix)));
      recipes.push_back(WeightRecipe::stack(std::move(experts)));
      continue;
    }
    recipes.push_back(
        v4_parameter_of(tensor(huggingface_name(parameter.name, config.family())), config, parameter, DType::i64));
  }
  return recipes;
}

bool may_ignore_v4(const ModelConfig& /*config*/, const std::string& tensor) {
  return tensor.starts_with("mtp.") || tensor.starts_with("model.mtp.");
}

}  // namespace

const ModelFamily& deepseek_v4_family() {
  static const ModelFamily kFamily = {.name = "deepseek_v4",
                                      .types = kDeepseekV4Types,
                                      .keys = kDeepseekV4Numbers,
                                      .latent_attention = true,
                                      .rotated_share = 64.0 / 512,
                                      .rotates_shares = true,
                                      .json_names = kDeepseekV4Keys,
                                      .yarn_states_betas = true,
                                      .only_experts = true,
                                      .gguf_keys = kDeepseekV4GgufKeys,
                                      .router_aux_loss_coef = 0.001,
                                      .read_json = read_deepseek_v4_json,
                                      .read_gguf = read_deepseek_v4_gguf,
                                      .write_json = write_deepseek_v4_json,
                                      .write_gguf = write_deepseek_v4_gguf,
                                      .gguf_notice = deepseek_v4_gguf_notice,
                                      .decoder = deepseek_v4_decoder,
                                      .gguf_names = kDeepseekV4GgufNames,
                                      .tensor_names = kDeepseekV4Tensors,
                                      .recipes = deepseek_v4_recipes,
                                      .may_ignore = may_ignore_v4,
                                      .further_layers = true,
                                      .mtp = ModelFamily::Mtp::own_module,
                                      .add_mtp_layers = add_v4_mtp_layer,
                                      .mtp_module = "mtp.0",
                                      .mtp_names = kDeepseekV4MtpNames,
                                      .gguf_mtp = false};
  return kFamily;
}

}  // namespace eadem::models
