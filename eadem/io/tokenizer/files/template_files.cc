// SPDX-License-Identifier: Apache-2.0
//
// The places where models keep chat templates.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "eadem/core/error.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/files/tokenizer_files.h"

namespace eadem::io {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kDefaultName = "default";
constexpr std::string_view kDefaultFile = "chat_template.jinja";
constexpr std::string_view kFolder = "additional_chat_templates";
constexpr std::string_view kGgufKey = "tokenizer.chat_template";

}  // namespace

std::vector<NamedTemplate> config_chat_templates(const JsonReader& config) {
  if (!config.has("chat_template")) return {};
  const std::string place = config.file() + ": chat_template";
  if (!config.raw("chat_template")->is_array())
    return {{std::string(kDefaultName), config.string("chat_template"), place}};
  std::vector<NamedTemplate> templates;
  for (const JsonReader& entry : config.elements("chat_template")) {
    const std::string& name = entry.string("name");
    for (const NamedTemplate& other : templates) {
      if (other.name == name) throw DataCorrupted("{}: two templates are named {}", place, quote(name));
    }
    templates.push_back({name, entry.string("template"), fmt::format("{} {}", place, quote(name))});
  }
  return templates;
}

std::vector<std::string> template_file_names(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code ignored;
  if (fs::is_regular_file(fs::path(folder) / kDefaultFile, ignored)) names.emplace_back(kDefaultFile);
  std::error_code missing;
  for (fs::directory_iterator entry(fs::path(folder) / kFolder, missing), end; !missing && entry != end;
       entry.increment(missing)) {
    if (entry->is_regular_file(ignored) && entry->path().extension() == ".jinja")
      names.push_back(fmt::format("{}/{}", kFolder, entry->path().filename().string()));
  }
  std::sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) {
    return std::pair(a != kDefaultFile, a) < std::pair(b != kDefaultFile, b);
  });
  return names;
}

std::vector<NamedTemplate> folder_chat_templates(const std::string& folder) {
  std::vector<NamedTemplate> templates;
  for (const std::string& file : template_file_names(folder)) {
    const std::string name = file == kDefaultFile ? std::string(kDefaultName) : fs::path(file).stem().string();
    if (!templates.empty() && file != kDefaultFile && name == kDefaultName)
      continue;  // chat_template.jinja is the default
    const std::string path = (fs::path(folder) / file).string();
    templates.push_back({name, read_file(path, kMaxTokenizerFileBytes), path});
  }
  return templates;
}

std::vector<NamedTemplate> gguf_chat_templates(const GgufFile& file) {
  std::vector<NamedTemplate> templates;
  if (auto text = file.optional_string(kGgufKey))
    templates.push_back({std::string(kDefaultName), *std::move(text), fmt::format("{}: {}", file.path(), kGgufKey)});
  const std::string prefix = std::string(kGgufKey) + ".";
  for (const auto& [key, value] : file.metadata()) {
    if (!key.starts_with(prefix)) continue;
    std::string name = key.substr(prefix.size());
    if (name == kDefaultName && !templates.empty() && templates[0].name == kDefaultName) continue;
    templates.push_back({std::move(name), file.string(key), fmt::format("{}: {}", file.path(), key)});
  }
  return templates;
}

GgufMetadata gguf_metadata_of(std::span<const NamedTemplate> templates) {
  GgufMetadata metadata;
  std::vector<std::string> names;
  for (const NamedTemplate& named : templates) {
    std::string key(kGgufKey);
    if (named.name != kDefaultName) {
      // Names in keys are letters, digits and underscores, as gguf-py writes them.
      std::string name = named.name;
      const auto plain = [](unsigned char c) {
        return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
      };
      std::replace_if(
          name.begin(), name.end(), [&](char c) { return !plain(static_cast<unsigned char>(c)); }, '_');
      if (std::find(names.begin(), names.end(), name) != names.end()) {
        throw Unsupported("{}: GGUF has one key for this and another template, {}.{}", named.place, kGgufKey, name);
      }
      names.push_back(name);
      key += "." + name;
    }
    metadata.emplace_back(key, GgufValue::string(named.source));
  }
  if (!names.empty()) metadata.emplace_back("tokenizer.chat_templates", GgufValue::strings(std::move(names)));
  return metadata;
}

JsonValue config_json_of(std::span<const NamedTemplate> templates) {
  if (templates.size() == 1 && templates[0].name == kDefaultName) return templates[0].source;
  JsonValue list = JsonValue::array();
  for (const NamedTemplate& named : templates)
    list.push_back(JsonValue::object().set("name", named.name).set("template", named.source));
  return list;
}

}  // namespace eadem::io
