// SPDX-License-Identifier: Apache-2.0
//
// GPT-NeoX and Pythia: layer norms with biases, attention and MLP side by side on norms of their own, a part of each
// head rotates; q, k and v of each head are neighbours in one matrix. Source: transformers, models/gpt_neox; llama.cpp,
// conversion/gpt_neox.py and src/models/gptneox.cpp (facts only).
#include "eadem/models/decoders/dense_decoder.h"

namespace eadem::models {

namespace {

using NormKind = modules::NormSpec::Kind;

constexpr ModelType kGptNeoxTypes[] = {{"gpt_neox", "gptneox", "GPTNeoXForCausalLM", 2048}};
constexpr OwnName kGptNeoxKeys[] = {{"rms_norm_eps", "layer_norm_eps"},
                                    {"partial_rotary_factor", "rotary_pct"},
                                    {"num_key_value_heads", ""},
                                    {"head_dim", ""}};
constexpr OwnName kGptNeoxNames[] = {{"model.layers.", "gpt_neox.layers."},
                                     {"model.embed_tokens.weight", "gpt_neox.embed_in.weight"},
                                     {"model.norm.weight", "gpt_neox.final_layer_norm.weight"},
                                     {"model.norm.bias", "gpt_neox.final_layer_norm.bias"},
                                     {"lm_head.weight", "embed_out.weight"},
                                     {"self_attn.o_proj.", "attention.dense."},
                                     {"mlp.up_proj.", "mlp.dense_h_to_4h."},
                                     {"mlp.down_proj.", "mlp.dense_4h_to_h."}};
constexpr const char* kBase = "rotary_emb_base";  // rope_theta, which transformers does not read beside the rope object
constexpr std::string_view kGptNeoxBuffers[] = {".attention.bias", ".attention.masked_bias"};

void read_gpt_neox_json(const io::JsonReader& config, ModelConfig& result) {
  const double base = config.optional_number(kBase, 1, 1e12).value_or(10000);
  if (const auto theta = config.optional_number("rope_theta", 1, 1e12); theta && *theta != base)
    throw Unsupported("{}: 'rope_theta' is {} and '{}' {}; models of type {} have the latter alone", config.file(),
                      *theta, kBase, base, result.model_type);
  read_rope_or(config, base, result);
  read_attention_bias(config, result, true, true);
  result.mlp_bias = true;
  result.parallel_residual = config.optional_boolean("use_parallel_residual").value_or(true);
}

void write_gpt_neox_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json, kBase);
  json.set("attention_bias", config.attention_bias).set("use_parallel_residual", config.parallel_residual);
}

void read_gpt_neox_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
  result.parallel_residual = file.optional_boolean(prefix + "use_parallel_residual").value_or(true);
}

void write_gpt_neox_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  metadata.emplace_back(prefix + "use_parallel_residual", io::GgufValue::boolean(config.parallel_residual));
}

DecoderSpec gpt_neox_decoder(const ModelConfig& config) {
  return dense_decoder(config, {.norm = NormKind::layer, .norm_bias = true, .gated = false});
}

// The rows of q, k or v of every head, out of each head's three blocks. GGUF files have q, then k, then v.
std::vector<WeightRecipe> gpt_neox_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                           CheckpointFormat format) {
  if (format == CheckpointFormat::gguf) return fused_rows(config, parameter, format, {"attn_qkv", ""});
  const LayerName name = layer_name(parameter.name);
  constexpr std::string_view kParts[] = {"self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."};
  for (int64_t part = 0; part < 3; ++part) {
    if (!name.rest.starts_with(kParts[part])) continue;
    const std::string tensor = fmt::format("gpt_neox.layers.{}.attention.query_key_value.{}", name.number,
                                           name.rest.substr(kParts[part].size()));
    const int64_t heads = config.num_attention_heads, dim = config.head_dim;
    std::vector<WeightRecipe> rows;
    for (int64_t head = 0; head < heads; ++head)
      rows.push_back(WeightRecipe::slice(tensor, 0, (head * 3 + part) * dim, dim, 3 * heads * dim));
    return {WeightRecipe::concat(std::move(rows), 0, std::vector<int64_t>(static_cast<size_t>(heads), dim))};
  }
  return {};
}

}  // namespace

const ModelFamily& gpt_neox_family() {
  static const ModelFamily kFamily = {.name = "gpt_neox",
                                      .types = kGptNeoxTypes,
                                      .activation = "gelu",
                                      .eps = 1e-5,
                                      .rotated_share = 0.25,
                                      .rotates_shares = true,
                                      .json_names = kGptNeoxKeys,
                                      .gguf_eps = "attention.layer_norm_epsilon",
                                      .gguf_keys = "use_parallel_residual",
                                      .read_json = read_gpt_neox_json,
                                      .read_gguf = read_gpt_neox_gguf,
                                      .write_json = write_gpt_neox_json,
                                      .write_gguf = write_gpt_neox_gguf,
                                      .decoder = gpt_neox_decoder,
                                      .tensor_names = kGptNeoxNames,
                                      .ignored_tensors = kGptNeoxBuffers,
                                      .recipes = gpt_neox_recipes};
  return kFamily;
}

}  // namespace eadem::models
