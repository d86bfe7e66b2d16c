// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/llama_config.h"

#include <algorithm>
#include <cmath>

#include "eadem/io/quantization_config.h"
#include "eadem/models/config_keys.h"

namespace eadem::models {

namespace {

using kernels::ActivationKind;
using modules::RopeScaling;

constexpr int64_t kMaxExtent = int64_t{1} << 31;
constexpr int64_t kMaxLayers = 4096;

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

// The values that transformers takes for keys that a config.json does not have. 0 stands for the meaning of null:
// num_attention_heads for num_key_value_heads, hidden_size / num_attention_heads for head_dim.
struct Defaults {
  std::string_view model_type;
  int64_t max_position_embeddings;
  int64_t num_key_value_heads;
  int64_t head_dim;
};
constexpr Defaults kDefaults[] = {
    {"llama", 2048, 0, 0}, {"mistral", 131072, 8, 0}, {"qwen2", 32768, 32, 0}, {"qwen3", 32768, 32, 128}};

const Defaults& defaults_of(const io::JsonReader& config, std::string_view model_type) {
  for (const Defaults& row : kDefaults)
    if (row.model_type == model_type) return row;
  throw Unsupported("{}: 'model_type' is \"{}\"; the Llama family has llama, mistral, qwen2, qwen3", config.file(),
                    model_type);
}

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

ActivationKind activation_of(const io::JsonReader& config) {
  const std::string name = config.optional_string("hidden_act").value_or("silu");
  for (const ActivationName& known : kActivationNames)
    if (known.name == name) return known.kind;
  throw Unsupported("{}: 'hidden_act' is \"{}\"; known are silu, swish, gelu, gelu_new, gelu_pytorch_tanh, relu, relu2",
                    config.file(), name);
}

std::string_view activation_name(ActivationKind kind) {
  for (const ActivationName& known : kActivationNames)
    if (known.kind == kind) return known.name;
  return "?";
}

// Truncated, as in transformers.
int64_t rotated_dimensions(int64_t head_dim, double partial_rotary_factor) {
  return static_cast<int64_t>(static_cast<double>(head_dim) * partial_rotary_factor);
}

// `rope_parameters` (transformers 5) or `rope_scaling` with a top-level `rope_theta` (before).
void read_rope(const io::JsonReader& config, LlamaConfig& result) {
  result.rope_theta = config.optional_number("rope_theta", 1.0, 1e12).value_or(10000.0);
  std::optional<io::JsonReader> rope = config.optional_object("rope_parameters");
  const std::optional<io::JsonReader> scaling = config.optional_object("rope_scaling");
  if (rope && scaling && !(rope->value() == scaling->value()))
    throw DataCorrupted("{}: 'rope_parameters' and 'rope_scaling' disagree", config.file());
  if (rope) config.ignore("rope_scaling");  // says the same
  if (!rope) rope = scaling;
  if (!rope) return;
  if (const auto theta = rope->optional_number("rope_theta", 1.0, 1e12)) result.rope_theta = *theta;
  if (const auto partial = rope->optional_number("partial_rotary_factor", 1e-6, 1.0))
    result.rotary_dim = rotated_dimensions(result.head_dim, *partial);
  const std::optional<std::string> new_key = rope->optional_string("rope_type"),
                                   old_key = rope->optional_string("type");
  if (new_key && old_key && *new_key != *old_key)
    throw DataCorrupted("{}: rope scaling has 'rope_type' \"{}\" and 'type' \"{}\"", config.file(), *new_key, *old_key);
  const std::string type = new_key ? *new_key : old_key.value_or("default");
  RopeScaling& s = result.rope_scaling;
  const auto original_positions = [&](bool required) {
    const auto value = rope->optional_number("original_max_position_embeddings", 1, kMaxExtent);
    if (!value && required) rope->fail("original_max_position_embeddings", "an integer, which llama3 scaling needs");
    if (value && *value != std::floor(*value)) rope->fail("original_max_position_embeddings", "an integer");
    return value.value_or(static_cast<double>(result.max_position_embeddings));
  };
  ignore_inert_rope_keys(*rope, type);
  if (type == "default") return;
  s.factor = rope->number("factor", 1.0, 1e6);
  if (type == "linear") {
    s.kind = RopeScaling::Kind::linear;
  } else if (type == "llama3") {
    s.kind = RopeScaling::Kind::llama3;
    s.original_max_positions = original_positions(true);
    s.low_freq_factor = rope->number("low_freq_factor", 1e-6, 1e6);
    s.high_freq_factor = rope->number("high_freq_factor", 1e-6, 1e6);
    if (s.high_freq_factor <= s.low_freq_factor)
      rope->fail("high_freq_factor", fmt::format("a number above low_freq_factor {}", s.low_freq_factor));
  } else if (type == "yarn") {
    s.kind = RopeScaling::Kind::yarn;
    s.original_max_positions = original_positions(false);
    s.beta_fast = rope->optional_number("beta_fast", 1e-6, 1e6).value_or(32.0);
    s.beta_slow = rope->optional_number("beta_slow", 1e-6, 1e6).value_or(1.0);
    s.attention_factor = rope->optional_number("attention_factor", 1e-6, 1e6);
    s.mscale = rope->optional_number("mscale", 0.0, 1e6);
    s.mscale_all_dim = rope->optional_number("mscale_all_dim", 0.0, 1e6);
    s.truncate = rope->optional_boolean("truncate").value_or(true);
  } else {
    throw Unsupported("{}: rope scaling of type \"{}\"; known are default, linear, llama3, yarn", config.file(), type);
  }
}

int64_t largest_window(const std::vector<int64_t>& layer_windows) {
  return layer_windows.empty() ? 0 : *std::max_element(layer_windows.begin(), layer_windows.end());
}

// Windows per layer from `layer_types`, or from the switches that older configs have.
void read_windows(const io::JsonReader& config, LlamaConfig& result) {
  const bool qwen = result.model_type == "qwen2" || result.model_type == "qwen3";
  std::optional<int64_t> window = config.optional_integer("sliding_window", 1, kMaxExtent);
  // The default of Hugging Face's MistralConfig when the key is absent; null means none.
  if (result.model_type == "mistral" && !window && config.value().find("sliding_window") == nullptr) window = 4096;
  const bool use_window = config.optional_boolean("use_sliding_window").value_or(!qwen);
  const int64_t first_windowed = config.optional_integer("max_window_layers", 0, kMaxExtent).value_or(qwen ? 28 : 0);
  const bool windowed = window && use_window && (qwen || result.model_type == "mistral");
  if (window && !qwen && result.model_type != "mistral")
    throw Unsupported("{}: 'sliding_window' is {}; models of type {} have none", config.file(), *window,
                      result.model_type);
  result.layer_windows.assign(static_cast<size_t>(result.num_hidden_layers), 0);
  if (config.has("layer_types")) {
    const std::vector<std::string> types = config.strings("layer_types");
    if (types.size() != result.layer_windows.size())
      config.fail("layer_types", fmt::format("{} entries, one per layer", result.num_hidden_layers));
    for (size_t layer = 0; layer < types.size(); ++layer) {
      if (types[layer] == "sliding_attention" && !windowed)
        config.fail(window ? "use_sliding_window" : "sliding_window",
                    fmt::format("{}, because 'layer_types' has \"sliding_attention\"", window ? "true" : "an integer"));
      if (types[layer] != "sliding_attention" && types[layer] != "full_attention")
        config.fail("layer_types", "only \"full_attention\" and \"sliding_attention\"");
      result.layer_windows[layer] = types[layer] == "sliding_attention" ? *window : 0;
    }
  } else if (windowed) {
    for (int64_t layer = first_windowed; layer < result.num_hidden_layers; ++layer)
      result.layer_windows[static_cast<size_t>(layer)] = *window;
  }
}

// Switches that transformers reads for some model types; for the others its code has one of the values built in.
void read_biases(const io::JsonReader& config, LlamaConfig& result) {
  const auto read = [&](const char* key, bool built_in, bool read_by_type) {
    const bool value = config.optional_boolean(key).value_or(built_in);
    if (value != built_in && !read_by_type)
      throw Unsupported("{}: '{}' is {}; models of type {} have {}", config.file(), key, value, result.model_type,
                        built_in ? "these biases" : "no such biases");
    return value;
  };
  const bool llama = result.model_type == "llama", qwen2 = result.model_type == "qwen2";
  result.attention_bias = read("attention_bias", qwen2, llama || result.model_type == "qwen3");
  result.attention_out_bias = result.attention_bias && !qwen2;
  result.mlp_bias = read("mlp_bias", false, llama);
}

}  // namespace

LlamaConfig LlamaConfig::from_json(const io::JsonReader& config) {
  LlamaConfig result;
  result.model_type = config.string("model_type");
  result.vocab_size = config.integer("vocab_size", 1, kMaxExtent);
  result.hidden_size = config.integer("hidden_size", 1, kMaxExtent);
  result.intermediate_size = config.integer("intermediate_size", 1, kMaxExtent);
  result.num_hidden_layers = config.integer("num_hidden_layers", 1, kMaxLayers);
  result.num_attention_heads = config.integer("num_attention_heads", 1, 65536);
  const Defaults& defaults = defaults_of(config, result.model_type);
  result.num_key_value_heads =
      integer_or(config, "num_key_value_heads", 65536, defaults.num_key_value_heads, result.num_attention_heads);
  if (!config.has("num_key_value_heads") && result.num_attention_heads % result.num_key_value_heads != 0)
    config.fail("num_key_value_heads",
                fmt::format("an integer that divides 'num_attention_heads' {}; the default of {} is {}",
                            result.num_attention_heads, result.model_type, result.num_key_value_heads));
  result.head_dim =
      integer_or(config, "head_dim", 65536, defaults.head_dim, result.hidden_size / result.num_attention_heads);
  result.max_position_embeddings =
      config.optional_integer("max_position_embeddings", 1, kMaxExtent).value_or(defaults.max_position_embeddings);
  result.rms_norm_eps = config.optional_number("rms_norm_eps", 0.0, 1.0).value_or(1e-6);
  result.hidden_act = activation_of(config);
  result.rotary_dim =
      rotated_dimensions(result.head_dim, config.optional_number("partial_rotary_factor", 1e-6, 1.0).value_or(1.0));
  read_rope(config, result);
  read_biases(config, result);
  result.qk_norm = result.model_type == "qwen3";
  result.tie_word_embeddings = config.optional_boolean("tie_word_embeddings").value_or(false);
  read_windows(config, result);
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
  if (const std::vector<std::string> unread = config.unread_keys(); !unread.empty()) {
    std::string names;
    for (const std::string& key : unread) names += (names.empty() ? "'" : ", '") + key + "'";
    throw Unsupported("{}: {} not honoured: {}", config.file(), unread.size() == 1 ? "a key is" : "keys are", names);
  }
  result.validate(config.file());
  return result;
}

LlamaConfig LlamaConfig::from_gguf(const io::GgufFile& file) {
  LlamaConfig result;
  result.gguf_names = true;
  result.model_type = file.string("general.architecture");
  const std::string prefix = result.model_type + ".";
  const auto key = [&](const char* name) { return prefix + name; };
  const auto number = [&](const char* name) { return file.optional_number(key(name)); };
  const io::WeightInfo* embedding = file.find("token_embd.weight");
  if (embedding == nullptr || embedding->shape.rank() != 2)
    throw DataCorrupted("{}: no matrix 'token_embd.weight'", file.path());
  result.vocab_size = embedding->shape[0];
  result.hidden_size = file.integer(key("embedding_length"), 1, kMaxExtent);
  result.intermediate_size = file.integer(key("feed_forward_length"), 1, kMaxExtent);
  result.num_hidden_layers = file.integer(key("block_count"), 1, kMaxLayers);
  result.num_attention_heads = file.integer(key("attention.head_count"), 1, 65536);
  result.num_key_value_heads =
      file.optional_integer(key("attention.head_count_kv"), 1, 65536).value_or(result.num_attention_heads);
  result.head_dim = file.optional_integer(key("attention.key_length"), 1, 65536)
                        .value_or(result.hidden_size / result.num_attention_heads);
  if (const auto value_dim = file.optional_integer(key("attention.value_length"), 1, 65536);
      value_dim.value_or(result.head_dim) != result.head_dim)
    throw Unsupported("{}: '{}' is {} but keys have {}", file.path(), key("attention.value_length"), *value_dim,
                      result.head_dim);
  result.max_position_embeddings = file.integer(key("context_length"), 1, kMaxExtent);
  result.rms_norm_eps = file.number(key("attention.layer_norm_rms_epsilon"));
  result.rope_theta = number("rope.freq_base").value_or(10000.0);
  result.rotary_dim = file.optional_integer(key("rope.dimension_count"), 1, 65536).value_or(result.head_dim);
  // GGUF conversions of Llama and Mistral permute q and k to the original interleaved layout; those of Qwen do not.
  result.rope_style = result.model_type == "llama" ? kernels::RopeStyle::interleaved : kernels::RopeStyle::rotate_half;
  if (const auto type = file.optional_string(key("rope.scaling.type")); type && *type != "none") {
    RopeScaling& s = result.rope_scaling;
    s.factor = number("rope.scaling.factor").value_or(1.0);
    s.original_max_positions =
        static_cast<double>(file.optional_integer(key("rope.scaling.original_context_length"), 1, kMaxExtent)
                                .value_or(result.max_position_embeddings));
    if (*type == "linear")
      s.kind = RopeScaling::Kind::linear;
    else if (*type == "yarn")
      s.kind = RopeScaling::Kind::yarn;
    else
      throw Unsupported("{}: '{}' is \"{}\"; known are none, linear, yarn", file.path(), key("rope.scaling.type"),
                        *type);
    if (const auto factor = number("rope.scaling.attn_factor")) s.attention_factor = *factor;
  }
  if (file.find("rope_freqs.weight") != nullptr) {
    const Tensor divisors = converted_on_host(file.get("rope_freqs.weight").view, DType::f32);
    result.rope_divisors.assign(divisors.view.as<float>(), divisors.view.as<float>() + divisors.view.num_elements());
  }
  result.attention_bias = file.find("blk.0.attn_q.bias") != nullptr;
  result.attention_out_bias = file.find("blk.0.attn_output.bias") != nullptr;
  result.mlp_bias = file.find("blk.0.ffn_gate.bias") != nullptr;
  result.qk_norm = file.find("blk.0.attn_q_norm.weight") != nullptr;
  result.tie_word_embeddings = file.find("output.weight") == nullptr;
  const int64_t window = file.optional_integer(key("attention.sliding_window"), 0, kMaxExtent).value_or(0);
  result.layer_windows.assign(static_cast<size_t>(result.num_hidden_layers), window);
  if (const auto bos = file.optional_integer("tokenizer.ggml.bos_token_id", 0, UINT32_MAX))
    result.bos_token_id = {*bos};
  if (const auto eos = file.optional_integer("tokenizer.ggml.eos_token_id", 0, UINT32_MAX))
    result.eos_token_id = {*eos};

  if (const auto layout = file.optional_string(key("tensor_data_layout")); layout && *layout != "Meta AI original pth")
    throw Unsupported("{}: '{}' is \"{}\"; known is \"Meta AI original pth\"", file.path(), key("tensor_data_layout"),
                      *layout);

  constexpr std::string_view kKnown[] = {"tensor_data_layout",
                                         "embedding_length",
                                         "feed_forward_length",
                                         "block_count",
                                         "attention.head_count",
                                         "attention.head_count_kv",
                                         "attention.key_length",
                                         "attention.value_length",
                                         "context_length",
                                         "attention.layer_norm_rms_epsilon",
                                         "rope.freq_base",
                                         "rope.dimension_count",
                                         "rope.scaling.type",
                                         "rope.scaling.factor",
                                         "rope.scaling.original_context_length",
                                         "rope.scaling.attn_factor",
                                         "rope.scaling.finetuned",
                                         "attention.sliding_window",
                                         "vocab_size"};
  for (const auto& [name, value] : file.metadata())
    if (name.starts_with(prefix) && std::find(std::begin(kKnown), std::end(kKnown),
                                              std::string_view(name).substr(prefix.size())) == std::end(kKnown))
      throw Unsupported("{}: metadata '{}' is not honoured", file.path(), name);
  result.validate(file.path());
  return result;
}

void LlamaConfig::validate(const std::string& source) const {
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
  require(rotary_dim > 0 && rotary_dim <= head_dim && rotary_dim % 2 == 0,
          fmt::format("{} of {} head dimensions are rotated; expected an even number up to head_dim", rotary_dim,
                      head_dim));
  require(rope_divisors.empty() || static_cast<int64_t>(rope_divisors.size()) == rotary_dim / 2,
          fmt::format("{} rope divisors for {} pairs", rope_divisors.size(), rotary_dim / 2));
  for (double divisor : rope_divisors)
    require(std::isfinite(divisor) && divisor > 0, fmt::format("a rope divisor is {}", divisor));
  require(rms_norm_eps >= 0 && std::isfinite(rms_norm_eps), fmt::format("rms_norm_eps is {}", rms_norm_eps));
  require(rope_theta >= 1 && std::isfinite(rope_theta), fmt::format("rope_theta is {}", rope_theta));
  if (const RopeScaling& s = rope_scaling; s.kind != RopeScaling::Kind::none) {
    require(s.factor >= 1 && std::isfinite(s.factor), fmt::format("the factor of rope scaling is {}", s.factor));
    const double table_factor = s.attention_factor.value_or(1.0);
    require(table_factor > 0 && std::isfinite(table_factor),
            fmt::format("the attention factor of rope scaling is {}", table_factor));
    // Its ramp divides by log(theta).
    require(s.kind != RopeScaling::Kind::yarn || rope_theta > 1, "yarn scaling needs a rope_theta above 1");
  }
  require(layer_windows.size() == static_cast<size_t>(num_hidden_layers),
          fmt::format("{} attention windows for {} layers", layer_windows.size(), num_hidden_layers));
  // The seven matrices of each of kMaxLayers layers stay inside 64 bits together, in bytes as well.
  constexpr double kMaxElements = 1e13;
  const double widest = static_cast<double>(std::max({vocab_size, intermediate_size, num_attention_heads * head_dim}));
  require(widest * static_cast<double>(hidden_size) < kMaxElements,
          fmt::format("a weight of {} x {}", widest, hidden_size));
  for (const auto& [name, ids] : {std::pair<const char*, const std::vector<int64_t>&>{"bos_token_id", bos_token_id},
                                  {"eos_token_id", eos_token_id}})
    for (int64_t id : ids)
      require(id >= 0 && id < vocab_size, fmt::format("{} {} is outside the vocabulary of {}", name, id, vocab_size));
}

int64_t LlamaConfig::num_parameters() const {
  const int64_t q = num_attention_heads * head_dim, kv = kv_dim();
  const int64_t attention = hidden_size * (2 * q + 2 * kv) + (attention_bias ? q + 2 * kv : 0) +
                            (attention_out_bias ? hidden_size : 0) + (qk_norm ? 2 * head_dim : 0);
  const int64_t mlp = 3 * hidden_size * intermediate_size + (mlp_bias ? 2 * intermediate_size + hidden_size : 0);
  return vocab_size * hidden_size * (tie_word_embeddings ? 1 : 2) +
         num_hidden_layers * (attention + mlp + 2 * hidden_size) + hidden_size;
}

io::JsonValue LlamaConfig::to_json() const {
  const auto refuse_if = [&](bool condition, std::string_view what) {
    if (condition) throw Unsupported("a config.json of type {} cannot state {}", model_type, what);
  };
  refuse_if(rope_style != kernels::RopeStyle::rotate_half, "interleaved rotary embeddings");
  refuse_if(!rope_divisors.empty(), "rope divisors");
  const bool llama = model_type == "llama", qwen2 = model_type == "qwen2", qwen3 = model_type == "qwen3";
  refuse_if(attention_bias != qwen2 && !llama && !qwen3,
            attention_bias ? "biases of q, k and v" : "q, k and v without biases");
  refuse_if(attention_out_bias != (attention_bias && !qwen2),
            attention_out_bias ? "a bias of o" : "biases of q, k and v without one of o");
  refuse_if(mlp_bias && !llama, "biases of the MLP");
  refuse_if(qk_norm != qwen3, qk_norm ? "norms of q and k" : "q and k without norms");
  const int64_t window = largest_window(layer_windows);
  refuse_if(window > 0 && llama, "attention windows");
  for (int64_t layer_window : layer_windows)
    refuse_if(layer_window > 0 && layer_window != window, "attention windows of several lengths");
  return describe();
}

io::JsonValue LlamaConfig::describe() const {
  const bool llama = model_type == "llama", qwen2 = model_type == "qwen2", qwen3 = model_type == "qwen3";
  const auto ids = [](const std::vector<int64_t>& values) {
    if (values.size() == 1) return io::JsonValue(values[0]);
    io::JsonValue list = io::JsonValue::array();
    for (int64_t value : values) list.push_back(value);
    return list;
  };
  io::JsonValue json = io::JsonValue::object();
  const std::string architecture = model_type == "mistral" ? "MistralForCausalLM"
                                   : qwen2                 ? "Qwen2ForCausalLM"
                                   : qwen3                 ? "Qwen3ForCausalLM"
                                                           : "LlamaForCausalLM";
  json.set("architectures", io::JsonValue::array().push_back(architecture)).set("model_type", model_type);
  json.set("vocab_size", vocab_size).set("hidden_size", hidden_size).set("intermediate_size", intermediate_size);
  json.set("num_hidden_layers", num_hidden_layers).set("num_attention_heads", num_attention_heads);
  json.set("num_key_value_heads", num_key_value_heads).set("head_dim", head_dim);
  json.set("max_position_embeddings", max_position_embeddings).set("rms_norm_eps", rms_norm_eps);
  json.set("hidden_act", std::string(activation_name(hidden_act))).set("rope_theta", rope_theta);
  const RopeScaling& s = rope_scaling;
  if (s.kind != RopeScaling::Kind::none) {
    io::JsonValue rope = io::JsonValue::object();
    rope.set("rope_type", s.kind == RopeScaling::Kind::linear   ? "linear"
                          : s.kind == RopeScaling::Kind::llama3 ? "llama3"
                                                                : "yarn");
    rope.set("factor", s.factor);
    if (s.kind != RopeScaling::Kind::linear)
      rope.set("original_max_position_embeddings", static_cast<int64_t>(s.original_max_positions));
    if (s.kind == RopeScaling::Kind::llama3)
      rope.set("low_freq_factor", s.low_freq_factor).set("high_freq_factor", s.high_freq_factor);
    if (s.kind == RopeScaling::Kind::yarn) {
      rope.set("beta_fast", s.beta_fast).set("beta_slow", s.beta_slow).set("truncate", s.truncate);
      if (s.attention_factor) rope.set("attention_factor", *s.attention_factor);
      if (s.mscale) rope.set("mscale", *s.mscale);
      if (s.mscale_all_dim) rope.set("mscale_all_dim", *s.mscale_all_dim);
    }
    json.set("rope_scaling", std::move(rope));
  }
  if (rotary_dim != head_dim) {
    // Readers truncate head_dim * factor, which must not fall short of rotary_dim by a rounding.
    double factor = static_cast<double>(rotary_dim) / static_cast<double>(head_dim);
    if (rotated_dimensions(head_dim, factor) < rotary_dim) factor = std::nextafter(factor, 1.0);
    json.set("partial_rotary_factor", factor);
  }
  if (!qwen2) json.set("attention_bias", attention_bias);
  if (llama) json.set("mlp_bias", mlp_bias);
  json.set("tie_word_embeddings", tie_word_embeddings);
  const int64_t window = largest_window(layer_windows);
  if (!llama) json.set("sliding_window", window > 0 ? io::JsonValue(window) : io::JsonValue(nullptr));
  if (window > 0 && !llama) {
    io::JsonValue types = io::JsonValue::array();
    for (int64_t layer_window : layer_windows)
      types.push_back(layer_window > 0 ? "sliding_attention" : "full_attention");
    json.set("layer_types", std::move(types)).set("use_sliding_window", true);
  }
  if (!bos_token_id.empty()) json.set("bos_token_id", ids(bos_token_id));
  if (!eos_token_id.empty()) json.set("eos_token_id", ids(eos_token_id));
  if (checkpoint_dtype)
    json.set("torch_dtype", *checkpoint_dtype == DType::bf16  ? "bfloat16"
                            : *checkpoint_dtype == DType::f16 ? "float16"
                                                              : "float32");
  return json;
}

}  // namespace eadem::models
