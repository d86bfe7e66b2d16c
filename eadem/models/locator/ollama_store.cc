// SPDX-License-Identifier: Apache-2.0
//
// Ollama's store:
//
//   manifests/registry.ollama.ai/library/NAME/TAG   a manifest in JSON; other registries and namespaces likewise
//   manifests-v2/ollama.com/library/NAME/TAG        newer; a link to the manifest among the blobs, or a file
//   blobs/sha256-DIGEST                             a layer. The one of the model's media type is a GGUF file
//
// Other layers are templates of Go, parameters and system prompts for Ollama; they are not read.
#include <fmt/format.h>

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/io/json.h"
#include "eadem/io/text.h"
#include "eadem/models/locator/model_stores.h"

namespace eadem::models {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kModel = "application/vnd.ollama.image.model";
constexpr std::string_view kAdapter = "application/vnd.ollama.image.adapter";
constexpr std::string_view kList = "application/vnd.ollama.manifest.list.v2+json";

// Where the manifest of a name may be, below the store.
std::vector<fs::path> manifest_paths(const ModelName& name) {
  const std::string tag = name.tag.empty() ? "latest" : name.tag;
  std::vector<fs::path> paths;
  if (!is_name_part(tag)) return paths;
  const auto add = [&](const std::string& host, const fs::path& model) {
    if (host.empty()) {  // Ollama's own registry
      paths.push_back(fs::path("manifests-v2/ollama.com") / model / tag);
      paths.push_back(fs::path("manifests/registry.ollama.ai") / model / tag);
      paths.push_back(fs::path("manifests/ollama.com") / model / tag);
    } else {
      for (const char* folder : {"manifests-v2", "manifests"}) paths.push_back(fs::path(folder) / host / model / tag);
    }
  };
  const auto& parts = name.parts;
  if (parts.size() == 1) add("", fs::path("library") / parts[0]);
  if (parts.size() == 2) add("", fs::path(parts[0]) / parts[1]);
  if (parts.size() == 2) add("hf.co", fs::path(parts[0]) / parts[1]);
  if (parts.size() == 3) add(parts[0], fs::path(parts[1]) / parts[2]);
  return paths;
}

struct Layer {
  std::string digest;
  std::optional<int64_t> size;
};

// The layer of the model. Throws Unsupported for a manifest of anything but one whole GGUF file.
Layer model_layer(const fs::path& path) {
  const io::JsonReader manifest = io::JsonReader::read(path.string(), {.max_bytes = kMaxManifestBytes});
  if (manifest.optional_string("mediaType").value_or("") == kList)
    throw Unsupported("{} lists several manifests, one for each program that can run the model; that is not read",
                      path.string());
  std::vector<Layer> models;
  for (const io::JsonReader& layer : manifest.elements("layers")) {
    const std::string type = layer.string("mediaType");
    if (type == kAdapter) throw Unsupported("{} adds an adapter to its model, which Eadem cannot", path.string());
    if (type == kModel) models.push_back({layer.string("digest"), layer.optional_integer("size", 0)});
  }
  if (models.size() != 1)
    throw Unsupported("{} has {} layers of type {}; expected one, a GGUF file", path.string(), models.size(), kModel);
  const std::string& digest = models[0].digest;
  constexpr std::string_view kStart = "sha256:";
  if (!digest.starts_with(kStart) || digest.size() != kStart.size() + 64 ||
      digest.find_first_not_of("0123456789abcdef", kStart.size()) != std::string::npos)
    throw DataCorrupted("{}: the model's digest is {}; expected sha256: and 64 hexadecimal digits", path.string(),
                        io::quote(digest));
  return models[0];
}

}  // namespace

std::optional<FoundModel> find_in_ollama(const ModelName& name, const std::string& folder, Obstacles& obstacles) {
  const std::optional<fs::path> root = existing_folder(folder);
  if (!root || !name.revision.empty()) return std::nullopt;
  for (const fs::path& below : manifest_paths(name)) {
    const std::optional<fs::path> manifest = inside(*root, *root / below);
    std::error_code error;
    if (!manifest || !fs::is_regular_file(*manifest, error)) continue;
    const Layer layer = model_layer(*manifest);
    const fs::path blob = *root / "blobs" / ("sha256-" + layer.digest.substr(layer.digest.find(':') + 1));
    if (!inside(*root, blob)) {
      obstacles.push_back(fmt::format("{} names {}, which is not there", manifest->string(), blob.string()));
      continue;
    }
    const auto size = fs::file_size(blob, error);
    if (error) throw IoError("{}: {}", blob.string(), error.message());
    if (layer.size && static_cast<uintmax_t>(*layer.size) != size) {
      obstacles.push_back(fmt::format("{} has {} of {} bytes", blob.string(), size, *layer.size));
      continue;
    }
    return FoundModel{blob.string(), fmt::format("Ollama's store, {}", below.string())};
  }
  return std::nullopt;
}

}  // namespace eadem::models
