// SPDX-License-Identifier: Apache-2.0
//
// Models as directories in Hugging Face layout. GGUF files of some architectures order the rows of each head of q and k
// for interleaved rotation, pairs (2i, 2i + 1), where a config.json implies pairs (i, i + head_dim / 2); they name
// tensors differently, and state rope scaling as divisors of the frequencies.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "eadem/io/tokenizer/files/tokenizer_files.h"
#include "eadem/models/auto_model.h"
#include "eadem/models/config/model_config.h"

namespace eadem::models {

// The tensors that a checkpoint of a format has, in order, as recipes over the model's parameters.
std::vector<NamedRecipe> tensors_of(const Model& model, CheckpointFormat format);

// The configuration as a config.json states it. `file`, which may be null, is the GGUF file that it was read from.
// Throws Unsupported, naming the file, for what config.json cannot state.
ModelConfig huggingface_config(ModelConfig config, const io::GgufFile* file);

// Returns the numbers by which Llama 3.1's scaling divides the frequencies.
std::vector<double> llama3_divisors(const ModelConfig& config, const modules::RopeScaling& scaling);

// The values of the tensor rope_freqs.weight in a GGUF file of this configuration; none: it has no such tensor.
std::vector<double> gguf_divisors(const ModelConfig& config);

// Returns the model with the names, the order of rows and the configuration of a directory in Hugging Face layout, so
// that it can be saved as such a directory. Its logits are those of `checkpoint`. A directory is returned unchanged.
// The weights are converted tensor by tensor as they are read. Throws Unsupported for a GGUF file that has no such
// form.
Checkpoint huggingface_form(const Checkpoint& checkpoint);

// One parameter of `model`, plain and on the host, between the values that the one tensor of a directory has for it and
// those that the model computes with: they differ in the order of rows in q and k of a model that was read from a GGUF
// file, and where norms multiply by 1 + w. A parameter that shares its tensor with others comes back as it is, as one
// of another shape does. `to_huggingface_order` takes the part of a rank, too. Throws Unsupported where only part of a
// head is rotated.
Tensor to_huggingface_order(const Model& model, const std::string& parameter, const Tensor& tensor);
Tensor from_huggingface_order(const Model& model, const std::string& parameter, const Tensor& tensor);
// The configuration of the same model that computes with rows in Hugging Face's order.
ModelConfig with_huggingface_order(ModelConfig config);

// The generation_config.json beside a checkpoint, if there is one.
std::optional<io::TokenizerFile> generation_config_of(const Checkpoint& checkpoint);
// The small files that belong beside the weights: the tokenizer's and generation_config.json, as far as there are any.
// Throws as io::tokenizer_files.
std::vector<io::TokenizerFile> companions_of(const Checkpoint& checkpoint);

// Writes config.json, generation_config.json (BOS and EOS) and model.safetensors into `directory`, which is made if it
// is missing, each file atomically. `parameters` are all of the model's, on the host, plain; rows in the order of a
// GGUF file are put in the order above. `file`, which may be null, is the GGUF file that the model was read from.
// Throws Unsupported or IoError.
void save_huggingface(const Model& model, std::span<const std::pair<std::string, Tensor>> parameters,
                      const std::string& directory, const io::GgufFile* file = nullptr);

}  // namespace eadem::models
