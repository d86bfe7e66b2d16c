// SPDX-License-Identifier: Apache-2.0
//
// Configurations as metadata of GGUF files, in both directions.
#include <algorithm>

#include "eadem/models/config/config_text.h"
#include "eadem/models/family.h"
#include "eadem/models/huggingface.h"

namespace eadem::models {

namespace {

using io::GgufValue;
using modules::RopeScaling;

// Keys below the architecture that every family reads, or that say nothing.
constexpr std::string_view kKnownKeys[] = {"tensor_data_layout",
                                           "embedding_length",
                                           "feed_forward_length",
                                           "block_count",
                                           "attention.head_count",
                                           "attention.head_count_kv",
                                           "attention.key_length",
                                           "attention.value_length",
                                           "context_length",
                                           "rope.freq_base",
                                           "rope.dimension_count",
                                           "rope.scaling.type",
                                           "rope.scaling.factor",
                                           "rope.scaling.original_context_length",
                                           "rope.scaling.attn_factor",
                                           "rope.scaling.finetuned",
                                           "rope.scaling.yarn_beta_fast",
                                           "rope.scaling.yarn_beta_slow",
                                           "attention.sliding_window",
                                           "vocab_size"};

bool has_word(std::string_view words, std::string_view word) {
  return (" " + std::string(words) + " ").find(" " + std::string(word) + " ") != std::string::npos;
}

void refuse_unknown_keys(const io::GgufFile& file, const ModelFamily& family, const std::string& prefix) {
  for (const auto& [name, value] : file.metadata()) {
    if (!name.starts_with(prefix)) continue;
    const std::string_view key = std::string_view(name).substr(prefix.size());
    const bool own = std::any_of(family.keys.begin(), family.keys.end(), [&](const auto& k) { return k.gguf == key; });
    if (!own && key != family.gguf_eps && !has_word(family.gguf_keys, key) &&
        std::find(std::begin(kKnownKeys), std::end(kKnownKeys), key) == std::end(kKnownKeys))
      throw Unsupported("{}: metadata '{}' is not honoured", file.path(), name);
  }
}

// A number that layers share. Of families that state it for each layer, of those that have one.
std::optional<int64_t> common_integer(const io::GgufFile& file, const ModelFamily& family, const std::string& key,
                                      int64_t max) {
  const io::GgufValue* value = file.find_metadata(key);
  if (value == nullptr || value->type != io::GgufType::array || !family.gguf_counts_by_layer)
    return file.optional_integer(key, 1, max);
  int64_t common = 0;
  for (const int64_t own : file.integers(key, 0, max)) {
    if (family.gguf_counts_differ && common != 0) break;
    if (own != 0 && common != 0 && own != common)
      throw Unsupported("{}: '{}' is {} in one layer and {} in another", file.path(), key, common, own);
    common = std::max(common, own);
  }
  return common == 0 ? std::nullopt : std::optional(common);
}

std::vector<double> numbers_of(const io::GgufFile& file, std::string_view tensor) {
  const Tensor values = converted_on_host(file.get(tensor).view, DType::f32);
  return {values.view.as<float>(), values.view.as<float>() + values.view.num_elements()};
}

// Its factors are two tensors; a scale of logits is only in the file.
void read_longrope_of_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  RopeScaling& s = result.rope_scaling;
  s = {.kind = RopeScaling::Kind::longrope};
  const auto pairs = static_cast<size_t>(result.rotary_dim / 2);
  for (const auto& [tensor, factors] : {std::pair{kLongFactors, &s.long_factor}, {kShortFactors, &s.short_factor}}) {
    *factors = numbers_of(file, tensor);
    if (factors->size() != pairs || std::any_of(factors->begin(), factors->end(), [](double f) { return !(f > 0); }))
      throw DataCorrupted("{}: '{}' has {} numbers; expected {}, each above 0", file.path(), tensor, factors->size(),
                          pairs);
  }
  s.original_max_positions =
      static_cast<double>(file.optional_integer(prefix + "rope.scaling.original_context_length", 1, kMaxExtent)
                              .value_or(result.max_position_embeddings));
  s.factor = std::max(1.0, static_cast<double>(result.max_position_embeddings) / s.original_max_positions);
  s.attention_factor = file.optional_number(prefix + "rope.scaling.attn_factor").value_or(1.0);
}

void read_rope_of_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const auto key = [&](const char* name) { return prefix + name; };
  result.rope_theta = file.optional_number(key("rope.freq_base")).value_or(10000.0);
  result.rotary_dim = file.optional_integer(key("rope.dimension_count"), 1, 65536).value_or(result.head_dim);
  const auto type = file.optional_string(key("rope.scaling.type"));
  if (file.find(kLongFactors) != nullptr && (!type || *type == "none" || *type == "longrope")) {
    read_longrope_of_gguf(file, prefix, result);
  } else if (type && *type != "none") {
    RopeScaling& s = result.rope_scaling;
    s.factor = file.optional_number(key("rope.scaling.factor")).value_or(1.0);
    const int64_t original = file.optional_integer(key("rope.scaling.original_context_length"), 1, kMaxExtent)
                                 .value_or(result.max_position_embeddings);
    if (*type == "linear")
      s.kind = RopeScaling::Kind::linear;
    else if (*type == "yarn")
      s.kind = RopeScaling::Kind::yarn;
    else
      throw Unsupported("{}: '{}' is \"{}\"; known are none, linear, yarn", file.path(), key("rope.scaling.type"),
                        *type);
    if (s.kind == RopeScaling::Kind::yarn) {
      s.original_max_positions = static_cast<double>(original);
      s.truncate = result.family().yarn_truncates;
      s.beta_fast = file.optional_number(key("rope.scaling.yarn_beta_fast")).value_or(s.beta_fast);
      s.beta_slow = file.optional_number(key("rope.scaling.yarn_beta_slow")).value_or(s.beta_slow);
    }
    if (const auto factor = file.optional_number(key("rope.scaling.attn_factor"))) s.attention_factor = *factor;
  }
  if (file.find("rope_freqs.weight") != nullptr) result.rope_divisors = numbers_of(file, "rope_freqs.weight");
}

