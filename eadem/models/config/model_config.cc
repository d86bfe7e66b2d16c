// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/config/model_config.h"

#include <algorithm>
#include <cmath>

#include "eadem/io/quantized/quantization_config.h"
#include "eadem/models/config/config_keys.h"
#include "eadem/models/config/config_text.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

using kernels::ActivationKind;
using modules::RopeScaling;

struct ActivationName {
  std::string_view name;
  ActivationKind kind;
};
constexpr ActivationName kActivationNames[] = {{"silu", ActivationKind::silu},
                                               {"swish", ActivationKind::silu},
                                               {"gelu", ActivationKind::gelu},
                                               {"gelu_new", ActivationKind::gelu_tanh},
                                               {"gelu_pytorch_tanh", ActivationKind::gelu_tanh},
                                               {"relu", ActivationKind::relu},
                                               {"relu2", ActivationKind::relu2}};

// The key's value; `if_null` for null; `if_absent`, unless that is 0, for an absent key.
int64_t integer_or(const io::JsonReader& config, std::string_view key, int64_t max, int64_t if_absent,
                   int64_t if_null) {
  const bool absent = config.value().find(key) == nullptr;
  return config.optional_integer(key, 1, max).value_or(absent && if_absent != 0 ? if_absent : if_null);
}

// One id, a list of ids, or none when the key is null or absent.
std::vector<int64_t> optional_ids(const io::JsonReader& config, std::string_view key) {
  if (config.has(key)) return config.integers(key, 0, kMaxExtent);
  config.ignore(key);
  return {};
}

// Returns the name of an activation function. One that has several names, such as gelu_new and gelu_pytorch_tanh, gets
// the one that the family's configs use.
std::string_view activation_name(ActivationKind kind, const ModelFamily& family) {
  if (activation_named(family.activation) == kind) return family.activation;
  for (const ActivationName& known : kActivationNames)
    if (known.kind == kind) return known.name;
  return "?";
}

// Truncated, as in transformers.
int64_t rotated_dimensions(int64_t head_dim, double partial_rotary_factor) {
  return static_cast<int64_t>(static_cast<double>(head_dim) * partial_rotary_factor);
}

// The dimensions of a head that rotate by `key` of `config`; nothing if it is not there. transformers passes the key
// over for models of most types, which rotate whole heads.
std::optional<int64_t> rotated_dimensions(const io::JsonReader& config, std::string_view key,
                                          const ModelConfig& result) {
  const std::optional<double> share = config.optional_number(key, 1e-6, 1.0);
  if (!share) return std::nullopt;
  const ModelFamily& family = result.family();
  if (*share == 1 || family.rotates_shares) return rotated_dimensions(result.head_dim, *share);
  if (family.rotates) config.ignore(key, "is not read for models of this type, as in transformers");
  return std::nullopt;
}

// transformers refuses a number with a fraction where its class has a whole one, and the other way around.
io::JsonValue number_value(const ConfigKey& key, double value) {
  const auto whole = static_cast<int64_t>(value);
  return key.whole && static_cast<double>(whole) == value ? io::JsonValue(whole) : io::JsonValue(value);
}

// Reads what only a family has.
void read_keys(const io::JsonReader& config, const ModelFamily& family, ModelConfig& result) {
  for (const ConfigKey& key : family.keys)
    result.*key.member = config.optional_number(key.json, key.least, key.most).value_or(key.if_absent);
}

// transformers adds the load-balancing loss when it returns the logits of the routers.
void read_load_balancing(const io::JsonReader& config, const ModelFamily& family, ModelConfig& result) {
  if (family.router_aux_loss_coef == 0) return;
  if (result.num_experts == 0) {
    for (const char* key : {"output_router_logits", "router_aux_loss_coef"}) config.ignore(key, "is for experts");
    return;
  }
  const double coef = config.optional_number("router_aux_loss_coef", 0, 1e6).value_or(family.router_aux_loss_coef);
  if (config.optional_boolean("output_router_logits").value_or(false)) result.router_aux_loss_coef = coef;
}

ActivationKind read_activation(const io::JsonReader& config, const ModelFamily& family) {
  const std::string name = config.optional_string(family.activation_key).value_or(std::string(family.activation));
  for (const ActivationName& known : kActivationNames)
    if (known.name == name) return known.kind;
  throw Unsupported("{}: '{}' is \"{}\"; known are silu, swish, gelu, gelu_new, gelu_pytorch_tanh, relu, relu2",
                    config.file(), family.activation_key, name);
}

int64_t read_ffn(const io::JsonReader& config, const ModelFamily& family, int64_t hidden) {
  const std::string_view key = family.json_name("intermediate_size");
  if (family.ffn_per_hidden == 0) return config.integer(key, 1, kMaxExtent);
  return config.optional_integer(key, 1, kMaxExtent).value_or(family.ffn_per_hidden * hidden);
}

