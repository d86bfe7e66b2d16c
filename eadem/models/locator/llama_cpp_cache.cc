// SPDX-License-Identifier: Apache-2.0
//
// The flat cache that llama.cpp's `-hf ORG/NAME:TAG` kept before it took to the hub's layout:
//
//   ORG_NAME_FILE.gguf                        a file of the repository; slashes in its name became underscores
//   ORG_NAME_FILE.gguf.downloadInProgress     a download that has not ended
//   manifest=ORG=NAME=TAG.json                which file the tag means: {"ggufFile": {"rfilename": "FILE.gguf"}}
#include <fmt/format.h>

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/io/json.h"
#include "eadem/models/locator/model_stores.h"

namespace eadem::models {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kUnfinished = ".downloadInProgress";

std::string flat(std::string text) {
  std::replace(text.begin(), text.end(), '/', '_');
  return text;
}

// "org_name_" of the repository whose manifest has that name; empty for another file.
std::string prefix_of_manifest(const std::string& file) {
  if (!file.starts_with("manifest=") || !file.ends_with(".json")) return "";
  const size_t org = file.find('=') + 1, name = file.find('=', org), tag = file.find('=', name + 1);
  if (name == std::string::npos || tag == std::string::npos) return "";
  return fmt::format("{}_{}_", file.substr(org, name - org), file.substr(name + 1, tag - name - 1));
}

}  // namespace

std::optional<FoundModel> find_in_llama_cpp(const ModelName& name, const std::string& folder, Obstacles& obstacles) {
  const std::optional<fs::path> root = existing_folder(folder);
  if (!root || name.parts.size() != 2 || !name.revision.empty()) return std::nullopt;
  std::vector<std::string> all;
  std::error_code error;
  for (fs::directory_iterator it(*root, error), end; !error && it != end; it.increment(error))
    all.push_back(it->path().filename().string());
  if (error) throw IoError("cannot list {}: {}", root->string(), error.message());

  // 1. The repository's files. ORG_NAME_ may also begin the files of a longer name, which has a manifest of its own.
  const std::string prefix = flat(name.repository()) + "_";
  std::vector<std::string> longer;
  for (const std::string& file : all)
    if (const std::string other = prefix_of_manifest(file); other.size() > prefix.size() && other.starts_with(prefix))
      longer.push_back(other);
  std::vector<std::string> files;  // without the prefix
  for (const std::string& file : all) {
    if (!file.starts_with(prefix) ||
        std::any_of(longer.begin(), longer.end(), [&](const std::string& other) { return file.starts_with(other); }))
      continue;
    if (file.ends_with(kUnfinished))
      obstacles.push_back(fmt::format("the download of {} in {} has not ended",
                                      file.substr(0, file.size() - kUnfinished.size()), root->string()));
    else if (inside(*root, *root / file))
      files.push_back(file.substr(prefix.size()));
  }

  // 2. The one that the tag's manifest names, or else the one whose name has the tag.
  std::optional<std::string> chosen;
  const std::string manifest =
      fmt::format("manifest={}={}={}.json", name.parts[0], name.parts[1], name.tag.empty() ? "latest" : flat(name.tag));
  if (inside(*root, *root / manifest)) {
    const auto reader = io::JsonReader::read((*root / manifest).string(), {.max_bytes = kMaxManifestBytes});
    if (const auto gguf = reader.optional_object("ggufFile")) chosen = flat(gguf->string("rfilename"));
    if (chosen && std::find(files.begin(), files.end(), *chosen) == files.end()) {
      obstacles.push_back(fmt::format("{} names {}, which is not there", (*root / manifest).string(), *chosen));
      chosen.reset();
    }
  }
  if (!chosen) chosen = choose_gguf(name, files, root->string());
  if (!chosen) return std::nullopt;
  std::sort(files.begin(), files.end());
  if (const auto missing = missing_part(*chosen, files)) {
    obstacles.push_back(fmt::format("{} in {} is not there", prefix + *missing, root->string()));
    return std::nullopt;
  }
  return FoundModel{(*root / (prefix + *chosen)).string(), "llama.cpp's cache"};
}

}  // namespace eadem::models
