// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "eadem/modules/build_context.h"
#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/experts/clamped_swiglu.h"

namespace eadem::modules {

// y = down_scale * down_proj(f(gate_scale * gate_proj(x)) * up_proj(x)), or down_proj(f(up_proj(x))) without a gate.
// Parameters: gate_proj, up_proj, down_proj (.weight, .bias).
class DenseMlp {
 public:
  struct Config {
    int64_t hidden = 0;
    int64_t ffn = 0;
    kernels::ActivationKind activation = kernels::ActivationKind::silu;
    bool bias = false;
    bool gated = true;
    double gate_scale = 1, down_scale = 1;  // where there is a gate
    // In the place of `activation` and a product with up.
    std::optional<kernels::ClampedSwigluAttrs> clamped = std::nullopt;
  };

  DenseMlp(const Config& config, int layer) : config_(config), layer_(layer) {}

  static HardwareConfig default_hw_config(const Device& device, HardwareMode mode, const ModelSpec& spec);

  // x [tokens, hidden] -> [tokens, hidden]
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  Config config_;
  int layer_;
};

}  // namespace eadem::modules
