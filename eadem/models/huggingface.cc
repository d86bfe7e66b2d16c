// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/huggingface.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "eadem/io/files/atomic_file.h"
#include "eadem/io/gguf.h"
#include "eadem/io/safetensors.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/family.h"
#include "eadem/models/parameter_reader.h"

namespace eadem::models {

namespace {

namespace fs = std::filesystem;
using kernels::RopeStyle;
using modules::RopeScaling;

// A number that went through f32, as a person would have written it.
double shortest(double value) {
  const std::string text = fmt::format("{}", static_cast<float>(value));
  double result = 0;
  std::from_chars(text.data(), text.data() + text.size(), result);
  return result;
}

// The parameters of a checkpoint as tensors of a directory. What is not the file's own bytes is decoded.
class HuggingFaceWeights final : public io::WeightSource {
 public:
  explicit HuggingFaceWeights(const Checkpoint& checkpoint)
      : WeightSource(checkpoint.weights->path()),
        weights_(checkpoint.weights),
        reader_(checkpoint),
        recipes_(tensors_of(*checkpoint.model, CheckpointFormat::huggingface)) {
    std::vector<io::WeightInfo> tensors;
    std::set<std::string> used;
    const auto type_of = [&](const std::string& parameter) { return reader_.type(parameter); };
    std::erase_if(recipes_, [&](const NamedRecipe& tensor) {
      const std::optional<RecipeType> made = describe(tensor.second, type_of, path());
      for (const std::string& parameter : tensor.second.names()) used.merge(reader_.tensors_of(parameter));
      if (!made) return true;  // whoever loads says which are missing
      if (const io::WeightInfo* same = same_in_file(tensor.second)) {
        tensors.push_back(*same);
        tensors.back().name = tensor.first;
      } else {
        const WeightType type = made->type.encoding == nullptr ? made->type : WeightType(DType::f32);
        tensors.push_back({tensor.first, std::string(type.name()), type, made->shape,
                           made->shape.num_elements() * static_cast<int64_t>(dtype_size(type.dtype))});
      }
      return false;
    });
    // Tensors that are no parameters keep their names; the code that loads them decides whether they are allowed.
    for (const io::WeightInfo& info : weights_->tensors())
      if (!used.contains(info.name) && !checkpoint.model->may_ignore(info.name)) tensors.push_back(info);
    set_tensors(std::move(tensors));
  }

  void release(std::string_view name) const override {
    const io::WeightInfo* info = find(name);
    if (info == nullptr) return;
    const auto index = static_cast<size_t>(info - tensors().data());
    if (index >= recipes_.size()) return weights_->release(name);
    for (const std::string& parameter : recipes_[index].second.names()) reader_.release(parameter);
  }
  std::vector<std::shared_ptr<const io::MappedFile>> files() const override { return weights_->files(); }

 private:
  // The tensor of the file that is the whole tensor here; null when it is made of others, or of a part.
  const io::WeightInfo* same_in_file(const WeightRecipe& recipe) const {
    const WeightRecipe* stored = recipe.is_name() ? reader_.recipe(recipe.tensor) : nullptr;
    return stored != nullptr && stored->is_name() ? weights_->find(stored->tensor) : nullptr;
  }

  Tensor load(size_t index) const override {
    if (index >= recipes_.size()) return weights_->get(tensors()[index].name);
    const WeightRecipe& recipe = recipes_[index].second;
    const Tensor made = evaluate(
        recipe, [this](const std::string& parameter) { return reader_.read(parameter); }, path());
    return made.view.encoding == nullptr || same_in_file(recipe) != nullptr ? made : values_in_f32(made.view);
  }
  Tensor load_bytes(size_t index) const override {
    if (index >= recipes_.size()) return weights_->get_bytes(tensors()[index].name);
    if (const io::WeightInfo* same = same_in_file(recipes_[index].second)) return weights_->get_bytes(same->name);
    throw Unsupported("{}: '{}' is made of other tensors of the file", path(), tensors()[index].name);
  }

