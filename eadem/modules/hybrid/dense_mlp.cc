// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/dense_mlp.h"

#include "eadem/modules/base/defaults.h"
#include "eadem/modules/factory/linear_factory.h"

namespace eadem::modules {

HardwareConfig DenseMlp::default_hw_config(const Device& device, HardwareMode mode, const ModelSpec&) {
  return matrix_defaults(device, mode);
}

ValueId DenseMlp::build(BuildContext& context, ValueId x) const {
  const HardwareConfig& hardware = context.hardware.of(Role::mlp, layer_);
  const auto project = [&](const char* name, int64_t in, int64_t out, Parallel parallel, ValueId value) {
    return LinearFactory::build(
        context,
        {.name = name, .in = in, .out = out, .bias = config_.bias, .parallel = parallel, .hardware = &hardware}, value);
  };
  const kernels::ActivationAttrs activation{config_.activation};
  if (!config_.gated) {
    const ValueId up = project("up_proj", config_.hidden, config_.ffn, Parallel::column, x);
    return project("down_proj", config_.ffn, config_.hidden, Parallel::row,
                   context.graph.add1(std::make_shared<ops::Activation>(activation), {up}));
  }
  const auto scaled = [&](const char* name, double factor, ValueId value) {
    if (factor == 1) return value;
    const Graph::Scope scope(context.graph, name);
    return context.graph.add1(std::make_shared<ops::Scale>(kernels::ScaleAttrs{.factor = static_cast<float>(factor)}),
                              {value});
  };
  const ValueId gate =
      scaled("gate_proj", config_.gate_scale, project("gate_proj", config_.hidden, config_.ffn, Parallel::column, x));
  const ValueId up = project("up_proj", config_.hidden, config_.ffn, Parallel::column, x);
  const ops::OpPtr product = config_.clamped ? ops::OpPtr(std::make_shared<ops::ClampedSwiglu>(*config_.clamped))
                                             : ops::OpPtr(std::make_shared<ops::GatedActivation>(activation));
  const ValueId gated = context.graph.add1(product, {gate, up});
  return scaled("down_proj", config_.down_scale,
                project("down_proj", config_.ffn, config_.hidden, Parallel::row, gated));
}

}  // namespace eadem::modules
