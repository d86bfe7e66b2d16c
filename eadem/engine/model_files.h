// SPDX-License-Identifier: Apache-2.0
//
// The files beside a model's weights.
#pragma once

#include <optional>
#include <string>

#include "eadem/models/auto_model.h"

namespace eadem::engine {

// The folder of a checkpoint: its path, or the folder of the file that the path names.
std::string model_folder(const models::Checkpoint& checkpoint);

// The path of its generation_config.json, if there is one. A GGUF file has none.
std::optional<std::string> generation_config_path(const models::Checkpoint& checkpoint);

}  // namespace eadem::engine