void refuse_unread_keys(const io::JsonReader& config) {
  const std::vector<std::string> unread = config.unread_keys();
  if (unread.empty()) return;
  std::string names;
  for (const std::string& key : unread) names += (names.empty() ? "'" : ", '") + key + "'";
  throw Unsupported("{}: {} not honoured: {}", config.file(), unread.size() == 1 ? "a key is" : "keys are", names);
}

}  // namespace

ActivationKind activation_named(std::string_view name) {
  const auto known = std::find_if(std::begin(kActivationNames), std::end(kActivationNames),
                                  [&](const ActivationName& row) { return row.name == name; });
  EADEM_CHECK(known != std::end(kActivationNames), "no activation '{}'", name);
  return known->kind;
}

namespace {

// `factor`, if absent, is what lengthens the original context to the stated one. An original context that is known
// already, since it stands beside the object, comes before the object's, as in transformers.
void read_longrope(const io::JsonReader& rope, const ModelConfig& result, RopeScaling& s) {
  s.kind = RopeScaling::Kind::longrope;
  const auto stated = static_cast<double>(result.max_position_embeddings);
  const auto original = rope.optional_number("original_max_position_embeddings", 1, 1e9);
  if (original && s.original_max_positions == 0) s.original_max_positions = *original;
  if (s.original_max_positions == 0) s.original_max_positions = stated;
  s.factor = rope.optional_number("factor", 1.0, 1e6).value_or(std::max(1.0, stated / s.original_max_positions));
  s.attention_factor = rope.optional_number("attention_factor", 1e-6, 1e6);
  s.short_factor = rope.numbers("short_factor");
  s.long_factor = rope.numbers("long_factor");
  const auto pairs = static_cast<size_t>(result.rotary_dim / 2);
  if (s.short_factor.size() != pairs) rope.fail("short_factor", fmt::format("{} numbers, one per pair", pairs));
  if (s.long_factor.size() != pairs) rope.fail("long_factor", fmt::format("{} numbers, one per pair", pairs));
  for (const std::vector<double>* factors : {&s.short_factor, &s.long_factor})
    for (double factor : *factors)
      if (!(factor > 0)) rope.fail("short_factor", "and 'long_factor' numbers above 0");
}

}  // namespace

void read_rope_object(const io::JsonReader& rope, ModelConfig& result, double& theta, RopeScaling& s) {
  if (const auto stated = rope.optional_number("rope_theta", 1.0, 1e12)) theta = *stated;
  if (const auto rotated = rotated_dimensions(rope, "partial_rotary_factor", result)) result.rotary_dim = *rotated;
  const std::optional<std::string> new_key = rope.optional_string("rope_type"), old_key = rope.optional_string("type");
  if (new_key && old_key && *new_key != *old_key)
    rope.ignore("type", "is not read beside rope_type, as in transformers");
  std::string type = new_key ? *new_key : old_key.value_or("default");
  if (type == "mrope") type = "default";  // rotates by positions on several axes, which are one in a text
  const auto original_positions = [&](bool required) {
    const auto value = rope.optional_number("original_max_position_embeddings", 1, kMaxExtent);
    if (!value && required) rope.fail("original_max_position_embeddings", "an integer, which llama3 scaling needs");
    if (value && *value != std::floor(*value)) rope.fail("original_max_position_embeddings", "an integer");
    return value.value_or(static_cast<double>(result.max_position_embeddings));
  };
  ignore_inert_rope_keys(rope, type);
  if (type == "default") return;
  if (type == "longrope") return read_longrope(rope, result, s);
  s.factor = rope.number("factor", 1.0, 1e6);
  if (type == "linear") {
    s.kind = RopeScaling::Kind::linear;
  } else if (type == "llama3") {
    s.kind = RopeScaling::Kind::llama3;
    s.original_max_positions = original_positions(true);
    s.low_freq_factor = rope.number("low_freq_factor", 1e-6, 1e6);
    s.high_freq_factor = rope.number("high_freq_factor", 1e-6, 1e6);
    if (s.high_freq_factor < s.low_freq_factor)
      rope.fail("high_freq_factor", fmt::format("a number from low_freq_factor {} on", s.low_freq_factor));
  } else if (type == "yarn") {
    s.kind = RopeScaling::Kind::yarn;
    s.original_max_positions = original_positions(false);
    s.beta_fast = rope.optional_number("beta_fast", 1e-6, 1e6).value_or(32.0);
    s.beta_slow = rope.optional_number("beta_slow", 1e-6, 1e6).value_or(1.0);
    s.attention_factor = rope.optional_number("attention_factor", 1e-6, 1e6);
    s.mscale = rope.optional_number("mscale", 0.0, 1e6);
    s.mscale_all_dim = rope.optional_number("mscale_all_dim", 0.0, 1e6);
    s.truncate = rope.optional_boolean("truncate").value_or(true);
  } else if (type == "dynamic") {
    s.kind = RopeScaling::Kind::dynamic;
  } else {
    throw Unsupported("{}: rope scaling of type \"{}\"; known are default, linear, dynamic, llama3, yarn, longrope",
                      rope.file(), type);
  }
}

