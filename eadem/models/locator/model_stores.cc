// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/locator/model_stores.h"

#include <fmt/format.h>

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/io/gguf_parts.h"

namespace eadem::models {

namespace {

namespace fs = std::filesystem;

bool is_alphanumeric(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

std::string upper(std::string_view text) {
  std::string result(text);
  for (char& c : result)
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  return result;
}

// A tag or a revision: as a part of a name, but that it may have slashes and anything in front.
bool is_choice(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return is_alphanumeric(c) || c == '-' || c == '.' || c == '/'; });
}

// Whether a file is a model by itself: a whole one, or the first part of one, and none that accompanies a model.
bool is_gguf_model(const std::string& file) {
  if (!file.ends_with(".gguf")) return false;
  const std::string name = fs::path(file).filename().string();
  for (const char* word : {"mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-"})
    if (name.find(word) != std::string::npos) return false;
  const std::optional<io::GgufPartName> part = io::GgufPartName::parse(name);
  return !part || part->number == 1;
}

// Whether `tag` stands in the name with a dot or a hyphen behind it, as llama.cpp looks for it.
bool has_tag(const std::string& file, const std::string& tag) {
  const std::string name = upper(file), wanted = upper(tag);
  for (size_t at = name.find(wanted); at != std::string::npos; at = name.find(wanted, at + 1)) {
    const size_t end = at + wanted.size();
    if (end < name.size() && (name[end] == '.' || name[end] == '-')) return true;
  }
  return false;
}

}  // namespace

bool is_name_part(std::string_view text) {
  return !text.empty() && text.size() <= 128 && is_alphanumeric(text[0]) && text.find("..") == std::string_view::npos &&
         std::all_of(text.begin(), text.end(), [](char c) { return is_alphanumeric(c) || c == '-' || c == '.'; });
}

std::string ModelName::repository() const { return fmt::format("{}", fmt::join(parts, "/")); }

std::optional<ModelName> parse_model_name(const std::string& text) {
  ModelName name;
  std::string rest = text;
  const auto cut = [&rest](char separator, std::string& tail) {
    const size_t at = rest.find(separator);
    if (at == std::string::npos) return true;
    tail = rest.substr(at + 1);
    rest.resize(at);
    return !tail.empty() && is_choice(tail);
  };
  if (!cut('@', name.revision) || !cut(':', name.tag)) return std::nullopt;
  for (size_t begin = 0; begin <= rest.size();) {
    const size_t end = std::min(rest.find('/', begin), rest.size());
    name.parts.push_back(rest.substr(begin, end - begin));
    if (!is_name_part(name.parts.back())) return std::nullopt;
    begin = end + 1;
  }
  if (name.parts.size() > 3) return std::nullopt;
  return name;
}

std::optional<fs::path> existing_folder(const std::string& folder) {
  std::error_code error;
  const fs::path path = fs::canonical(folder, error);
  return error || !fs::is_directory(path, error) ? std::nullopt : std::optional(path);
}

std::optional<fs::path> inside(const fs::path& root, const fs::path& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  if (error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory) return std::nullopt;
  if (error) throw IoError("{}: {}", path.string(), error.message());
  if (std::mismatch(root.begin(), root.end(), real.begin(), real.end()).first != root.end())
    throw DataCorrupted("{} leads out of {}, to {}; name that path itself if it is the model", path.string(),
                        root.string(), real.string());
  return real;
}

std::optional<std::string> choose_gguf(const ModelName& name, const std::vector<std::string>& files,
                                       const std::string& where) {
  std::vector<std::string> fitting;
  for (const std::string& file : files) {
    if (!is_gguf_model(file)) continue;
    if (file == name.tag || file == name.tag + ".gguf") return file;
    if (name.tag.empty() || has_tag(file, name.tag)) fitting.push_back(file);
  }
  if (fitting.empty()) return std::nullopt;
  if (fitting.size() == 1) return fitting[0];
  std::sort(fitting.begin(), fitting.end());
  std::string choices;
  for (const std::string& file : fitting)
    choices += fmt::format("{}{}:{}", choices.empty() ? "" : ", ", name.repository(), file);
  const std::string tag = name.tag.empty() ? "" : ":" + name.tag;
  throw InvalidArgument("{}{} may be any of {} GGUF files in {}; say which: {}", name.repository(), tag, fitting.size(),
                        where, choices);
}

std::optional<std::string> missing_part(const std::string& file, const std::vector<std::string>& files) {
  const std::optional<io::GgufPartName> first = io::GgufPartName::parse(file);
  if (!first) return std::nullopt;
  for (int64_t number = 1; number <= first->count; ++number)
    if (std::string part = first->of(number); !std::binary_search(files.begin(), files.end(), part)) return part;
  return std::nullopt;
}

}  // namespace eadem::models
