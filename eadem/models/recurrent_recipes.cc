// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/recurrent_recipes.h"

namespace eadem::models {

WeightRecipe convolution_recipe(WeightRecipe part, int64_t channels, int64_t taps, CheckpointFormat format) {
  if (format == CheckpointFormat::huggingface)
    part = WeightRecipe::reshape(std::move(part), {channels, 1, taps}, {channels, taps});
  return WeightRecipe::transpose(std::move(part));
}

WeightRecipe decay_recipe(WeightRecipe part, const Shape& shape, CheckpointFormat format, const Shape& gguf_shape) {
  if (format == CheckpointFormat::huggingface) return part;
  return WeightRecipe::log_of_negative(WeightRecipe::reshape(std::move(part), gguf_shape, shape));
}

}  // namespace eadem::models
