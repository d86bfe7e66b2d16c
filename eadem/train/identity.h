// SPDX-License-Identifier: Apache-2.0
//
// What the result of a run depends on, value by value. A run is only continued by a recipe that means the same: files
// may have moved, comments and defaults that were written out change nothing.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "eadem/io/json.h"
#include "eadem/train/recipe.h"

namespace eadem::train {

// Keys of the recipe, or of config.json behind "model.", with their values as text.
using Identity = std::vector<std::pair<std::string, std::string>>;

// Hashes of what the recipe names.
struct InputHashes {
  std::string initial_weights;  // of a model to fine-tune; empty from scratch
  std::string tokenizer;
  std::vector<std::string> train, eval;  // of each file
};

// `config` is the model's config.json. Steps, intervals, numbers of checkpoints and the output directory are no part
// of it, nor is decay_steps, which a checkpoint keeps by itself.
Identity identity_of(const Recipe& recipe, const io::JsonValue& config, const InputHashes& hashes);

// One clause for each key with other values, "training.seed is 1 in A and 2 in B"; empty when there is none.
std::vector<std::string> differences(const Identity& a, const std::string& name_a, const Identity& b,
                                     const std::string& name_b);

}  // namespace eadem::train
