// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/model_files.h"

#include <filesystem>

#include "eadem/io/gguf.h"

namespace eadem::engine {

namespace fs = std::filesystem;

std::string model_folder(const models::Checkpoint& checkpoint) {
  return fs::is_directory(checkpoint.path) ? checkpoint.path : fs::path(checkpoint.path).parent_path().string();
}

std::optional<std::string> generation_config_path(const models::Checkpoint& checkpoint) {
  if (dynamic_cast<const io::GgufFile*>(checkpoint.weights.get()) != nullptr) return std::nullopt;
  const fs::path path = fs::path(model_folder(checkpoint)) / "generation_config.json";
  if (!fs::exists(path)) return std::nullopt;
  return path.string();
}

}  // namespace eadem::engine
