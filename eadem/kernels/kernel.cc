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

Verdict accept(const KernelRequest& request, const Estimate& estimate) {
  const DeviceRates rates = request.device->rates();
  const double arithmetic = request.cost.flops / (rates.flops_per_second * estimate.flops_share);
  const double traffic =
      (request.cost.bytes + estimate.extra_bytes) / (rates.bytes_per_second * estimate.bandwidth_share);
  return Verdict::yes(1e6 * (estimate.launches * rates.launch_seconds + std::max(arithmetic, traffic)),
                      estimate.reason);
}

}  // namespace eadem::kernels
