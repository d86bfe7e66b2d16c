// SPDX-License-Identifier: Apache-2.0
//
// Gemma 4, text: norms before and after attention and MLP, of q, of k and, without weights, of v; scores have no
// factor; windows in all layers but some, the last among these. Layers without a window have heads of their own, of
// which a part rotates, and may take values from keys. The last layers may read the keys of earlier ones. Each layer
// may read an embedding of its own, and is times a number.
// Source: transformers, models/gemma4; llama.cpp, conversion/gemma.py and src/models/gemma4.cpp (facts only).
#include <algorithm>
#include <cmath>

#include "eadem/models/config/config_text.h"
#include "eadem/models/dense_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kGemma4Types[] = {{.name = "gemma4_text",
                                       .gguf_architecture = "gemma4",
                                       .python_class = "Gemma4ForCausalLM",
                                       .max_position_embeddings = 131072,
                                       .num_key_value_heads = 4,
                                       .head_dim = 256}};

constexpr GgufName kGemma4Names[] = {{"post_attention_layernorm.", "post_attention_norm."},
                                     {"pre_feedforward_layernorm.", "ffn_norm."},
                                     {"post_feedforward_layernorm.", "post_ffw_norm."},
                                     {"per_layer_input_gate.", "inp_gate."},
                                     {"per_layer_projection.", "proj."},
                                     {"post_per_layer_input_norm.", "post_norm."},
                                     {"layer_scalar", "layer_output_scale.weight"}};

constexpr double kLocalTheta = 10000, kFullTheta = 1e6, kFullShare = 0.25;
constexpr int64_t kGemma4Pattern = 6;

bool is_full(const ModelConfig& config, int64_t layer) { return config.layer_windows[static_cast<size_t>(layer)] == 0; }

// rope_parameters has an object for each kind of layer.
void read_gemma4_rope(const io::JsonReader& config, ModelConfig& result) {
  result.rope_theta = kFullTheta;
  result.local_rope_theta = kLocalTheta;
  result.full_rotated_share = kFullShare;
  const auto rope = config.optional_object("rope_parameters");
  if (!rope) return config.ignore("rope_parameters");  // null
  const auto known = [&](const io::JsonReader& object, std::string_view type) {
    if (const std::string stated = object.optional_string("rope_type").value_or("default"); stated != type)
      throw Unsupported("{}: 'rope_type' is \"{}\"; of these layers only \"{}\" is honoured", object.file(), stated,
                        type);
  };
  if (const auto full = rope->optional_object("full_attention")) {
    result.full_rotated_share = full->optional_number("partial_rotary_factor", 0.0, 1.0).value_or(1.0);
    result.rope_theta = full->optional_number("rope_theta", 1.0, 1e12).value_or(kLocalTheta);
    if (full->optional_string("rope_type").value_or("default") != "default") known(*full, "proportional");
    if (const double factor = full->optional_number("factor", 1e-6, 1e6).value_or(1.0); factor != 1)
      throw Unsupported("{}: 'factor' is {}; only 1 is honoured", full->file(), factor);
  }
  if (const auto sliding = rope->optional_object("sliding_attention")) {
    result.local_rope_theta = sliding->optional_number("rope_theta", 1.0, 1e12).value_or(kLocalTheta);
    known(*sliding, "default");
  }
}

void read_gemma4_windows(const io::JsonReader& config, ModelConfig& result) {
  const int64_t window = config.optional_integer("sliding_window", 1, kMaxExtent).value_or(512);
  if (!read_layer_types(config, result, window, "sliding_window")) set_windows(result, window, kGemma4Pattern);
  result.layer_windows.back() = 0;  // transformers forces it
}

