// SPDX-License-Identifier: Apache-2.0
//
// ModelFamily: everything that Eadem knows of an architecture. A family is one file in models/families and one line of
// the list in family.cc; no other code names it.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/models/config/model_config.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/weight_recipe.h"

namespace eadem::models {

// A value of config.json's `model_type`.
struct ModelType {
  std::string_view name;
  std::string_view gguf_architecture;  // empty: there are no GGUF files of it here
  std::string_view python_class;       // for `architectures` in a config.json
  // The values that transformers takes for keys that a config.json does not have. 0 stands for the meaning of null:
  // num_attention_heads for num_key_value_heads, hidden_size / num_attention_heads for head_dim.
  int64_t max_position_embeddings = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  bool out_bias = true;           // o has a bias where q, k and v have
  bool gguf_interleaves = false;  // GGUF files order rows of q and k for interleaved rotation
  bool gguf_experts = false;      // files of gguf_architecture that state experts are of this type, others are not
};

// A key with one number or truth, which a family adds to those of every config.
struct ConfigKey {
  std::string_view json;
  std::string_view gguf;  // below the architecture; empty: GGUF files do not state it
  double ModelConfig::*member;
  double if_absent;
  double least, most;
  bool whole = false;  // transformers takes whole numbers alone
};

// A part of a parameter's name below "model.layers.N.", or a whole name, and what GGUF files have in its place.
struct GgufName {
  std::string_view ours, gguf;
};

// A key of every config.json, or a part of a tensor's name, and what this family has in its place.
struct OwnName {
  std::string_view usual, own;
};

struct ModelFamily {
  std::string_view name;
  std::span<const ModelType> types;

  // Configurations.
  std::span<const ConfigKey> keys = {};
  std::string_view activation_key = "hidden_act";
  std::string_view activation = "silu";  // of a config.json that does not state it, and of GGUF files, which cannot
  bool latent_attention = false;         // read_json says how heads rotate; GGUF's widths of heads are the family's
  bool tied = false;                     // tie_word_embeddings of a config.json that does not state it
  double eps = 1e-6;                     // of norms, in a config.json that does not state it
  double rotated_share = 1;              // partial_rotary_factor of a config.json that does not state it
  bool rotates_shares = false;           // config.json may state another, which transformers reads
  int64_t ffn_per_hidden = 0;  // intermediate_size / hidden_size where the former is null; 0: it must be there
  std::span<const OwnName> json_names = {};  // of keys that other families share: "hidden_size" -> "n_embd"
  std::string_view gguf_eps = "attention.layer_norm_rms_epsilon";
  bool rotates = true;              // GGUF files state a rotation
  bool yarn_truncates = true;       // what yarn's `truncate` is in GGUF files, which do not state it
  bool yarn_states_betas = false;   // GGUF files state yarn's betas, and nothing multiplies what is rotated
  bool only_experts = false;        // GGUF files have no width of dense MLPs, of which there are none
  std::string_view gguf_keys = {};  // further keys of GGUF files that read_gguf reads, separated by spaces
  // The GGUF architecture of a configuration whose model type has several. Null: that of its row.
  std::string_view (*gguf_architecture)(const ModelConfig& config) = nullptr;
  bool gguf_counts_by_layer = false;  // GGUF files have heads of keys and widths of MLPs for each layer; 0: it has none
  bool gguf_counts_differ = false;    // these may be of several sizes, which read_gguf reads
  // The number of layers, where num_hidden_layers does not say it. Null: it does.
  int64_t (*count_layers)(const io::JsonReader& config) = nullptr;
  // On the load-balancing loss of a config.json that asks for it without stating this; 0: the family has none.
  double router_aux_loss_coef = 0;
  // Reads the keys of this family alone: windows, biases, norms, ropes. `result` has the sizes already.
  void (*read_json)(const io::JsonReader& config, ModelConfig& result);
  void (*read_gguf)(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) = nullptr;
  void (*write_json)(const ModelConfig& config, io::JsonValue& json);
  // Throws Unsupported for what the config.json of a model type cannot state. Null: what is not read back as it is.
  void (*check_json)(const ModelConfig& config) = nullptr;
  // Changes the configuration of a GGUF file to one that a config.json of some model type can state. May be null.
  void (*prepare_json)(ModelConfig& config) = nullptr;
  // Adds the family's keys to GGUF metadata. Throws Unsupported for what they cannot state.
  void (*write_gguf)(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) = nullptr;
  // The divisors of the rotary frequencies that GGUF files have as a tensor, of a configuration that does not state
  // them. Null: those of llama3 scaling, where there is such.
  std::vector<double> (*gguf_divisors)(const ModelConfig& config) = nullptr;
  // Returns a warning about GGUF files that other programs would compute differently; empty if there is none. May be
  // null.
  std::string (*gguf_notice)(const ModelConfig& config) = nullptr;

