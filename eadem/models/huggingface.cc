// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/huggingface.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "eadem/io/atomic_file.h"
#include "eadem/io/gguf.h"
#include "eadem/io/safetensors.h"
#include "eadem/models/llama.h"

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

bool is_rotated(std::string_view parameter) {
  return parameter.find(".q_proj.") != std::string_view::npos || parameter.find(".k_proj.") != std::string_view::npos;
}

enum class Order : uint8_t { halves, interleaved };

// Rows (or the values of a bias) of each head in the other order: 0 1 2 3 … interleaved are 0 2 4 … 1 3 5 … in halves.
Tensor reordered(const TensorView& rows, int64_t head_dim, Order to) {
  const int64_t count = rows.shape[0], bytes = rows.size_bytes() / count, half = head_dim / 2;
  const Tensor result = Tensor::on_host(rows.dtype, rows.shape);
  const auto* from = static_cast<const std::byte*>(rows.data);
  auto* target = static_cast<std::byte*>(result.view.data);
  for (int64_t row = 0; row < count; ++row) {
    const int64_t first = row / head_dim * head_dim, i = row % head_dim;
    const int64_t source = first + (to == Order::halves ? i % half * 2 + i / half : i % 2 * half + i / 2);
    std::memcpy(target + row * bytes, from + source * bytes, static_cast<size_t>(bytes));
  }
  return result;
}

// Whether rows of q and k have to change their order. Throws Unsupported where that order is not known.
bool reorders(const LlamaConfig& config, const std::string& source) {
  if (config.rope_style != RopeStyle::interleaved) return false;
  if (config.rotary_dim != config.head_dim)
    throw Unsupported(
        "{}: only {} of {} dimensions of a head are rotated; their order in Hugging Face layout is not known", source,
        config.rotary_dim, config.head_dim);
  return true;
}

// Tensors of a GGUF file under the model's names, in the order of Hugging Face's rows.
class HuggingFaceWeights final : public io::WeightSource {
 public:
  HuggingFaceWeights(const Checkpoint& checkpoint, const LlamaConfig& config, const std::vector<std::string>& names)
      : WeightSource(checkpoint.weights->path()),
        weights_(checkpoint.weights),
        head_dim_(config.head_dim),
        reorders_(reorders(config, checkpoint.path)) {
    std::vector<io::WeightInfo> tensors;
    for (const std::string& name : names) {
      const io::WeightInfo* info = nullptr;
      for (const std::string& from : checkpoint.model->checkpoint_names(name))
        if (info == nullptr) info = weights_->find(from);
      if (info == nullptr) continue;  // whoever loads says which are missing
      tensors.push_back(*info);
      tensors.back().name = name;
      // Values that move are read out of their encoding.
      if (moves(name) && info->type && info->type->encoding != nullptr) tensors.back().type = DType::f32;
      from_.push_back(info->name);
    }
    // Tensors that are no parameters keep their names; the code that loads them decides whether they are allowed.
    for (const io::WeightInfo& info : weights_->tensors())
      if (std::find(from_.begin(), from_.end(), info.name) == from_.end() && !checkpoint.model->may_ignore(info.name)) {
        tensors.push_back(info);
        from_.push_back(info.name);
      }
    set_tensors(std::move(tensors));
  }

  void release(std::string_view name) const override {
    if (const io::WeightInfo* info = find(name); info != nullptr)
      weights_->release(from_[static_cast<size_t>(info - tensors().data())]);
  }
  std::vector<std::shared_ptr<const io::MappedFile>> files() const override { return weights_->files(); }

 private:
  bool moves(std::string_view name) const { return reorders_ && is_rotated(name); }

  Tensor load(size_t index) const override {
    const Tensor stored = weights_->get(from_[index]);
    const std::string& name = tensors()[index].name;
    if (!moves(name)) return stored;
    Tensor plain = stored;
    if (stored.view.encoding != nullptr) {
      plain = Tensor::on_host(DType::f32, stored.shape());
      stored.view.encoding->decode(plain.view, stored.view);
    }
    if (plain.shape().rank() < 1 || plain.shape()[0] % head_dim_ != 0)
      throw DataCorrupted("{}: '{}' is {}, which are no heads of {} rows", path(), from_[index],
                          to_string(plain.shape()), head_dim_);
    return reordered(plain.view, head_dim_, Order::halves);
  }
  Tensor load_bytes(size_t index) const override { return weights_->get_bytes(from_[index]); }

  std::shared_ptr<const io::WeightSource> weights_;
  int64_t head_dim_;
  bool reorders_;
  std::vector<std::string> from_;  // the file's name of each of tensors()
};

const LlamaConfig& require_config(const Model& model) {
  const auto* llama = dynamic_cast<const Llama*>(&model);
  if (llama == nullptr)
    throw Unsupported("models of architecture '{}' have no form in Hugging Face layout here",
                      model.info().architecture);
  return llama->config();
}

}  // namespace

std::vector<std::string> parameter_names(const LlamaConfig& config) {
  std::vector<std::string> names = {"model.embed_tokens.weight"};
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    const auto add = [&](const char* name, bool bias) {
      names.push_back(prefix + name + ".weight");
      if (bias) names.push_back(prefix + name + ".bias");
    };
    add("input_layernorm", false);
    for (const char* name : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"})
      add(name, config.attention_bias);
    if (config.qk_norm) add("self_attn.q_norm", false);
    if (config.qk_norm) add("self_attn.k_norm", false);
    add("self_attn.o_proj", config.attention_out_bias);
    add("post_attention_layernorm", false);
    for (const char* name : {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}) add(name, config.mlp_bias);
  }
  names.emplace_back("model.norm.weight");
  if (!config.tie_word_embeddings) names.emplace_back("lm_head.weight");
  return names;
}