// The heads of layers without a window: `global_head_dim` and its kin, or, as transformers writes it, an object for
// each of these layers.
void read_full_heads(const io::JsonReader& config, ModelConfig& result) {
  const int64_t head_dim = config.optional_integer("global_head_dim", 1, kMaxExtent).value_or(512);
  const auto heads = config.optional_integer("num_global_key_value_heads", 1, kMaxExtent);
  result.full_head_dim = head_dim;
  result.full_key_value_heads = result.full_values_of_keys && heads ? *heads : result.num_key_value_heads;
  const auto layers = config.optional_object("per_layer_config");
  if (!layers) return config.ignore("per_layer_config");  // null
  bool first = true;
  for (int64_t layer = 0; layer < result.num_hidden_layers; ++layer) {
    const auto own = layers->optional_object(std::to_string(layer));
    const int64_t own_dim =
        own ? own->optional_integer("head_dim", 1, kMaxExtent).value_or(result.head_dim) : result.head_dim;
    const int64_t own_heads =
        own ? own->optional_integer("num_key_value_heads", 1, kMaxExtent).value_or(result.num_key_value_heads)
            : result.num_key_value_heads;
    const bool full = is_full(result, layer);
    if (full && first) {
      result.full_head_dim = own_dim;
      result.full_key_value_heads = own_heads;
      first = false;
    }
    const int64_t dim = full ? result.full_head_dim : result.head_dim,
                  kv_heads = full ? result.full_key_value_heads : result.num_key_value_heads;
    if (own_dim != dim || own_heads != kv_heads)
      throw Unsupported(
          "{}: 'per_layer_config' gives layer {} {} heads of keys of {}, another of its kind {} of {}; layers of a "
          "kind "
          "are alike here",
          config.file(), layer, own_heads, own_dim, kv_heads, dim);
  }
}

void read_gemma4_json(const io::JsonReader& config, ModelConfig& result) {
  const auto refuse_true = [&](const char* key) {
    if (config.optional_boolean(key).value_or(false))
      throw Unsupported("{}: '{}' is true; only false is honoured for {}", config.file(), key, result.model_type);
  };
  read_gemma4_rope(config, result);
  read_gemma4_windows(config, result);
  result.attention_bias = config.optional_boolean("attention_bias").value_or(false);
  result.attention_out_bias = result.attention_bias;
  result.qk_norm = true;
  result.logit_softcap = config.optional_number("final_logit_softcapping", 1e-6, 1e6).value_or(0);
  result.full_values_of_keys = config.optional_boolean("attention_k_eq_v").value_or(false);
  read_full_heads(config, result);
  if (const auto kind = config.optional_string("use_bidirectional_attention"); kind && *kind == "all")
    throw Unsupported("{}: 'use_bidirectional_attention' is \"all\"; texts are read causally only", config.file());
  refuse_true("enable_moe_block");
  for (const char* key : {"num_experts", "top_k_experts", "moe_intermediate_size"})
    config.ignore(key, "is of experts, which enable_moe_block switches off");
  result.num_kv_shared_layers =
      config.optional_integer("num_kv_shared_layers", 0, result.num_hidden_layers - 1).value_or(0);
  result.use_double_wide_mlp = config.optional_boolean("use_double_wide_mlp").value_or(false);
  const bool is_null =
      config.value().find("hidden_size_per_layer_input") != nullptr && !config.has("hidden_size_per_layer_input");
  result.hidden_size_per_layer_input =
      config.optional_integer("hidden_size_per_layer_input", 0, kMaxExtent).value_or(is_null ? 0 : 256);
  const int64_t vocab = config.optional_integer("vocab_size_per_layer_input", 1, kMaxExtent).value_or(262144);
  if (result.hidden_size_per_layer_input == 0) return;
  result.vocab_size_per_layer_input = vocab;
  if (vocab < result.vocab_size)
    throw Unsupported("{}: 'vocab_size_per_layer_input' is {}, below the vocabulary of {}", config.file(), vocab,
                      result.vocab_size);
}

// Each kind of layer that shares keys needs one that has them.
void check_gemma4_json(const ModelConfig& config) {
  refuse_if(config, config.attention_out_bias != config.attention_bias, "biases of q, k and v without one of o");
  refuse_if(config, config.mlp_bias, "biases of the MLP");
  refuse_if(config, !config.qk_norm, "q and k without norms");
  refuse_several_windows(config);
}