// Adds the keys of rope scaling.
void add_rope(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const RopeScaling& scaling = config.rope_scaling;
  const RopeScaling usual;
  const auto add = [&](const char* key, GgufValue value) { metadata.emplace_back(prefix + key, std::move(value)); };
  const auto positions = [&] {
    add("rope.scaling.original_context_length",
        GgufValue::scalar(static_cast<uint32_t>(scaling.original_max_positions)));
  };
  switch (scaling.kind) {
    case RopeScaling::Kind::none:
    case RopeScaling::Kind::dynamic: break;  // nothing within the context
    case RopeScaling::Kind::linear:
      add("rope.scaling.type", GgufValue::string("linear"));
      add("rope.scaling.factor", GgufValue::scalar(static_cast<float>(scaling.factor)));
      break;
    case RopeScaling::Kind::yarn: {
      const bool betas = config.family().yarn_states_betas;
      const bool own_betas = scaling.beta_fast != usual.beta_fast || scaling.beta_slow != usual.beta_slow;
      if ((betas ? scaling.attention_factor != 1.0 : own_betas || scaling.attention_factor) ||
          ((scaling.mscale || scaling.mscale_all_dim) && config.kv_lora_rank == 0) ||
          scaling.truncate != config.family().yarn_truncates)
        throw Unsupported(
            "yarn scaling with parameters of its own (betas, mscale, attention_factor, truncate), which "
            "GGUF cannot state here");
      add("rope.scaling.type", GgufValue::string("yarn"));
      add("rope.scaling.factor", GgufValue::scalar(static_cast<float>(scaling.factor)));
      positions();
      if (betas) {
        add("rope.scaling.yarn_beta_fast", GgufValue::scalar(static_cast<float>(scaling.beta_fast)));
        add("rope.scaling.yarn_beta_slow", GgufValue::scalar(static_cast<float>(scaling.beta_slow)));
      }
      break;
    }
    case RopeScaling::Kind::llama3: positions(); break;  // the divisors are a tensor
    case RopeScaling::Kind::longrope:                    // the factors are tensors
      positions();
      add("rope.scaling.attn_factor",
          GgufValue::scalar(static_cast<float>(
              modules::rope_frequencies({.rotary_dim = config.rotary_dim, .scaling = scaling}).attention_factor)));
      break;
  }
}

}  // namespace

