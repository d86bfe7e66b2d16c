// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/locator/model_locator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "eadem/core/error.h"
#include "eadem/io/gguf_parts.h"
#include "eadem/models/locator/model_stores.h"

namespace eadem::models {

namespace {

namespace fs = std::filesystem;

bool is_file_or_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// The first part of the split model `stem`, which the user calls `text`. Throws InvalidArgument when there are several.
std::optional<std::string> find_parts(const std::string& text, const fs::path& stem) {
  std::vector<std::string> found;
  std::error_code error;  // a folder that is not there or not to be listed has none
  for (fs::directory_iterator entry(stem.parent_path(), error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const std::optional<io::GgufPartName> part = io::GgufPartName::parse(name);
    if (part && part->number == 1 && part->stem == stem.filename().string()) found.push_back(entry->path().string());
  }
  if (found.empty()) return std::nullopt;
  std::sort(found.begin(), found.end());
  if (found.size() > 1)
    throw InvalidArgument("{} may be any of {} split models; name the path of one: {}", text, found.size(),
                          fmt::join(found, ", "));
  return found[0];
}

std::optional<std::string> find_own(const std::string& text, const ModelFolders& folders) {
  if (folders.own.empty() || text.empty() || text.starts_with('/')) return std::nullopt;
  for (const fs::path& part : fs::path(text))
    if (part == "..") return std::nullopt;
  for (const char* ending : {"", ".gguf"})
    if (const fs::path path = fs::path(folders.own) / (text + ending); is_file_or_folder(path)) return path.string();
  return find_parts(text, fs::path(folders.own) / text);
}

// The command that fetches a model.
std::string fetching(const ModelName& name) {
  const std::string tag = name.tag.empty() ? "" : ":" + name.tag;
  if (name.parts.size() != 2) return "ollama pull " + name.repository() + tag;
  std::string command = "hf download " + name.repository();
  if (!name.revision.empty()) command += fmt::format(" --revision {}", name.revision);
  if (!name.tag.empty()) command += fmt::format(" --include '*{}*'", name.tag);
  return command;
}

[[noreturn]] void throw_not_found(const std::string& text, const ModelFolders& folders,
                                  const std::optional<ModelName>& name, const Obstacles& obstacles) {
  std::string message = text + ": no such file or directory";
  if (text.find('/') == std::string::npos)
    message += fmt::format(", and no bundled model of that name ({})", fmt::join(folders.bundled, ", "));
  if (name) {
    std::vector<std::string> places = folders.hub;
    if (!folders.own.empty()) places.insert(places.begin(), folders.own);
    if (!folders.llama_cpp.empty()) places.push_back(folders.llama_cpp);
    places.insert(places.end(), folders.ollama.begin(), folders.ollama.end());
    message += fmt::format(", and {} of that name in {}", obstacles.empty() ? "no model" : "no complete model",
                           fmt::join(places, ", "));
    for (const std::string& obstacle : obstacles) message += "; " + obstacle;
    message += fmt::format("; `{}` fetches it", fetching(*name));
  }
  throw NotFound("{}", message);
}

}  // namespace

ModelFolders ModelFolders::from(const Variable& variable) {
  const std::optional<std::string> home = variable("HOME");
  const auto expanded = [&](std::string path) {
    const bool below_home = home && (path == "~" || path.starts_with("~/"));
    return below_home ? *home + path.substr(1) : path;
  };
  // The folder that a variable names, or `below` that folder; empty without the variable.
  const auto named = [&](const char* name, const char* below = "") -> std::string {
    const std::optional<std::string> value = variable(name);
    if (!value || value->empty()) return "";
    const fs::path path = expanded(*value);
    return *below == '\0' ? path.string() : (path / below).string();
  };
  const auto first = [](std::initializer_list<std::string> paths) {
    const auto* found = std::find_if(paths.begin(), paths.end(), [](const std::string& path) { return !path.empty(); });
    return found == paths.end() ? std::string() : *found;
  };

  ModelFolders folders;
  folders.own = named("EADEM_MODELS");
  const std::string hub = first({named("HF_HUB_CACHE"), named("HUGGINGFACE_HUB_CACHE"), named("HF_HOME", "hub"),
                                 named("XDG_CACHE_HOME", "huggingface/hub"), named("HOME", ".cache/huggingface/hub")});
  // llama.cpp of 2026 keeps the hub's layout in its own cache folder, too.
  for (const std::string& folder : {hub, named("LLAMA_CACHE")})
    if (!folder.empty()) folders.hub.push_back(folder);
  folders.llama_cpp =
      first({named("LLAMA_CACHE"), named("XDG_CACHE_HOME", "llama.cpp"), named("HOME", ".cache/llama.cpp")});
  folders.ollama = {named("OLLAMA_MODELS")};
  if (folders.ollama[0].empty())  // the user's, and that of the service that Ollama's installer sets up
    folders.ollama = {named("HOME", ".ollama/models"), "/usr/share/ollama/.ollama/models"};
  std::erase(folders.ollama, "");
  return folders;
}

ModelFolders ModelFolders::from_environment() {
  return from([](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  });
}

std::optional<std::string> find_bundled(const std::string& name, const ModelFolders& folders) {
  if (!is_name_part(name)) return std::nullopt;
  for (const std::string& folder : folders.bundled)
    if (const fs::path model = fs::path(folder) / name; is_file_or_folder(model / "config.json")) return model.string();
  return std::nullopt;
}

LocatedModel locate_model(const std::string& text, const ModelFolders& folders) {
  std::error_code error;
  if (fs::exists(text, error)) return {text, ""};
  if (error) throw IoError("{}: {}", text, error.message());
  if (auto path = find_bundled(text, folders)) return {*path, ""};
  if (auto path = find_own(text, folders)) return {*path, fmt::format("using {} ({}, of EADEM_MODELS)", text, *path)};

  const std::optional<ModelName> name = parse_model_name(text);
  Obstacles obstacles;
  std::optional<FoundModel> found;
  if (name) {
    for (const std::string& folder : folders.hub)
      if (!found) found = find_in_hub(*name, folder, obstacles);
    if (!found && !folders.llama_cpp.empty()) found = find_in_llama_cpp(*name, folders.llama_cpp, obstacles);
    for (const std::string& folder : folders.ollama)
      if (!found) found = find_in_ollama(*name, folder, obstacles);
  }
  if (!found) throw_not_found(text, folders, name, obstacles);
  return {found->path, fmt::format("using {} from {} ({})", text, found->where, found->path)};
}

}  // namespace eadem::models
