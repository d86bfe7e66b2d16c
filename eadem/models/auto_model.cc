// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/auto_model.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numbers>
#include <set>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/philox.h"
#include "eadem/io/quantized/quantized_checkpoint.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/multimodal/text_part.h"
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

// Writes elements [begin, end) of a stream of normal values to data [end - begin], by Box & Muller 1958, two per Philox
// block half. `begin` is a multiple of 4.
void fill_normal(float* data, int64_t begin, int64_t end, uint64_t seed, uint64_t stream, double stddev) {
  for (int64_t i = begin; i < end; i += 4) {
    const PhiloxBlock block = philox4x32(seed, static_cast<uint64_t>(i / 4), stream);
    for (int pair = 0; pair < 2; ++pair) {
      const double u1 = 1.0 - uniform_float(block.words[2 * pair]);  // (0, 1]
      const double u2 = uniform_float(block.words[2 * pair + 1]);
      const double radius = stddev * std::sqrt(-2 * std::log(u1)), angle = 2 * std::numbers::pi * u2;
      float* to = data + (i - begin) + 2 * pair;
      if (i + 2 * pair < end) to[0] = static_cast<float>(radius * std::cos(angle));
      if (i + 2 * pair + 1 < end) to[1] = static_cast<float>(radius * std::sin(angle));
    }
  }
}

std::string config_file(const std::string& path) {
  return fs::is_directory(path) ? (fs::path(path) / "config.json").string() : path;
}

// Reads the config.json into the checkpoint, whose weights are open, or null.
void read_config(Checkpoint& checkpoint) {
  const io::JsonReader whole = io::JsonReader::read(checkpoint.config_path);
  const bool multimodal = is_multimodal(whole);
  const io::JsonReader config = multimodal ? text_config_of(whole, checkpoint.weights.get()) : whole;
  checkpoint.model = std::make_shared<Decoder>(ModelConfig::from_json(config));
  checkpoint.ignored_keys = ignored_keys(config);
  if (multimodal) {
    checkpoint.notice = text_part_notice(whole, checkpoint.weights.get());
    for (IgnoredKey& key : ignored_keys(whole)) checkpoint.ignored_keys.push_back(std::move(key));
  }
  if (checkpoint.weights == nullptr) return;
  if (const auto quantization = io::QuantizationConfig::from_json(config))
    checkpoint.weights = io::open_quantized(checkpoint.weights, *quantization);
  if (multimodal) checkpoint.weights = text_weights_of(checkpoint.weights);
}

}  // namespace

std::shared_ptr<const Model> model_from_config(const io::JsonReader& config) {
  return std::make_shared<Decoder>(
      ModelConfig::from_json(is_multimodal(config) ? text_config_of(config, nullptr) : config));
}

std::shared_ptr<const Model> model_from_config(const std::string& path) { return open_config(path).model; }

Checkpoint open_config(const std::string& path) {
  Checkpoint checkpoint{path, nullptr, nullptr, config_file(path)};
  read_config(checkpoint);
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
    read_config(checkpoint);
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
  EADEM_CHECK(!options.pack_later || (options.in_place && options.pack_cache.empty()), "packed later, or from a cache");
  std::optional<PackCache> cache;
  if (!options.pack_cache.empty())
    cache.emplace(options.pack_cache, parameters, checkpoint, options.log != nullptr ? *options.log : Logger());
  if (options.log != nullptr && !checkpoint.notice.empty())
    options.log->log(LogLevel::warning, "{}: {}", checkpoint.path, checkpoint.notice);
  if (options.log != nullptr)
    if (const std::string notice = unusual_keys_notice(checkpoint.ignored_keys, checkpoint.config_path);
        !notice.empty())
      options.log->log(LogLevel::warning, "{}", notice);
  const bool cached = cache && cache->open();
  int64_t total = 0, done = 0;
  for (const io::WeightInfo& info : weights.tensors()) total += info.size_bytes;
  const auto shared = std::make_shared<const ParameterReader>(checkpoint);
  const ParameterReader& reader = *shared;
  std::set<std::string> used;
  for (const std::string& name : parameters.names()) {
    if (reader.recipe(name) == nullptr) continue;
    reader.require_one_value(name);
    if (!cached || !cache->place(name)) {
      const std::optional<PartRange> experts = parameters.own_experts(name);
      const Tensor tensor =
          experts ? reader.read_experts(name, *experts, parameters.whole_shape(name)) : reader.read(name);
      const std::shared_ptr<const void> owner = options.in_place ? tensor.storage : nullptr;
      const auto release = [shared, name] { shared->release(name); };
      if (options.pack_later && !experts) {
        parameters.load(name, tensor.view, weights.path(), owner, release);
      } else {
        if (experts)
          parameters.load_experts(name, tensor.view, weights.path(), owner);
        else
          parameters.load(name, tensor.view, weights.path(), owner);
        release();
      }
    }
    for (const std::string& tensor : reader.tensors_of(name))
      if (used.insert(tensor).second) done += weights.find(tensor)->size_bytes;
    if (progress) progress(done, total);
  }
  parameters.require_all_loaded(weights.path());
  if (!options.one_stage) reader.require_no_other(used);
  if (cache && !cached) cache->write();
}

