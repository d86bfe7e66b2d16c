// SPDX-License-Identifier: Apache-2.0
//
// eadem convert: a model's files in the other format, or its weights stored in another way.
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "eadem/cli/arguments.h"
#include "eadem/cli/commands.h"
#include "eadem/cli/convert_tokenizer.h"
#include "eadem/cli/convert_types.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/model_options.h"
#include "eadem/cli/terminal.h"
#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/thread_pool.h"
#include "eadem/io/atomic_file.h"
#include "eadem/io/gguf.h"
#include "eadem/io/json.h"
#include "eadem/io/safetensors.h"
#include "eadem/models/auto_model.h"
#include "eadem/models/llama.h"

namespace eadem::cli {

namespace {

namespace fs = std::filesystem;
using io::GgufMetadata;
using io::GgufValue;
using models::LlamaConfig;
using modules::RopeScaling;

// Every parameter of the model, by its Hugging Face name.
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

int64_t stored_bytes(const WeightType& type, const Shape& shape) {
  if (type.encoding == nullptr) return shape.num_elements() * static_cast<int64_t>(dtype_size(type.dtype));
  int64_t total = 0;
  for (const PlaneSpec& plane : type.encoding->planes(shape)) total += plane.size_bytes();
  return total;
}
int64_t stored_bytes(const TensorView& view) { return stored_bytes({view.dtype, view.encoding}, view.shape); }

Tensor empty_like(const WeightType& type, const Shape& shape) {
  if (type.encoding == nullptr) return Tensor::on_host(type.dtype, shape);
  Tensor result = Tensor::on_host(DType::u8, Shape{stored_bytes(type, shape)});
  result.view = TensorView(result.view.data, type.dtype, shape);
  result.view.encoding = type.encoding;
  return result;
}

// A copy of `tensor` stored in another way: decoded, rounded or quantized.
Tensor stored_as(ThreadPool& pool, const Tensor& tensor, const WeightType& type) {
  const TensorView& view = tensor.view;
  const int64_t columns = view.shape.rank() == 0 ? 1 : view.shape[view.shape.rank() - 1];
  const int64_t rows = columns == 0 ? 0 : view.num_elements() / columns;
  if (view.encoding != nullptr) {
    EADEM_CHECK(type == WeightType(DType::f32), "{} to {}", to_string(view), type.name());
    Tensor result = Tensor::on_host(DType::f32, view.shape);
    pool.parallel_for(
        rows, [&](int64_t row, int) { view.encoding->decode_row(result.view.as<float>() + row * columns, view, row); });
    return result;
  }
  if (type.encoding == nullptr) return converted_on_host(view, type.dtype);
  Tensor result = empty_like(type, view.shape);
  type.encoding->encode(result.view, view, [&pool](int64_t count, FunctionRef<void(int64_t)> task) {
    pool.parallel_for(count, [&](int64_t index, int) { task(index); });
  });
  return result;
}

// GGUF files of the Llama architecture order the rows of each head of q and k for interleaved rotation: pairs (2i, 2i +
// 1) instead of (i, i + head_dim / 2). `to_interleaved` or back. Whole rows move, however they are stored.
Tensor permuted(const Tensor& tensor, int64_t heads, int64_t head_dim, bool to_interleaved) {
  const TensorView& view = tensor.view;
  const int64_t rows = view.shape[0], row_bytes = stored_bytes(view) / std::max<int64_t>(rows, 1);
  Tensor result = empty_like({view.dtype, view.encoding}, view.shape);
  const auto* from = static_cast<const std::byte*>(view.data);
  auto* to = static_cast<std::byte*>(result.view.data);
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t pair = 0; pair < head_dim / 2; ++pair)
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t interleaved = head * head_dim + 2 * pair + half;
        const int64_t split = head * head_dim + half * (head_dim / 2) + pair;
        std::memcpy(to + (to_interleaved ? interleaved : split) * row_bytes,
                    from + (to_interleaved ? split : interleaved) * row_bytes, static_cast<size_t>(row_bytes));
      }
  return result;
}

struct Difference {
  double largest = 0;
  double relative = 0;  // root of the sum of squares, over that of the values
};

