// SPDX-License-Identifier: Apache-2.0
//
// GPT-2: learned positions, layer norms with biases, an MLP without a gate; matrices are stored [in, out], and those of
// q, k and v side by side. Source: transformers, models/gpt2; llama.cpp, conversion/gpt2.py and src/models/gpt2.cpp
// (facts only).
#include "eadem/models/decoders/dense_decoder.h"

namespace eadem::models {

namespace {

using NormKind = modules::NormSpec::Kind;

constexpr ModelType kGpt2Types[] = {{"gpt2", "gpt2", "GPT2LMHeadModel", 1024}};
constexpr OwnName kGpt2Keys[] = {{"hidden_size", "n_embd"},
                                 {"intermediate_size", "n_inner"},
                                 {"num_hidden_layers", "n_layer"},
                                 {"num_attention_heads", "n_head"},
                                 {"max_position_embeddings", "n_positions"},
                                 {"rms_norm_eps", "layer_norm_epsilon"},
                                 {"num_key_value_heads", ""},
                                 {"head_dim", ""}};
// Below a layer, or whole, behind "transformer.", which the oldest files do not have.
constexpr OwnName kGpt2Names[] = {
    {"model.embed_tokens.", "wte."}, {"model.embed_positions.", "wpe."},     {"model.norm.", "ln_f."},
    {"input_layernorm.", "ln_1."},   {"post_attention_layernorm.", "ln_2."}, {"self_attn.o_proj.", "attn.c_proj."},
    {"mlp.up_proj.", "mlp.c_fc."},   {"mlp.down_proj.", "mlp.c_proj."}};
constexpr std::string_view kGpt2Buffers[] = {".attn.bias", ".attn.masked_bias"};

void read_gpt2_json(const io::JsonReader& config, ModelConfig& result) {
  result.attention_bias = result.attention_out_bias = result.mlp_bias = true;
  if (!config.optional_boolean("scale_attn_weights").value_or(true)) result.attention_multiplier = 1;
  result.scores_per_layer = config.optional_boolean("scale_attn_by_inverse_layer_idx").value_or(false);
  if (const auto context = config.optional_integer("n_ctx", 1, kMaxExtent);
      context.value_or(0) > result.max_position_embeddings)
    throw Unsupported("{}: 'n_ctx' is {} but there are {} positions", config.file(), *context,
                      result.max_position_embeddings);
}

void write_gpt2_json(const ModelConfig& config, io::JsonValue& json) {
  json.set("scale_attn_weights", config.attention_multiplier == 0);
  json.set("scale_attn_by_inverse_layer_idx", config.scores_per_layer);
}

void write_gpt2_gguf(const ModelConfig& config, const std::string&, io::GgufMetadata&) {
  if (config.attention_multiplier != 0 || config.scores_per_layer)
    throw Unsupported("scores with a scale of their own, which GGUF's gpt2 architecture cannot state");
}

DecoderSpec gpt2_decoder(const ModelConfig& config) {
  DecoderSpec spec =
      dense_decoder(config, {.norm = NormKind::layer, .norm_bias = true, .gated = false, .learned_positions = true});
  for (size_t layer = 0; config.scores_per_layer && layer < spec.layers.size(); ++layer)
    std::get<modules::CausalAttention::Config>(spec.layers[layer].mixer).scale /= static_cast<double>(layer + 1);
  return spec;
}

// The tensor of a checkpoint whose names begin with `prefix`.
WeightRecipe gpt2_recipe(const ModelConfig& config, const ParameterInfo& parameter, const std::string& prefix) {
  const LayerName name = layer_name(parameter.name);
  const std::string layer = name.number.empty() ? prefix : fmt::format("{}h.{}.", prefix, name.number);
  const std::string& own = name.number.empty() ? parameter.name : name.rest;
  constexpr std::string_view kParts[] = {"self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."};
  const int64_t width = config.hidden_size;
  const bool matrix = !name.number.empty() && parameter.shape.rank() == 2;
  for (int64_t part = 0; part < 3; ++part)
    if (own.starts_with(kParts[part])) {
      WeightRecipe columns = WeightRecipe::slice(layer + "attn.c_attn." + own.substr(kParts[part].size()),
                                                 matrix ? 1 : 0, part * width, width, 3 * width);
      return matrix ? WeightRecipe::transpose(std::move(columns)) : columns;
    }
  for (const OwnName& known : kGpt2Names)
    if (own.starts_with(known.usual)) {
      WeightRecipe whole = WeightRecipe::name(layer + std::string(known.own) + own.substr(known.usual.size()));
      return matrix ? WeightRecipe::transpose(std::move(whole)) : whole;
    }
  return WeightRecipe::name(parameter.name);  // the head
}

std::vector<WeightRecipe> gpt2_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                       CheckpointFormat format) {
  if (format == CheckpointFormat::gguf) return fused_rows(config, parameter, format, {"attn_qkv", ""});
  return {gpt2_recipe(config, parameter, "transformer."), gpt2_recipe(config, parameter, "")};
}

}  // namespace

const ModelFamily& gpt2_family() {
  static const ModelFamily kFamily = {.name = "gpt2",
                                      .types = kGpt2Types,
                                      .activation_key = "activation_function",
                                      .activation = "gelu_new",
                                      .tied = true,
                                      .eps = 1e-5,
                                      .ffn_per_hidden = 4,
                                      .json_names = kGpt2Keys,
                                      .gguf_eps = "attention.layer_norm_epsilon",
                                      .rotates = false,
                                      .read_json = read_gpt2_json,
                                      .read_gguf = read_biases,
                                      .write_json = write_gpt2_json,
                                      .write_gguf = write_gpt2_gguf,
                                      .decoder = gpt2_decoder,
                                      .ignored_tensors = kGpt2Buffers,
                                      .recipes = gpt2_recipes};
  return kFamily;
}

}  // namespace eadem::models
