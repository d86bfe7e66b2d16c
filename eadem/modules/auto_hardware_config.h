// SPDX-License-Identifier: Apache-2.0
//
// The resolved hardware configuration of a whole model: each module's own defaults, collected, then overridden in order
// of precedence (core/machine/hardware_config.h).
#pragma once

#include <map>
#include <string_view>
#include <vector>

#include "eadem/core/device/device.h"
#include "eadem/core/machine/hardware_config.h"
#include "eadem/modules/model_spec.h"

namespace eadem::modules {

// The role of a module in a model. Policies and configurations are per role.
enum class Role : uint8_t { embedding, norm, attention, mlp, lm_head };
inline constexpr Role kRoles[] = {Role::embedding, Role::norm, Role::attention, Role::mlp, Role::lm_head};

std::string_view role_name(Role role);

// A model's own wishes: `overrides` for layers [first_layer, last_layer] of a role.
struct PolicyRule {
  Role role;
  int first_layer;
  int last_layer;
  HardwareOverrides overrides;
};

class AutoHardwareConfig {
 public:
  // Asks every module for its `default_hw_config` and applies, in order: the policy, the checkpoint's encoding, the
  // explicit arguments (`explicit_by` names the caller, for values that do not name their flag).
  static AutoHardwareConfig from_model_spec(const ModelSpec& spec, const Device& device, HardwareMode mode,
                                            const HardwareOverrides& explicit_arguments = {},
                                            const std::string& explicit_by = "argument",
                                            const std::vector<PolicyRule>& policy = {});

  // `layer` -1: outside the layers.
  const HardwareConfig& of(Role role, int layer = -1) const;

  // The storage type of `parameter`, a matrix of a module configured by `config`; a rank has rows of `columns`. It is
  // the checkpoint's type (decoded if no kernel reads that) unless a stronger source set another, and the type of
  // `config` without a checkpoint.
  WeightType weight_type(const HardwareConfig& config, const std::string& parameter, int64_t columns) const;

  // Names of the fusions that the compute options of the roles switch off.
  std::vector<std::string> disabled_fusions() const;

  HardwareMode mode() const { return mode_; }

 private:
  HardwareMode mode_ = HardwareMode::performance;
  std::function<std::optional<WeightType>(const std::string&)> checkpoint_type_of_;
  std::map<std::pair<Role, int>, HardwareConfig> configs_;
};

}  // namespace eadem::modules
