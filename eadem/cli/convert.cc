// SPDX-License-Identifier: Apache-2.0
//
// eadem convert: a model's files in the other format, or its weights stored in another way.
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "eadem/cli/arguments.h"
#include "eadem/cli/commands.h"
#include "eadem/cli/convert_layers.h"
#include "eadem/cli/convert_tokenizer.h"
#include "eadem/cli/convert_types.h"
#include "eadem/cli/convert_weights.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/model_options.h"
#include "eadem/cli/terminal.h"
#include "eadem/core/thread_pool.h"
#include "eadem/engine/calibration.h"
#include "eadem/engine/llm.h"
#include "eadem/io/atomic_file.h"
#include "eadem/io/gguf.h"
#include "eadem/io/json.h"
#include "eadem/io/mapped_file.h"
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

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;
constexpr int64_t kCalibrationTokens = int64_t{1} << 15;

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

// The header of the converted GGUF file. Adds the tensor of rotary divisors, if the model has one.
std::unique_ptr<io::WeightWriter> begin_gguf_model(const models::Checkpoint& checkpoint, const LlamaConfig& config,
                                                   const std::string& out, std::vector<ConvertedTensor>& tensors,
                                                   const std::string& type, bool with_tokenizer) {
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
    tensors.push_back({.from = "(rope scaling)",
                       .to = "rope_freqs.weight",
                       .before = DType::f32,
                       .type = DType::f32,
                       .shape = tensor.shape(),
                       .constant = tensor});
  }
  return io::begin_gguf(out, metadata, headers_of(tensors));
}

// Everything of the converted directory but the weights.
std::unique_ptr<io::WeightWriter> begin_directory(const models::Checkpoint& checkpoint, const LlamaConfig& config,
                                                  const fs::path& target, const std::vector<ConvertedTensor>& tensors,
                                                  bool with_tokenizer) {
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
  io::JsonValue json = written.to_json();
  if (auto quantization = quantization_config_of(tensors)) json.set("quantization_config", *std::move(quantization));
  io::write_file_atomically((target / "config.json").string(), io::to_json(json) + "\n");
  return io::begin_safetensors((target / "model.safetensors").string(), headers_of(tensors), {{"format", "pt"}});
}

// Measures what the model's matrices are multiplied by on the text of `file`.
engine::Calibration calibrate(const models::Checkpoint& checkpoint, const std::string& file, int64_t max_tokens,
                              const std::shared_ptr<Device>& device) {
  const std::string text = io::read_file(file, kMaxTextBytes);
  const io::Tokenizer tokenizer = engine::open_tokenizer(checkpoint);
  std::vector<int32_t> ids;
  try {
    ids = tokenizer.encode(text, {.add_special_tokens = false, .parse_special = false, .cancel = &interrupt_flag()});
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("{}: {}", file, error.what());
  }
  if (ids.empty()) throw InvalidArgument("{} has no tokens to calibrate with", file);
  engine::CalibrationOptions options{.max_tokens = max_tokens, .cancel = &interrupt_flag()};
  if (!tokenizer.prefix_ids().empty() && tokenizer.prefix_ids()[0] == tokenizer.bos()) options.bos = tokenizer.bos();
  ProgressBar bar("calibrating");
  const auto calibration = engine::Calibration::run(
      checkpoint, device, ids, options, [&](std::string_view stage, int64_t done, int64_t total) {
        stop_if_interrupted();
        bar.update(static_cast<double>(done), static_cast<double>(total), stage);
      });
  bar.clear();
  note("{}: calibrated with {} tokens of {}", file, calibration.tokens(), ids.size());
  return calibration;
}

}  // namespace

