// SPDX-License-Identifier: Apache-2.0
//
// Everything that the result of a run depends on, value by value. A run may only be continued by a recipe with an equal
// identity. Moved files, comments, and defaults that are written out do not change it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "eadem/io/json.h"
#include "eadem/train/recipe.h"

namespace eadem::train {

// Keys of the recipe, or "model." + keys of config.json, with their values as text.
using Identity = std::vector<std::pair<std::string, std::string>>;

// Hashes of the files that the recipe names.
struct InputHashes {
  std::string initial_weights;  // weights of a model to fine-tune; empty from scratch
  std::string tokenizer;
  std::vector<std::string> train, eval;  // one hash for each file
};

// `config` is the model's config.json. Steps, intervals, numbers of checkpoints and the output directory do not belong
// to the identity, nor does decay_steps, which a checkpoint stores separately.
Identity identity_of(const Recipe& recipe, const io::JsonValue& config, const InputHashes& hashes);

// Returns one clause for each key whose values differ, "training.seed is 1 in A and 2 in B"; empty when none differs.
std::vector<std::string> differences(const Identity& a, const std::string& name_a, const Identity& b,
                                     const std::string& name_b);

}  // namespace eadem::train
