// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/embedding.h"

#include "eadem/modules/base/defaults.h"
#include "eadem/ops/embedding.h"

namespace eadem::modules {

HardwareConfig Embedding::default_hw_config(const Device& device, HardwareMode mode, const ModelSpec&) {
  return matrix_defaults(device, mode);
}

ValueId Embedding::build(BuildContext& context, ValueId token_ids) const {
  const HardwareConfig& config = context.hardware.of(Role::embedding);
  const std::string name = context.graph.scoped_name("weight");
  const WeightType type = context.hardware.weight_type(config, name, hidden_);
  const PartRange own = context.part(vocab_, "words of the vocabulary");
  const ValueId weight =
      context.graph.add_parameter(name, TensorType(type.dtype, {vocab_, hidden_}, type.encoding), /*shard_axis=*/0);
  const DType activations = config.precision.activations.value;
  const auto factor = static_cast<float>(scale_);
  const float scale = activations == DType::bf16 ? bf16_t::from_float(factor).to_float() : factor;
  return context.graph.add1(
      std::make_shared<ops::Embedding>(kernels::EmbeddingAttrs{activations, own.size, own.begin, scale}),
      {weight, token_ids});
}

}  // namespace eadem::modules
