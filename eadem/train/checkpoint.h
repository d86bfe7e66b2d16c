// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints: directories that appear whole or not at all. A checkpoint is written beside its place, flushed to the
// disk, and renamed; one that was cut off by a crash or a full disk is never looked at.
#pragma once

#include <optional>
#include <string>

#include "eadem/train/trainer.h"

namespace eadem::train {

// What a run must remember besides tensors.
struct RunState {
  std::string recipe_hash;  // SHA-256 of the recipe: another recipe cannot continue this run
  int64_t step = 0;
  int64_t tokens = 0;
  DataCursor cursor;
};

// Files of a tokenizer directory that belong beside a model.
void copy_tokenizer_files(const std::string& tokenizer_directory, const std::string& model_directory);

// Writes config.json, model.safetensors, generation_config.json and the tokenizer's files into an existing directory.
void write_model(const Trainer& trainer, const std::string& tokenizer_directory, const std::string& directory);

// Writes `root`/step_NNNNNNNN and removes all but the newest `keep`. Throws IoError naming path and reason.
void save_checkpoint(const Trainer& trainer, const RunState& state, const std::string& tokenizer_directory,
                     const std::string& root, int64_t keep);

// The newest complete checkpoint below `root`, if there is one.
std::optional<std::string> newest_checkpoint(const std::string& root);

// Restores parameters and optimizer. Throws DataCorrupted, NotFound or InvalidArgument naming file and value.
RunState load_checkpoint(Trainer& trainer, const std::string& directory);

}  // namespace eadem::train
