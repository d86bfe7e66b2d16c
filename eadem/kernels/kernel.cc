// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/kernel.h"

#include <algorithm>

namespace eadem::kernels {

std::string_view pass_name(Pass pass) {
  switch (pass) {
    case Pass::forward: return "forward";
    case Pass::backward: return "backward";
    case Pass::inference: return "inference";
  }
  return "?";
}

double modelled_us(const Device& device, double flops, double bytes) {
  const DeviceRates rates = device.rates();
  return 1e6 * (rates.launch_seconds + std::max(flops / rates.flops_per_second, bytes / rates.bytes_per_second));
}

}  // namespace eadem::kernels
