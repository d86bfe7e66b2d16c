// SPDX-License-Identifier: Apache-2.0
//
// Gemma 4, text: Gemma 3's norms with weights w; layers of full attention have heads of their own size, whose keys may
// be their values; the last layers may read the keys and values of earlier ones; each layer may read an input of its
// own, and may have experts beside its MLP.
// Source: transformers, models/gemma4; llama.cpp, conversion/gemma.py and src/models/gemma4.cpp (facts only).
#include <algorithm>
#include <charconv>
#include <cmath>
#include <tuple>

#include "eadem/models/decoders/dense_decoder.h"
#include "eadem/models/decoders/moe_decoder.h"

namespace eadem::models {

namespace {

constexpr ModelType kGemma4Types[] = {{"gemma4_text", "gemma4", "Gemma4ForCausalLM", 131072, 4, 256}};
constexpr double kGemma4SlidingTheta = 10000, kGemma4FullTheta = 1e6, kGemma4Share = 0.25;
constexpr int64_t kGemma4Pattern = 6, kGemma4Window = 512, kGemma4FullHeadDim = 512;
constexpr int64_t kGemma4InputSize = 256, kGemma4InputVocab = 262144;
// The divisor of the frequencies that do not rotate, in GGUF files.
constexpr double kNoRotation = 1e30;

constexpr GgufName kGemma4GgufNames[] = {{"post_attention_layernorm.", "post_attention_norm."},
                                         {"pre_feedforward_layernorm.", "ffn_norm."},
                                         {"pre_feedforward_layernorm_2.", "pre_ffw_norm_2."},
                                         {"post_feedforward_layernorm.", "post_ffw_norm."},
                                         {"post_feedforward_layernorm_1.", "post_ffw_norm_1."},
                                         {"post_feedforward_layernorm_2.", "post_ffw_norm_2."},
                                         {"per_layer_input_gate.", "inp_gate."},
                                         {"per_layer_projection.", "proj."},
                                         {"post_per_layer_input_norm.", "post_norm."},
                                         {"layer_scalar", "layer_output_scale.weight"},
                                         {"moe.gate.", "ffn_gate_inp."},
                                         {"moe.per_expert_scale", "ffn_down_exps.scale"},
                                         {"moe.experts.down_proj.", "ffn_down_exps."}};
constexpr OwnName kGemma4TensorNames[] = {{"moe.gate.weight", "router.proj.weight"},
                                          {"moe.gate.scale", "router.scale"},
                                          {"moe.per_expert_scale", "router.per_expert_scale"},
                                          {"moe.experts.down_proj.weight", "experts.down_proj"}};

bool is_full(const ModelConfig& config, int64_t layer) { return config.layer_windows[static_cast<size_t>(layer)] == 0; }

int64_t first_shared_layer(const ModelConfig& config) { return config.num_hidden_layers - config.num_kv_shared_layers; }

// The layer whose keys and values a layer reads: the last one of its kind that does not share.
std::optional<int> lender_of(const ModelConfig& config, int64_t layer) {
  const int64_t first = first_shared_layer(config);
  if (layer < first) return std::nullopt;
  for (int64_t lender = first; lender-- > 0;)
    if (is_full(config, lender) == is_full(config, layer)) return static_cast<int>(lender);
  return -1;
}

// ---- config.json

void set_gemma4_layers(const io::JsonReader& config, ModelConfig& result) {
  const auto window = config.optional_integer("sliding_window", 1, kMaxExtent).value_or(kGemma4Window);
  if (!read_layer_types(config, result, window, "sliding_window")) {
    config.ignore("layer_types");  // null
    set_windows(result, window, kGemma4Pattern);
  }
  result.layer_windows.back() = 0;  // as transformers does, whatever the type
}

// per_layer_config has what layers of full attention have in the place of head_dim and num_key_value_heads; before
// transformers 5 had it, keys of the config said the same.
void read_full_heads(const io::JsonReader& config, ModelConfig& result) {
  const auto head_dim = config.optional_integer("global_head_dim", 1, kMaxHeadDim).value_or(kGemma4FullHeadDim);
  const auto kv_heads = config.optional_integer("num_global_key_value_heads", 1, 65536);
  result.global_head_dim = head_dim;
  result.num_global_key_value_heads =
      result.keys_are_values ? kv_heads.value_or(result.num_key_value_heads) : result.num_key_value_heads;
  const auto layers = config.optional_object("per_layer_config");
  if (!layers) return;
  std::vector<std::pair<int64_t, int64_t>> heads(static_cast<size_t>(result.num_hidden_layers),
                                                 {result.head_dim, result.num_key_value_heads});
  for (const auto& [name, own] : layers->members()) {
    int64_t layer = -1;
    const auto parsed = std::from_chars(name.data(), name.data() + name.size(), layer);
    if (parsed.ptr != name.data() + name.size() || layer < 0 || layer >= result.num_hidden_layers)
      layers->fail(name, fmt::format("a number of the {} layers", result.num_hidden_layers));
    auto& [dim, kv] = heads[static_cast<size_t>(layer)];
    dim = own.optional_integer("head_dim", 1, kMaxHeadDim).value_or(dim);
    kv = own.optional_integer("num_key_value_heads", 1, 65536).value_or(kv);
  }
  std::tie(result.global_head_dim, result.num_global_key_value_heads) = heads.back();  // the last layer is a full one
  for (int64_t layer = 0; layer < result.num_hidden_layers; ++layer) {
    const auto [dim, kv] = heads[static_cast<size_t>(layer)];
    const bool full = is_full(result, layer);
    const int64_t usual_dim = full ? result.global_head_dim : result.head_dim,
                  usual_kv = full ? result.num_global_key_value_heads : result.num_key_value_heads;
    if (dim != usual_dim || kv != usual_kv)
      throw Unsupported(
          "{}: 'per_layer_config' gives layer {} {} key-value heads of {}, and other layers of its type {} of {}",
          config.file(), layer, kv, dim, usual_kv, usual_dim);
  }
}

// The object of layers of full attention, whose pairs rotate in part.
void read_full_rope(const io::JsonReader& rope, ModelConfig& result) {
  const std::string type = rope.optional_string("rope_type").value_or("default");
  result.rope_theta = rope.optional_number("rope_theta", 1.0, 1e12).value_or(10000.0);
  const double share = rope.optional_number("partial_rotary_factor", 0.0, 1.0).value_or(1.0);
  const double factor = rope.optional_number("factor", 1.0, 1e6).value_or(1.0);
  const bool proportional = type == "proportional";
  if (!proportional && (type != "default" || share != 1 || factor != 1))
    throw Unsupported(
        "{}: rope of type \"{}\" in layers of full attention; known are proportional and default, of all dimensions",
        rope.file(), type);
  result.rotated_pairs = static_cast<int64_t>(share * static_cast<double>(result.global_head_dim) / 2);
  if (factor != 1) result.rope_scaling = {.kind = modules::RopeScaling::Kind::linear, .factor = factor};
}

void read_gemma4_rope(const io::JsonReader& config, ModelConfig& result) {
  result.rope_theta = kGemma4FullTheta;
  result.local_rope_theta = kGemma4SlidingTheta;
  result.rotated_pairs = static_cast<int64_t>(kGemma4Share * static_cast<double>(result.global_head_dim) / 2);
  const auto rope = config.optional_object("rope_parameters");
  if (!rope) return;
  if (const auto full = rope->optional_object("full_attention")) read_full_rope(*full, result);
  read_local_rope(*rope, result);
}

void read_gemma4_experts(const io::JsonReader& config, ModelConfig& result) {
  if (!config.optional_boolean("enable_moe_block").value_or(false)) {
    for (const char* key : {"num_experts", "top_k_experts", "moe_intermediate_size"})
      config.ignore(key, "is for experts, which enable_moe_block switches off");
    return;
  }
  result.num_experts = config.integer("num_experts", 1, kMaxExperts);
  result.num_experts_per_tok = config.integer("top_k_experts", 1, kMaxExperts);
  result.moe_intermediate_size = config.integer("moe_intermediate_size", 1, kMaxExtent);
  result.norm_topk_prob = true;
}

void read_layer_inputs(const io::JsonReader& config, ModelConfig& result) {
  const bool absent = config.value().find("hidden_size_per_layer_input") == nullptr;
  result.layer_input_size =
      config.optional_integer("hidden_size_per_layer_input", 0, kMaxExtent).value_or(absent ? kGemma4InputSize : 0);
  if (result.layer_input_size > 0)
    result.layer_input_vocab =
        config.optional_integer("vocab_size_per_layer_input", 1, kMaxExtent).value_or(kGemma4InputVocab);
  else
    config.ignore("vocab_size_per_layer_input",
                  "is for inputs of layers, which hidden_size_per_layer_input switches off");
}

// What a configuration must have, wherever it comes from.
void check_gemma4(const std::string& source, const ModelConfig& config) {
  if (config.global_head_dim < 1 || config.num_global_key_value_heads < 1)
    throw InvalidArgument("{}: full layers have {} key-value heads of {}", source, config.num_global_key_value_heads,
                          config.global_head_dim);
  if (config.num_kv_shared_layers >= config.num_hidden_layers)
    throw DataCorrupted("{}: {} of {} layers share keys and values; expected fewer", source,
                        config.num_kv_shared_layers, config.num_hidden_layers);
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    if (lender_of(config, layer) == -1)
      throw DataCorrupted("{}: layer {} shares keys and values, and none of the first {} layers is of its type", source,
                          layer, first_shared_layer(config));
  if (config.num_attention_heads % config.num_global_key_value_heads != 0)
    throw DataCorrupted("{}: {} attention heads do not divide into {} key-value heads of full layers", source,
                        config.num_attention_heads, config.num_global_key_value_heads);
  if (config.global_head_dim % 2 != 0)
    throw DataCorrupted("{}: heads of full layers have {} dimensions; expected an even number", source,
                        config.global_head_dim);
  if (config.rotated_pairs == 0)
    throw Unsupported("{}: no pair of the {} dimensions of full layers rotates; expected one or more", source,
                      config.global_head_dim);
  if (config.rotary_dim != config.head_dim)
    throw Unsupported("{}: {} of {} dimensions of a head are rotated in layers with a window; only all are honoured",
                      source, config.rotary_dim, config.head_dim);
  if (config.layer_input_size > 0 && config.layer_input_vocab < config.vocab_size)
    throw Unsupported("{}: inputs of layers are there for {} of {} tokens", source, config.layer_input_vocab,
                      config.vocab_size);
  if (static_cast<double>(config.num_attention_heads) * static_cast<double>(config.global_head_dim) *
          static_cast<double>(config.hidden_size) >
      1e13)
    throw DataCorrupted("{}: {} heads of {} for {} hidden values", source, config.num_attention_heads,
                        config.global_head_dim, config.hidden_size);
  if (static_cast<double>(config.layer_input_vocab) * static_cast<double>(config.layer_input_size) *
          static_cast<double>(config.num_hidden_layers) >
      1e13)
    throw DataCorrupted("{}: inputs of {} numbers for {} layers and {} tokens", source, config.layer_input_size,
                        config.num_hidden_layers, config.layer_input_vocab);
}

void read_gemma4_json(const io::JsonReader& config, ModelConfig& result) {
  read_attention_bias(config, result, false, true);
  result.qk_norm = true;
  result.logit_softcap = config.optional_number("final_logit_softcapping", 1e-6, 1e9).value_or(0);
  if (const auto both = config.optional_string("use_bidirectional_attention"); both && *both != "vision")
    throw Unsupported(
        "{}: 'use_bidirectional_attention' is \"{}\"; only null and \"vision\" are honoured, for a text is causal",
        config.file(), *both);
  set_gemma4_layers(config, result);
  result.keys_are_values = config.optional_boolean("attention_k_eq_v").value_or(false);
  read_full_heads(config, result);
  read_gemma4_rope(config, result);
  result.num_kv_shared_layers = config.optional_integer("num_kv_shared_layers", 0, kMaxLayers).value_or(0);
  result.double_wide_mlp = config.optional_boolean("use_double_wide_mlp").value_or(false);
  read_layer_inputs(config, result);
  read_gemma4_experts(config, result);
  check_gemma4(config.file(), result);
}

// The partial_rotary_factor from which readers get the pairs of full layers: they truncate, and the product must not
// fall short by a rounding.
double full_share(const ModelConfig& config) {
  const auto dim = static_cast<double>(config.global_head_dim);
  const double share = 2 * static_cast<double>(config.rotated_pairs) / dim;
  return static_cast<int64_t>(share * dim / 2) < config.rotated_pairs ? std::nextafter(share, 1.0) : share;
}

void write_gemma4_json(const ModelConfig& config, io::JsonValue& json) {
  json.set("attention_bias", config.attention_bias);
  json.set("final_logit_softcapping", config.logit_softcap > 0 ? io::JsonValue(config.logit_softcap) : io::JsonValue());
  if (const int64_t window = largest_window(config.layer_windows); window > 0) json.set("sliding_window", window);
  json.set("layer_types", layer_types_of(config));
  json.set("attention_k_eq_v", config.keys_are_values);
  // Both spellings: the second one is that of transformers 5.
  json.set("global_head_dim", config.global_head_dim);
  const bool own_kv = config.num_global_key_value_heads != config.num_key_value_heads;
  if (own_kv) json.set("num_global_key_value_heads", config.num_global_key_value_heads);
  if (own_kv || config.global_head_dim != config.head_dim) {
    io::JsonValue heads = io::JsonValue::object(), layers = io::JsonValue::object();
    if (config.global_head_dim != config.head_dim) heads.set("head_dim", config.global_head_dim);
    if (own_kv) heads.set("num_key_value_heads", config.num_global_key_value_heads);
    for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
      if (is_full(config, layer)) layers.set(std::to_string(layer), heads);
    json.set("per_layer_config", std::move(layers));
  }
  io::JsonValue full = io::JsonValue::object(), rope = io::JsonValue::object();
  full.set("rope_type", "proportional").set("rope_theta", config.rope_theta);
  full.set("partial_rotary_factor", full_share(config));
  if (config.rope_scaling.kind != modules::RopeScaling::Kind::none) full.set("factor", config.rope_scaling.factor);
  rope.set("full_attention", std::move(full));
  rope.set("sliding_attention", rope_object(config.local_rope_scaling, config.local_rope_theta));
  json.set("rope_parameters", std::move(rope));
  json.set("num_kv_shared_layers", config.num_kv_shared_layers).set("use_double_wide_mlp", config.double_wide_mlp);
  json.set("hidden_size_per_layer_input", config.layer_input_size);
  if (config.layer_input_size > 0) json.set("vocab_size_per_layer_input", config.layer_input_vocab);
  json.set("enable_moe_block", config.num_experts > 0);
  if (config.num_experts == 0) return;
  json.set("num_experts", config.num_experts).set("top_k_experts", config.num_experts_per_tok);
  json.set("moe_intermediate_size", config.moe_intermediate_size);
}

// ---- GGUF

constexpr std::string_view kGemma4GgufKeys =
    "attention.key_length_swa attention.value_length_swa attention.shared_kv_layers attention.sliding_window_pattern "
    "rope.freq_base_swa rope.dimension_count_swa embedding_length_per_layer_input final_logit_softcapping "
    "expert_count expert_used_count expert_feed_forward_length";

// A number from `least` on for each layer, from an array of them or one for all.
std::vector<int64_t> layer_numbers(const io::GgufFile& file, const std::string& key, int64_t layers, int64_t least) {
  const io::GgufValue* value = file.find_metadata(key);
  if (value == nullptr || value->type != io::GgufType::array)
    return std::vector<int64_t>(static_cast<size_t>(layers), file.integer(key, least, kMaxExtent));
  std::vector<int64_t> numbers;
  const auto& array = std::get<io::GgufArray>(value->data);
  if (array.element_type == io::GgufType::boolean)
    for (const char truth : array.scalars) numbers.push_back(truth != 0);
  else
    numbers = file.integers(key, least, kMaxExtent);
  if (static_cast<int64_t>(numbers.size()) != layers)
    throw DataCorrupted("{}: '{}' has {} entries for {} layers", file.path(), key, numbers.size(), layers);
  return numbers;
}

// Throws Unsupported unless every layer has the number that `expected` gives for it.
template <typename Expected>
void require_layer_numbers(const io::GgufFile& file, const std::string& key, int64_t layers, Expected&& expected) {
  const std::vector<int64_t> stated = layer_numbers(file, key, layers, 1);
  for (int64_t layer = 0; layer < layers; ++layer)
    if (const int64_t own = stated[static_cast<size_t>(layer)]; own != expected(layer))
      throw Unsupported("{}: '{}' is {} in layer {}; expected {}, as other layers of its type have", file.path(), key,
                        own, layer, expected(layer));
}

// Full layers rotate the pairs whose divisor is 1.
int64_t rotated_pairs_of(const io::GgufFile& file, const ModelConfig& config) {
  const std::vector<double>& divisors = config.rope_divisors;
  if (divisors.empty())
    throw DataCorrupted("{}: no tensor 'rope_freqs.weight', which says what rotates in full layers", file.path());
  const auto pairs = std::find_if(divisors.begin(), divisors.end(), [](double d) { return d != 1; }) - divisors.begin();
  if (static_cast<int64_t>(divisors.size()) != config.global_head_dim / 2 || pairs == 0 ||
      std::any_of(divisors.begin() + pairs, divisors.end(), [](double d) { return d < kNoRotation / 10; }))
    throw Unsupported("{}: 'rope_freqs.weight' is not {} divisors, first of 1 and then of {}", file.path(),
                      config.global_head_dim / 2, kNoRotation);
  return pairs;
}

void read_gemma4_gguf_layers(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const int64_t layers = result.num_hidden_layers, window = result.layer_windows[0];
  const std::vector<int64_t> windowed = layer_numbers(file, prefix + "attention.sliding_window_pattern", layers, 0);
  for (int64_t layer = 0; layer < layers; ++layer)
    result.layer_windows[static_cast<size_t>(layer)] = windowed[static_cast<size_t>(layer)] != 0 ? window : 0;
  if (window == 0 && std::find(windowed.begin(), windowed.end(), 1) != windowed.end())
    throw Unsupported("{}: '{}attention.sliding_window' is 0 or absent, and layers have windows", file.path(), prefix);
  if (!is_full(result, layers - 1))
    throw Unsupported("{}: the last layer has a window; only full attention is honoured there", file.path());
  result.num_kv_shared_layers = file.optional_integer(prefix + "attention.shared_kv_layers", 0, kMaxLayers).value_or(0);

  const std::string kv_key = prefix + "attention.head_count_kv", ffn_key = prefix + "feed_forward_length";
  const std::vector<int64_t> kv = layer_numbers(file, kv_key, layers, 1), ffn = layer_numbers(file, ffn_key, layers, 1);
  result.num_global_key_value_heads = result.num_key_value_heads = kv.back();
  for (int64_t layer = layers; layer-- > 0;)
    if (!is_full(result, layer)) result.num_key_value_heads = kv[static_cast<size_t>(layer)];
  require_layer_numbers(file, kv_key, layers, [&](int64_t layer) {
    return is_full(result, layer) ? result.num_global_key_value_heads : result.num_key_value_heads;
  });
  result.intermediate_size = ffn[0];
  result.double_wide_mlp = result.num_kv_shared_layers > 0 && ffn.back() != ffn[0];
  require_layer_numbers(file, ffn_key, layers, [&](int64_t layer) {
    return ffn[0] * (result.double_wide_mlp && layer >= first_shared_layer(result) ? 2 : 1);
  });
}

void read_gemma4_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  result.qk_norm = true;
  result.global_head_dim = result.head_dim;
  const auto width = [&](const char* key, int64_t if_absent) {
    return file.optional_integer(prefix + key, 1, kMaxHeadDim).value_or(if_absent);
  };
  result.head_dim = width("attention.key_length_swa", result.global_head_dim);
  if (const int64_t values = width("attention.value_length_swa", result.head_dim); values != result.head_dim)
    throw Unsupported("{}: '{}attention.value_length_swa' is {} but keys have {}", file.path(), prefix, values,
                      result.head_dim);
  if (result.rotary_dim != result.global_head_dim)
    throw Unsupported("{}: '{}rope.dimension_count' is {}; expected {}, as heads of full layers have", file.path(),
                      prefix, result.rotary_dim, result.global_head_dim);
  result.rotary_dim = width("rope.dimension_count_swa", result.head_dim);
  result.rope_theta = file.number(prefix + "rope.freq_base");
  result.local_rope_theta = file.number(prefix + "rope.freq_base_swa");
  if (result.rope_scaling.kind != modules::RopeScaling::Kind::none)
    throw Unsupported("{}: '{}rope.scaling.type' is there; only none is honoured", file.path(), prefix);
  result.rotated_pairs = rotated_pairs_of(file, result);
  result.rope_divisors.clear();
  read_gemma4_gguf_layers(file, prefix, result);
  const auto full =
      std::find(result.layer_windows.begin(), result.layer_windows.end(), 0) - result.layer_windows.begin();
  result.keys_are_values = file.find(fmt::format("blk.{}.attn_v.weight", full)) == nullptr;
  result.logit_softcap = file.optional_number(prefix + "final_logit_softcapping").value_or(0);
  result.layer_input_size =
      file.optional_integer(prefix + "embedding_length_per_layer_input", 0, kMaxExtent).value_or(0);
  if (result.layer_input_size > 0) {
    const io::WeightInfo* table = file.find("per_layer_token_embd.weight");
    if (table == nullptr || table->shape.rank() != 2)
      throw DataCorrupted("{}: no matrix 'per_layer_token_embd.weight'", file.path());
    result.layer_input_vocab = table->shape[0];
  }
  if (file.optional_integer(prefix + "expert_count", 0, kMaxExperts).value_or(0) > 0) {
    result.num_experts = file.integer(prefix + "expert_count", 1, kMaxExperts);
    result.num_experts_per_tok = file.integer(prefix + "expert_used_count", 1, kMaxExperts);
    result.moe_intermediate_size = file.integer(prefix + "expert_feed_forward_length", 1, kMaxExtent);
    result.norm_topk_prob = true;
  }
  check_gemma4(file.path(), result);
}

// The divisors of the frequencies of full layers: the tensor rope_freqs.weight.
std::vector<double> gemma4_divisors(const ModelConfig& config) {
  std::vector<double> divisors(static_cast<size_t>(config.global_head_dim / 2), kNoRotation);
  std::fill_n(divisors.begin(), config.rotated_pairs, 1.0);
  return divisors;
}

void write_gemma4_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  if (config.attention_bias) throw Unsupported("biases of attention, which GGUF's gemma4 architecture cannot state");
  if (config.local_rope_scaling.kind != modules::RopeScaling::Kind::none)
    throw Unsupported("rope scaling of layers with a window, which GGUF's gemma4 architecture cannot state");
  if (config.rope_scaling.kind != modules::RopeScaling::Kind::none)
    throw Unsupported("a factor {} of rope, which GGUF's gemma4 architecture cannot state", config.rope_scaling.factor);
  // Keys that are there already have the numbers of layers with a window.
  const auto set = [&](const char* key, io::GgufValue value) {
    const std::string name = prefix + key;
    const auto found = std::find_if(metadata.begin(), metadata.end(), [&](const auto& e) { return e.first == name; });
    if (found == metadata.end())
      metadata.emplace_back(name, std::move(value));
    else
      found->second = std::move(value);
  };
  const auto integer = [](int64_t value) { return io::GgufValue::scalar(static_cast<uint32_t>(value)); };
  const auto by_layer = [&](const char* key, auto&& number) {
    std::vector<uint32_t> numbers;
    for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
      numbers.push_back(static_cast<uint32_t>(number(layer)));
    const bool same = std::all_of(numbers.begin(), numbers.end(), [&](uint32_t n) { return n == numbers[0]; });
    set(key, same ? integer(numbers[0]) : io::GgufValue::scalars(std::span<const uint32_t>(numbers)));
  };
  for (const char* key : {"attention.key_length", "attention.value_length", "rope.dimension_count"})
    set(key, integer(config.global_head_dim));
  for (const char* key : {"attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"})
    set(key, integer(config.head_dim));
  set("rope.freq_base_swa", io::GgufValue::scalar(static_cast<float>(config.local_rope_theta)));
  by_layer("attention.head_count_kv", [&](int64_t layer) {
    return is_full(config, layer) ? config.num_global_key_value_heads : config.num_key_value_heads;
  });
  by_layer("feed_forward_length", [&](int64_t layer) {
    return config.intermediate_size * (config.double_wide_mlp && lender_of(config, layer) ? 2 : 1);
  });
  std::string windowed;
  for (const int64_t window : config.layer_windows) windowed += window > 0 ? '\1' : '\0';
  set("attention.sliding_window_pattern",
      {io::GgufType::array, io::GgufArray{io::GgufType::boolean, std::move(windowed), {}, {}}});
  set("attention.shared_kv_layers", integer(config.num_kv_shared_layers));
  set("embedding_length_per_layer_input", integer(config.layer_input_size));
  if (config.logit_softcap > 0)
    set("final_logit_softcapping", io::GgufValue::scalar(static_cast<float>(config.logit_softcap)));
  if (config.num_experts > 0) write_experts(config, prefix, metadata);
}