std::vector<double> llama3_divisors(const LlamaConfig& config, const RopeScaling& scaling) {
  modules::RopeConfig rope{.theta = config.rope_theta, .rotary_dim = config.rotary_dim};
  const std::vector<double> plain = modules::rope_frequencies(rope).inv_freq;
  rope.scaling = scaling;
  const std::vector<double> scaled = modules::rope_frequencies(rope).inv_freq;
  std::vector<double> divisors(plain.size());
  for (size_t i = 0; i < plain.size(); ++i) divisors[i] = plain[i] / scaled[i];
  return divisors;
}

LlamaConfig huggingface_config(LlamaConfig config, const io::GgufFile* file) {
  const std::string source = file != nullptr ? file->path() : "the model";
  config.rope_style = RopeStyle::rotate_half;
  config.gguf_names = false;
  for (double* value : {&config.rms_norm_eps, &config.rope_theta, &config.rope_scaling.factor})
    *value = shortest(*value);
  const bool windowed =
      std::any_of(config.layer_windows.begin(), config.layer_windows.end(), [](int64_t w) { return w > 0; });
  if (config.model_type == "qwen2" && !config.attention_bias)
    throw Unsupported("{}: a qwen2 model without biases, which config.json cannot state", source);
  if (!config.rope_divisors.empty()) {
    // Llama 3.1's scaling, if its usual numbers give these divisors. Converters do not write the original context;
    // `eadem convert` does.
    std::optional<int64_t> stated;
    if (file != nullptr)
      stated = file->optional_integer(config.model_type + ".rope.scaling.original_context_length", 1, INT32_MAX);
    const int64_t positions = stated.value_or(8192);
    RopeScaling scaling{.kind = RopeScaling::Kind::llama3,
                        .factor = shortest(*std::max_element(config.rope_divisors.begin(), config.rope_divisors.end())),
                        .original_max_positions = static_cast<double>(positions)};
    const std::vector<double> expected = llama3_divisors(config, scaling);
    for (size_t i = 0; i < expected.size(); ++i)
      if (config.rope_scaling.kind != RopeScaling::Kind::none ||
          std::abs(expected[i] - config.rope_divisors[i]) > 1e-5 * expected[i])
        throw Unsupported(
            "{}: 'rope_freqs.weight' is not Llama 3.1's scaling from {} positions, the only one that config.json can "
            "state",
            source, positions);
    config.rope_scaling = scaling;
    config.rope_divisors.clear();
  }
  if (windowed && config.model_type == "llama") config.model_type = "mistral";  // the same model with a window
  return config;
}

Checkpoint huggingface_form(const Checkpoint& checkpoint) {
  const auto* gguf = dynamic_cast<const io::GgufFile*>(checkpoint.weights.get());
  if (gguf == nullptr) return checkpoint;
  const LlamaConfig& config = require_config(*checkpoint.model);
  Checkpoint result = checkpoint;
  const LlamaConfig converted = huggingface_config(config, gguf);
  converted.to_json();  // throws for what a config.json cannot state
  result.model = std::make_shared<Llama>(converted);
  result.weights = std::make_shared<HuggingFaceWeights>(checkpoint, config, parameter_names(config));
  return result;
}

namespace {

Tensor in_order(const Model& model, const std::string& parameter, const Tensor& tensor, Order to) {
  const auto* llama = dynamic_cast<const Llama*>(&model);
  if (llama == nullptr || !is_rotated(parameter) || !reorders(llama->config(), "the model")) return tensor;
  const int64_t head_dim = llama->config().head_dim;
  // Whoever takes the tensor says what is wrong with its shape.
  if (tensor.shape().rank() < 1 || tensor.shape()[0] == 0 || tensor.shape()[0] % head_dim != 0) return tensor;
  return reordered(tensor.view, head_dim, to);
}

}  // namespace

Tensor to_huggingface_order(const Model& model, const std::string& parameter, const Tensor& tensor) {
  return in_order(model, parameter, tensor, Order::halves);
}

Tensor from_huggingface_order(const Model& model, const std::string& parameter, const Tensor& tensor) {
  return in_order(model, parameter, tensor, Order::interleaved);
}

LlamaConfig with_huggingface_order(LlamaConfig config) {
  if (reorders(config, "the configuration")) config.rope_style = RopeStyle::rotate_half;
  config.gguf_names = false;
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
  const LlamaConfig& config = require_config(model);
  LlamaConfig written = config;
  // A GGUF file's configuration is converted; a directory's configuration needs no change.
  if (file != nullptr || config.gguf_names || config.rope_style == RopeStyle::interleaved ||
      !config.rope_divisors.empty())
    written = huggingface_config(config, file);
  reorders(config, file != nullptr ? file->path() : "the model");  // before anything is written
  EADEM_CHECK(!parameters.empty(), "a model without parameters");
  written.checkpoint_dtype = parameters.front().second.dtype();
  const io::JsonValue json = written.to_json();

  std::error_code error;
  fs::create_directories(directory, error);
  if (error || !fs::is_directory(directory, error))
    throw IoError("cannot make directory '{}': {}", directory,
                  error ? error.message() : "a file of that name is there");
  const fs::path folder(directory);
  std::vector<Tensor> kept;
  std::vector<io::NamedTensor> tensors;
  for (const auto& [name, tensor] : parameters) {
    kept.push_back(to_huggingface_order(model, name, tensor));
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
