// SPDX-License-Identifier: Apache-2.0
//
// Phi-3, 3.5 and 4: q, k and v are rows of one matrix, and so are gate and up; a part of each head may rotate, with
// factors for each frequency (longrope), others for contexts beyond the original one.
// Source: transformers, models/phi3; llama.cpp, conversion/phi.py and src/models/phi3.cpp (facts only).
#include "eadem/models/decoders/dense_decoder.h"

namespace eadem::models {

namespace {

constexpr ModelType kPhi3Types[] = {{"phi3", "phi3", "Phi3ForCausalLM", 4096}};

// The original context stands beside the scaling, whose older types mean longrope too.
void read_phi3_json(const io::JsonReader& config, ModelConfig& result) {
  const int64_t original = config.optional_integer("original_max_position_embeddings", 1, kMaxExtent).value_or(4096);
  result.rope_scaling.original_max_positions = static_cast<double>(original);
  read_rope(config, result);
  if (result.rope_scaling.kind == modules::RopeScaling::Kind::none)
    result.rope_scaling = {};
  else if (result.rope_scaling.kind != modules::RopeScaling::Kind::longrope)
    throw Unsupported("{}: rope scaling of models of type phi3 is longrope; this is another", config.file());
  read_windows(config, result, 0, 0);
}

void write_phi3_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  if (config.rope_scaling.kind != modules::RopeScaling::Kind::none)
    json.set("original_max_position_embeddings", static_cast<int64_t>(config.rope_scaling.original_max_positions));
  const int64_t window = largest_window(config.layer_windows);
  json.set("sliding_window", window > 0 ? io::JsonValue(window) : io::JsonValue(nullptr));
}

void read_phi3_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
}

DecoderSpec phi3_decoder(const ModelConfig& config) { return dense_decoder(config, {}); }

std::vector<WeightRecipe> phi3_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                       CheckpointFormat format) {
  return fused_rows(config, parameter, format, {"self_attn.qkv_proj", "mlp.gate_up_proj"});
}

}  // namespace

const ModelFamily& phi3_family() {
  static const ModelFamily kFamily = {.name = "phi3",
                                      .types = kPhi3Types,
                                      .eps = 1e-5,
                                      .rotates_shares = true,
                                      .read_json = read_phi3_json,
                                      .read_gguf = read_phi3_gguf,
                                      .write_json = write_phi3_json,
                                      .decoder = phi3_decoder,
                                      .recipes = phi3_recipes};
  return kFamily;
}

}  // namespace eadem::models