// ---- The model

modules::CausalAttention::Config gemma4_attention(const ModelConfig& config, int64_t layer) {
  const bool full = is_full(config, layer);
  const modules::RopeConfig global{.theta = config.rope_theta,
                                   .rotary_dim = config.global_head_dim,
                                   .scaling = config.rope_scaling,
                                   .rotated_pairs = config.rotated_pairs};
  const modules::RopeConfig local{.name = "rotary_emb_local",
                                  .theta = config.local_rope_theta,
                                  .rotary_dim = config.rotary_dim,
                                  .scaling = config.local_rope_scaling};
  return {.hidden = config.hidden_size,
          .heads = config.num_attention_heads,
          .kv_heads = full ? config.num_global_key_value_heads : config.num_key_value_heads,
          .head_dim = full ? config.global_head_dim : config.head_dim,
          .scale = 1,
          .qkv_bias = config.attention_bias,
          .out_bias = config.attention_out_bias,
          .qk_norm_eps = config.rms_norm_eps,
          .window = config.layer_windows[static_cast<size_t>(layer)],
          .rope = full ? global : local,
          .value_norm = true,
          .keys_are_values = full && config.keys_are_values,
          .kv_layer = lender_of(config, layer)};
}

modules::LayerSpec gemma4_layer(const ModelConfig& config, int64_t layer) {
  const auto norm = [&](const char* name) { return modules::NormSpec{name, config.rms_norm_eps}; };
  const modules::CausalAttention::Config attention = gemma4_attention(config, layer);
  const modules::DenseMlp::Config dense{
      .hidden = config.hidden_size,
      .ffn = config.intermediate_size * (config.double_wide_mlp && attention.kv_layer ? 2 : 1),
      .activation = config.hidden_act};
  modules::LayerSpec spec{.hidden = config.hidden_size,
                          .mixer = attention,
                          .mlp = dense,
                          .before_mixer = norm("input_layernorm"),
                          .after_mixer = norm("post_attention_layernorm"),
                          .before_mlp = norm("pre_feedforward_layernorm"),
                          .after_mlp = norm("post_feedforward_layernorm"),
                          .scaled = true};
  if (config.num_experts > 0) {
    modules::MoeMlp::Config experts = experts_of(config);
    experts.router_norm_eps = config.rms_norm_eps;
    experts.expert_scales = true;
    spec.before_mlp = std::nullopt;
    spec.mlp = modules::DenseAndExperts::Config{.dense = dense,
                                                .experts = std::move(experts),
                                                .before_dense = norm("pre_feedforward_layernorm"),
                                                .after_dense = norm("post_feedforward_layernorm_1"),
                                                .before_experts = norm("pre_feedforward_layernorm_2"),
                                                .after_experts = norm("post_feedforward_layernorm_2")};
  }
  if (config.layer_input_size > 0)
    spec.reads_input = modules::LayerInputReader::Config{.width = config.layer_input_size,
                                                         .hidden = config.hidden_size,
                                                         .activation = config.hidden_act,
                                                         .norm = norm("post_per_layer_input_norm")};
  return spec;
}

