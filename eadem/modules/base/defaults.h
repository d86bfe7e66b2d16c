// SPDX-License-Identifier: Apache-2.0
//
// Defaults that several modules share.
#pragma once

#include "eadem/core/device/device.h"
#include "eadem/core/machine/hardware_config.h"

namespace eadem::modules {

// The defaults of modules whose cost is reading a weight matrix. Performance: 16-bit weights (half the bytes;
// activations stay in what the device computes best). Accuracy: f32 throughout.
HardwareConfig matrix_defaults(const Device& device, HardwareMode mode);

}  // namespace eadem::modules
