// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/quantized/quantized_checkpoint.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/io/quantized/quantized_layouts.h"
#include "eadem/io/text.h"

namespace eadem::io {

namespace {

class QuantizedCheckpoint final : public WeightSource {
 public:
  QuantizedCheckpoint(std::shared_ptr<const WeightSource> files, const QuantizationConfig& config)
      : WeightSource(files->path()), files_(std::move(files)), config_(config) {
    // 1. The quantized layers, and which tensors are parts of them.
    std::unordered_map<std::string, QuantizedLayer> layer_at;  // keyed by the name of the codes
    std::unordered_set<std::string> parts;
    for (const WeightInfo& info : files_->tensors()) {
      const std::string name = layer_with(info);
      if (name.empty()) continue;
      if (config_.ignores(name))
        throw DataCorrupted("{}: the layer {} is quantized ({} is there); {} says that it is not", path(), quote(name),
                            quote(info.name), config_.place);
      const QuantizationScheme* scheme = config_.scheme_of(name);
      if (scheme == nullptr)
        throw DataCorrupted("{}: the layer {} is quantized ({} is there), but no target of the schemes of {} is for it",
                            path(), quote(name), quote(info.name), config_.place);
      if (quantized_layer_of(*scheme, info) != name)
        throw DataCorrupted("{}: the layer {} should be {}, but {} is {} there", path(), quote(name), scheme->method,
                            quote(info.name), info.type_name);
      QuantizedLayer layer = describe_layer(*files_, *scheme, name);
      parts.insert(layer.parts.begin(), layer.parts.end());
      layer_at.emplace(info.name, std::move(layer));
    }
    if (layer_at.empty())
      throw DataCorrupted("{}: no layer is quantized, though {} says {}", path(), config_.place, config_.method);
    if (config_.expert_dtype == "fp4" && std::none_of(layer_at.begin(), layer_at.end(), [](const auto& layer) {
          return BlockEncoding::of(layer.second.type.encoding) != nullptr;
        }))
      throw DataCorrupted("{}: no layer is in 4-bit floats, though {} says 'expert_dtype' \"fp4\"", path(),
                          config_.place);

    refuse_plain_layers(layer_at);

    // 2. What there is instead, in the order of the file.
    std::vector<WeightInfo> infos;
    for (const WeightInfo& info : files_->tensors()) {
      const auto layer = layer_at.find(info.name);
      if (layer == layer_at.end()) {
        if (parts.contains(info.name)) continue;
        infos.push_back(info);
        sources_.emplace_back();
        continue;
      }
      const WeightType type = layer->second.type;
      WeightInfo whole{layer->second.name + ".weight", std::string(type.name()), type, layer->second.shape, 0};
      if (whole.name != info.name && files_->find(whole.name) != nullptr)
        throw DataCorrupted("{}: both {} and {} are there", path(), quote(info.name), quote(whole.name));
      for (const std::string& part : layer->second.parts) whole.size_bytes += files_->find(part)->size_bytes;
      infos.push_back(std::move(whole));
      sources_.push_back(std::move(layer->second));
    }
    set_tensors(std::move(infos));
  }

  void release(std::string_view name) const override {
    const WeightInfo* info = find(name);
    if (info == nullptr) return;
    const QuantizedLayer& layer = source_of(*info);
    if (layer.parts.empty()) files_->release(name);
    for (const std::string& part : layer.parts) files_->release(part);
  }

  std::vector<std::shared_ptr<const MappedFile>> files() const override { return files_->files(); }

 private:
  // The layer whose codes the tensor is in the layout of any scheme, or "".
  std::string layer_with(const WeightInfo& info) const {
    if (config_.schemes.empty()) return quantized_layer_of(config_, info);
    for (const QuantizationScheme& scheme : config_.schemes)
      if (std::string name = quantized_layer_of(scheme, info); !name.empty()) return name;
    return "";
  }

  // Whether a name is of a layer that predicts further tokens, which compressed-tensors does not make.
  bool is_behind_the_model(const std::string& name) const {
    constexpr std::string_view kLayers = ".layers.";
    const size_t at = name.find(kLayers);
    return config_.num_layers > 0 && at != std::string::npos &&
           std::atoll(name.c_str() + at + kLayers.size()) >= config_.num_layers;
  }

  // compressed-tensors makes every layer that a target is for a quantized one, and loads a plain one as noise. Which
  // names are of layers shows where others that differ in numbers alone are quantized.
  void refuse_plain_layers(const std::unordered_map<std::string, QuantizedLayer>& layer_at) const {
    if (config_.targets.empty()) return;
    const auto without_numbers = [](std::string_view name) {
      std::string kind;
      for (const char c : name)
        if (c < '0' || c > '9')
          kind += c;
        else if (!kind.ends_with('0'))
          kind += '0';
      return kind;
    };
    std::unordered_map<std::string, std::string> layer_of_kind;
    for (const auto& [codes, layer] : layer_at) layer_of_kind.emplace(without_numbers(layer.name), layer.name);
    constexpr std::string_view kWeight = ".weight";
    for (const WeightInfo& info : files_->tensors()) {
      if (!info.name.ends_with(kWeight) || layer_at.contains(info.name)) continue;
      const std::string name = info.name.substr(0, info.name.size() - kWeight.size());
      if (is_behind_the_model(name)) continue;
      const auto like = layer_of_kind.find(without_numbers(name));
      if (like == layer_of_kind.end() || like->second == name || config_.may_be_plain(name)) continue;
      throw DataCorrupted("{}: the layer {} is not quantized ({} is {}), but {} says that it is, as {} is", path(),
                          quote(name), quote(info.name), info.type_name, config_.place, quote(like->second));
    }
  }

  const QuantizedLayer& source_of(const WeightInfo& info) const {
    return sources_[static_cast<size_t>(&info - tensors().data())];
  }

  Tensor load(size_t index) const override {
    const QuantizedLayer& layer = sources_[index];
    if (layer.parts.empty()) return files_->get(tensors()[index].name);
    return load_layer(*files_, *config_.scheme_of(layer.name), layer);
  }

  Tensor load_bytes(size_t index) const override {
    if (!sources_[index].parts.empty())
      throw Unsupported("{}: tensor {} is several in the file", path(), quote(tensors()[index].name));
    return files_->get_bytes(tensors()[index].name);
  }

  std::shared_ptr<const WeightSource> files_;
  QuantizationConfig config_;
  std::vector<QuantizedLayer> sources_;  // one per tensor; without parts if the tensor passes through
};

}  // namespace

std::shared_ptr<const WeightSource> open_quantized(std::shared_ptr<const WeightSource> files,
                                                   const QuantizationConfig& config) {
  return std::make_shared<const QuantizedCheckpoint>(std::move(files), config);
}

}  // namespace eadem::io