void read_rope(const io::JsonReader& config, ModelConfig& result) {
  result.rope_theta = config.optional_number("rope_theta", 1.0, 1e12).value_or(10000.0);
  std::optional<io::JsonReader> rope = config.optional_object("rope_parameters");
  const std::optional<io::JsonReader> scaling = config.optional_object("rope_scaling");
  if (rope && scaling && !(rope->value() == scaling->value()))
    throw DataCorrupted("{}: 'rope_parameters' and 'rope_scaling' disagree", config.file());
  if (rope) config.ignore("rope_scaling");  // says the same
  if (!rope) rope = scaling;
  if (rope) read_rope_object(*rope, result, result.rope_theta, result.rope_scaling);
}

void read_rope_or(const io::JsonReader& config, double theta, ModelConfig& result) {
  read_rope(config, result);
  const auto states = [](const std::optional<io::JsonReader>& object) { return object && object->has("rope_theta"); };
  if (!config.has("rope_theta") && !states(config.optional_object("rope_parameters")) &&
      !states(config.optional_object("rope_scaling")))
    result.rope_theta = theta;
}

void require_truncated(const io::JsonReader& config, const RopeScaling& scaling) {
  if (!scaling.truncate)
    throw Unsupported(
        "{}: 'truncate' of rope scaling is false; only true is honoured where kinds of layers have rope "
        "scaling of their own, in which transformers does not read it",
        config.file());
}

void read_local_rope(const io::JsonReader& rope_parameters, ModelConfig& result) {
  const auto sliding = rope_parameters.optional_object("sliding_attention");
  if (!sliding) return;
  RopeScaling& scaling = result.local_rope_scaling;
  read_rope_object(*sliding, result, result.local_rope_theta, scaling);
  require_truncated(*sliding, scaling);
  if (scaling.kind == RopeScaling::Kind::longrope)
    throw Unsupported(
        "{}: 'rope_parameters.sliding_attention' has rope scaling of type \"longrope\"; known there are "
        "default, linear, dynamic, llama3, yarn",
        sliding->file());
}

void read_ropes_of_layers(const io::JsonReader& config, ModelConfig& result) {
  const auto before = config.optional_object("rope_scaling");
  if (before) read_rope_object(*before, result, result.rope_theta, result.rope_scaling);
  const RopeScaling scaling = result.rope_scaling;
  if (const auto rope = config.optional_object("rope_parameters")) {
    if (const auto full = rope->optional_object("full_attention"))
      read_rope_object(*full, result, result.rope_theta, result.rope_scaling);
    read_local_rope(*rope, result);
  }
  if (before && !(scaling == result.rope_scaling))
    throw DataCorrupted("{}: 'rope_parameters' and 'rope_scaling' disagree", config.file());
  require_truncated(config, result.rope_scaling);
}

double partial_rotary_factor_of(const ModelConfig& config) {
  // Readers truncate head_dim * factor, which must not fall short of rotary_dim by a rounding.
  const double factor = static_cast<double>(config.rotary_dim) / static_cast<double>(config.head_dim);
  return rotated_dimensions(config.head_dim, factor) < config.rotary_dim ? std::nextafter(factor, 1.0) : factor;
}

int64_t largest_window(const std::vector<int64_t>& layer_windows) {
  return layer_windows.empty() ? 0 : *std::max_element(layer_windows.begin(), layer_windows.end());
}

bool read_layer_types(const io::JsonReader& config, ModelConfig& result, std::optional<int64_t> window,
                      std::string_view needed) {
  if (!config.has("layer_types")) {
    config.ignore("layer_types");  // null
    return false;
  }
  const std::vector<std::string> types = config.strings("layer_types");
  if (types.size() != result.layer_windows.size())
    config.fail("layer_types", fmt::format("{} entries, one per layer", result.num_hidden_layers));
  for (size_t layer = 0; layer < types.size(); ++layer) {
    if (types[layer] == "sliding_attention" && !window)
      config.fail(needed, fmt::format("{}, because 'layer_types' has \"sliding_attention\"",
                                      needed == "sliding_window" ? "an integer" : "true"));
    if (types[layer] != "sliding_attention" && types[layer] != "full_attention")
      config.fail("layer_types", "only \"full_attention\" and \"sliding_attention\"");
    result.layer_windows[layer] = types[layer] == "sliding_attention" ? *window : 0;
  }
  return true;
}

io::JsonValue layer_types_of(const ModelConfig& config) {
  io::JsonValue types = io::JsonValue::array();
  for (int64_t window : config.layer_windows) types.push_back(window > 0 ? "sliding_attention" : "full_attention");
  return types;
}