int convert(CommandLine command_line) {
  std::string in, out, type = "as-is";
  std::optional<std::string> calibration_file;
  std::optional<int64_t> calibration_tokens;
  ModelOptions calibration_options;
  bool force = false, no_tokenizer = false, json = false;
  Arguments arguments("convert",
                      "Writes a model in the other format, or with its weights stored in another way: a .gguf file "
                      "when OUT ends in .gguf, else a directory in Hugging Face layout. Shows each tensor's size and "
                      "error. Tensors are read, converted and written a part at a time; the output appears whole or "
                      "not at all.");
  arguments.operand("IN", in, "a model, as other commands take it");
  arguments.operand("OUT", out, "a .gguf file or a directory");
  std::vector<std::string> types = all_type_names();
  types.insert(types.begin(), "as-is");
  arguments.choice(
      "--type", types, type,
      "of matrices (default: as-is); norms and biases are never rounded. int8, int4 in groups and fp8 are "
      "for directories, and for the linear layers of the decoder; the other quantized types are for .gguf "
      "files; _s, _m and _l are mixtures that spend more bits on values, down projections and the LM head");
  arguments.option("--calibrate", "FILE", calibration_file,
                   "run the model over this UTF-8 text first, and let an error cost what the inputs of its column are "
                   "worth (an importance matrix)");
  arguments.option("--calibrate-tokens", "N", calibration_tokens, "at most so many tokens of the text (default: 32k)");
  arguments.flag("--no-tokenizer", no_tokenizer, "leave the tokenizer out");
  arguments.flag("--force", force, "overwrite OUT");
  arguments.flag("--json", json, "the list of tensors as JSON");
  calibration_options.add_device(arguments);
  arguments.note(
      "Between the formats, rows of q and k are reordered as Llama files in GGUF have them, and config.json and "
      "tokenizer.json become metadata or the other way round; what one cannot say of the other is refused "
      "by name. GGUF has no place for generation_config.json.");
  arguments.example("eadem convert path/to/model model.gguf", "a directory to GGUF");
  arguments.example("eadem convert path/to/model model.gguf --type q4_k_m", "quantized, to a third of 16 bits");
  arguments.example("eadem convert path/to/model model.gguf --type q3_k_m --calibrate text.txt",
                    "quantized so that a text like this one suffers least");
  arguments.example("eadem convert model.gguf path/to/model --type bf16", "GGUF to a directory, in 16 bits");
  arguments.example("eadem convert path/to/model path/to/small --type int4_g128",
                    "4 bits in groups of 128, as compressed-tensors lays them out");
  if (!arguments.parse(command_line)) return kOk;
  if (calibration_tokens && !calibration_file) throw UsageError("--calibrate-tokens is for --calibrate");
  if (calibration_tokens && *calibration_tokens < 1)
    throw UsageError(fmt::format("--calibrate-tokens is {}; expected at least 1", *calibration_tokens));
  if (calibration_file && !is_quantized_type(type) && !is_layer_type(type))
    throw UsageError(fmt::format("--calibrate is for quantized types; --type is {}", type));
  if (!calibration_file && (calibration_options.device != "cpu" || !calibration_options.isa.empty()))
    throw UsageError("--device and --isa say what --calibrate runs on");
  listen_for_interrupt();

  const std::string path = resolve_model(in);
  while (out.size() > 1 && out.ends_with('/')) out.pop_back();
  const models::Checkpoint checkpoint = models::open_checkpoint(path);
  const auto* llama = dynamic_cast<const models::Llama*>(checkpoint.model.get());
  if (llama == nullptr)
    throw Unsupported("{}: models of architecture '{}' are not converted", path, checkpoint.model->info().architecture);
  const bool source_gguf = dynamic_cast<const io::GgufFile*>(checkpoint.weights.get()) != nullptr;
  const bool target_gguf = out.ends_with(".gguf");
  if (is_layer_type(type) && target_gguf)
    throw UsageError(fmt::format("--type {} is for directories; {} is a GGUF file", type, out));
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
  std::vector<ConvertedTensor> tensors = plan_weights(checkpoint, config, {target_gguf, type});
  std::optional<NewDirectory> directory;
  if (!target_gguf) directory.emplace(out);
  const std::unique_ptr<io::WeightWriter> writer =
      target_gguf ? begin_gguf_model(checkpoint, config, out, tensors, type, with_tokenizer)
                  : begin_directory(checkpoint, config, directory->path(), tensors, with_tokenizer);
  std::optional<engine::Calibration> calibration;
  if (calibration_file)
    calibration = calibrate(checkpoint, *calibration_file, calibration_tokens.value_or(kCalibrationTokens),
                            calibration_options.open());
  {
    // All of it computes, as prefill does.
    const DeviceOptions device = calibration_options.device_options();
    ThreadPool pool(device.prefill_threads > 0 ? device.prefill_threads : device.num_threads, device.pin);
    ProgressBar bar("converting");
    convert_weights(tensors, checkpoint, calibration ? &*calibration : nullptr, pool, *writer,
                    [&](int64_t done, int64_t total, const std::string& name) {
                      stop_if_interrupted();
                      bar.update(static_cast<double>(done), static_cast<double>(total), name);
                    });
  }
  writer->commit();
  if (directory) directory->commit();
  models::open_checkpoint(out);  // what was written reads back

  int64_t bytes_before = 0, bytes_after = 0;
  double worst = 0;
  io::JsonValue list = io::JsonValue::array();
  std::string text = fmt::format("{:<44} {:<16} {:>10} {:>13} {:>14}{}  {}\n", "tensor", "type", "bytes",
                                 "largest error", "relative error", calibration ? " error of output" : "", "from");
  for (const ConvertedTensor& tensor : tensors) {
    const Rounding& error = tensor.rounding;
    const int64_t bytes = stored_bytes(tensor.type, tensor.shape);
    bytes_before += stored_bytes(tensor.before, tensor.shape);
    bytes_after += bytes;
    worst = std::max(worst, error.relative);
    const std::string change = tensor.before == tensor.type
                                   ? std::string(tensor.before.name())
                                   : fmt::format("{} > {}", tensor.before.name(), tensor.type.name());
    const auto number = [](double error) { return error == 0 ? std::string("exact") : fmt::format("{:.3g}", error); };
    // Of tensors that nothing is known about the inputs of, a dash.
    const std::string output = error.relative > 0 && error.relative_output == 0 ? "-" : number(error.relative_output);
    text += fmt::format("{:<44} {:<16} {:>10} {:>13} {:>14}{}  {}\n", tensor.to, change, bytes, number(error.largest),
                        number(error.relative), calibration ? fmt::format(" {:>15}", output) : "", tensor.from);
    io::JsonValue entry = io::JsonValue::object();
    entry.set("name", tensor.to)
        .set("from", tensor.from)
        .set("type", std::string(tensor.type.name()))
        .set("bytes", bytes)
        .set("largest_error", error.largest)
        .set("relative_error", error.relative);
    if (calibration && output != "-") entry.set("relative_output_error", error.relative_output);
    list.push_back(std::move(entry));
  }
  print(json ? io::to_json(io::JsonValue::object().set("output", out).set("tensors", std::move(list))) + "\n" : text);
  note("{}: {} tensors, {} before, {} now, {}", out, tensors.size(), bytes_text(static_cast<double>(bytes_before)),
       bytes_text(static_cast<double>(bytes_after)),
       worst == 0 ? "exact" : fmt::format("largest relative error {:.3g}", worst));
  return kOk;
}

}  // namespace eadem::cli