  std::shared_ptr<const io::WeightSource> weights_;
  ParameterReader reader_;
  std::vector<NamedRecipe> recipes_;  // of the first tensors(), over parameters
};

const ModelConfig& require_config(const Model& model) {
  if (model.config() == nullptr)
    throw Unsupported("models of architecture '{}' have no form in Hugging Face layout here",
                      model.info().architecture);
  return *model.config();
}

}  // namespace

namespace {

// Whether a recipe takes one tensor whole, without another shape.
bool has_one_tensor(const WeightRecipe& recipe) {
  if (recipe.is_name()) return true;
  return (recipe.kind == WeightRecipe::Kind::reorder || recipe.kind == WeightRecipe::Kind::add) &&
         has_one_tensor(recipe.parts[0]);
}

}  // namespace

std::vector<NamedRecipe> tensors_of(const Model& model, CheckpointFormat format) {
  std::vector<NamedRecipe> parameters;
  for (const ParameterInfo& parameter : model.parameters())
    parameters.emplace_back(parameter.name, model.recipes(parameter, format).at(0));
  return invert(parameters);
}

std::vector<double> llama3_divisors(const ModelConfig& config, const RopeScaling& scaling) {
  modules::RopeConfig rope{.theta = config.rope_theta, .rotary_dim = config.rotary_dim};
  const std::vector<double> plain = modules::rope_frequencies(rope).inv_freq;
  rope.scaling = scaling;
  const std::vector<double> scaled = modules::rope_frequencies(rope).inv_freq;
  std::vector<double> divisors(plain.size());
  for (size_t i = 0; i < plain.size(); ++i) divisors[i] = plain[i] / scaled[i];
  return divisors;
}

// The factor of Llama 3.1's scaling, of which a divisor d is 1 / d = (1 - s) / factor + s with the same s for every
// factor. That of the lowest frequency says it best.
double llama3_factor(const ModelConfig& config, const RopeScaling& scaling) {
  RopeScaling two = scaling;
  two.factor = 2;
  const double s = 2 / llama3_divisors(config, two).back() - 1;
  if (s >= 1) return 1;  // nothing is divided
  const double factor = (1 - s) / (1 / config.rope_divisors.back() - s), near = std::round(factor * 1000) / 1000;
  return std::abs(near - factor) < 1e-5 * factor ? near : shortest(factor);
}

std::vector<double> gguf_divisors(const ModelConfig& config) {
  if (!config.rope_divisors.empty()) return config.rope_divisors;
  if (config.family().gguf_divisors != nullptr) return config.family().gguf_divisors(config);
  return config.rope_scaling.kind == RopeScaling::Kind::llama3 ? llama3_divisors(config, config.rope_scaling)
                                                               : std::vector<double>();
}

ModelConfig huggingface_config(ModelConfig config, const io::GgufFile* file) {
  const std::string source = file != nullptr ? file->path() : "the model";
  if (!config.family().latent_attention) config.rope_style = RopeStyle::rotate_half;
  for (double* value : {&config.rms_norm_eps, &config.rope_theta, &config.local_rope_theta, &config.pooled_rope_theta,
                        &config.rope_scaling.factor, &config.rope_scaling.beta_fast, &config.rope_scaling.beta_slow,
                        &config.routed_scaling_factor, &config.swiglu_limit, &config.stream_eps, &config.attn_scale})
    *value = shortest(*value);
  if (std::optional<double>& factor = config.rope_scaling.attention_factor) factor = shortest(*factor);
  for (std::vector<double>* factors : {&config.rope_scaling.short_factor, &config.rope_scaling.long_factor})
    for (double& factor : *factors) factor = shortest(factor);
  if (!config.rope_divisors.empty()) {
    // Llama 3.1's scaling, if its usual numbers give these divisors. Converters do not write the original context;
    // `eadem convert` does.
    std::optional<int64_t> stated;
    if (file != nullptr)
      stated = file->optional_integer(file->string("general.architecture") + ".rope.scaling.original_context_length", 1,
                                      INT32_MAX);
    const int64_t positions = stated.value_or(8192);
    RopeScaling scaling{.kind = RopeScaling::Kind::llama3, .original_max_positions = static_cast<double>(positions)};
    scaling.factor = llama3_factor(config, scaling);
    const std::vector<double> expected = llama3_divisors(config, scaling);
    for (size_t i = 0; i < expected.size(); ++i)
      if (config.rope_scaling.kind != RopeScaling::Kind::none ||
          std::abs(expected[i] - config.rope_divisors[i]) > 1e-5 * expected[i])
        throw Unsupported(
            "{}: 'rope_freqs.weight' is not Llama 3.1's scaling from {} positions with frequency factors of 1 and 4; "
            "others cannot be told from it",
            source, positions);
    config.rope_scaling = scaling;
    config.rope_divisors.clear();
  }
  if (config.family().prepare_json != nullptr) config.family().prepare_json(config);
  return config;
}

Checkpoint huggingface_form(const Checkpoint& checkpoint) {
  const auto* gguf = dynamic_cast<const io::GgufFile*>(checkpoint.weights.get());
  if (gguf == nullptr) return checkpoint;
  Checkpoint result = checkpoint;
  const ModelConfig converted = huggingface_config(require_config(*checkpoint.model), gguf);
  converted.to_json();  // throws for what a config.json cannot state
  result.model = std::make_shared<Decoder>(converted);
  result.weights = std::make_shared<HuggingFaceWeights>(result);
  return result;
}

Tensor to_huggingface_order(const Model& model, const std::string& parameter, const Tensor& tensor) {
  for (const ParameterInfo& known : model.parameters()) {
    // The part of a rank has whole heads, and is turned as the whole is.
    if (known.name != parameter || known.shape.rank() != tensor.shape().rank()) continue;
    const NamedRecipe recipe{parameter, model.recipes(known, CheckpointFormat::huggingface).at(0)};
    const std::vector<NamedRecipe> tensors =
        has_one_tensor(recipe.second) ? invert({&recipe, 1}) : std::vector<NamedRecipe>();
    if (!tensors.empty())
      return evaluate(
          tensors[0].second, [&](const auto&) { return tensor; }, "the model");
  }
  return tensor;
}

Tensor from_huggingface_order(const Model& model, const std::string& parameter, const Tensor& tensor) {
  for (const ParameterInfo& known : model.parameters()) {
    if (known.name != parameter) continue;
    const WeightRecipe recipe = model.recipes(known, CheckpointFormat::huggingface).at(0);
    // Whoever takes the tensor says what is wrong with its shape.
    if (has_one_tensor(recipe) && known.shape == tensor.shape())
      return evaluate(
          recipe, [&](const auto&) { return tensor; }, "the model");
  }
  return tensor;
}

ModelConfig with_huggingface_order(ModelConfig config) {
  if (config.rope_style == RopeStyle::interleaved && config.rotary_dim == config.head_dim)
    config.rope_style = RopeStyle::rotate_half;
  return config;
}

std::optional<io::TokenizerFile> generation_config_of(const Checkpoint& checkpoint) {
  constexpr const char* kName = "generation_config.json";
  constexpr int64_t kMaxBytes = 1 << 20;
  const fs::path path = fs::path(checkpoint.config_path).parent_path() / kName;
  std::error_code ignored;
  if (io::is_gguf_file(checkpoint.config_path) || !fs::exists(path, ignored)) return std::nullopt;
  return io::TokenizerFile{kName, io::read_file(path.string(), kMaxBytes)};
}

std::vector<io::TokenizerFile> companions_of(const Checkpoint& checkpoint) {
  std::vector<io::TokenizerFile> files;
  if (io::is_gguf_file(checkpoint.config_path)) {
    const auto gguf = io::GgufFile::open(checkpoint.config_path);
    if (gguf->find_metadata("tokenizer.ggml.model") != nullptr) files = io::tokenizer_files(*gguf);
  } else {
    files = io::tokenizer_files(fs::path(checkpoint.config_path).parent_path().string());
  }
  if (auto generation = generation_config_of(checkpoint)) files.push_back(*std::move(generation));
  return files;
}

void save_huggingface(const Model& model, std::span<const std::pair<std::string, Tensor>> parameters,
                      const std::string& directory, const io::GgufFile* file) {
  const ModelConfig& config = require_config(model);
  ModelConfig written = config;
  // A GGUF file's configuration is converted; a directory's configuration needs no change.
  const bool other_order = config.rope_style == RopeStyle::interleaved && !config.family().latent_attention;
  if (file != nullptr || other_order || !config.rope_divisors.empty()) written = huggingface_config(config, file);
  const std::vector<NamedRecipe> recipes = tensors_of(model, CheckpointFormat::huggingface);
  EADEM_CHECK(!parameters.empty(), "a model without parameters");
  written.checkpoint_dtype = parameters.front().second.dtype();
  const io::JsonValue json = written.to_json();

  std::error_code error;
  fs::create_directories(directory, error);
  if (error || !fs::is_directory(directory, error))
    throw IoError("cannot make directory '{}': {}", directory,
                  error ? error.message() : "a file of that name is there");
  const fs::path folder(directory);
  std::map<std::string, Tensor, std::less<>> by_name(parameters.begin(), parameters.end());
  std::vector<Tensor> kept;
  std::vector<io::NamedTensor> tensors;
  for (const auto& [name, recipe] : recipes) {
    const auto parameter = [&](const std::string& own) {
      EADEM_CHECK(by_name.contains(own), "no parameter '{}'", own);
      return by_name.at(own);
    };
    kept.push_back(evaluate(recipe, parameter, "the model"));
    tensors.push_back({name, kept.back().view});
  }
  io::write_safetensors((folder / "model.safetensors").string(), tensors, {{"format", "pt"}});
  io::write_file_atomically((folder / "config.json").string(), io::to_json(json) + "\n");
  io::JsonValue generation = io::JsonValue::object();
  for (const char* key : {"bos_token_id", "eos_token_id"})
    if (const io::JsonValue* value = json.find(key)) generation.set(key, *value);
  io::write_file_atomically((folder / "generation_config.json").string(), io::to_json(generation) + "\n");
}

}  // namespace eadem::models
