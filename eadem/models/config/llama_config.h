// SPDX-License-Identifier: Apache-2.0
//
// LlamaConfig: the typed configuration of the Llama family, model types llama (Llama 2, 3.x, SmolLM2), mistral, qwen2
// and qwen3.
#pragma once

#include "eadem/models/config/model_config.h"

namespace eadem::models {

struct LlamaConfig : ModelConfig {
  LlamaConfig() { model_type = "llama"; }
  // Throws InvalidArgument for a model type of another family.
  explicit LlamaConfig(ModelConfig config);

  static LlamaConfig from_json(const io::JsonReader& config) { return LlamaConfig(ModelConfig::from_json(config)); }
  static LlamaConfig from_gguf(const io::GgufFile& file) { return LlamaConfig(ModelConfig::from_gguf(file)); }

  static bool has_type(const ModelConfig& config);
};

}  // namespace eadem::models
