// SPDX-License-Identifier: Apache-2.0
//
// LFM2: gated short convolutions, and attention with norms of q and k in the other layers. The norm that checkpoints
// call that of the embedding stands before the head.
// Source: transformers, models/lfm2; llama.cpp, conversion/lfm2.py and src/models/lfm2.cpp (facts only).
#include <algorithm>

#include "eadem/models/decoders/dense_decoder.h"
#include "eadem/models/decoders/mamba_layers.h"
#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/recurrent_recipes.h"

namespace eadem::models {

namespace {

constexpr ModelType kLfm2Types[] = {{.name = "lfm2",
                                     .gguf_architecture = "lfm2",
                                     .python_class = "Lfm2ForCausalLM",
                                     .max_position_embeddings = 128000,
                                     .num_key_value_heads = 8}};

constexpr OwnName kLfm2KeyNames[] = {{"rms_norm_eps", "norm_eps"}};
constexpr OwnName kLfm2Names[] = {{"model.norm.weight", "model.embedding_norm.weight"},
                                  {"input_layernorm.", "operator_norm."},
                                  {"post_attention_layernorm.", "ffn_norm."},
                                  {"self_attn.o_proj.", "self_attn.out_proj."},
                                  {"self_attn.q_norm.", "self_attn.q_layernorm."},
                                  {"self_attn.k_norm.", "self_attn.k_layernorm."},
                                  {"mlp.gate_proj.", "feed_forward.w1."},
                                  {"mlp.up_proj.", "feed_forward.w3."},
                                  {"mlp.down_proj.", "feed_forward.w2."}};
constexpr GgufName kLfm2GgufNames[] = {{"conv.out_proj.", "shortconv.out_proj."}};

bool has_convolution(const ModelConfig& config, size_t layer) { return config.layer_pattern[layer] == 'C'; }

// `layer_types`, or the layers that attend, or all of them do.
std::string read_lfm2_layers(const io::JsonReader& config, int64_t layers) {
  const std::vector<int64_t> attending =
      config.has("full_attn_idxs") ? config.integers("full_attn_idxs", 0, layers - 1) : std::vector<int64_t>();
  std::string pattern(static_cast<size_t>(layers), config.has("full_attn_idxs") ? 'C' : '*');
  for (const int64_t layer : attending) pattern[static_cast<size_t>(layer)] = '*';
  config.ignore("full_attn_idxs");
  if (!config.has("layer_types")) {
    config.ignore("layer_types");  // null
    return pattern;
  }
  const std::vector<std::string> types = config.strings("layer_types");
  if (std::ssize(types) != layers) config.fail("layer_types", fmt::format("{} entries, one per layer", layers));
  for (size_t layer = 0; layer < types.size(); ++layer) {
    if (types[layer] != "conv" && types[layer] != "full_attention")
      config.fail("layer_types", "only \"full_attention\" and \"conv\"");
    pattern[layer] = types[layer] == "conv" ? 'C' : '*';
  }
  return pattern;
}

// MLPs are two thirds as wide as stated, times a factor, in whole multiples, unless that is switched off. Published
// files state it as block_ff_dim.
void read_lfm2_width(const io::JsonReader& config, ModelConfig& result) {
  int64_t& width = result.intermediate_size;
  if (!config.has("intermediate_size")) width = 12288;
  width = config.optional_integer("block_ff_dim", 1, kMaxExtent).value_or(width);
  const bool adjusts = config.optional_boolean("block_auto_adjust_ff_dim").value_or(true);
  const int64_t multiple = config.optional_integer("block_multiple_of", 1, kMaxExtent).value_or(256);
  const bool is_null =
      config.value().find("block_ffn_dim_multiplier") != nullptr && !config.has("block_ffn_dim_multiplier");
  const double factor = config.optional_number("block_ffn_dim_multiplier", 1e-6, 1e6).value_or(1.0);
  if (!adjusts) return;
  width = 2 * width / 3;
  if (!is_null)
    width = (static_cast<int64_t>(factor * static_cast<double>(width)) + multiple - 1) / multiple * multiple;
}

void read_lfm2_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope_or(config, 1000000, result);
  read_lfm2_width(config, result);
  require_silu(config, result, "MLPs");
  result.qk_norm = true;
  result.tie_word_embeddings = config.optional_boolean("tie_embedding").value_or(result.tie_word_embeddings);
  result.conv_taps = config.optional_integer("conv_L_cache", 2, kernels::kMaxTaps).value_or(3);
  result.conv_bias = config.optional_boolean("conv_bias").value_or(false);
  result.layer_pattern = read_lfm2_layers(config, result.num_hidden_layers);
}

void write_lfm2_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("block_auto_adjust_ff_dim", false);
  json.set("conv_L_cache", config.conv_taps).set("conv_bias", config.conv_bias);
  io::JsonValue types = io::JsonValue::array();
  for (size_t layer = 0; layer < config.layer_pattern.size(); ++layer)
    types.push_back(has_convolution(config, layer) ? "conv" : "full_attention");
  json.set("layer_types", std::move(types));
}

