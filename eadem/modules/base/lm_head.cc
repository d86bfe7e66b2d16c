// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/lm_head.h"

#include "eadem/modules/base/defaults.h"
#include "eadem/ops/linear.h"

namespace eadem::modules {

HardwareConfig LmHead::default_hw_config(const Device& device, HardwareMode mode, const ModelSpec&) {
  return matrix_defaults(device, mode);
}

ValueId LmHead::build(BuildContext& context, ValueId hidden) const {
  // A tied weight is stored once, as the embedding says.
  const HardwareConfig& config = context.hardware.of(tied_ ? Role::embedding : Role::lm_head);
  const WeightType type = context.hardware.weight_type(config, weight_name_, hidden_);
  const ValueId weight =
      context.graph.add_parameter(weight_name_, TensorType(type.dtype, {vocab_, hidden_}, type.encoding),
                                  /*shard_axis=*/0);
  const bool has_bias = !bias_name_.empty();
  const ValueId bias = has_bias ? context.graph.add_parameter(bias_name_, TensorType(DType::f32, {vocab_}),
                                                              /*shard_axis=*/0)
                                : pipeline::kNoValue;
  const Encoding* to = context.hardware.of(Role::lm_head).precision.rounded_head.value;
  if (to != nullptr && (has_bias || context.num_ranks > 1))
    throw Unsupported("{}: the output layer is not rounded to {} where {}; expected plain products of the head",
                      weight_name_, to->name(),
                      has_bias ? "it has a bias" : fmt::format("{} ranks of tp divide it", context.num_ranks));
  return context.graph.add1(
      std::make_shared<ops::Linear>(kernels::LinearAttrs{
          .has_bias = has_bias, .out_dtype = DType::f32, .matmul_input = config.precision.matmul_input.value}),
      {hidden, to == nullptr ? weight : context.rounded(weight, to), bias});
}

}  // namespace eadem::modules
