// SPDX-License-Identifier: Apache-2.0
//
// Pieces of config.json that families share, read into a ModelConfig and written from one. For the files of families.
#pragma once

#include <string>
#include <string_view>

#include "eadem/models/config/model_config.h"

namespace eadem::models {

inline constexpr int64_t kMaxExtent = int64_t{1} << 31;
inline constexpr int64_t kMaxLayers = 4096;
inline constexpr int64_t kMaxExperts = 4096;
inline constexpr int64_t kMaxHeadDim = 65536;

// "silu", "gelu_pytorch_tanh" …: one of the names that configs have.
kernels::ActivationKind activation_named(std::string_view name);

// `rope_parameters` (transformers 5) or `rope_scaling` with a top-level `rope_theta` (before).
void read_rope(const io::JsonReader& config, ModelConfig& result);

// Likewise, with `theta` where nothing states a rope_theta.
void read_rope_or(const io::JsonReader& config, double theta, ModelConfig& result);
// One object of either: `theta`, if it is there, and `scaling`. Sets rotary_dim for a partial rotation.
void read_rope_object(const io::JsonReader& rope, ModelConfig& result, double& theta, modules::RopeScaling& scaling);
// `rope_parameters` with an object for each kind of layers, "full_attention" and "sliding_attention" (local_rope_theta
// and local_rope_scaling), or `rope_scaling` for the former (before). Keeps the thetas that `result` has where neither
// states one.
void read_ropes_of_layers(const io::JsonReader& config, ModelConfig& result);
// Throws Unsupported for yarn with `truncate` false, which transformers looks for beside such objects and not in them.
void require_truncated(const io::JsonReader& config, const modules::RopeScaling& scaling);
// The object "sliding_attention" of `rope_parameters`, if it is there.
void read_local_rope(const io::JsonReader& rope_parameters, ModelConfig& result);
// The object that `read_rope_object` reads back. `with_theta` adds rope_theta, as transformers 5 keeps it.
io::JsonValue rope_object(const modules::RopeScaling& scaling, std::optional<double> theta = {});

// `layer_types`, if there: the layers of "sliding_attention" get `window`, of which nothing means that they may not be.
// `needed` is the key to name then. False if the key is absent.
bool read_layer_types(const io::JsonReader& config, ModelConfig& result, std::optional<int64_t> window,
                      std::string_view needed);
io::JsonValue layer_types_of(const ModelConfig& config);

// The partial_rotary_factor from which readers get rotary_dim.
double partial_rotary_factor_of(const ModelConfig& config);

int64_t largest_window(const std::vector<int64_t>& layer_windows);

// Throws Unsupported unless the activation is SiLU, which is the only one that `where` has here; transformers applies
// the MLP's there.
void require_silu(const io::JsonReader& config, const ModelConfig& result, std::string_view where);

// Throws Unsupported: a config.json of this model type cannot state `what`.
void refuse_if(const ModelConfig& config, bool condition, std::string_view what);
// Refuses windows of several lengths.
void refuse_several_windows(const ModelConfig& config);

}  // namespace eadem::models
