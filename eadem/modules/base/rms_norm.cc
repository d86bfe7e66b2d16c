// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/rms_norm.h"

#include <algorithm>

#include "eadem/modules/base/defaults.h"
#include "eadem/ops/rms_norm.h"

namespace eadem::modules {

HardwareConfig RmsNorm::default_hw_config(const Device& device, HardwareMode mode, const ModelSpec&) {
  HardwareConfig config = matrix_defaults(device, mode);
  config.precision.weights.set(DType::f32, OptionSource::module_override, "RmsNorm");
  return config;
}

ValueId RmsNorm::build(BuildContext& context, ValueId x, int layer) const {
  const HardwareConfig& config = context.hardware.of(Role::norm, layer);
  const DType dtype = config.precision.weights.value.dtype;
  const TensorType type = groups_ == 0 ? TensorType(dtype, {size_}) : TensorType(dtype, {groups_, size_});
  const ValueId weight =
      context.graph.add_parameter(context.graph.scoped_name("weight"), type, /*shard_axis=*/divided_ ? 0 : -1);
  return context.graph.add1(std::make_shared<ops::RmsNorm>(kernels::RmsNormAttrs{static_cast<float>(eps_)}),
                            {x, weight});
}

ValueId RmsNorm::build_weightless(BuildContext& context, ValueId x) const {
  Tensor ones = Tensor::on_host(DType::f32, Shape{size_});
  std::fill_n(ones.view.as<float>(), size_, 1.0f);
  const ValueId weight = context.graph.add_constant(context.graph.scoped_name("ones"), std::move(ones));
  return context.graph.add1(std::make_shared<ops::RmsNorm>(kernels::RmsNormAttrs{static_cast<float>(eps_)}),
                            {x, weight});
}

}  // namespace eadem::modules
