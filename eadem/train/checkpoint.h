// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints: directories that appear whole or not at all, and whose contents can be verified. A checkpoint is written
// beside its final place, flushed to the disk, and renamed; one that was cut off by a crash or a full disk is never
// read. Its trainer.json holds the size and the XXH3 hash of every other file, and its own hash.
//
// It holds whole tensors by name, whatever mesh has written it, and a trainer on any mesh takes its parts of them. All
// ranks of a mesh call the functions that take a trainer together, with the same arguments: the first one writes, with
// one tensor of the optimizer's states at a time in its memory; each reads its own. What one of them cannot do, all
// report.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "eadem/core/log.h"
#include "eadem/io/tokenizer/files/tokenizer_files.h"
#include "eadem/train/identity.h"
#include "eadem/train/trainer.h"

namespace eadem::train {

// The state of a run besides its tensors.
struct RunState {
  Identity identity;  // identity of the recipe that the run follows; empty for a trainer without one
  int64_t step = 0;
  int64_t tokens = 0;
  DataCursor cursor;
  int64_t decay_steps = 0;  // where the cosine of the learning rate ends
};

// Small files stored beside the weights: the tokenizer's files, and a generation_config.json that differs from the
// default.
using Companions = std::vector<io::TokenizerFile>;

// Makes a directory and its parents unless they exist. Throws IoError naming path and reason.
void make_directory(const std::string& path);

// Writes a directory that appears whole or not at all: `fill` writes into a temporary directory, which then replaces
// `directory`. Throws IoError naming path and reason; `directory` is unchanged then.
void write_directory(const std::string& directory, const std::function<void(const std::string& directory)>& fill);

// Writes config.json, model.safetensors, generation_config.json and the companions into `directory`, each atomically.
// Throws NotFound while a parameter is not set, and IoError, on ranks other than the first too.
void write_model(const Trainer& trainer, const Companions& companions, const std::string& directory);

// Writes that directory as a whole (write_directory).
void replace_model(const Trainer& trainer, const Companions& companions, const std::string& directory);

// Writes a model, optimizer.safetensors and trainer.json as the directory `directory`. A checkpoint there is replaced;
// anything else there throws InvalidArgument.
void write_checkpoint(const Trainer& trainer, const RunState& state, const Companions& companions,
                      const std::string& directory);
// Writes `root`/step_NNNNNNNN and removes all but the newest `keep`. Throws IoError naming path and reason.
void save_checkpoint(const Trainer& trainer, const RunState& state, const Companions& companions,
                     const std::string& root, int64_t keep);

// Reads a checkpoint's state and verifies each of its files. Throws NotFound (no checkpoint), or DataCorrupted naming
// the file that differs from what was written.
RunState verify_checkpoint(const std::string& directory);
// Restores parameters and optimizer from a verified checkpoint. Throws DataCorrupted, NotFound or InvalidArgument,
// naming file and value, when it belongs to another model or holds weights of another dtype; nothing has changed then.
void load_checkpoint(Trainer& trainer, const std::string& directory, const RunState& state);

// Where the checkpoint of a step is.
std::string checkpoint_directory(const std::string& root, int64_t step);
// The checkpoints below `root`, complete or damaged, oldest first.
std::vector<std::string> list_checkpoints(const std::string& root);

struct FoundCheckpoint {
  std::string directory;
  RunState state;
};
// Returns the newest checkpoint below `root` that verifies, or nothing if there is no checkpoint. Newer ones that are
// damaged are renamed to damaged_step_NNNNNNNN with a warning. Throws DataCorrupted, naming the damage of each, if none
// verifies.
std::optional<FoundCheckpoint> newest_checkpoint(const std::string& root, const Logger& log);

// Removes the unfinished files that killed runs left in `directory`.
void remove_unfinished(const std::string& directory);

}  // namespace eadem::train