ModelConfig ModelConfig::from_gguf(const io::GgufFile& file) {
  ModelConfig result;
  const std::string architecture = file.string("general.architecture");
  const ModelFamily& family = family_of_gguf(
      architecture, file.optional_integer(architecture + ".expert_count", 0, kMaxExperts).value_or(0) > 0, file.path());
  const ModelType& type = *std::find_if(family.types.begin(), family.types.end(), [&](const ModelType& candidate) {
    return candidate.gguf_architecture == architecture;
  });
  result.model_type = type.name;
  const std::string prefix = architecture + ".";
  const auto key = [&](std::string_view name) { return prefix + std::string(name); };
  const io::WeightInfo* embedding = file.find("token_embd.weight");
  if (embedding == nullptr || embedding->shape.rank() != 2)
    throw DataCorrupted("{}: no matrix 'token_embd.weight'", file.path());
  result.vocab_size = embedding->shape[0];
  result.hidden_size = file.integer(key("embedding_length"), 1, kMaxExtent);
  const auto ffn = common_integer(file, family, key("feed_forward_length"), kMaxExtent);
  if (!ffn && !family.gguf_counts_by_layer && !family.only_experts && family.ffn_per_hidden == 0)
    file.integer(key("feed_forward_length"), 1, kMaxExtent);
  const int64_t absent = std::max<int64_t>(family.ffn_per_hidden, 1) * result.hidden_size;  // no layer has that one
  result.intermediate_size = ffn.value_or(absent);
  result.num_hidden_layers = file.integer(key("block_count"), 1, kMaxLayers);
  result.num_attention_heads = file.integer(key("attention.head_count"), 1, 65536);
  result.num_key_value_heads =
      common_integer(file, family, key("attention.head_count_kv"), 65536).value_or(result.num_attention_heads);
  result.head_dim = file.optional_integer(key("attention.key_length"), 1, 65536)
                        .value_or(result.hidden_size / result.num_attention_heads);
  if (const auto value_dim = file.optional_integer(key("attention.value_length"), 1, 65536);
      !family.latent_attention && value_dim.value_or(result.head_dim) != result.head_dim)
    throw Unsupported("{}: '{}' is {} but keys have {}", file.path(), key("attention.value_length"), *value_dim,
                      result.head_dim);
  result.max_position_embeddings = file.integer(key("context_length"), 1, kMaxExtent);
  result.rms_norm_eps = file.number(key(family.gguf_eps));
  result.hidden_act = activation_named(family.activation);
  result.rotary_dim = result.head_dim;
  if (family.rotates) read_rope_of_gguf(file, prefix, result);
  result.rope_style = type.gguf_interleaves ? kernels::RopeStyle::interleaved : kernels::RopeStyle::rotate_half;
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
  for (const ConfigKey& own : family.keys)
    result.*own.member =
        (own.gguf.empty() ? std::nullopt : file.optional_number(key(own.gguf))).value_or(own.if_absent);
  if (family.read_gguf != nullptr) family.read_gguf(file, prefix, result);
  refuse_unknown_keys(file, family, prefix);
  result.validate(file.path());
  return result;
}

io::GgufMetadata ModelConfig::to_gguf() const {
  const ModelFamily& own = family();
  const std::string architecture(own.gguf_architecture != nullptr ? own.gguf_architecture(*this)
                                                                  : own.find_type(model_type)->gguf_architecture),
      prefix = architecture + ".";
  if (architecture.empty()) throw Unsupported("models of type {} are not written to GGUF files", model_type);
  if (hidden_act != activation_named(own.activation))
    throw Unsupported("{} is not {}, which GGUF's {} architecture cannot state", own.activation_key, own.activation,
                      architecture);
  io::GgufMetadata metadata = {{"general.architecture", GgufValue::string(architecture)}};
  const auto integer = [&](const char* key, int64_t value) {
    if (value < 0 || value > UINT32_MAX) throw Unsupported("{} is {}, which GGUF cannot hold", key, value);
    metadata.emplace_back(prefix + key, GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  const auto number = [&](std::string_view key, double value) {
    metadata.emplace_back(prefix + std::string(key), GgufValue::scalar(static_cast<float>(value)));
  };
  integer("context_length", max_position_embeddings);
  integer("embedding_length", hidden_size);
  integer("block_count", num_hidden_layers);
  if (!own.gguf_counts_by_layer && !own.only_experts) integer("feed_forward_length", intermediate_size);
  integer("attention.head_count", num_attention_heads);
  if (!own.latent_attention) {
    if (!own.gguf_counts_by_layer) integer("attention.head_count_kv", num_key_value_heads);
    integer("attention.key_length", head_dim);
    integer("attention.value_length", head_dim);
  }
  number(own.gguf_eps, rms_norm_eps);
  if (own.rotates) {
    number("rope.freq_base", rope_theta);
    integer("rope.dimension_count", rotary_dim);
  }
  integer("vocab_size", vocab_size);
  if (const int64_t window = largest_window(layer_windows); window > 0) integer("attention.sliding_window", window);
  add_rope(*this, prefix, metadata);
  for (const ConfigKey& key : own.keys)
    if (!key.gguf.empty()) number(key.gguf, this->*key.member);
  if (own.write_gguf != nullptr) own.write_gguf(*this, prefix, metadata);
  return metadata;
}

}  // namespace eadem::models