  // The model.
  DecoderSpec (*decoder)(const ModelConfig& config);

  // Checkpoints. Parameters are named as tensors of Hugging Face checkpoints are unless `recipes` says more.
  std::span<const GgufName> gguf_names = {};  // before those that most families share
  // Names in Hugging Face checkpoints: whole ones ("lm_head.weight"), what stands for "model.layers.", and parts of
  // names below a layer ("mlp.up_proj." -> "mlp.c_fc.").
  std::span<const OwnName> tensor_names = {};
  std::span<const std::string_view> ignored_tensors = {};  // ends of the names of buffers that some files have
  std::string_view ignored_module = {};                    // of tensors that are not computed with: "mtp."
  // Returns how a parameter is made of a checkpoint's tensors, the usual way first; none: under its own name.
  std::vector<WeightRecipe> (*recipes)(const ModelConfig& config, const ParameterInfo& parameter,
                                       CheckpointFormat format) = nullptr;
  // Further tensors that are not computed with. May be null.
  bool (*may_ignore)(const ModelConfig& config, const std::string& tensor) = nullptr;

  bool further_layers = false;  // files have layers behind the last one, which predict further tokens
  // Where files have the module for multi-token prediction that MtpModel builds.
  enum class Mtp : uint8_t {
    none,
    further_layer,  // it is the layer behind the model's last one
    own_module,     // directories: tensors below mtp_module; GGUF files: the layer behind the model's last one
    own_layers,     // directories: layers below "mtp.", counted from 0
  };
  Mtp mtp = Mtp::none;
  // Adds the module's layers to a configuration, behind the model's. Throws Unsupported where a model cannot have them.
  // Null: adds one layer like the last one.
  void (*add_mtp_layers)(ModelConfig& config) = nullptr;
  // For own_module, in directories: the first part of its tensors' names, and what stands there in place of a name's
  // beginning below a layer (the first entry that fits).
  std::string_view mtp_module = "mtp";
  std::span<const OwnName> mtp_names = {};
  bool gguf_mtp = true;  // GGUF files may have the module

  const ModelType* find_type(std::string_view model_type) const;
  // This family's name of a key that all configs have.
  std::string_view json_name(std::string_view usual) const;
};

std::span<const ModelFamily* const> families();

// Throws Unsupported naming `source` and what each family serves.
const ModelFamily& family_of_type(std::string_view model_type, const std::string& source);
// Of one architecture, files with experts and those without may be of two families.
const ModelFamily& family_of_gguf(std::string_view architecture, bool has_experts, const std::string& source);

// The GGUF name of a parameter ("model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight"). Throws InvalidArgument
// for a name that has none.
std::string gguf_name(const std::string& parameter, const ModelFamily* family = nullptr);

// The name of a parameter in Hugging Face checkpoints of a family.
std::string huggingface_name(const std::string& parameter, const ModelFamily& family);

}  // namespace eadem::models
