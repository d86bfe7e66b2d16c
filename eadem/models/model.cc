// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/model.h"

namespace eadem::models {

ValueId Model::build_layers(BuildContext& context) const {
  ValueId x = embed(context);
  for (int index = 0; index < info().layers; ++index) x = layer(context, index, x);
  return x;
}

std::vector<WeightRecipe> Model::recipes(const ParameterInfo& parameter, CheckpointFormat) const {
  return {WeightRecipe::name(parameter.name)};
}

}  // namespace eadem::models