// A layer without heads of keys has a convolution.
void read_lfm2_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  result.qk_norm = true;
  result.conv_taps = file.integer(prefix + "shortconv.l_cache", 2, kernels::kMaxTaps);
  for (const int64_t heads : file.integers(prefix + "attention.head_count_kv", 0, 65536))
    result.layer_pattern += heads > 0 ? '*' : 'C';
}

void write_lfm2_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  if (config.conv_bias) throw Unsupported("biases of convolutions, which GGUF's lfm2 architecture cannot state");
  add("feed_forward_length", config.intermediate_size);
  add("shortconv.l_cache", config.conv_taps);
  metadata.emplace_back(prefix + "attention.head_count_kv",
                        layer_counts(config.num_hidden_layers, config.num_key_value_heads, [&](int64_t layer) {
                          return !has_convolution(config, static_cast<size_t>(layer));
                        }));
}

DecoderSpec lfm2_decoder(const ModelConfig& config) {
  DecoderSpec spec = dense_decoder(config, {});
  for (size_t layer = 0; layer < spec.layers.size(); ++layer)
    if (has_convolution(config, layer))
      spec.layers[layer].mixer = modules::GatedConvolution::Config{
          .hidden = config.hidden_size, .taps = config.conv_taps, .bias = config.conv_bias};
  return spec;
}

// b, c and x are rows of one matrix, in this order.
std::vector<WeightRecipe> lfm2_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                       CheckpointFormat format) {
  const LayerName name = layer_name(parameter.name);
  const bool gguf = format == CheckpointFormat::gguf;
  if (gguf && parameter.name == "model.norm.weight") return {WeightRecipe::name("token_embd_norm.weight")};
  if (!name.rest.starts_with("conv.")) return {};
  const std::string prefix =
      gguf ? fmt::format("blk.{}.shortconv.", name.number) : fmt::format("model.layers.{}.conv.", name.number);
  const std::string part = name.rest.substr(5), end = part.substr(part.find('.'));
  if (part == "conv.weight")
    return {convolution_recipe(WeightRecipe::name(prefix + part), config.hidden_size, config.conv_taps, format)};
  if (part == "conv.bias") return {WeightRecipe::name(prefix + part)};
  for (const auto& [own, index] : {std::pair<std::string_view, int64_t>{"b_proj.", 0}, {"c_proj.", 1}, {"x_proj.", 2}})
    if (part.starts_with(own))
      return {WeightRecipe::slice(prefix + "in_proj" + end, 0, index * config.hidden_size, config.hidden_size,
                                  3 * config.hidden_size)};
  return {};
}

}  // namespace

const ModelFamily& lfm2_family() {
  static const ModelFamily kFamily = {.name = "lfm2",
                                      .types = kLfm2Types,
                                      .tied = true,
                                      .eps = 1e-5,
                                      .ffn_per_hidden = 4,  // stated by block_ff_dim
                                      .json_names = kLfm2KeyNames,
                                      .gguf_keys = "shortconv.l_cache",
                                      .gguf_counts_by_layer = true,
                                      .read_json = read_lfm2_json,
                                      .read_gguf = read_lfm2_gguf,
                                      .write_json = write_lfm2_json,
                                      .write_gguf = write_lfm2_gguf,
                                      .decoder = lfm2_decoder,
                                      .gguf_names = kLfm2GgufNames,
                                      .tensor_names = kLfm2Names,
                                      .recipes = lfm2_recipes};
  return kFamily;
}

}  // namespace eadem::models