DecoderSpec gemma4_decoder(const ModelConfig& config) {
  check_gemma4("the configuration", config);
  DecoderSpec spec{.vocab = config.vocab_size,
                   .hidden = config.hidden_size,
                   .embedding_scale = std::sqrt(static_cast<double>(config.hidden_size)),
                   .norm = {"norm", config.rms_norm_eps},
                   .tied = config.tie_word_embeddings,
                   .logit_softcap = config.logit_softcap,
                   .layer_inputs = {.width = config.layer_input_size,
                                    .vocab = config.layer_input_vocab,
                                    .hidden = config.hidden_size,
                                    .layers = config.num_hidden_layers,
                                    .eps = config.rms_norm_eps}};
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) spec.layers.push_back(gemma4_layer(config, layer));
  return spec;
}

// Gate and up of all experts in one tensor, in both formats.
std::vector<WeightRecipe> gemma4_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                         CheckpointFormat format) {
  const LayerName name = layer_name(parameter.name);
  const bool is_up = name.rest == "moe.experts.up_proj.weight";
  if (!is_up && name.rest != "moe.experts.gate_proj.weight") return {};
  const std::string tensor = format == CheckpointFormat::gguf
                                 ? fmt::format("blk.{}.ffn_gate_up_exps.weight", name.number)
                                 : fmt::format("model.layers.{}.experts.gate_up_proj", name.number);
  const int64_t ffn = config.moe_intermediate_size;
  return {WeightRecipe::slice(tensor, 1, is_up ? ffn : 0, ffn, 2 * ffn)};
}

