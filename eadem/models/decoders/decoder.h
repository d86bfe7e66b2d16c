// SPDX-License-Identifier: Apache-2.0
//
// Decoder: the one model class of all families. A DecoderSpec says what its layers are made of; parameters are named as
// the modules that own them are ("model.layers.3.self_attn.q_proj.weight").
#pragma once

#include "eadem/models/config/model_config.h"
#include "eadem/models/model.h"

namespace eadem::models {

struct DecoderSpec {
  int64_t vocab = 0;
  int64_t hidden = 0;
  double embedding_scale = 1;  // factor on the rows of the embedding, rounded to the dtype of the activations
  std::vector<modules::LayerSpec> layers;
  modules::NormSpec norm{.name = "norm"};     // after the last layer
  bool tied = false;                          // the head reads the embedding's matrix
  bool head_bias = false;                     // on the logits, with the head's or the embedding's matrix
  int64_t positions = 0;                      // learned positions, added to the embeddings; 0: none
  double logit_scale = 1;                     // factor on the logits
  double logit_softcap = 0;                   // of the logits; 0: none
  modules::LayerInputs::Config layer_inputs;  // what layers read besides; of width 0: nothing
  modules::HyperConnections::Config streams;  // of all layers; hc_head merges them before the norm. Of 0: one residual
};

// Every parameter: the embedding, layer by layer in the order of the computation, the norm, the head.
std::vector<ParameterInfo> parameters_of(const DecoderSpec& spec);

class Decoder final : public Model {
 public:
  // The family of the configuration's model type makes the spec.
  explicit Decoder(ModelConfig config);
  // A family that is in no list.
  Decoder(ModelConfig config, const ModelFamily& family);

  const ModelConfig* config() const override { return &config_; }
  const ModelFamily& family() const { return family_; }
  const DecoderSpec& decoder_spec() const { return spec_; }

  const ModelInfo& info() const override { return info_; }
  modules::ModelSpec spec() const override;
  ValueId embed(BuildContext& context) const override;
  ValueId layer(BuildContext& context, int index, ValueId x) const override;
  ValueId finish(BuildContext& context, ValueId x) const override;
  ValueId head(BuildContext& context, ValueId hidden) const override;
  ValueId mtp_hidden(ValueId x, ValueId finished) const override { return spec_.streams.streams > 0 ? x : finished; }
  std::vector<ParameterInfo> parameters() const override { return parameters_of(spec_); }
  std::vector<WeightRecipe> recipes(const ParameterInfo& parameter, CheckpointFormat format) const override;
  bool may_ignore(const std::string& tensor) const override;
  io::JsonValue config_json() const override { return config_.to_json(); }

 private:
  // What layers read besides their hidden states, unless it is there; x are the embeddings.
  void build_layer_inputs(BuildContext& context, ValueId x) const;
  void build_ropes(BuildContext& context, int first_layer, int end_layer) const;

  ModelConfig config_;
  const ModelFamily& family_;
  DecoderSpec spec_;
  ModelInfo info_;
};

}  // namespace eadem::models
