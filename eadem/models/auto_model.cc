// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/auto_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <numbers>
#include <set>

#include "eadem/core/philox.h"
#include "eadem/io/quantized_checkpoint.h"
#include "eadem/models/llama.h"
#include "eadem/models/pack_cache.h"

namespace eadem::models {

namespace {

namespace fs = std::filesystem;

// The architecture that a file states. kArchitectures has one entry per model file; that list is the registry.
struct ArchitectureRequest {
  std::string model_type;
};

struct Architecture {
  std::string_view name;
  Verdict (*can_handle)(const ArchitectureRequest& request);
  std::shared_ptr<const Model> (*from_json)(const io::JsonReader& config);
  std::shared_ptr<const Model> (*from_gguf)(const io::GgufFile& file);
};

constexpr Architecture kLlama = {"llama",
                                 [](const ArchitectureRequest& request) {
                                   for (std::string_view type : {"llama", "mistral", "qwen2", "qwen3"})
                                     if (request.model_type == type) return Verdict::yes(0.0);
                                   return Verdict::no("serves model types llama, mistral, qwen2, qwen3");
                                 },
                                 [](const io::JsonReader& config) -> std::shared_ptr<const Model> {
                                   return std::make_shared<Llama>(LlamaConfig::from_json(config));
                                 },
                                 [](const io::GgufFile& file) -> std::shared_ptr<const Model> {
                                   return std::make_shared<Llama>(LlamaConfig::from_gguf(file));
                                 }};

constexpr const Architecture* kArchitectures[] = {&kLlama};

// "model type 'x': llama serves model types a, b; …".
std::string refusals_text(const Decision& decision) {
  std::string text = decision.subject + ": ";
  for (const Decision::Answer& answer : decision.answers)
    text +=
        fmt::format("{}{} {}", &answer == &decision.answers[0] ? "" : "; ", answer.candidate, answer.verdict.reason);
  return text;
}

const Architecture& find_architecture(const std::string& model_type, const std::string& source) {
  Decision decision{fmt::format("model type '{}'", model_type), {}, {}};
  const Architecture* architecture =
      select(std::span<const Architecture* const>(kArchitectures), ArchitectureRequest{model_type}, decision);
  if (architecture == nullptr) throw Unsupported("{}: {}", source, refusals_text(decision));
  return *architecture;
}

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

const io::WeightInfo* find_stored(const Model& model, const io::WeightSource& weights, const std::string& parameter) {
  for (const std::string& name : model.checkpoint_names(parameter))
    if (const io::WeightInfo* info = weights.find(name)) return info;
  return nullptr;
}

// The views have one type and one shape.
bool hold_same_values(const TensorView& a, const TensorView& b) {
  if (a.encoding == nullptr) return std::memcmp(a.data, b.data, static_cast<size_t>(a.size_bytes())) == 0;
  const Tensor x = converted_on_host(a, DType::f32), y = converted_on_host(b, DType::f32);
  return std::memcmp(x.view.data, y.view.data, static_cast<size_t>(x.view.size_bytes())) == 0;
}

std::string config_file(const std::string& path) {
  return fs::is_directory(path) ? (fs::path(path) / "config.json").string() : path;
}

}  // namespace

std::shared_ptr<const Model> model_from_config(const io::JsonReader& config) {
  if (!config.has("model_type")) config.fail("model_type", "a string naming the architecture");
  return find_architecture(config.string("model_type"), config.file()).from_json(config);
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
    checkpoint.model = find_architecture(gguf->string("general.architecture"), gguf->path()).from_gguf(*gguf);
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
    spec.checkpoint_type_of = [model = checkpoint.model, weights = checkpoint.weights](
                                  const std::string& parameter) -> std::optional<WeightType> {
      const io::WeightInfo* info = find_stored(*model, *weights, parameter);
      return info == nullptr ? std::nullopt : info->type;
    };
    spec.checkpoint_source = checkpoint.weights->path();
  }
  return spec;
}

const io::WeightInfo* stored_tensor(const Checkpoint& checkpoint, const std::string& parameter) {
  return find_stored(*checkpoint.model, *checkpoint.weights, parameter);
}

void require_one_value(const Checkpoint& checkpoint, const std::string& parameter) {
  const io::WeightSource& weights = *checkpoint.weights;
  const io::WeightInfo* first = stored_tensor(checkpoint, parameter);
  if (first == nullptr) return;
  for (const std::string& name : checkpoint.model->checkpoint_names(parameter)) {
    const io::WeightInfo* other = weights.find(name);
    if (other == nullptr || other == first) continue;
    const bool same = first->type == other->type && first->shape == other->shape &&
                      hold_same_values(weights.get(first->name).view, weights.get(name).view);
    weights.release(name);
    if (!same)
      throw DataCorrupted(
          "{}: '{}' {} {} and '{}' {} {} differ, but {} says that they are tied; with \"tie_word_embeddings\": false "
          "both "
          "are used",
          weights.path(), first->name, first->type_name, to_string(first->shape), name, other->type_name,
          to_string(other->shape), checkpoint.config_path);
  }
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
  std::set<std::string, std::less<>> used;
  for (const std::string& name : parameters.names()) {
    const io::WeightInfo* info = stored_tensor(checkpoint, name);
    if (info == nullptr) continue;
    require_one_value(checkpoint, name);
    if (!cached || !cache->place(name)) {
      const Tensor tensor = weights.get(info->name);
      parameters.load(name, tensor.view, weights.path(), options.in_place ? tensor.storage : nullptr);
      weights.release(info->name);
    }
    used.insert(info->name);
    done += info->size_bytes;
    if (progress) progress(done, total);
  }
  parameters.require_all_loaded(weights.path());
  for (const io::WeightInfo& info : weights.tensors())
    if (!options.one_stage && !used.contains(info.name) && !checkpoint.model->may_ignore(info.name) &&
        !adds_nothing(weights, info))
      throw DataCorrupted("{}: tensor '{}' {} {} is no parameter of the model that {} describes", weights.path(),
                          info.name, info.type_name, to_string(info.shape), checkpoint.config_path);
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
