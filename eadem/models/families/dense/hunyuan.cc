// SPDX-License-Identifier: Apache-2.0
//
// Hunyuan dense: the Llama model with norms of q and k after their rotation. Its "dynamic" scaling with an alpha is a
// theta. Source: transformers, models/hunyuan_v1_dense; llama.cpp, conversion/hunyuan.py (facts only).
#include <cmath>

#include "eadem/models/decoders/dense_decoder.h"

namespace eadem::models {

namespace {

using QkNorm = modules::CausalAttention::Config::QkNorm;

constexpr ModelType kHunyuanTypes[] = {{"hunyuan_v1_dense", "hunyuan-dense", "HunYuanDenseV1ForCausalLM", 2048}};
constexpr OwnName kHunyuanNames[] = {{"self_attn.q_norm.", "self_attn.query_layernorm."},
                                     {"self_attn.k_norm.", "self_attn.key_layernorm."}};

// theta * alpha ^ (d / (d - 2)), whatever the other numbers of the scaling say.
void read_hunyuan_rope(const io::JsonReader& config, ModelConfig& result) {
  std::optional<io::JsonReader> rope = config.optional_object("rope_parameters");
  if (!rope) rope = config.optional_object("rope_scaling");
  const std::optional<double> alpha = rope ? rope->optional_number("alpha", 1e-6, 1e9) : std::nullopt;
  if (!alpha || *alpha == 0) return read_rope(config, result);
  result.rope_theta = config.optional_number("rope_theta", 1.0, 1e12).value_or(10000.0);
  if (const auto theta = rope->optional_number("rope_theta", 1.0, 1e12)) result.rope_theta = *theta;
  const std::string type =
      rope->optional_string("rope_type").value_or(rope->optional_string("type").value_or("default"));
  rope->ignore("type");
  if (type != "dynamic")
    throw Unsupported("{}: rope scaling of type \"{}\" has an 'alpha'; only \"dynamic\" has one", config.file(), type);
  for (const char* key :
       {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings"})
    rope->ignore(key, "means nothing beside alpha");
  const auto dim = static_cast<double>(result.head_dim);
  result.rope_theta *= std::pow(*alpha, dim / (dim - 2));
}

void read_hunyuan_json(const io::JsonReader& config, ModelConfig& result) {
  read_hunyuan_rope(config, result);
  read_attention_bias(config, result, false, true);
  result.qk_norm = true;
}

void write_hunyuan_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("attention_bias", config.attention_bias);
}

void read_hunyuan_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
  result.qk_norm = true;
}

DecoderSpec hunyuan_decoder(const ModelConfig& config) {
  return dense_decoder(config, {.qk_norm = QkNorm::per_head_after_rope});
}

}  // namespace

const ModelFamily& hunyuan_family() {
  static const ModelFamily kFamily = {.name = "hunyuan",
                                      .types = kHunyuanTypes,
                                      .eps = 1e-5,
                                      .read_json = read_hunyuan_json,
                                      .read_gguf = read_hunyuan_gguf,
                                      .write_json = write_hunyuan_json,
                                      .decoder = hunyuan_decoder,
                                      .tensor_names = kHunyuanNames};
  return kFamily;
}

}  // namespace eadem::models
