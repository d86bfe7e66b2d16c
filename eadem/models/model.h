// SPDX-License-Identifier: Apache-2.0
//
// Model: one architecture with one configuration. It names parameters and composes modules; it runs nothing and holds
// no weights. Immutable: may be shared between threads.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "eadem/io/json.h"
#include "eadem/models/weight_recipe.h"
#include "eadem/modules/modules.h"

namespace eadem::models {

using modules::BuildContext;
using pipeline::ValueId;

struct ModelConfig;

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
  // Of longrope: the positions that its short factors are for. An engine for longer sequences has the long factors, for
  // all of its sequences, so it is made only where that is asked for. 0: there is no such limit.
  int64_t short_positions = 0;
  bool tied = false;  // the head reads the embedding's matrix
  std::vector<int64_t> bos_token_ids;
  std::vector<int64_t> eos_token_ids;

  bool has_token(int64_t id) const { return id >= 0 && id < vocab; }

  // The context of an engine that is asked for none.
  int64_t default_context() const {
    return short_positions > 0 && short_positions < max_positions ? short_positions : max_positions;
  }
};

using modules::ParameterInfo;

class Model {
 public:
  virtual ~Model() = default;

  virtual const ModelInfo& info() const = 0;
  virtual modules::ModelSpec spec() const = 0;

  // The decoder in parts, so that a stage of a pipeline can hold some of them, embeddings can come from outside, and a
  // pass can leave early. Hidden states are [tokens, hidden].
  //   embed   context.step.token_ids to hidden states
  //   layer   hidden states to those after layer `index`, 0 <= index < info().layers
  //   finish  the last layer's hidden states to those that the head reads, normalized
  //   head    hidden states [rows, hidden] to logits [rows, vocab], f32
  // With hyper-connections hidden states of layers are [tokens, streams, hidden].
  virtual ValueId embed(BuildContext& context) const = 0;
  virtual ValueId layer(BuildContext& context, int index, ValueId x) const = 0;
  virtual ValueId finish(BuildContext& context, ValueId x) const = 0;
  virtual ValueId head(BuildContext& context, ValueId hidden) const = 0;

  // The hidden states that the module for multi-token prediction reads. x: the last layer's output; finished: what
  // finish makes of it, which is the usual answer.
  virtual ValueId mtp_hidden(ValueId /*x*/, ValueId finished) const { return finished; }

  // embed and every layer.
  ValueId build_layers(BuildContext& context) const;
  // build_layers and finish.
  ValueId build_decoder(BuildContext& context) const { return finish(context, build_layers(context)); }

  // Every parameter, in the order in which checkpoints are written; none for a model that is never read from files.
  virtual std::vector<ParameterInfo> parameters() const { return {}; }
  // How a parameter is made of the tensors of a checkpoint, the usual way first. One of the recipes is enough; a
  // checkpoint that serves several must have equal values there. The first one is what is written.
  virtual std::vector<WeightRecipe> recipes(const ParameterInfo& parameter, CheckpointFormat format) const;
  // Tensors that a checkpoint may hold besides the parameters, because they can be derived from them or the config.
  virtual bool may_ignore(const std::string& tensor) const = 0;

  // The typed configuration; null for a model that no family made.
  virtual const ModelConfig* config() const { return nullptr; }
  // The configuration as Hugging Face's config.json.
  virtual io::JsonValue config_json() const = 0;
};

}  // namespace eadem::models
