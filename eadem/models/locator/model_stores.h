// SPDX-License-Identifier: Apache-2.0
//
// The layouts in which other programs keep models, one source file each. For locate_model() alone.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace eadem::models {

// [HOST/][ORG/]NAME[:TAG][@REVISION]. Every part is made of letters, digits, '-', '_' and '.', begins with none but a
// letter, a digit or '_', and has no ".."; so it can stand in a path. TAG and REVISION may have slashes and ".." as
// well.
struct ModelName {
  std::vector<std::string> parts;  // one to three
  std::string tag, revision;       // empty where there is none

  std::string repository() const;  // the parts with slashes between them
};
std::optional<ModelName> parse_model_name(const std::string& text);
// Whether `text` may stand in a path as one part of a name.
bool is_name_part(std::string_view text);

struct FoundModel {
  std::string path;
  std::string where;  // "the Hugging Face cache, main at 1234567"
};

inline constexpr int64_t kMaxManifestBytes = 4 << 20;

// Each of these looks for a complete model in one store and returns nothing when there is none. Incomplete ones are
// described in `obstacles`, a sentence each. The functions throw what locate_model() throws.
using Obstacles = std::vector<std::string>;
std::optional<FoundModel> find_in_hub(const ModelName& name, const std::string& folder, Obstacles& obstacles);
std::optional<FoundModel> find_in_llama_cpp(const ModelName& name, const std::string& folder, Obstacles& obstacles);
std::optional<FoundModel> find_in_ollama(const ModelName& name, const std::string& folder, Obstacles& obstacles);

// The existing file or folder to which `path` leads, links followed; nothing when it is not there, or a link leads
// nowhere. Throws DataCorrupted when it lies outside of `root`, which is a canonical path.
std::optional<std::filesystem::path> inside(const std::filesystem::path& root, const std::filesystem::path& path);

// The canonical form of a folder; nothing when there is none of that name.
std::optional<std::filesystem::path> existing_folder(const std::string& folder);

// The one of `files` (paths below `where`) that is the model of that tag. Parts of a split file count once, files that
// accompany a model (mmproj, imatrix ...) not at all. Nothing when none fits. Throws InvalidArgument when several do.
std::optional<std::string> choose_gguf(const ModelName& name, const std::vector<std::string>& files,
                                       const std::string& where);

// The first part that `files`, which are sorted, lack of the split model that begins with `file`; nothing when all are
// there, or the file is whole.
std::optional<std::string> missing_part(const std::string& file, const std::vector<std::string>& files);

}  // namespace eadem::models
