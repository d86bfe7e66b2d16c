// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/config/llama_config.h"

#include "eadem/models/family.h"

namespace eadem::models {

bool LlamaConfig::has_type(const ModelConfig& config) { return config.family().find_type("llama") != nullptr; }

LlamaConfig::LlamaConfig(ModelConfig config) : ModelConfig(std::move(config)) {
  if (!has_type(*this)) throw InvalidArgument("model type '{}' is not of the Llama family", model_type);
}

}  // namespace eadem::models