void write_gemma4_json(const ModelConfig& config, io::JsonValue& json) {
  json.set("rope_parameters",
           io::JsonValue::object()
               .set("full_attention", io::JsonValue::object()
                                          .set("rope_type", "proportional")
                                          .set("partial_rotary_factor", config.full_rotated_share)
                                          .set("rope_theta", config.rope_theta))
               .set("sliding_attention",
                    io::JsonValue::object().set("rope_type", "default").set("rope_theta", config.local_rope_theta)));
  json.set("attention_bias", config.attention_bias);
  json.set("final_logit_softcapping",
           config.logit_softcap > 0 ? io::JsonValue(config.logit_softcap) : io::JsonValue(nullptr));
  if (const int64_t window = largest_window(config.layer_windows); window > 0) json.set("sliding_window", window);
  json.set("layer_types", layer_types_of(config));
  json.set("attention_k_eq_v", config.full_values_of_keys);
  io::JsonValue layers = io::JsonValue::object();
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    if (is_full(config, layer))
      layers.set(std::to_string(layer), io::JsonValue::object()
                                            .set("head_dim", config.full_head_dim)
                                            .set("num_key_value_heads", config.full_key_value_heads));
  json.set("per_layer_config", std::move(layers));
  json.set("num_kv_shared_layers", config.num_kv_shared_layers).set("use_double_wide_mlp", config.use_double_wide_mlp);
  json.set("hidden_size_per_layer_input", config.hidden_size_per_layer_input);
  if (config.hidden_size_per_layer_input > 0) json.set("vocab_size_per_layer_input", config.vocab_size_per_layer_input);
}

// A number of each layer, which is one for all in files where layers do not differ.
std::vector<int64_t> by_layer(const io::GgufFile& file, const std::string& key, int64_t layers) {
  if (const io::GgufValue* value = file.find_metadata(key); value != nullptr && value->type != io::GgufType::array)
    return std::vector<int64_t>(static_cast<size_t>(layers), file.integer(key, 1, kMaxExtent));
  std::vector<int64_t> counts = file.integers(key, 1, kMaxExtent);
  if (std::ssize(counts) != layers)
    throw DataCorrupted("{}: '{}' has {} numbers for {} layers", file.path(), key, counts.size(), layers);
  return counts;
}

// Counts that differ between layers: of heads of keys by the kind of layer, of the MLP's width by what shares keys.
void read_gemma4_counts(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const int64_t layers = result.num_hidden_layers, first_shared = layers - result.num_kv_shared_layers;
  const std::vector<int64_t> widths = by_layer(file, prefix + "feed_forward_length", layers),
                             heads = by_layer(file, prefix + "attention.head_count_kv", layers);
  result.intermediate_size = widths[0];
  result.use_double_wide_mlp = widths.back() == 2 * widths[0];
  for (int64_t layer = 0; layer < layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    const bool full = is_full(result, layer), shares = layer >= first_shared;
    (full ? result.full_key_value_heads : result.num_key_value_heads) = heads[at];
    if (full && !shares) result.full_values_of_keys = file.find(fmt::format("blk.{}.attn_v.weight", layer)) == nullptr;
    if (widths[at] != widths[0] * (result.use_double_wide_mlp && shares ? 2 : 1))
      throw Unsupported("{}: the MLP of layer {} is {} wide, that of layer 0 {}", file.path(), layer, widths[at],
                        widths[0]);
  }
}

