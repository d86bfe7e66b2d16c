// SPDX-License-Identifier: Apache-2.0
//
// The parts that families share whose layers are linear attention with the gated delta rule but for every few, which
// are attention with a gate: Qwen3-Next and Qwen3.5.
#pragma once

#include <string>
#include <vector>

#include "eadem/models/config/config_text.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/family.h"
#include "eadem/models/weight_recipe.h"

namespace eadem::models {

// Keys of config.json: linear_num_key_heads and its kin; layer_types, or full_attention_interval.
void read_linear_attention(const io::JsonReader& config, ModelConfig& result);
void write_linear_attention(const ModelConfig& config, io::JsonValue& json);

// Keys of GGUF files, as gguf_keys of a family names them.
inline constexpr std::string_view kLinearGgufKeys =
    "ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size full_attention_interval";
void read_linear_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result);
// Throws Unsupported for layers that follow no interval, and for heads whose keys and values differ in width.
void write_linear_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);

// Names of the module for multi-token prediction, as mtp_names of a family.
inline constexpr OwnName kLinearMtpNames[] = {{"enorm.", "pre_fc_norm_embedding."},
                                              {"hnorm.", "pre_fc_norm_hidden."},
                                              {"eh_proj.", "fc."},
                                              {"shared_head.norm.", "norm."},
                                              {"", "layers.0."}};

// Puts linear attention into the layers that have it, and gates into the others.
void set_linear_layers(const ModelConfig& config, DecoderSpec& spec);

// How files name and order what linear attention projects.
struct LinearNames {
  bool grouped = false;       // Hugging Face: rows of q, k, v and z, or of b and a, for one key head after the other
  bool gguf_grouped = false;  // GGUF: b and a likewise, in ssm_ba; else ssm_beta and ssm_alpha
  bool gguf_tiled = false;    // GGUF: value heads of one key head stand key_heads apart
};
// Recipes of linear attention, of queries and their gates, and of norms of 1 + w; none for other parameters.
std::vector<WeightRecipe> linear_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                         CheckpointFormat format, const LinearNames& names);

}  // namespace eadem::models