namespace {

// Random values of a parameter of that type and whole shape.
Tensor random_values(const TensorType& type, const Shape& shape, const std::string& name, Device& device, uint64_t seed,
                     double stddev) {
  constexpr int64_t kBlock = int64_t{1} << 16;  // about 2 ms of one thread
  const int64_t count = shape.num_elements();
  const auto in_pieces = [&](int64_t all, int64_t size, auto&& fill) {
    device.host_parallel_for((all + size - 1) / size,
                             [&](int64_t piece) { fill(piece * size, std::min(all, (piece + 1) * size)); });
  };
  if (const BlockEncoding* blocks = BlockEncoding::of(type.encoding); blocks != nullptr && !blocks->is_writable()) {
    const Tensor result = Tensor::in_one_piece(DType::f32, shape, *blocks);
    auto* data = static_cast<uint8_t*>(result.view.data);
    in_pieces(count / blocks->format().block_size, kBlock / kMaxBlockSize, [&](int64_t begin, int64_t end) {
      blocks->fill_random(data + begin * blocks->format().block_bytes, begin, end - begin, stddev,
                          seed ^ hash_of(name));
    });
    return result;
  }
  if (shape.rank() < 2) {
    Tensor values = Tensor::on_host(DType::f32, shape);
    std::fill_n(values.view.as<float>(), count, name.ends_with(".bias") ? 0.0f : 1.0f);
    return values;
  }
  // Each piece is rounded where it was made, so that no copy of all in f32 is needed.
  const DType dtype = type.encoding == nullptr ? type.dtype : DType::f32;
  Tensor values = Tensor::on_host(dtype, shape);
  const TensorView flat = values.view.reshaped(Shape{count});
  in_pieces(count, kBlock, [&](int64_t begin, int64_t end) {
    const TensorView piece = flat.rows(begin, end - begin);
    if (dtype == DType::f32) return fill_normal(piece.as<float>(), begin, end, seed, hash_of(name), stddev);
    const Tensor wide = Tensor::on_host(DType::f32, piece.shape);
    fill_normal(wide.view.as<float>(), begin, end, seed, hash_of(name), stddev);
    convert_on_host(piece, wide.view);
  });
  return values;
}

}  // namespace

void load_random(pipeline::ParameterStore& parameters, uint64_t seed, double stddev,
                 const std::function<void(int64_t, int64_t)>& progress) {
  int64_t total = 0, done = 0;
  for (const std::string& name : parameters.names()) total += parameters.whole_shape(name).num_elements();
  for (const std::string& name : parameters.names()) {
    const Shape shape = parameters.whole_shape(name);
    const Tensor values = random_values(parameters.type(name), shape, name, *parameters.device(), seed, stddev);
    parameters.load(name, values.view, "random weights");
    done += shape.num_elements();
    if (progress) progress(done, total);
  }
}

}  // namespace eadem::models