Difference difference(const Tensor& before, const Tensor& after) {
  const auto* a = before.view.as<float>();
  const auto* b = after.view.as<float>();
  double largest = 0, squares = 0, total = 0;
  for (int64_t i = 0; i < before.view.num_elements(); ++i) {
    const double error = static_cast<double>(a[i]) - b[i];
    largest = std::max(largest, std::abs(error));
    squares += error * error;
    total += static_cast<double>(a[i]) * a[i];
    if (!std::isfinite(error)) return {error, error};
  }
  return {largest, total > 0 ? std::sqrt(squares / total) : 0.0};
}

// A number that went through f32, as a person would have written it.
double shortest(double value) {
  const std::string text = fmt::format("{}", static_cast<float>(value));
  double result = 0;
  std::from_chars(text.data(), text.data() + text.size(), result);
  return result;
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

// What a config.json says of a GGUF file's model.
LlamaConfig config_for_json(LlamaConfig config, const io::GgufFile& file) {
  const std::string& source = file.path();
  config.rope_style = kernels::RopeStyle::rotate_half;
  config.gguf_names = false;
  for (double* value : {&config.rms_norm_eps, &config.rope_theta, &config.rope_scaling.factor})
    *value = shortest(*value);
  const bool windowed =
      std::any_of(config.layer_windows.begin(), config.layer_windows.end(), [](int64_t w) { return w > 0; });
  if (config.model_type == "qwen2" && !config.attention_bias)
    throw Unsupported("{}: a qwen2 model without biases, which config.json cannot state", source);
  if (!config.rope_divisors.empty()) {
    // Llama 3.1's scaling, if its usual numbers give these divisors. Converters do not write the original context; this
    // one does.
    const int64_t positions =
        file.optional_integer(config.model_type + ".rope.scaling.original_context_length", 1, INT32_MAX).value_or(8192);
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

// The metadata of a model without its tokenizer, and the divisors of its frequencies, if any.
GgufMetadata metadata_of(const LlamaConfig& config, const std::string& name, uint32_t file_type,
                         std::vector<double>& divisors) {
  const std::string architecture = config.model_type == "mistral" ? "llama" : config.model_type;
  if (config.hidden_act != kernels::ActivationKind::silu)
    throw Unsupported("hidden_act is not silu, which GGUF's {} architecture cannot state", architecture);
  const int64_t window = config.layer_windows.empty() ? 0 : config.layer_windows[0];
  for (int64_t other : config.layer_windows)
    if (other != window) throw Unsupported("layers have different attention windows, which GGUF cannot state here");
  GgufMetadata metadata;
  const auto add = [&](const std::string& key, GgufValue value) { metadata.emplace_back(key, std::move(value)); };
  const auto integer = [&](const char* key, int64_t value) {
    if (value < 0 || value > UINT32_MAX) throw Unsupported("{} is {}, which GGUF cannot hold", key, value);
    add(architecture + "." + key, GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  const auto number = [&](const char* key, double value) {
    add(architecture + "." + key, GgufValue::scalar(static_cast<float>(value)));
  };
  add("general.architecture", GgufValue::string(architecture));
  add("general.name", GgufValue::string(name));
  add("general.file_type", GgufValue::scalar(file_type));
  integer("context_length", config.max_position_embeddings);
  integer("embedding_length", config.hidden_size);
  integer("block_count", config.num_hidden_layers);
  integer("feed_forward_length", config.intermediate_size);
  integer("attention.head_count", config.num_attention_heads);
  integer("attention.head_count_kv", config.num_key_value_heads);
  integer("attention.key_length", config.head_dim);
  integer("attention.value_length", config.head_dim);
  number("attention.layer_norm_rms_epsilon", config.rms_norm_eps);
  number("rope.freq_base", config.rope_theta);
  integer("rope.dimension_count", config.rotary_dim);
  integer("vocab_size", config.vocab_size);
  if (window > 0) integer("attention.sliding_window", window);
  const RopeScaling& scaling = config.rope_scaling;
  const RopeScaling usual;
  switch (scaling.kind) {
    case RopeScaling::Kind::none: break;
    case RopeScaling::Kind::linear:
      add(architecture + ".rope.scaling.type", GgufValue::string("linear"));
      number("rope.scaling.factor", scaling.factor);
      break;
    case RopeScaling::Kind::yarn:
      if (scaling.beta_fast != usual.beta_fast || scaling.beta_slow != usual.beta_slow || scaling.attention_factor ||
          scaling.mscale || scaling.mscale_all_dim || !scaling.truncate)
        throw Unsupported(
            "yarn scaling with parameters of its own (betas, mscale, attention_factor, truncate), which "
            "GGUF cannot state here");
      add(architecture + ".rope.scaling.type", GgufValue::string("yarn"));
      number("rope.scaling.factor", scaling.factor);
      integer("rope.scaling.original_context_length", static_cast<int64_t>(scaling.original_max_positions));
      break;
    case RopeScaling::Kind::llama3:
      divisors = llama3_divisors(config, scaling);
      integer("rope.scaling.original_context_length", static_cast<int64_t>(scaling.original_max_positions));
      break;
  }
  return metadata;
}

struct Converted {
  std::string from, to;
  Tensor tensor;
  WeightType before;
  Difference error;

  WeightType type() const { return {tensor.view.dtype, tensor.view.encoding}; }
};

struct Plan {
  bool target_gguf;
  std::string type;  // a name of convert_type_names(), or "as-is"
};

std::vector<Converted> convert_weights(const models::Checkpoint& checkpoint, const LlamaConfig& config,
                                       const Plan& plan) {
  const io::WeightSource& weights = *checkpoint.weights;
  const bool source_interleaved = config.rope_style == kernels::RopeStyle::interleaved;
  const bool target_interleaved = plan.target_gguf && (config.model_type == "llama" || config.model_type == "mistral");
  if (source_interleaved != target_interleaved && config.rotary_dim != config.head_dim)
    throw Unsupported(
        "{}: only {} of {} dimensions of a head are rotated; their order in the other format is not known",
        checkpoint.path, config.rotary_dim, config.head_dim);
  std::vector<Converted> result;
  std::set<std::string, std::less<>> used;
  ThreadPool pool;
  ProgressBar bar("converting");
  const std::vector<std::string> names = parameter_names(config);
  for (size_t i = 0; i < names.size(); ++i) {
    stop_if_interrupted();
    const std::string& name = names[i];
    bar.update(static_cast<double>(i), static_cast<double>(names.size()), name);
    const std::string from = checkpoint.model->checkpoint_names(name).front();
    Tensor tensor = weights.get(from);
    used.insert(from);
    if (!is_floating(tensor.dtype()))
      throw Unsupported("{}: '{}' is {}; only floating-point tensors are converted", weights.path(), from,
                        dtype_name(tensor.dtype()));
    const WeightType before = {tensor.dtype(), tensor.view.encoding};
    // What neither kind of file holds as it is.
    if (before.encoding != nullptr && BlockEncoding::of(before.encoding) == nullptr)
      tensor = stored_as(pool, tensor, DType::f32);
    const bool is_q = name.find(".q_proj.") != std::string::npos, is_k = name.find(".k_proj.") != std::string::npos;
    if (source_interleaved != target_interleaved && (is_q || is_k)) {
      const int64_t heads = is_q ? config.num_attention_heads : config.num_key_value_heads;
      if (tensor.shape().rank() < 1 || tensor.shape()[0] != heads * config.head_dim)
        throw DataCorrupted("{}: '{}' is {}; the config implies {} rows ({} heads x head_dim {})", weights.path(), from,
                            to_string(tensor.shape()), heads * config.head_dim, heads, config.head_dim);
      tensor = permuted(tensor, heads, config.head_dim, target_interleaved);
    }
    // Norms and biases are few bytes: they keep what they have, and are f32 in GGUF, where readers expect that.
    WeightType type = {tensor.dtype(), tensor.view.encoding};
    if (tensor.shape().rank() < 2)
      type = plan.target_gguf ? DType::f32 : before;
    else if (plan.type != "as-is")
      type = convert_type_of(plan.type, config, name, tensor.shape()[1]);
    if (type.dtype == DType::f64) type = DType::f32;
    Difference error;
    if (!(type == before)) {
      const Tensor values = stored_as(pool, tensor, DType::f32);
      Tensor rounded;
      try {
        rounded = stored_as(pool, values, type);
      } catch (const InvalidArgument& error) {
        throw InvalidArgument("{}: '{}': {}", weights.path(), from, error.what());
      }
      error = difference(values, stored_as(pool, rounded, DType::f32));
      if (!std::isfinite(error.largest))
        throw InvalidArgument("{}: '{}' has values that {} cannot hold", weights.path(), from, type.name());
      tensor = std::move(rounded);
    }
    result.push_back({from, plan.target_gguf ? models::gguf_name(name) : name, std::move(tensor), before, error});
  }
  for (const io::WeightInfo& info : weights.tensors())
    if (!used.contains(info.name) && !checkpoint.model->may_ignore(info.name) && !models::adds_nothing(weights, info))
      throw DataCorrupted("{}: tensor '{}' is no parameter of the model that {} describes", weights.path(), info.name,
                          checkpoint.config_path);
  return result;
}

std::vector<io::NamedTensor> named(const std::vector<Converted>& tensors) {
  std::vector<io::NamedTensor> result;
  for (const Converted& tensor : tensors) result.push_back({tensor.to, tensor.tensor.view});
  return result;
}

WeightType most_common_type(const std::vector<Converted>& tensors) {
  std::map<std::string_view, int64_t> bytes;
  WeightType best;
  int64_t most = 0;
  for (const Converted& tensor : tensors) {
    if (tensor.tensor.shape().rank() < 2) continue;
    const int64_t total = bytes[tensor.type().name()] += stored_bytes(tensor.tensor.view);
    if (total > most) most = total, best = tensor.type();
  }
  return best;
}

// A directory that appears whole: written beside its place and renamed, or, over an old one, file by file.
class NewDirectory {
 public:
  explicit NewDirectory(std::string path)
      : path_(std::move(path)), temporary_(fmt::format("{}.{}.tmp", path_, getpid())) {
    std::error_code error;
    fs::create_directories(temporary_, error);
    if (error) throw IoError("{}: cannot make the directory: {}", temporary_, error.message());
  }
  ~NewDirectory() {
    std::error_code ignored;
    fs::remove_all(temporary_, ignored);
  }
  const std::string& path() const { return temporary_; }
  void commit() {
    std::error_code error;
    if (!fs::exists(path_)) {
      fs::rename(temporary_, path_, error);
    } else {
      for (const auto& entry : fs::directory_iterator(temporary_))
        if (!error) fs::rename(entry.path(), fs::path(path_) / entry.path().filename(), error);
    }
    if (error) throw IoError("{}: cannot move the finished files there: {}", path_, error.message());
  }

 private:
  std::string path_, temporary_;
};

void write_gguf_model(const models::Checkpoint& checkpoint, const LlamaConfig& config, const std::string& out,
                      std::vector<Converted>& tensors, const std::string& type, bool with_tokenizer) {
  const uint32_t file_type = gguf_file_type(type, most_common_type(tensors));
  std::vector<double> divisors;
  GgufMetadata metadata;
  if (const auto* gguf = dynamic_cast<const io::GgufFile*>(checkpoint.weights.get())) {
    metadata = gguf->metadata();  // only types change
    for (auto& [key, value] : metadata)
      if (key == "general.file_type") value = GgufValue::scalar(file_type);
    divisors = config.rope_divisors;
  } else {
    const fs::path folder = fs::path(checkpoint.config_path).parent_path();
    metadata = metadata_of(config, fs::absolute(folder).lexically_normal().filename().string(), file_type, divisors);
    if (with_tokenizer) {
      GgufMetadata tokenizer = gguf_tokenizer_of(folder.empty() ? "." : folder.string(), config.vocab_size);
      metadata.insert(metadata.end(), tokenizer.begin(), tokenizer.end());
    }
    // Without a tokenizer the config's own ids.
    const auto id = [&](const char* key, const std::vector<int64_t>& ids) {
      const bool there = std::any_of(metadata.begin(), metadata.end(), [&](const auto& e) { return e.first == key; });
      if (!there && !ids.empty()) metadata.emplace_back(key, GgufValue::scalar(static_cast<uint32_t>(ids[0])));
    };
    id("tokenizer.ggml.bos_token_id", config.bos_token_id);
    id("tokenizer.ggml.eos_token_id", config.eos_token_id);
    if (config.eos_token_id.size() > 1)
      note("warning: of {} end-of-text tokens in the config, GGUF names the first only", config.eos_token_id.size());
    if (config.model_type == "mistral" && config.layer_windows[0] > 0)
      note("warning: the attention window of {} tokens is written, but other programs ignore it in Llama files",
           config.layer_windows[0]);
  }
  if (!divisors.empty()) {
    Tensor tensor = Tensor::on_host(DType::f32, Shape{static_cast<int64_t>(divisors.size())});
    for (size_t i = 0; i < divisors.size(); ++i) tensor.view.as<float>()[i] = static_cast<float>(divisors[i]);
    tensors.push_back({"(rope scaling)", "rope_freqs.weight", std::move(tensor), DType::f32, {}});
  }
  io::write_gguf(out, metadata, named(tensors));
}

void write_directory(const models::Checkpoint& checkpoint, const LlamaConfig& config, const std::string& out,
                     const std::vector<Converted>& tensors, bool with_tokenizer) {
  NewDirectory directory(out);
  const fs::path target = directory.path();
  LlamaConfig written = config;
  if (const auto* gguf = dynamic_cast<const io::GgufFile*>(checkpoint.weights.get())) {
    written = config_for_json(config, *gguf);
    if (with_tokenizer) save_tokenizer_of(*gguf, target.string());
  } else {
    const fs::path folder = fs::path(checkpoint.config_path).parent_path();
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model",
                             "chat_template.jinja", "special_tokens_map.json", "generation_config.json"})
      if (fs::exists(folder / name)) fs::copy_file(folder / name, target / name);
  }
  written.checkpoint_dtype = most_common_type(tensors).dtype;
  io::write_file_atomically((target / "config.json").string(), io::to_json(written.to_json()) + "\n");
  io::write_safetensors((target / "model.safetensors").string(), named(tensors), {{"format", "pt"}});
  directory.commit();
}

}  // namespace

int convert(CommandLine command_line) {
  std::string in, out, type = "as-is";
  bool force = false, no_tokenizer = false, json = false;
  Arguments arguments("convert",
                      "Writes a model in the other format, or with its weights stored in another way: a .gguf file "
                      "when OUT ends in .gguf, else a directory in Hugging Face layout. Shows each tensor's size and "
                      "error. The output appears whole or not at all.");
  arguments.operand("IN", in, "a model, as other commands take it");
  arguments.operand("OUT", out, "a .gguf file or a directory");
  std::vector<std::string> types = convert_type_names();
  types.insert(types.begin(), "as-is");
  arguments.choice("--type", types, type,
                   "of matrices (default: as-is); norms and biases are never rounded. Quantized types are for .gguf "
                   "files; _s and _m are mixtures that spend more bits on values, down projections and the LM head");
  arguments.flag("--no-tokenizer", no_tokenizer, "leave the tokenizer out");
  arguments.flag("--force", force, "overwrite OUT");
  arguments.flag("--json", json, "the list of tensors as JSON");
  arguments.note(
      "Between the formats, rows of q and k are reordered as Llama files in GGUF have them, and config.json and "
      "tokenizer.json become metadata or the other way round; what one cannot say of the other is refused "
      "by name. GGUF has no place for generation_config.json.");
  arguments.example("eadem convert path/to/model model.gguf", "a directory to GGUF");
  arguments.example("eadem convert path/to/model model.gguf --type q4_k_m", "quantized, to a third of 16 bits");
  arguments.example("eadem convert model.gguf path/to/model --type bf16", "GGUF to a directory, in 16 bits");
  if (!arguments.parse(command_line)) return kOk;
  listen_for_interrupt();

  const std::string path = resolve_model(in);
  while (out.size() > 1 && out.ends_with('/')) out.pop_back();
  const models::Checkpoint checkpoint = models::open_checkpoint(path);
  const auto* llama = dynamic_cast<const models::Llama*>(checkpoint.model.get());
  if (llama == nullptr)
    throw Unsupported("{}: models of architecture '{}' are not converted", path, checkpoint.model->info().architecture);
  const bool source_gguf = dynamic_cast<const io::GgufFile*>(checkpoint.weights.get()) != nullptr;
  const bool target_gguf = out.ends_with(".gguf");
  if (fs::exists(out)) {
    if (!force) throw InvalidArgument("{} exists; --force overwrites it", out);
    if (fs::is_directory(out) == target_gguf)
      throw InvalidArgument("{} is {}; expected {}", out, target_gguf ? "a directory" : "no directory",
                            target_gguf ? "a file" : "a directory");
  }
  bool with_tokenizer = !no_tokenizer;
  if (with_tokenizer && source_gguf && !target_gguf &&
      dynamic_cast<const io::GgufFile&>(*checkpoint.weights).find_metadata("tokenizer.ggml.model") == nullptr) {
    note("warning: {} has no tokenizer; none is written", path);
    with_tokenizer = false;
  }
  if (with_tokenizer && !source_gguf && target_gguf) {
    const fs::path folder = fs::path(checkpoint.config_path).parent_path();
    bool any = false;
    for (const char* name : {"tokenizer.json", "vocab.json", "tokenizer.model"}) any = any || fs::exists(folder / name);
    if (!any) {
      note("warning: {} has no tokenizer; none is written", path);
      with_tokenizer = false;
    } else if (!fs::exists(folder / "tokenizer.json")) {
      throw Unsupported("{}: only tokenizer.json is converted to GGUF; --no-tokenizer leaves it out", folder.string());
    }
  }

  const LlamaConfig& config = llama->config();
  std::vector<Converted> tensors = convert_weights(checkpoint, config, {target_gguf, type});
  if (target_gguf)
    write_gguf_model(checkpoint, config, out, tensors, type, with_tokenizer);
  else
    write_directory(checkpoint, config, out, tensors, with_tokenizer);
  models::open_checkpoint(out);  // what was written reads back

  int64_t bytes_before = 0, bytes_after = 0;
  double worst = 0;
  io::JsonValue list = io::JsonValue::array();
  std::string text = fmt::format("{:<44} {:<16} {:>10} {:>13} {:>14}  {}\n", "tensor", "type", "bytes", "largest error",
                                 "relative error", "from");
  for (const Converted& tensor : tensors) {
    const TensorView& view = tensor.tensor.view;
    const int64_t bytes = stored_bytes(view);
    bytes_before += stored_bytes(tensor.before, view.shape);
    bytes_after += bytes;
    worst = std::max(worst, tensor.error.relative);
    const std::string change = tensor.before == tensor.type()
                                   ? std::string(tensor.before.name())
                                   : fmt::format("{} > {}", tensor.before.name(), tensor.type().name());
    const auto number = [](double error) { return error == 0 ? std::string("exact") : fmt::format("{:.3g}", error); };
    text += fmt::format("{:<44} {:<16} {:>10} {:>13} {:>14}  {}\n", tensor.to, change, bytes,
                        number(tensor.error.largest), number(tensor.error.relative), tensor.from);
    list.push_back(io::JsonValue::object()
                       .set("name", tensor.to)
                       .set("from", tensor.from)
                       .set("type", std::string(tensor.type().name()))
                       .set("bytes", bytes)
                       .set("largest_error", tensor.error.largest)
                       .set("relative_error", tensor.error.relative));
  }
  print(json ? io::to_json(io::JsonValue::object().set("output", out).set("tensors", std::move(list))) + "\n" : text);
  note("{}: {} tensors, {} before, {} now, {}", out, tensors.size(), bytes_text(static_cast<double>(bytes_before)),
       bytes_text(static_cast<double>(bytes_after)),
       worst == 0 ? "exact" : fmt::format("largest relative error {:.3g}", worst));
  return kOk;
}

}  // namespace eadem::cli
