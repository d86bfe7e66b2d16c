// SPDX-License-Identifier: Apache-2.0
//
// From a path to a model: which architecture a config or GGUF file states, its typed configuration, its weights.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "eadem/core/log.h"
#include "eadem/io/weights.h"
#include "eadem/models/config/config_keys.h"
#include "eadem/models/model.h"

namespace eadem::models {

// A model and where it comes from.
struct Checkpoint {
  std::string path;  // the path that was given
  std::shared_ptr<const Model> model;
  std::shared_ptr<const io::WeightSource> weights;  // null when only a config was read
  std::string config_path;                          // config.json or the .gguf
  std::vector<IgnoredKey> ignored_keys{};           // keys of the config.json
  std::string notice{};  // one line for people where only a part of the files is read; empty: nothing is left out
};

// `path`: a directory in Hugging Face layout, a .safetensors with its config.json beside it, or a .gguf. Throws
// NotFound, DataCorrupted, or Unsupported: an architecture that Eadem does not have, with each refusal, or a key that
// is not honoured. Of a multimodal model in Hugging Face layout, the text part is opened (multimodal/text_part.h).
Checkpoint open_checkpoint(const std::string& path);

// A model without weights, from a config.json or the directory around one.
Checkpoint open_config(const std::string& path);

// The model that a config.json (or the directory around one) describes, without weights.
std::shared_ptr<const Model> model_from_config(const std::string& path);
std::shared_ptr<const Model> model_from_config(const io::JsonReader& config);

// The model's spec, with the dtype in which its checkpoint stores most of the weights.
modules::ModelSpec spec_of(const Checkpoint& checkpoint);

// Whether a tensor that is no parameter can be left out: a bias of zeros. Some programs write one beside every layer
// that they quantize.
bool adds_nothing(const io::WeightSource& weights, const io::WeightInfo& info);

struct LoadOptions {
  // For programs that write no parameter: parameters that are stored as the file stores them lie in the mapped file.
  bool in_place = false;
  // A folder for pack files (pack_cache.h); none when empty. Needs in_place.
  std::string pack_cache;
  // Matrices may stay as the file stores them until ParameterStore::pack_stored(). Needs in_place.
  bool pack_later = false;
  // The store has the parameters of one pipeline stage: tensors of the file that it lacks belong to others.
  bool one_stage = false;
  // Receives notes of the pack cache, and one warning that names unusual ignored keys. May be null.
  const Logger* log = nullptr;
};

// Fills every parameter of the store. Throws NotFound or InvalidArgument naming file, tensor and both shapes; also when
// the file holds tensors that the model does not have (unless they are biases of zeros), or a tied parameter under two
// names with two values. `progress(done, total)` in bytes, may be empty.
void load_weights(pipeline::ParameterStore& parameters, const Checkpoint& checkpoint,
                  const std::function<void(int64_t done, int64_t total)>& progress = {},
                  const LoadOptions& options = {});

// Fills every parameter with values that depend on `seed` and the parameter's name alone: matrices normal with standard
// deviation `stddev`, vectors one for norms and zero for biases. For benchmarks and for training from scratch.
// `progress(done, total)` in elements, may be empty.
void load_random(pipeline::ParameterStore& parameters, uint64_t seed, double stddev,
                 const std::function<void(int64_t done, int64_t total)>& progress = {});

}  // namespace eadem::models
