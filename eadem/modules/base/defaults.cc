// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/defaults.h"

namespace eadem::modules {

HardwareConfig matrix_defaults(const Device& device, HardwareMode mode) {
  HardwareConfig config;
  const bool fast = mode == HardwareMode::performance;
  const DType activations = fast ? device.preferred_activations() : DType::f32;
  const std::string by(hardware_mode_name(mode));
  config.precision.weights.set(fast ? DType::bf16 : DType::f32, OptionSource::mode_default, by);
  config.precision.activations.set(activations, OptionSource::mode_default, by);
  config.precision.matmul_input.set(fast ? MatmulInput::int8 : MatmulInput::f32, OptionSource::mode_default, by);
  config.precision.kv_cache.set(activations, OptionSource::mode_default, by);
  return config;
}

}  // namespace eadem::modules