void read_gemma4_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const auto optional = [&](const char* key) { return file.optional_integer(prefix + key, 0, kMaxExtent).value_or(0); };
  const int64_t layers = result.num_hidden_layers;
  const std::vector<bool> windowed = file.booleans(prefix + "attention.sliding_window_pattern");
  if (std::ssize(windowed) != layers)
    throw DataCorrupted("{}: '{}attention.sliding_window_pattern' has {} entries for {} layers", file.path(), prefix,
                        windowed.size(), layers);
  for (size_t layer = 0; layer < windowed.size(); ++layer)
    if (!windowed[layer]) result.layer_windows[layer] = 0;
  if (optional("expert_count") > 0) throw Unsupported("{}: experts beside the MLP are not computed", file.path());
  result.qk_norm = true;
  result.full_head_dim = result.head_dim;
  result.head_dim = result.rotary_dim = file.integer(prefix + "attention.key_length_swa", 1, kMaxExtent);
  result.local_rope_theta = file.optional_number(prefix + "rope.freq_base_swa").value_or(kLocalTheta);
  const auto rotated = std::count_if(result.rope_divisors.begin(), result.rope_divisors.end(),
                                     [](double divisor) { return divisor < 1e20; });
  result.full_rotated_share =
      result.rope_divisors.empty() ? 1.0 : static_cast<double>(2 * rotated) / static_cast<double>(result.full_head_dim);
  result.rope_divisors.clear();
  result.num_kv_shared_layers = optional("attention.shared_kv_layers");
  if (result.num_kv_shared_layers >= layers)
    throw DataCorrupted("{}: {} of {} layers share keys", file.path(), result.num_kv_shared_layers, layers);
  read_gemma4_counts(file, prefix, result);
  result.logit_softcap = file.optional_number(prefix + "final_logit_softcapping").value_or(0);
  result.hidden_size_per_layer_input = optional("embedding_length_per_layer_input");
  if (result.hidden_size_per_layer_input == 0) return;
  const io::WeightInfo* table = file.find("per_layer_token_embd.weight");
  if (table == nullptr || table->shape.rank() != 2)
    throw DataCorrupted("{}: no matrix 'per_layer_token_embd.weight'", file.path());
  result.vocab_size_per_layer_input = table->shape[0];
}

void write_gemma4_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  if (config.attention_bias) throw Unsupported("biases of attention, which GGUF's gemma4 architecture cannot state");
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  std::vector<int32_t> widths, heads;
  std::vector<bool> windowed;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const bool shares = layer >= config.num_hidden_layers - config.num_kv_shared_layers, full = is_full(config, layer);
    widths.push_back(static_cast<int32_t>(config.intermediate_size * (config.use_double_wide_mlp && shares ? 2 : 1)));
    heads.push_back(static_cast<int32_t>(full ? config.full_key_value_heads : config.num_key_value_heads));
    windowed.push_back(!full);
  }
  metadata.emplace_back(prefix + "feed_forward_length", io::GgufValue::scalars(std::span<const int32_t>(widths)));
  metadata.emplace_back(prefix + "attention.head_count_kv", io::GgufValue::scalars(std::span<const int32_t>(heads)));
  metadata.emplace_back(prefix + "attention.sliding_window_pattern", io::GgufValue::booleans(windowed));
  add("attention.key_length_swa", config.head_dim);
  add("attention.value_length_swa", config.head_dim);
  add("rope.dimension_count_swa", config.head_dim);
  add("attention.shared_kv_layers", config.num_kv_shared_layers);
  add("embedding_length_per_layer_input", config.hidden_size_per_layer_input);
  const auto number = [&](const char* key, double value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<float>(value)));
  };
  number("rope.freq_base_swa", config.local_rope_theta);
  if (config.logit_softcap > 0) number("final_logit_softcapping", config.logit_softcap);
}

// The layer whose keys a layer reads, the last of its kind before those that share; -1: its own.
int keys_of(const ModelConfig& config, int64_t layer) {
  const int64_t first_shared = config.num_hidden_layers - config.num_kv_shared_layers;
  if (layer < first_shared) return -1;
  for (int64_t owner = first_shared - 1; owner >= 0; --owner)
    if (is_full(config, owner) == is_full(config, layer)) return static_cast<int>(owner);
  throw Unsupported("layer {} shares the keys of no earlier layer of its kind: {} of {} layers share", layer,
                    config.num_kv_shared_layers, config.num_hidden_layers);
}

// Pairs beyond the part that rotates have the frequency 0.
modules::RopeConfig gemma4_rope(const ModelConfig& config, bool full) {
  if (!full) return {.name = "rotary_emb_local", .theta = config.local_rope_theta, .rotary_dim = config.head_dim};
  modules::RopeConfig rope{.theta = config.rope_theta, .rotary_dim = config.full_head_dim};
  const auto rotated = static_cast<int64_t>(config.full_rotated_share * static_cast<double>(config.full_head_dim) / 2);
  for (int64_t pair = 0; pair < config.full_head_dim / 2; ++pair)
    rope.divisors.push_back(pair < rotated ? 1.0 : HUGE_VAL);
  return rope;
}

