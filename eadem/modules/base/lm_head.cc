// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/lm_head.h"

#include "eadem/modules/base/defaults.h"
#include "eadem/ops/linear.h"

namespace eadem::modules {

HardwareConfig LmHead::default_hw_config(const Device& device, HardwareMode mode, const ModelSpec&) {
  return matrix_defaults(device, mode);
}

ValueId LmHead::build(BuildContext& context, ValueId hidden) const {
  // A tied weight has one dtype, the embedding's.
  const HardwareConfig& config = context.hardware.of(tied_ ? Role::embedding : Role::lm_head);
  const ValueId weight =
      context.graph.add_parameter(weight_name_, TensorType(config.precision.weights.value, {vocab_, hidden_}));
  return context.graph.add1(
      std::make_shared<ops::Linear>(kernels::LinearAttrs{.has_bias = false, .out_dtype = DType::f32}),
      {hidden, weight});
}

}  // namespace eadem::modules