void require_silu(const io::JsonReader& config, const ModelConfig& result, std::string_view where) {
  if (result.hidden_act == ActivationKind::silu) return;
  const ModelFamily& family = result.family();
  throw Unsupported("{}: '{}' is \"{}\"; {} of models of type {} have silu alone", config.file(), family.activation_key,
                    config.string(family.activation_key), where, result.model_type);
}

void refuse_if(const ModelConfig& config, bool condition, std::string_view what) {
  if (condition) throw Unsupported("a config.json of type {} cannot state {}", config.model_type, what);
}

void refuse_several_windows(const ModelConfig& config) {
  const int64_t window = largest_window(config.layer_windows);
  for (int64_t layer_window : config.layer_windows)
    refuse_if(config, layer_window > 0 && layer_window != window, "attention windows of several lengths");
}

ModelConfig ModelConfig::from_json(const io::JsonReader& config) {
  ModelConfig result;
  if (!config.has("model_type")) config.fail("model_type", "a string naming the architecture");
  result.model_type = config.string("model_type");
  const ModelFamily& family = family_of_type(result.model_type, config.file());
  const ModelType& defaults = *family.find_type(result.model_type);
  result.vocab_size = config.integer("vocab_size", 1, kMaxExtent);
  const auto name = [&](std::string_view usual) { return family.json_name(usual); };
  result.hidden_size = config.integer(name("hidden_size"), 1, kMaxExtent);
  result.intermediate_size = read_ffn(config, family, result.hidden_size);
  result.num_hidden_layers = family.count_layers != nullptr ? family.count_layers(config)
                                                            : config.integer(name("num_hidden_layers"), 1, kMaxLayers);
  result.num_attention_heads = config.integer(name("num_attention_heads"), 1, 65536);
  result.num_key_value_heads =
      integer_or(config, "num_key_value_heads", 65536, defaults.num_key_value_heads, result.num_attention_heads);
  if (!config.has("num_key_value_heads") && result.num_attention_heads % result.num_key_value_heads != 0)
    config.fail("num_key_value_heads",
                fmt::format("an integer that divides 'num_attention_heads' {}; the default of {} is {}",
                            result.num_attention_heads, result.model_type, result.num_key_value_heads));
  result.head_dim =
      integer_or(config, "head_dim", 65536, defaults.head_dim, result.hidden_size / result.num_attention_heads);
  result.max_position_embeddings = config.optional_integer(name("max_position_embeddings"), 1, kMaxExtent)
                                       .value_or(defaults.max_position_embeddings);
  result.rms_norm_eps = config.optional_number(name("rms_norm_eps"), 0.0, 1.0).value_or(family.eps);
  result.hidden_act = read_activation(config, family);
  result.rotary_dim = rotated_dimensions(config, name("partial_rotary_factor"), result)
                          .value_or(rotated_dimensions(result.head_dim, family.rotated_share));
  result.tie_word_embeddings = config.optional_boolean("tie_word_embeddings").value_or(family.tied);
  result.layer_windows.assign(static_cast<size_t>(result.num_hidden_layers), 0);
  read_keys(config, family, result);
  family.read_json(config, result);
  read_load_balancing(config, family, result);
  result.bos_token_id = optional_ids(config, "bos_token_id");
  result.eos_token_id = optional_ids(config, "eos_token_id");
  for (const char* key : {"torch_dtype", "dtype"})
    if (const auto name = config.optional_string(key)) {
      if (*name == "float32") result.checkpoint_dtype = DType::f32;
      if (*name == "bfloat16") result.checkpoint_dtype = DType::bf16;
      if (*name == "float16") result.checkpoint_dtype = DType::f16;
    }
  io::QuantizationConfig::from_json(config);  // refuses what no reader of weights understands
  ignore_inert_keys(config, result.model_type);
  refuse_unread_keys(config);
  result.validate(config.file());
  return result;
}

