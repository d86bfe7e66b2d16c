// SPDX-License-Identifier: Apache-2.0
//
// Decoders of softmax attention and one MLP a layer, as most families are. For the files of families: what differs
// between them beyond numbers of the configuration is a row of DenseTraits.
#pragma once

#include <string>
#include <string_view>

#include "eadem/models/config/config_text.h"
#include "eadem/models/family.h"

namespace eadem::models {

struct DenseTraits {
  // The names of the norms before and after attention, and before and after the MLP; empty: there is none.
  std::string_view before_mixer = "input_layernorm", after_mixer = "";
  std::string_view before_mlp = "post_attention_layernorm", after_mlp = "";
  modules::NormSpec::Kind norm = modules::NormSpec::Kind::rms;
  bool norm_bias = false;
  modules::CausalAttention::Config::QkNorm qk_norm = modules::CausalAttention::Config::QkNorm::per_head;
  bool gated = true;
  bool interleaved = false;                   // pairs (2i, 2i + 1) rotate, in files too
  bool scales_full_layers_only = false;       // layers with a window have no rope scaling
  bool learned_positions = false;             // in the place of a rotation
  bool rotates_windowed_layers_only = false;  // layers without a window rotate nothing
};

DecoderSpec dense_decoder(const ModelConfig& config, const DenseTraits& traits);

// "rope_theta" or what the family has in its place, "rope_scaling" and "partial_rotary_factor", as read_rope and
// from_json read them back.
void write_rope(const ModelConfig& config, io::JsonValue& json, const char* theta_key = "rope_theta");

// `key`, or `if_absent`, for the biases of q, k, v and o.
void read_attention_bias(const io::JsonReader& config, ModelConfig& result, bool if_absent, bool out_bias);

// `sliding_window` for every layer, or with `pattern` for all but every pattern-th; `layer_types` decides where it is
// there. A null window is none; `if_absent` stands for a key that is not there, 0 for none.
void read_windows(const io::JsonReader& config, ModelConfig& result, int64_t pattern, int64_t if_absent);
// All layers but every pattern-th get `window`; pattern 0: all do.
void set_windows(ModelConfig& config, int64_t window, int64_t pattern);
// Throws Unsupported unless the windows are those of this pattern, which GGUF files of `architecture` imply.
void require_windows(const ModelConfig& config, int64_t pattern, std::string_view architecture);
// `sliding_window` and `layer_types`. transformers needs a window of these models though no layer may have it.
void write_windows(const ModelConfig& config, io::JsonValue& json);

// Biases as the tensors of a GGUF file have them.
void read_biases(const io::GgufFile& file, const std::string& prefix, ModelConfig& result);

// Recipes for parameters that are rows of a fused matrix: "qkv_proj" of q, then k, then v (`qkv`), or "gate_up_proj" of
// gate, then up (`gate_up`), as Hugging Face checkpoints name them below a layer; GGUF files have attn_qkv and ffn_up.
// None for other parameters.
struct FusedRows {
  std::string_view qkv, gate_up;
};
std::vector<WeightRecipe> fused_rows(const ModelConfig& config, const ParameterInfo& parameter, CheckpointFormat format,
                                     const FusedRows& fused);

// "3" and "mlp.up_proj.weight" of "model.layers.3.mlp.up_proj.weight"; both empty for what is in no layer.
struct LayerName {
  std::string number, rest;
};
LayerName layer_name(const std::string& parameter);

}  // namespace eadem::models
