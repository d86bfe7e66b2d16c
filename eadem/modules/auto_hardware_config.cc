// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/auto_hardware_config.h"

#include "eadem/core/encodings/group_encoding.h"
#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/modules/base/embedding.h"
#include "eadem/modules/base/lm_head.h"
#include "eadem/modules/base/rms_norm.h"
#include "eadem/modules/hybrid/causal_attention.h"
#include "eadem/modules/hybrid/dense_mlp.h"

namespace eadem::modules {

namespace {

HardwareConfig module_default(Role role, const Device& device, HardwareMode mode, const ModelSpec& spec) {
  switch (role) {
    case Role::embedding: return Embedding::default_hw_config(device, mode, spec);
    case Role::norm: return RmsNorm::default_hw_config(device, mode, spec);
    case Role::attention: return CausalAttention::default_hw_config(device, mode, spec);
    case Role::mlp: return DenseMlp::default_hw_config(device, mode, spec);
    case Role::lm_head: return LmHead::default_hw_config(device, mode, spec);
  }
  EADEM_UNREACHABLE("role {}", static_cast<int>(role));
}

// A type that no kernel reads is decoded at load. Kernels read integers in steps of 32.
WeightType kept_type(const WeightType& stored, int64_t columns) {
  if (GroupEncoding::of(matrix_encoding(stored.encoding)) != nullptr && columns % 32 != 0) return stored.dtype;
  return stored.dtype == DType::f64 ? DType::f32 : stored;
}

}  // namespace

std::string_view role_name(Role role) {
  switch (role) {
    case Role::embedding: return "embedding";
    case Role::norm: return "norm";
    case Role::attention: return "attention";
    case Role::mlp: return "mlp";
    case Role::lm_head: return "lm_head";
  }
  return "?";
}

AutoHardwareConfig AutoHardwareConfig::from_model_spec(const ModelSpec& spec, const Device& device, HardwareMode mode,
                                                       const HardwareOverrides& explicit_arguments,
                                                       const std::string& explicit_by,
                                                       const std::vector<PolicyRule>& policy) {
  AutoHardwareConfig result;
  result.mode_ = mode;
  result.checkpoint_type_of_ = spec.checkpoint_type_of;
  for (Role role : kRoles) {
    const bool per_layer = role == Role::attention || role == Role::mlp || role == Role::norm;
    for (int layer = -1; layer < (per_layer ? spec.layers : 0); ++layer) {
      HardwareConfig config = module_default(role, device, mode, spec);
      for (const PolicyRule& rule : policy)
        if (rule.role == role && layer >= rule.first_layer && layer <= rule.last_layer)
          rule.overrides.apply_to(config, OptionSource::model_policy, "model policy");
      // Norm weights are a vanishing part of the bytes; their module keeps them exact whatever the file stores.
      if (spec.checkpoint_type && role != Role::norm)
        config.precision.weights.set(*spec.checkpoint_type, OptionSource::checkpoint, spec.checkpoint_source);
      HardwareOverrides arguments = explicit_arguments;
      if (role == Role::norm) arguments.weights = {};
      arguments.apply_to(config, OptionSource::explicit_argument, explicit_by);
      // Unless somebody says otherwise, the cache holds keys and values as they are computed, so that serving sees the
      // bits of training.
      auto& kv_cache = config.precision.kv_cache;
      if (kv_cache.source == OptionSource::mode_default) kv_cache.value = config.precision.activations.value;
      result.configs_[{role, layer}] = std::move(config);
    }
  }
  return result;
}

const HardwareConfig& AutoHardwareConfig::of(Role role, int layer) const {
  auto found = configs_.find({role, layer});
  if (found == configs_.end()) found = configs_.find({role, -1});
  EADEM_CHECK(found != configs_.end(), "no configuration for {} of layer {}", role_name(role), layer);
  return found->second;
}

WeightType AutoHardwareConfig::weight_type(const HardwareConfig& config, const std::string& parameter,
                                           int64_t columns) const {
  const ConfigOption<WeightType>& option = config.precision.weights;
  if (option.source != OptionSource::checkpoint || !checkpoint_type_of_) return option.value;
  const std::optional<WeightType> stored = checkpoint_type_of_(parameter);
  if (!stored) return option.value;
  return kept_type(*stored, columns);
}

std::vector<std::string> AutoHardwareConfig::disabled_fusions() const {
  std::vector<std::string> result;
  if (!of(Role::mlp).compute.fuse_gated_activation.value) result.emplace_back("linear_gated_activation");
  if (!of(Role::norm).compute.fuse_residual.value) result.emplace_back("add_rms_norm");
  if (!of(Role::attention).compute.fuse_residual.value) result.emplace_back("linear_add");
  if (!of(Role::attention).compute.fuse_rope_append.value)
    result.insert(result.end(), {"rope_append_attention", "rope_qk_append", "rope_kv_append"});
  return result;
}

}  // namespace eadem::modules