void ModelConfig::validate(const std::string& source) const {
  const auto require = [&](bool condition, const std::string& message) {
    if (!condition) throw InvalidArgument("{}: {}", source, message);
  };
  for (const auto& [name, value] : {std::pair<const char*, int64_t>{"vocab_size", vocab_size},
                                    {"hidden_size", hidden_size},
                                    {"intermediate_size", intermediate_size},
                                    {"num_hidden_layers", num_hidden_layers},
                                    {"num_attention_heads", num_attention_heads},
                                    {"num_key_value_heads", num_key_value_heads},
                                    {"head_dim", head_dim},
                                    {"max_position_embeddings", max_position_embeddings}})
    require(value > 0 && value <= kMaxExtent, fmt::format("{} is {}; expected 1 to {}", name, value, kMaxExtent));
  require(num_attention_heads % num_key_value_heads == 0,
          fmt::format("{} attention heads do not divide into {} key-value heads", num_attention_heads,
                      num_key_value_heads));
  const bool rotates = family().rotates && std::ssize(nope_layers) < num_hidden_layers;
  require(!rotates || (rotary_dim > 0 && rotary_dim <= head_dim && rotary_dim % 2 == 0),
          fmt::format(
              "{} of {} head dimensions are rotated (partial_rotary_factor); expected an even number up to head_dim",
              rotary_dim, head_dim));
  require(rope_divisors.empty() || static_cast<int64_t>(rope_divisors.size()) == rotary_dim / 2,
          fmt::format("{} rope divisors for {} pairs", rope_divisors.size(), rotary_dim / 2));
  for (double divisor : rope_divisors)
    require(std::isfinite(divisor) && divisor > 0, fmt::format("a rope divisor is {}", divisor));
  require(rms_norm_eps >= 0 && std::isfinite(rms_norm_eps), fmt::format("rms_norm_eps is {}", rms_norm_eps));
  require(rope_theta >= 1 && std::isfinite(rope_theta), fmt::format("rope_theta is {}", rope_theta));
  for (const auto& [name, value] : {std::pair<const char*, double>{"embedding_multiplier", embedding_multiplier},
                                    {"residual_multiplier", residual_multiplier},
                                    {"logits_scaling", logits_scaling},
                                    {"logit_scale", logit_scale}})
    require(value > 0 && std::isfinite(value), fmt::format("{} is {}; expected a number above 0", name, value));
  for (const auto& [name, value] : {std::pair<const char*, double>{"the factor on scores", attention_multiplier},
                                    {"the soft cap of scores", attention_softcap},
                                    {"the soft cap of logits", logit_softcap}})
    require(value >= 0 && std::isfinite(value), fmt::format("{} is {}; expected 0 or more", name, value));
  const auto check_scaling = [&](const RopeScaling& s, double theta) {
    if (s.kind == RopeScaling::Kind::none) return;
    require(s.factor >= 1 && std::isfinite(s.factor), fmt::format("the factor of rope scaling is {}", s.factor));
    const double table_factor = s.attention_factor.value_or(1.0);
    require(table_factor > 0 && std::isfinite(table_factor),
            fmt::format("the attention factor of rope scaling is {}", table_factor));
    // Its ramp divides by log(theta).
    require(s.kind != RopeScaling::Kind::yarn || theta > 1, "yarn scaling needs a rope_theta above 1");
  };
  check_scaling(rope_scaling, rope_theta);
  check_scaling(local_rope_scaling, local_rope_theta);
  require(local_rope_theta == 0 || (local_rope_theta >= 1 && std::isfinite(local_rope_theta)),
          fmt::format("rope_theta of layers with a window is {}", local_rope_theta));
  require(layer_windows.size() == static_cast<size_t>(num_hidden_layers),
          fmt::format("{} attention windows for {} layers", layer_windows.size(), num_hidden_layers));
  require(layer_chunks.empty() || layer_chunks.size() == layer_windows.size(),
          fmt::format("attention chunks of {} layers for {}", layer_chunks.size(), num_hidden_layers));
  for (int64_t chunk : layer_chunks)
    require(chunk >= 0 && chunk <= kMaxExtent, fmt::format("a chunk of attention is {} positions long", chunk));
  require(!attn_temperature_tuning || (std::isfinite(attn_scale) && floor_scale >= 1 && floor_scale <= kMaxExtent &&
                                       floor_scale == std::floor(floor_scale)),
          fmt::format("attn_scale is {} and floor_scale {}; expected a number, and a whole one from 1 on", attn_scale,
                      floor_scale));
  // The seven matrices of each of kMaxLayers layers stay inside 64 bits together, in bytes as well.
  constexpr double kMaxElements = 1e13;
  const double widest = static_cast<double>(std::max({vocab_size, intermediate_size, num_attention_heads * head_dim}));
  require(widest * static_cast<double>(hidden_size) < kMaxElements,
          fmt::format("a weight of {} x {}", widest, hidden_size));
  if (kv_lora_rank > 0) {
    require(qk_nope_head_dim > 0 && v_head_dim > 0 && head_dim == qk_nope_head_dim + rotary_dim,
            fmt::format("heads of {} dimensions, {} not rotated and {} rotated, with values of {}", head_dim,
                        qk_nope_head_dim, rotary_dim, v_head_dim));
    require(num_key_value_heads == num_attention_heads,
            fmt::format("latent attention with {} heads of keys for {} of queries", num_key_value_heads,
                        num_attention_heads));
    const double latents = static_cast<double>(std::max({kv_lora_rank, q_lora_rank, v_head_dim}));
    require(latents * static_cast<double>(std::max(num_attention_heads * head_dim, hidden_size)) < kMaxElements &&
                latents * static_cast<double>(num_attention_heads) * static_cast<double>(v_head_dim) < kMaxElements,
            fmt::format("latents of {} and {}", q_lora_rank, kv_lora_rank));
  }
  if (!linear_layers.empty()) {
    require(linear_key_heads > 0 && linear_value_heads > 0 && linear_value_heads % linear_key_heads == 0,
            fmt::format("linear attention of {} value heads for {} key heads", linear_value_heads, linear_key_heads));
    require(
        linear_key_dim > 0 && linear_value_dim > 0 && linear_key_dim <= kMaxHeadDim &&
            linear_value_dim <= kMaxHeadDim && linear_value_heads <= kMaxHeadDim,
        fmt::format("linear attention of {} heads of {} x {}", linear_value_heads, linear_key_dim, linear_value_dim));
    require(static_cast<double>(linear_value_heads) * static_cast<double>(std::max(linear_key_dim, linear_value_dim)) *
                    static_cast<double>(hidden_size) <
                kMaxElements,
            fmt::format("linear attention of {} heads for {} hidden values", linear_value_heads, hidden_size));
    require(linear_taps >= 2 && linear_taps <= kernels::kMaxTaps,
            fmt::format("a convolution over {} tokens; expected 2 to {}", linear_taps, kernels::kMaxTaps));
    require(linear_layers.front() >= 0 && linear_layers.back() < num_hidden_layers &&
                std::adjacent_find(linear_layers.begin(), linear_layers.end(), std::greater_equal<>()) ==
                    linear_layers.end(),
            "the layers of linear attention are not in order, or not among the layers");
  }
  if (num_experts > 0) {
    const int64_t choices = num_experts + identity_experts;
    require(choices <= kMaxExperts, fmt::format("{} experts; expected at most {}", choices, kMaxExperts));
    require(num_experts_per_tok > 0 && num_experts_per_tok <= choices,
            fmt::format("{} of {} experts compute a token", num_experts_per_tok, choices));
    require(n_group > 0 && topk_group > 0 && topk_group <= n_group && choices % n_group == 0 &&
                num_experts_per_tok <= topk_group * (choices / n_group),
            fmt::format("{} of {} experts compute a token, of {} of {} groups", num_experts_per_tok, choices,
                        topk_group, n_group));
    require(std::isfinite(routed_scaling_factor) && moe_norm_min >= 0 && std::isfinite(moe_norm_min),
            fmt::format("routed_scaling_factor is {} and moe_norm_min {}", routed_scaling_factor, moe_norm_min));
    require(static_cast<double>(shared_expert_intermediate_size) * static_cast<double>(hidden_size) < kMaxElements,
            fmt::format("a shared expert of {} x {}", shared_expert_intermediate_size, hidden_size));
    require(decoder_sparse_step > 0, fmt::format("every {} layers have experts", decoder_sparse_step));
    require(static_cast<double>(moe_latent_size) * static_cast<double>(hidden_size) < kMaxElements &&
                static_cast<double>(num_experts) * static_cast<double>(moe_intermediate_size) *
                        static_cast<double>(moe_latent_size) <
                    kMaxElements,
            fmt::format("experts that read {} numbers", moe_latent_size));
    require(moe_intermediate_size > 0 && static_cast<double>(num_experts) * static_cast<double>(moe_intermediate_size) *
                                                 static_cast<double>(hidden_size) <
                                             kMaxElements,
            fmt::format("weights of {} experts of {} x {}", num_experts, moe_intermediate_size, hidden_size));
  }
  require(layer_pattern.empty() || layer_pattern.size() == layer_windows.size(),
          fmt::format("{} kinds of layers for {} layers", layer_pattern.size(), num_hidden_layers));
  validate_mamba(source);
  validate_pooled(source);
  for (const auto& [name, ids] : {std::pair<const char*, const std::vector<int64_t>&>{"bos_token_id", bos_token_id},
                                  {"eos_token_id", eos_token_id}})
    for (int64_t id : ids)
      require(id >= 0 && id < vocab_size, fmt::format("{} {} is outside the vocabulary of {}", name, id, vocab_size));
}

