// SPDX-License-Identifier: Apache-2.0
//
// The Llama family: pre-norm decoder with grouped-query attention, rotary positions and a gated MLP. Llama 2 and 3.x,
// Mistral, Qwen2 / 2.5, Qwen3 dense and SmolLM2 are this model with other switches (llama_config.h).
// Source: the modeling files of Hugging Face transformers for these model types.
#pragma once

#include "eadem/models/llama_config.h"
#include "eadem/models/model.h"

namespace eadem::models {

class Llama final : public Model {
 public:
  explicit Llama(LlamaConfig config);

  const LlamaConfig& config() const { return config_; }

  const ModelInfo& info() const override { return info_; }
  modules::ModelSpec spec() const override;
  ValueId build_decoder(BuildContext& context) const override;
  ValueId build_head(BuildContext& context, ValueId hidden) const override;
  std::vector<std::string> checkpoint_names(const std::string& parameter) const override;
  bool may_ignore(const std::string& tensor) const override;
  io::JsonValue config_json() const override { return config_.to_json(); }

 private:
  LlamaConfig config_;
  ModelInfo info_;
};

// The GGUF name of a parameter of this family ("model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight"). Throws
// InvalidArgument for a name that is none.
std::string gguf_name(const std::string& parameter);

}  // namespace eadem::models
