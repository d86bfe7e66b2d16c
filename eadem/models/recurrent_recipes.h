// SPDX-License-Identifier: Apache-2.0
//
// Recipes of parameters that recurrent layers of several families share.
#pragma once

#include "eadem/models/weight_recipe.h"

namespace eadem::models {

// The weight [taps, channels] of a short convolution: `part` is [channels, 1, taps] in Hugging Face's files, and
// [channels, taps] in GGUF files.
WeightRecipe convolution_recipe(WeightRecipe part, int64_t channels, int64_t taps, CheckpointFormat format);

// The logarithm of a rate of decay, of `shape`: GGUF files keep -exp of it, of shape `gguf_shape`.
WeightRecipe decay_recipe(WeightRecipe part, const Shape& shape, CheckpointFormat format, const Shape& gguf_shape);

}  // namespace eadem::models