void ModelConfig::validate_mamba(const std::string& source) const {
  const auto require = [&](bool condition, const std::string& message) {
    if (!condition) throw InvalidArgument("{}: {}", source, message);
  };
  for (double multiplier : {attention_in_multiplier, attention_out_multiplier, key_multiplier, ssm_in_multiplier,
                            ssm_out_multiplier, mlp_gate_multiplier, mlp_down_multiplier})
    require(std::isfinite(multiplier), fmt::format("a multiplier is {}", multiplier));
  if (mamba.heads == 0)
    return require(layer_pattern.find('M') == std::string::npos, "state-space layers without heads");
  for (const auto& [name, value] : {std::pair<const char*, int64_t>{"heads", mamba.heads},
                                    {"head_dim", mamba.head_dim},
                                    {"groups", mamba.groups},
                                    {"state size", mamba.state}})
    require(value > 0 && value <= kMaxExtent, fmt::format("the {} of state-space layers is {}", name, value));
  require(mamba.heads % mamba.groups == 0,
          fmt::format("{} state-space heads do not divide into {} groups", mamba.heads, mamba.groups));
  require(mamba.taps >= 2 && mamba.taps <= kernels::kMaxTaps,
          fmt::format("a convolution over {} tokens; expected 2 to {}", mamba.taps, kernels::kMaxTaps));
  require(mamba.dt_min >= 0 && mamba.dt_min <= mamba.dt_max,
          fmt::format("limits of time steps are {} and {}", mamba.dt_min, mamba.dt_max));
  for (double multiplier : mamba.multipliers)
    require(std::isfinite(multiplier), fmt::format("a multiplier is {}", multiplier));
  const double inner = static_cast<double>(mamba.heads) * static_cast<double>(mamba.head_dim),
               shared = static_cast<double>(mamba.groups) * static_cast<double>(mamba.state);
  require(std::max(inner, shared) * static_cast<double>(hidden_size) < 1e13 &&
              inner * static_cast<double>(mamba.state) < 1e13,
          fmt::format("state-space layers of {} x {}, with states of {}", inner, hidden_size, mamba.state));
}

