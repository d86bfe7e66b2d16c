// SPDX-License-Identifier: Apache-2.0
//
// The Llama family: pre-norm decoder with grouped-query attention, rotary positions and a gated MLP. Llama 2 and 3.x,
// Mistral, Qwen2 / 2.5, Qwen3 dense and SmolLM2 are this model with other switches.
// Source: the modeling files of Hugging Face transformers for these model types.
#include <algorithm>
#include <cmath>

#include "eadem/models/config/config_text.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kLlamaTypes[] = {
    {"llama", "llama", "LlamaForCausalLM", 2048, 0, 0, /*out_bias=*/true, /*gguf_interleaves=*/true},
    {"mistral", "llama", "MistralForCausalLM", 131072, 8, 0, /*out_bias=*/true, /*gguf_interleaves=*/true},
    {"qwen2", "qwen2", "Qwen2ForCausalLM", 32768, 32, 0, /*out_bias=*/false},
    {"qwen3", "qwen3", "Qwen3ForCausalLM", 32768, 32, 128}};

bool is_qwen(const ModelConfig& config) { return config.model_type == "qwen2" || config.model_type == "qwen3"; }

// Windows per layer from `layer_types`, or from the switches that older configs have.
void read_llama_windows(const io::JsonReader& config, ModelConfig& result) {
  const bool qwen = is_qwen(result), mistral = result.model_type == "mistral";
  std::optional<int64_t> window = config.optional_integer("sliding_window", 1, kMaxExtent);
  // The default of transformers when the key is absent; null means none.
  if ((mistral || qwen) && !window && config.value().find("sliding_window") == nullptr) window = 4096;
  const bool use_window = config.optional_boolean("use_sliding_window").value_or(!qwen);
  const int64_t first_windowed = config.optional_integer("max_window_layers", 0, kMaxExtent).value_or(qwen ? 28 : 0);
  if (window && !qwen && !mistral)
    throw Unsupported("{}: 'sliding_window' is {}; models of type {} have none", config.file(), *window,
                      result.model_type);
  const bool windowed = window && use_window;
  if (read_layer_types(config, result, windowed ? window : std::nullopt,
                       window ? "use_sliding_window" : "sliding_window"))
    return;
  if (windowed)
    for (int64_t layer = first_windowed; layer < result.num_hidden_layers; ++layer)
      result.layer_windows[static_cast<size_t>(layer)] = *window;
}

// Switches that transformers reads for some model types; for the others its code has one of the values built in.
void read_llama_biases(const io::JsonReader& config, ModelConfig& result) {
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

void read_llama_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  read_llama_biases(config, result);
  result.qk_norm = result.model_type == "qwen3";
  read_llama_windows(config, result);
}

void check_llama_json(const ModelConfig& c) {
  const bool llama = c.model_type == "llama", qwen2 = c.model_type == "qwen2", qwen3 = c.model_type == "qwen3";
  refuse_if(c, c.attention_bias != qwen2 && !llama && !qwen3,
            c.attention_bias ? "biases of q, k and v" : "q, k and v without biases");
  refuse_if(c, c.attention_out_bias != (c.attention_bias && !qwen2),
            c.attention_out_bias ? "a bias of o" : "biases of q, k and v without one of o");
  refuse_if(c, c.mlp_bias && !llama, "biases of the MLP");
  refuse_if(c, c.qk_norm != qwen3, c.qk_norm ? "norms of q and k" : "q and k without norms");
  refuse_if(c, largest_window(c.layer_windows) > 0 && llama, "attention windows");
  refuse_several_windows(c);
}

void write_llama_json(const ModelConfig& config, io::JsonValue& json) {
  const bool llama = config.model_type == "llama";
  json.set("rope_theta", config.rope_theta);
  if (config.rope_scaling.kind != modules::RopeScaling::Kind::none)
    json.set("rope_scaling", rope_object(config.rope_scaling));
  if (config.model_type != "qwen2") json.set("attention_bias", config.attention_bias);
  if (llama) json.set("mlp_bias", config.mlp_bias);
  const int64_t window = largest_window(config.layer_windows);
  if (!llama) json.set("sliding_window", window > 0 ? io::JsonValue(window) : io::JsonValue(nullptr));
  if (window > 0 && !llama) json.set("layer_types", layer_types_of(config)).set("use_sliding_window", true);
}

void read_llama_gguf(const io::GgufFile& file, const std::string&, ModelConfig& result) {
  result.attention_bias = file.find("blk.0.attn_q.bias") != nullptr;
  result.attention_out_bias = file.find("blk.0.attn_output.bias") != nullptr;
  result.mlp_bias = file.find("blk.0.ffn_gate.bias") != nullptr;
  result.qk_norm = file.find("blk.0.attn_q_norm.weight") != nullptr;
}

void write_llama_gguf(const ModelConfig& config, const std::string&, io::GgufMetadata&) {
  for (int64_t other : config.layer_windows)
    if (other != config.layer_windows[0])
      throw Unsupported("layers have different attention windows, which GGUF cannot state here");
}

// A GGUF file of the llama architecture with a window is a Mistral model.
void prepare_llama_json(ModelConfig& config) {
  if (config.model_type == "llama" && largest_window(config.layer_windows) > 0) config.model_type = "mistral";
}

std::string llama_gguf_notice(const ModelConfig& config) {
  const int64_t window = largest_window(config.layer_windows);
  if (config.model_type != "mistral" || window == 0) return "";
  return fmt::format("the attention window of {} tokens is written, but other programs ignore it in Llama files",
                     window);
}

DecoderSpec llama_decoder(const ModelConfig& config) {
  const modules::RopeConfig rope{.theta = config.rope_theta,
                                 .rotary_dim = config.rotary_dim,
                                 .style = config.rope_style,
                                 .scaling = config.rope_scaling,
                                 .divisors = config.rope_divisors};
  const double eps = config.rms_norm_eps;
  DecoderSpec spec{.vocab = config.vocab_size,
                   .hidden = config.hidden_size,
                   .norm = {"norm", eps},
                   .tied = config.tie_word_embeddings};
  for (int64_t window : config.layer_windows)
    spec.layers.push_back(
        {.hidden = config.hidden_size,
         .mixer = modules::CausalAttention::Config{.hidden = config.hidden_size,
                                                   .heads = config.num_attention_heads,
                                                   .kv_heads = config.num_key_value_heads,
                                                   .head_dim = config.head_dim,
                                                   .scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim)),
                                                   .qkv_bias = config.attention_bias,
                                                   .out_bias = config.attention_out_bias,
                                                   .qk_norm_eps = config.qk_norm ? std::optional(eps) : std::nullopt,
                                                   .window = window,
                                                   .rope = rope},
         .mlp = modules::DenseMlp::Config{.hidden = config.hidden_size,
                                          .ffn = config.intermediate_size,
                                          .activation = config.hidden_act,
                                          .bias = config.mlp_bias},
         .before_mixer = modules::NormSpec{"input_layernorm", eps},
         .before_mlp = modules::NormSpec{"post_attention_layernorm", eps}});
  return spec;
}

}  // namespace

const ModelFamily& llama_family() {
  static const ModelFamily kFamily = {.name = "llama",
                                      .types = kLlamaTypes,
                                      .read_json = read_llama_json,
                                      .read_gguf = read_llama_gguf,
                                      .write_json = write_llama_json,
                                      .check_json = check_llama_json,
                                      .prepare_json = prepare_llama_json,
                                      .write_gguf = write_llama_gguf,
                                      .gguf_notice = llama_gguf_notice,
                                      .decoder = llama_decoder};
  return kFamily;
}

}  // namespace eadem::models
