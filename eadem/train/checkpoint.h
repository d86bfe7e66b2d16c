// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints: directories that appear whole or not at all, and that say whether they still are what was written. A
// checkpoint is written beside its place, flushed to the disk, and renamed; one that was cut off by a crash or a full
// disk is never looked at. Its trainer.json holds the size and the XXH3 hash of every other file, and its own hash.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "eadem/core/log.h"
#include "eadem/io/tokenizer/tokenizer_files.h"
#include "eadem/train/identity.h"
#include "eadem/train/trainer.h"

namespace eadem::train {

// What a run must remember besides tensors.
struct RunState {
  Identity identity;  // of the recipe that the run follows; empty for a trainer without one
  int64_t step = 0;
  int64_t tokens = 0;
  DataCursor cursor;
  int64_t decay_steps = 0;  // where the cosine of the learning rate ends
};

// Small files that stand beside the weights: the tokenizer's, and a generation_config.json other than the usual one.
using Companions = std::vector<io::TokenizerFile>;

// Writes a directory that appears whole or not at all: `fill` writes into the directory that it is given, which then
// takes the place of `directory`. Throws IoError naming path and reason; `directory` is as it was then.
void write_directory(const std::string& directory, const std::function<void(const std::string& directory)>& fill);

// Writes config.json, model.safetensors, generation_config.json and the companions into `directory`, each atomically.
// Throws NotFound while a parameter is not set, IoError.
void write_model(const Trainer& trainer, const Companions& companions, const std::string& directory);

// Writes a model, optimizer.safetensors and trainer.json as the directory `directory`, which may be a checkpoint that
// is replaced. Throws InvalidArgument when something else is there.
void write_checkpoint(const Trainer& trainer, const RunState& state, const Companions& companions,
                      const std::string& directory);
// Writes `root`/step_NNNNNNNN and removes all but the newest `keep`. Throws IoError naming path and reason.
void save_checkpoint(const Trainer& trainer, const RunState& state, const Companions& companions,
                     const std::string& root, int64_t keep);

// Reads a checkpoint's state and checks each of its files. Throws NotFound (no checkpoint) or DataCorrupted naming the
// file that is not what was written.
RunState verify_checkpoint(const std::string& directory);
// Restores parameters and optimizer from a checkpoint that was verified. Throws DataCorrupted, NotFound or
// InvalidArgument naming file and value, when it is of another model or of weights in another dtype; nothing has
// changed then.
void load_checkpoint(Trainer& trainer, const std::string& directory, const RunState& state);

// The checkpoints below `root`, complete or damaged, oldest first.
std::vector<std::string> list_checkpoints(const std::string& root);

struct FoundCheckpoint {
  std::string directory;
  RunState state;
};
// The newest checkpoint below `root` that verifies, if there is any checkpoint. Damaged ones that are newer are renamed
// to damaged_step_NNNNNNNN with a warning. Throws DataCorrupted, naming what is wrong with each, if none verifies.
std::optional<FoundCheckpoint> newest_checkpoint(const std::string& root, const Logger& log);

// Removes what runs that were killed had not finished writing in `directory`.
void remove_unfinished(const std::string& directory);

}  // namespace eadem::train