void ModelConfig::validate_pooled(const std::string& source) const {
  const auto require = [&](bool condition, const std::string& message) {
    if (!condition) throw InvalidArgument("{}: {}", source, message);
  };
  const auto require_size = [&](std::string_view what, int64_t rows, int64_t columns) {
    require(static_cast<double>(rows) * static_cast<double>(columns) < 1e13,
            fmt::format("{} of {} x {}", what, rows, columns));
  };
  if (streams > 0) {
    require(streams <= 64 && stream_iterations >= 1 && stream_iterations <= 1000 && stream_eps >= 0 &&
                std::isfinite(stream_eps),
            fmt::format("{} streams, {} iterations and eps {}; expected up to 64, 1 to 1000 and a number from 0 on",
                        streams, stream_iterations, stream_eps));
    require_size("weights of streams", streams * (streams + 2), streams * hidden_size);
  }
  if (output_groups == 0) return;
  require(
      num_attention_heads % output_groups == 0 && output_rank > 0,
      fmt::format("{} heads in {} groups of the output, of {} each", num_attention_heads, output_groups, output_rank));
  for (const int64_t stride : {indexed_stride, pooled_stride}) {
    require(stride > 0 && stride <= kMaxExtent, fmt::format("rows of {} tokens", stride));
    require_size("places in a row", stride, 2 * std::max(head_dim, index_head_dim));
  }
  require(pooled_rope_theta >= 1 && std::isfinite(pooled_rope_theta), fmt::format("a theta of {}", pooled_rope_theta));
  require(rope_scaling.kind != RopeScaling::Kind::yarn || pooled_rope_theta > 1, "yarn scaling needs a theta above 1");
  require(rotary_dim <= index_head_dim || layer_pattern.find('I') == std::string::npos,
          fmt::format("{} of {} dimensions of an index are rotated", rotary_dim, index_head_dim));
  require_size("queries", num_attention_heads * head_dim, q_lora_rank);
  require_size("queries of an index", index_n_heads * index_head_dim, q_lora_rank);
  require_size("weights of an index", std::max(index_n_heads, 2 * index_head_dim), hidden_size);
  require_size("keys", 2 * head_dim, hidden_size);
  require_size("the output", output_groups * output_rank,
               std::max(hidden_size, num_attention_heads * head_dim / output_groups));
  require_size("experts of tokens", vocab_size, num_experts_per_tok);
}

bool ModelConfig::has_experts(int64_t layer) const {
  return num_experts > 0 && (layer + 1) % decoder_sparse_step == 0 &&
         std::find(mlp_only_layers.begin(), mlp_only_layers.end(), layer) == mlp_only_layers.end();
}

bool ModelConfig::is_linear(int64_t layer) const {
  return std::binary_search(linear_layers.begin(), linear_layers.end(), layer);
}

bool ModelConfig::is_hashed(int64_t layer) const {
  return std::binary_search(hash_layers.begin(), hash_layers.end(), layer);
}

const ModelFamily& ModelConfig::family() const { return family_of_type(model_type, "the model"); }

int64_t ModelConfig::kv_dim() const {
  if (kv_lora_rank > 0)
    throw Unsupported("kv_dim of type {}: a token has a latent of {} + {} elements in place of keys and values",
                      model_type, kv_lora_rank, rotary_dim);
  if (output_groups > 0) throw Unsupported("kv_dim of type {}: keys are values, and layers pool them", model_type);
  if (global_head_dim > 0 && (global_head_dim != head_dim || num_global_key_value_heads != num_key_value_heads))
    throw Unsupported("kv_dim of type {}: layers have {} heads of {} elements or {} of {}", model_type,
                      num_key_value_heads, head_dim, num_global_key_value_heads, global_head_dim);
  return num_key_value_heads * head_dim;
}

