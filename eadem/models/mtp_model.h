// SPDX-License-Identifier: Apache-2.0
//
// MtpModel: the module with which a model predicts one more token (multi-token prediction), as a model of one layer, or
// of two where a layer is attention or an MLP. It reads, besides tokens, hidden states of the model that it belongs to.
// Of position i, with token i + 1:
//
//   x = eh_proj [enorm(embedding of token i + 1), hnorm(previous_hidden of position i)]
//   hidden = shared_head.norm(layers(x));   logits of token i + 2 = head(hidden)
//
// previous_hidden is the model's hidden state behind its last norm, which its head reads, or, for a token further on,
// the `hidden` of this module at the position before. With hyper-connections both are the streams behind the last
// layer, before they are merged: each stream is joined with the token (modules::MtpInput), and
//
//   hidden = shared_head.norm(hc_head(layers(x)))
//
// with an hc_head of the module's. The embedding and the head are the model's own. Of several modules of a checkpoint
// this is the first.
//
// Parameters are named as in published files of DeepSeek: model.layers.N.{enorm,hnorm,eh_proj,shared_head.norm}.weight
// and those of a decoder layer, N being the model's number of layers. Directories of ModelFamily::Mtp::own_module have
// them under names of the family's, as Qwen's mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc,norm}.weight and below
// mtp.layers.0, and those of Mtp::own_layers as mtp.layers.0.{enorm,hnorm,eh_proj}.weight,
// mtp.layers.{L - 1}.final_layernorm.weight and below mtp.layers.0 to L - 1. A layer of a model with linear attention
// in some layers has attention here. Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2; vLLM,
// models/deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py, qwen3_5_mtp.py, nemotron_h_mtp.py,
// longcat_flash_mtp.py and deepseek_v4_mtp.py; SGLang, models/longcat_flash_nextn.py and deepseek_v4_nextn.py;
// llama.cpp, src/models/glm4-moe.cpp (facts only).
#pragma once

#include <string>
#include <vector>

#include "eadem/models/auto_model.h"
#include "eadem/models/decoders/decoder.h"

namespace eadem::models {

class MtpModel final : public Model {
 public:
  // Throws Unsupported for a model whose family has no such module here.
  explicit MtpModel(const Decoder& model);

  const ModelInfo& info() const override { return info_; }
  modules::ModelSpec spec() const override;
  // Adds the input previous_hidden [tokens, hidden], or [tokens, streams, hidden], of the dtype of activations. Throws
  // Unsupported for several ranks.
  ValueId embed(BuildContext& context) const override;
  ValueId layer(BuildContext& context, int index, ValueId x) const override;
  ValueId finish(BuildContext& context, ValueId x) const override;
  ValueId head(BuildContext& context, ValueId hidden) const override { return longer_.head(context, hidden); }
  ValueId mtp_hidden(ValueId x, ValueId finished) const override { return longer_.mtp_hidden(x, finished); }
  std::vector<ParameterInfo> parameters() const override;
  std::vector<WeightRecipe> recipes(const ParameterInfo& parameter, CheckpointFormat format) const override;
  // Every tensor: those that are no parameters belong to the model.
  bool may_ignore(const std::string& /*tensor*/) const override { return true; }
  io::JsonValue config_json() const override { return longer_.config_json(); }

  // Returns how the names of the module's tensors begin: "model.layers.61", "blk.46" or "mtp".
  std::string place(CheckpointFormat format) const;

 private:
  int64_t hidden() const { return info_.hidden; }
  // Whether a parameter of `longer_` is one of the module's layers.
  bool is_own(const std::string& parameter) const;
  // The name in directories of ModelFamily::Mtp::own_layers; others stay.
  std::string name_in_own_layers(const std::string& tensor) const;

  Decoder longer_;  // the model with the module's layers behind its own
  int layer_;       // the number of the first of them
  std::string scope_;
  ModelInfo info_;
  modules::MtpInput input_;
  modules::NormSpec norm_;
  modules::HyperConnections::Config streams_;
};

// Why a checkpoint has no MTP module that is computed, for people; empty: it has one.
std::string why_no_mtp(const Checkpoint& checkpoint);

// Where the files have the module (MtpModel::place); empty: nowhere, or why_no_mtp() says why it is not computed.
std::string mtp_place(const Checkpoint& checkpoint);

// Returns the checkpoint with its MTP module as the model. Throws Unsupported with the text of why_no_mtp().
Checkpoint mtp_checkpoint(const Checkpoint& checkpoint);

}  // namespace eadem::models
