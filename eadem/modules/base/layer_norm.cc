// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/layer_norm.h"

#include "eadem/ops/layer_norm.h"

namespace eadem::modules {

ValueId LayerNorm::build(BuildContext& context, ValueId x, int layer) const {
  const DType dtype = context.hardware.of(Role::norm, layer).precision.weights.value.dtype;
  const auto parameter = [&](const char* name) {
    return context.graph.add_parameter(context.graph.scoped_name(name), TensorType(dtype, {size_}));
  };
  std::vector<ValueId> inputs = {x, parameter("weight")};
  if (bias_) inputs.push_back(parameter("bias"));
  return context.graph.add1(std::make_shared<ops::LayerNorm>(kernels::LayerNormAttrs{static_cast<float>(eps_)}),
                            inputs);
}

}  // namespace eadem::modules