int64_t ModelConfig::num_parameters() const { return Decoder(*this).spec().num_parameters; }

io::JsonValue ModelConfig::to_json() const {
  refuse_if(*this, rope_style != kernels::RopeStyle::rotate_half && !family().latent_attention,
            "interleaved rotary embeddings");
  refuse_if(*this, !rope_divisors.empty(), "rope divisors");
  refuse_if(*this, rotary_dim != head_dim && family().rotates && !family().latent_attention && !family().rotates_shares,
            "a rotation of a part of each head");
  io::JsonValue json = describe();
  if (family().check_json != nullptr)
    family().check_json(*this);
  else
    refuse_if(*this, !(from_json(io::JsonReader::parse(io::to_json(json), "config.json")) == *this),
              "this configuration");
  return json;
}

io::JsonValue rope_object(const RopeScaling& s, std::optional<double> theta) {
  io::JsonValue rope = io::JsonValue::object();
  rope.set("rope_type", s.kind == RopeScaling::Kind::none      ? "default"
                        : s.kind == RopeScaling::Kind::linear  ? "linear"
                        : s.kind == RopeScaling::Kind::dynamic ? "dynamic"
                        : s.kind == RopeScaling::Kind::llama3  ? "llama3"
                        : s.kind == RopeScaling::Kind::yarn    ? "yarn"
                                                               : "longrope");
  if (theta) rope.set("rope_theta", *theta);
  if (s.kind == RopeScaling::Kind::none) return rope;
  rope.set("factor", s.factor);
  if (s.kind != RopeScaling::Kind::linear && s.kind != RopeScaling::Kind::dynamic)
    rope.set("original_max_position_embeddings", static_cast<int64_t>(s.original_max_positions));
  if (s.kind == RopeScaling::Kind::llama3)
    rope.set("low_freq_factor", s.low_freq_factor).set("high_freq_factor", s.high_freq_factor);
  if (s.kind == RopeScaling::Kind::yarn) {
    rope.set("beta_fast", s.beta_fast).set("beta_slow", s.beta_slow).set("truncate", s.truncate);
    if (s.attention_factor) rope.set("attention_factor", *s.attention_factor);
    if (s.mscale) rope.set("mscale", *s.mscale);
    if (s.mscale_all_dim) rope.set("mscale_all_dim", *s.mscale_all_dim);
  }
  if (s.kind == RopeScaling::Kind::longrope) {
    if (s.attention_factor) rope.set("attention_factor", *s.attention_factor);
    for (const auto& [key, factors] : {std::pair{"short_factor", &s.short_factor}, {"long_factor", &s.long_factor}}) {
      io::JsonValue list = io::JsonValue::array();
      for (double factor : *factors) list.push_back(factor);
      rope.set(key, std::move(list));
    }
  }
  return rope;
}

io::JsonValue ModelConfig::describe() const {
  const ModelFamily& own = family();
  const auto ids = [](const std::vector<int64_t>& values) {
    if (values.size() == 1) return io::JsonValue(values[0]);
    io::JsonValue list = io::JsonValue::array();
    for (int64_t value : values) list.push_back(value);
    return list;
  };
  io::JsonValue json = io::JsonValue::object();
  json.set("architectures", io::JsonValue::array().push_back(std::string(own.find_type(model_type)->python_class)))
      .set("model_type", model_type);
  const auto set = [&](std::string_view usual, io::JsonValue value) {
    if (const std::string_view key = own.json_name(usual); !key.empty()) json.set(std::string(key), std::move(value));
  };
  set("vocab_size", vocab_size), set("hidden_size", hidden_size), set("intermediate_size", intermediate_size);
  set("num_hidden_layers", num_hidden_layers), set("num_attention_heads", num_attention_heads);
  set("num_key_value_heads", num_key_value_heads), set("head_dim", head_dim);
  set("max_position_embeddings", max_position_embeddings), set("rms_norm_eps", rms_norm_eps);
  json.set(std::string(own.activation_key), std::string(activation_name(hidden_act, own)));
  for (const ConfigKey& key : own.keys) json.set(std::string(key.json), number_value(key, this->*key.member));
  own.write_json(*this, json);
  if (router_aux_loss_coef > 0)
    json.set("output_router_logits", true).set("router_aux_loss_coef", router_aux_loss_coef);
  json.set("tie_word_embeddings", tie_word_embeddings);
  if (!bos_token_id.empty()) json.set("bos_token_id", ids(bos_token_id));
  if (!eos_token_id.empty()) json.set("eos_token_id", ids(eos_token_id));
  if (checkpoint_dtype)
    json.set("torch_dtype", *checkpoint_dtype == DType::bf16  ? "bfloat16"
                            : *checkpoint_dtype == DType::f16 ? "float16"
                                                              : "float32");
  return json;
}

}  // namespace eadem::models
