// SPDX-License-Identifier: Apache-2.0
//
// Model: one architecture with one configuration. It names parameters and composes modules; it runs nothing and holds
// no weights. Immutable: may be shared between threads.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "eadem/io/json.h"
#include "eadem/modules/modules.h"

namespace eadem::models {

using modules::BuildContext;
using pipeline::ValueId;

// Properties of any decoder-only language model that engines and tools need.
struct ModelInfo {
  std::string architecture;  // "llama", "qwen3": the config's model_type
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t max_positions = 0;
  std::vector<int64_t> bos_token_ids;
  std::vector<int64_t> eos_token_ids;
};

class Model {
 public:
  virtual ~Model() = default;

  virtual const ModelInfo& info() const = 0;
  virtual modules::ModelSpec spec() const = 0;

  // Adds the decoder: context.step's inputs to the final hidden states [tokens, hidden], normalized.
  virtual ValueId build_decoder(BuildContext& context) const = 0;
  // Adds the LM head: hidden states [rows, hidden] to logits [rows, vocab], f32.
  virtual ValueId build_head(BuildContext& context, ValueId hidden) const = 0;

  // Names under which `parameter` may stand in a checkpoint, the usual one first. One of them is enough; a checkpoint
  // that has several must have equal values there.
  virtual std::vector<std::string> checkpoint_names(const std::string& parameter) const = 0;
  // Tensors that a checkpoint may hold besides the parameters, because they can be derived from them or the config.
  virtual bool may_ignore(const std::string& tensor) const = 0;

  // The configuration as Hugging Face's config.json.
  virtual io::JsonValue config_json() const = 0;
};

}  // namespace eadem::models
