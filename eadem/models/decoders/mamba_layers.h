// SPDX-License-Identifier: Apache-2.0
//
// The parts that families with Mamba-2 layers share: keys of their configurations in both formats, the mixer, and how
// checkpoints store its parameters. For the files of families.
#pragma once

#include <string_view>
#include <vector>

#include "eadem/models/config/config_text.h"
#include "eadem/models/family.h"

namespace eadem::models {

// What a config.json calls the sizes, with those for absent keys.
struct MambaKeys {
  std::string_view heads = "mamba_n_heads", groups = "mamba_n_groups", state = "mamba_d_state", taps = "mamba_d_conv",
                   conv_bias = "mamba_conv_bias";
  MambaConfig if_absent = {.heads = 128, .groups = 1, .state = 256};
};
// All of MambaConfig that these keys state; head_dim and biases of projections are each family's own.
void read_mamba(const io::JsonReader& config, const MambaKeys& keys, MambaConfig& result);
void write_mamba(const MambaConfig& mamba, const MambaKeys& keys, io::JsonValue& json);

// `mamba_d_head`, which may be "auto", of `inner` in all heads. Throws DataCorrupted where they do not fit.
void read_mamba_head_dim(const io::JsonReader& config, int64_t inner, MambaConfig& result);

// `time_step_limit`, the least and the largest time step; the largest may be infinite.
void read_time_step_limit(const io::JsonReader& config, MambaConfig& result);
io::JsonValue time_step_limit_of(const MambaConfig& mamba);

// One of `layer_types` and `layers_block_type`, as a pattern; nothing without either. "mamba" and "attention" are what
// transformers 4 called "linear_attention" and "full_attention".
std::optional<std::string> read_layer_pattern(const io::JsonReader& config);
io::JsonValue layer_kinds_of(const std::string& pattern);

// The keys below the architecture of GGUF files.
inline constexpr std::string_view kMambaGgufKeys =
    "ssm.conv_kernel ssm.state_size ssm.group_count ssm.inner_size ssm.time_step_rank";
void read_mamba_gguf(const io::GgufFile& file, const std::string& prefix, MambaConfig& result);
// Throws Unsupported for limits of time steps other than `dt_min` and infinity.
void write_mamba_gguf(const MambaConfig& mamba, const std::string& prefix, io::GgufMetadata& metadata,
                      double dt_min = 0);
// A number for each layer: `value` where `has` says so, else 0.
template <typename Has>
io::GgufValue layer_counts(int64_t layers, int64_t value, Has&& has) {
  std::vector<int32_t> counts;
  for (int64_t layer = 0; layer < layers; ++layer) counts.push_back(has(layer) ? static_cast<int32_t>(value) : 0);
  return io::GgufValue::scalars(std::span<const int32_t>(counts));
}

modules::Mamba2::Config mamba_of(const ModelConfig& config);

// How a parameter below "mamba." is made; nothing for others. `module` is what Hugging Face files have for
// "model.layers.N.mamba.", with "{}" for N.
std::vector<WeightRecipe> mamba_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                        CheckpointFormat format, std::string_view module = "model.layers.{}.mamba.");

}  // namespace eadem::models