DecoderSpec gemma4_decoder(const ModelConfig& config) {
  const double eps = config.rms_norm_eps;
  DecoderSpec spec = dense_decoder(config, {.before_mixer = "input_layernorm",
                                            .after_mixer = "post_attention_layernorm",
                                            .before_mlp = "pre_feedforward_layernorm",
                                            .after_mlp = "post_feedforward_layernorm"});
  spec.embedding_scale = std::sqrt(static_cast<double>(config.hidden_size));
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    modules::LayerSpec& own = spec.layers[static_cast<size_t>(layer)];
    const bool full = is_full(config, layer);
    auto& attention = std::get<modules::CausalAttention::Config>(own.mixer);
    attention.scale = 1;
    attention.v_norm_eps = eps;
    attention.rope = gemma4_rope(config, full);
    attention.keys_of = keys_of(config, layer);
    if (full) {
      attention.head_dim = config.full_head_dim;
      attention.kv_heads = config.full_key_value_heads;
      attention.values_of_keys = config.full_values_of_keys;
    }
    if (config.use_double_wide_mlp && attention.keys_of >= 0) std::get<modules::DenseMlp::Config>(own.mlp).ffn *= 2;
    if (config.hidden_size_per_layer_input > 0)
      own.per_layer_input = modules::PerLayerInput::Config{.hidden = config.hidden_size,
                                                           .size = config.hidden_size_per_layer_input,
                                                           .vocab = config.vocab_size_per_layer_input,
                                                           .activation = config.hidden_act,
                                                           .norm_eps = eps};
    own.scalar = true;
  }
  return spec;
}

// The embeddings of all layers stand side by side in one matrix, and their projections below each other in another.
std::vector<WeightRecipe> gemma4_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                         CheckpointFormat format) {
  const LayerName name = layer_name(parameter.name);
  const bool gguf = format == CheckpointFormat::gguf;
  const int64_t size = config.hidden_size_per_layer_input, all = size * config.num_hidden_layers;
  const auto part = [&](const char* tensor, int axis) {
    return WeightRecipe::slice(tensor, axis, size * std::stoll(name.number), size, all);
  };
  if (name.rest == "per_layer_embedding.weight")
    return {part(gguf ? "per_layer_token_embd.weight" : "model.embed_tokens_per_layer.weight", 1)};
  if (name.rest == "per_layer_model_projection.weight")
    return {part(gguf ? "per_layer_model_proj.weight" : "model.per_layer_model_projection.weight", 0)};
  if (gguf && parameter.name == modules::PerLayerInput::kPerLayerNorm)
    return {WeightRecipe::name("per_layer_proj_norm.weight")};
  return {};
}

// Published files have keys and values of layers that share others.
constexpr std::string_view kGemma4Ignored[] = {"self_attn.k_proj.weight", "self_attn.v_proj.weight",
                                               "self_attn.k_norm.weight", "attn_k.weight",
                                               "attn_v.weight",           "attn_k_norm.weight"};

}  // namespace

const ModelFamily& gemma4_family() {
  static const ModelFamily kFamily = {.name = "gemma4",
                                      .types = kGemma4Types,
                                      .activation_key = "hidden_activation",
                                      .activation = "gelu_pytorch_tanh",
                                      .tied = true,
                                      .gguf_keys =
                                          "attention.key_length_swa attention.value_length_swa "
                                          "rope.dimension_count_swa rope.freq_base_swa attention.shared_kv_layers "
                                          "attention.sliding_window_pattern embedding_length_per_layer_input "
                                          "final_logit_softcapping expert_count",
                                      .gguf_counts_by_layer = true,
                                      .gguf_counts_differ = true,
                                      .read_json = read_gemma4_json,
                                      .read_gguf = read_gemma4_gguf,
                                      .write_json = write_gemma4_json,
                                      .check_json = check_gemma4_json,
                                      .write_gguf = write_gemma4_gguf,
                                      .decoder = gemma4_decoder,
                                      .gguf_names = kGemma4Names,
                                      .ignored_tensors = kGemma4Ignored,
                                      .recipes = gemma4_recipes};
  return kFamily;
}

}  // namespace eadem::models
