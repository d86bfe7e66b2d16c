// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/auto_model.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numbers>
#include <set>

#include "eadem/core/philox.h"
#include "eadem/io/quantized/quantized_checkpoint.h"
#include "eadem/models/decoder.h"
#include "eadem/models/pack_cache.h"
#include "eadem/models/parameter_reader.h"

namespace eadem::models {

namespace {

namespace fs = std::filesystem;

// The storage type that most bytes of the matrices have.
WeightType most_common_type(const io::WeightSource& weights) {
  std::vector<std::pair<WeightType, int64_t>> bytes;
  for (const io::WeightInfo& info : weights.tensors()) {
    if (!info.type || !is_floating(info.type->dtype) || info.shape.rank() < 2) continue;
    auto found = std::find_if(bytes.begin(), bytes.end(), [&](const auto& entry) { return entry.first == *info.type; });
    if (found == bytes.end()) found = bytes.insert(bytes.end(), {*info.type, 0});
    found->second += info.size_bytes;
  }
  const auto most =
      std::max_element(bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most == bytes.end() || most->first.dtype == DType::f64) return DType::f32;
  return most->first;
}

// FNV-1a: a parameter's stream must not depend on which other parameters there are.
uint64_t hash_of(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

// Elements [begin, end) of a stream of normal values by Box & Muller 1958, two per Philox block half. `begin` is a
// multiple of 4.
void fill_normal(float* data, int64_t begin, int64_t end, uint64_t seed, uint64_t stream, double stddev) {
  for (int64_t i = begin; i < end; i += 4) {
    const PhiloxBlock block = philox4x32(seed, static_cast<uint64_t>(i / 4), stream);
    for (int pair = 0; pair < 2; ++pair) {
      const double u1 = 1.0 - uniform_float(block.words[2 * pair]);  // (0, 1]
      const double u2 = uniform_float(block.words[2 * pair + 1]);
      const double radius = stddev * std::sqrt(-2 * std::log(u1)), angle = 2 * std::numbers::pi * u2;
      if (i + 2 * pair < end) data[i + 2 * pair] = static_cast<float>(radius * std::cos(angle));
      if (i + 2 * pair + 1 < end) data[i + 2 * pair + 1] = static_cast<float>(radius * std::sin(angle));
    }
  }
}

std::string config_file(const std::string& path) {
  return fs::is_directory(path) ? (fs::path(path) / "config.json").string() : path;
}

}  // namespace

std::shared_ptr<const Model> model_from_config(const io::JsonReader& config) {
  return std::make_shared<Decoder>(ModelConfig::from_json(config));
}

std::shared_ptr<const Model> model_from_config(const std::string& path) { return open_config(path).model; }

Checkpoint open_config(const std::string& path) {
  Checkpoint checkpoint{path, nullptr, nullptr, config_file(path)};
  const io::JsonReader config = io::JsonReader::read(checkpoint.config_path);
  checkpoint.model = model_from_config(config);
  checkpoint.ignored_keys = ignored_keys(config);
  return checkpoint;
}

Checkpoint open_checkpoint(const std::string& path) {
  Checkpoint checkpoint{path, nullptr, io::open_weights(path), {}};
  if (const auto* gguf = dynamic_cast<const io::GgufFile*>(checkpoint.weights.get())) {
    checkpoint.config_path = gguf->path();
    checkpoint.model = std::make_shared<Decoder>(ModelConfig::from_gguf(*gguf));
  } else {
    const fs::path folder = fs::is_directory(path) ? fs::path(path) : fs::path(path).parent_path();
    checkpoint.config_path = (folder / "config.json").string();
    const io::JsonReader config = io::JsonReader::read(checkpoint.config_path);
    checkpoint.model = model_from_config(config);
    checkpoint.ignored_keys = ignored_keys(config);
    if (const auto quantization = io::QuantizationConfig::from_json(config))
      checkpoint.weights = io::open_quantized(checkpoint.weights, *quantization);
  }
  return checkpoint;
}

modules::ModelSpec spec_of(const Checkpoint& checkpoint) {
  modules::ModelSpec spec = checkpoint.model->spec();
  if (checkpoint.weights != nullptr) {
    spec.checkpoint_type = most_common_type(*checkpoint.weights);
    spec.checkpoint_type_of = [reader = std::make_shared<const ParameterReader>(checkpoint)](
                                  const std::string& parameter) -> std::optional<WeightType> {
      const std::optional<RecipeType> made = reader->type(parameter);
      return made ? std::optional(made->type) : std::nullopt;
    };
    spec.checkpoint_source = checkpoint.weights->path();
  }
  return spec;
}

bool adds_nothing(const io::WeightSource& weights, const io::WeightInfo& info) {
  if (!info.name.ends_with(".bias") || info.shape.rank() != 1 || !info.type || !is_floating(info.type->dtype))
    return false;
  const Tensor values = converted_on_host(weights.get(info.name).view, DType::f32);
  const float* data = values.view.as<float>();
  return std::all_of(data, data + values.view.num_elements(), [](float value) { return value == 0.0f; });
}

void load_weights(pipeline::ParameterStore& parameters, const Checkpoint& checkpoint,
                  const std::function<void(int64_t, int64_t)>& progress, const LoadOptions& options) {
  const io::WeightSource& weights = *checkpoint.weights;
  EADEM_CHECK(options.in_place || options.pack_cache.empty(), "a pack cache is for parameters in place");
  std::optional<PackCache> cache;
  if (!options.pack_cache.empty())
    cache.emplace(options.pack_cache, parameters, checkpoint, options.log != nullptr ? *options.log : Logger());
  if (options.log != nullptr)
    if (const std::string notice = unusual_keys_notice(checkpoint.ignored_keys, checkpoint.config_path);
        !notice.empty())
      options.log->log(LogLevel::warning, "{}", notice);
  const bool cached = cache && cache->open();
  int64_t total = 0, done = 0;
  for (const io::WeightInfo& info : weights.tensors()) total += info.size_bytes;
  const ParameterReader reader(checkpoint);
  std::set<std::string> used;
  for (const std::string& name : parameters.names()) {
    if (reader.recipe(name) == nullptr) continue;
    reader.require_one_value(name);
    if (!cached || !cache->place(name)) {
      const Tensor tensor = reader.read(name);
      parameters.load(name, tensor.view, weights.path(), options.in_place ? tensor.storage : nullptr);
      reader.release(name);
    }
    for (const std::string& tensor : reader.tensors_of(name))
      if (used.insert(tensor).second) done += weights.find(tensor)->size_bytes;
    if (progress) progress(done, total);
  }
  parameters.require_all_loaded(weights.path());
  if (!options.one_stage) reader.require_no_other(used);
  if (cache && !cached) cache->write();
}

void load_random(pipeline::ParameterStore& parameters, uint64_t seed, double stddev,
                 const std::function<void(int64_t, int64_t)>& progress) {
  constexpr int64_t kBlock = int64_t{1} << 16;  // about 2 ms of one thread
  int64_t total = 0, done = 0;
  for (const std::string& name : parameters.names()) total += parameters.whole_shape(name).num_elements();
  for (const std::string& name : parameters.names()) {
    const Shape shape = parameters.whole_shape(name);
    const int64_t count = shape.num_elements();
    Tensor values = Tensor::on_host(DType::f32, shape);
    float* data = values.view.as<float>();
    if (shape.rank() >= 2)
      parameters.device()->host_parallel_for((count + kBlock - 1) / kBlock, [&](int64_t block) {
        fill_normal(data, block * kBlock, std::min(count, (block + 1) * kBlock), seed, hash_of(name), stddev);
      });
    else
      std::fill(data, data + count, name.ends_with(".bias") ? 0.0f : 1.0f);
    parameters.load(name, values.view, "random weights");
    done += count;
    if (progress) progress(done, total);
  }
}

}  // namespace eadem::models