// Files may have keys and values of layers that read those of others.
bool is_unused_kv(const ModelConfig& config, const std::string& tensor) {
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {{"model.layers.", "self_attn."},
                                                                      {"blk.", "attn_"}};
  for (const auto& [layers, module] : kNames) {
    if (!tensor.starts_with(layers)) continue;
    const std::string_view rest = std::string_view(tensor).substr(layers.size());
    int64_t layer = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), layer);
    if (error != std::errc() || layer < first_shared_layer(config) || layer >= config.num_hidden_layers) return false;
    const std::string_view name = rest.substr(static_cast<size_t>(end - rest.data()));
    if (!name.starts_with("." + std::string(module))) return false;
    const std::string_view part = name.substr(1 + module.size());
    for (const char* own : {"k_proj.", "v_proj.", "k_norm.", "v_norm.", "k.", "v."})
      if (part.starts_with(own)) return true;
    return false;
  }
  return false;
}

}  // namespace

const ModelFamily& gemma4_family() {
  static const ModelFamily kFamily = {.name = "gemma4",
                                      .types = kGemma4Types,
                                      .activation_key = "hidden_activation",
                                      .activation = "gelu_pytorch_tanh",
                                      .tied = true,
                                      .gguf_keys = kGemma4GgufKeys,
                                      .gguf_counts_by_layer = true,
                                      .gguf_counts_differ = true,
                                      .read_json = read_gemma4_json,
                                      .read_gguf = read_gemma4_gguf,
                                      .write_json = write_gemma4_json,
                                      .write_gguf = write_gemma4_gguf,
                                      .gguf_divisors = gemma4_divisors,
                                      .decoder = gemma4_decoder,
                                      .gguf_names = kGemma4GgufNames,
                                      .tensor_names = kGemma4TensorNames,
                                      .recipes = gemma4_recipes,
                                      .may_ignore = is_unused_kv};
  return kFamily;
}

}  // namespace eadem::models
