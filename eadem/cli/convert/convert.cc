// SPDX-License-Identifier: Apache-2.0
//
// eadem convert: writes a model in the other file format, or with its weights stored in other types.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "eadem/cli/commands.h"
#include "eadem/cli/convert/layers.h"
#include "eadem/cli/convert/tokenizer.h"
#include "eadem/cli/convert/types.h"
#include "eadem/cli/convert/weights.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/cli/options/model_options.h"
#include "eadem/cli/terminal.h"
#include "eadem/core/machine/thread_pool.h"
#include "eadem/engine/calibration.h"
#include "eadem/engine/llm.h"
#include "eadem/io/files/atomic_file.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/gguf.h"
#include "eadem/io/json.h"
#include "eadem/io/safetensors.h"
#include "eadem/io/tokenizer/files/tokenizer_files.h"
#include "eadem/models/auto_model.h"
#include "eadem/models/config/model_config.h"
#include "eadem/models/family.h"
#include "eadem/models/huggingface.h"

namespace eadem::cli {

namespace {

namespace fs = std::filesystem;
using io::GgufMetadata;
using io::GgufValue;
using models::ModelConfig;

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;
constexpr int64_t kCalibrationTokens = int64_t{1} << 15;

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
    const bool is_own_directory = fs::symlink_status(path_).type() == fs::file_type::directory;
    if (!fs::exists(path_) || (is_own_directory && fs::is_empty(path_))) {
      fs::rename(temporary_, path_, error);  // also over an empty directory
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
std::unique_ptr<io::WeightWriter> begin_gguf_model(const models::Checkpoint& checkpoint, const ModelConfig& config,
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
    metadata = config.to_gguf();
    metadata.insert(metadata.begin() + 1,
                    {{"general.name", GgufValue::string(fs::absolute(folder).lexically_normal().filename().string())},
                     {"general.file_type", GgufValue::scalar(file_type)}});
    if (config.rope_scaling.kind == modules::RopeScaling::Kind::llama3)
      divisors = models::llama3_divisors(config, config.rope_scaling);
    if (with_tokenizer) {
      GgufMetadata tokenizer = gguf_tokenizer_of(folder.empty() ? "." : folder.string(), config.vocab_size);
      metadata.insert(metadata.end(), tokenizer.begin(), tokenizer.end());
    }
    // The config's own ids, for keys that the tokenizer did not set.
    const auto id = [&](const char* key, const std::vector<int64_t>& ids) {
      const bool there = std::any_of(metadata.begin(), metadata.end(), [&](const auto& e) { return e.first == key; });
      if (!there && !ids.empty()) metadata.emplace_back(key, GgufValue::scalar(static_cast<uint32_t>(ids[0])));
    };
    id("tokenizer.ggml.bos_token_id", config.bos_token_id);
    id("tokenizer.ggml.eos_token_id", config.eos_token_id);
    if (config.eos_token_id.size() > 1)
      note("warning: of {} end-of-text tokens in the config, GGUF names the first only", config.eos_token_id.size());
    const models::ModelFamily& family = config.family();
    if (const std::string notice = family.gguf_notice == nullptr ? "" : family.gguf_notice(config); !notice.empty())
      note("warning: {}", notice);
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

// Writes everything of the converted directory except the weights.
std::unique_ptr<io::WeightWriter> begin_directory(const models::Checkpoint& checkpoint, const ModelConfig& config,
                                                  const fs::path& target, const std::vector<ConvertedTensor>& tensors,
                                                  bool with_tokenizer) {
  ModelConfig written = config;
  if (const auto* gguf = dynamic_cast<const io::GgufFile*>(checkpoint.weights.get())) {
    written = models::huggingface_config(config, gguf);
    if (with_tokenizer) io::write_tokenizer_files(io::tokenizer_files(*gguf), target.string());
  } else {
    const fs::path folder = fs::path(checkpoint.config_path).parent_path();
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model",
                             "special_tokens_map.json", "generation_config.json"})
      if (fs::exists(folder / name)) fs::copy_file(folder / name, target / name);
    for (const std::string& name : io::template_file_names(folder.string())) {
      fs::create_directories((target / name).parent_path());
      fs::copy_file(folder / name, target / name);
    }
  }
  written.checkpoint_dtype = most_common_type(tensors).dtype;
  io::JsonValue json = written.to_json();
  if (auto quantization = quantization_config_of(tensors)) json.set("quantization_config", *std::move(quantization));
  io::write_file_atomically((target / "config.json").string(), io::to_json(json) + "\n");
  return io::begin_safetensors((target / "model.safetensors").string(), headers_of(tensors), {{"format", "pt"}});
}

// Checks the output path, a .gguf file or a directory, before anything is read.
void check_output(const std::string& out, bool is_gguf, bool force) {
  const std::string extension = fs::path(out).extension().string();
  for (std::string_view other : {".bin", ".safetensors", ".pt", ".pth", ".onnx", ".ggml", ".json", ".index"})
    if (extension == other)
      throw UsageError(
          fmt::format("OUT is {}: {} files are not written; OUT is a .gguf file, or a directory, in which "
                      "model.safetensors is made",
                      out, extension));
  std::error_code error;
  const fs::file_status status = fs::status(out, error);
  if (status.type() == fs::file_type::not_found) return;
  if (error) throw IoError("{}: {}", out, error.message());
  const bool is_directory = fs::is_directory(status);
  if (is_directory == is_gguf)
    throw InvalidArgument("{} is {}; expected {}", out, is_gguf ? "a directory" : "no directory",
                          is_gguf ? "a file" : "a directory");
  if (!force && !(is_directory && fs::is_empty(out)))
    throw InvalidArgument("{} exists{}; --force overwrites it", out, is_directory ? " and is not empty" : "");
}

// Measures the inputs of the model's matrices on the text of `file`.
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

struct ConvertOptions {
  std::string in, out, type = "as-is";
  std::optional<std::string> calibration_file;
  std::optional<int64_t> calibration_tokens;
  ModelOptions device;  // the device that computes
  bool force = false, no_tokenizer = false, json = false, quiet = false;

  bool to_gguf() const { return out.ends_with(".gguf"); }
};

// Returns nothing when help was asked for.
std::optional<ConvertOptions> parse_convert(CommandLine command_line) {
  ConvertOptions options;
  Arguments arguments("convert",
                      "Writes a model in the other format, or with its weights stored in another way: a .gguf file "
                      "when OUT ends in .gguf, else a directory in Hugging Face layout. Shows each tensor's size and "
                      "error. Tensors are read, converted and written a part at a time; the output appears whole or "
                      "not at all.");
  arguments.operand("IN", options.in, "a model, as other commands take it");
  arguments.operand("OUT", options.out, "a .gguf file or a directory");
  std::vector<std::string> types = all_type_names();
  types.insert(types.begin(), "as-is");
  arguments.choice(
      "--type", types, options.type,
      "of matrices (default: as-is); norms and biases are never rounded. int8, int4 in groups and fp8 are "
      "for directories, and for the linear layers of the decoder; the other quantized types are for .gguf "
      "files; _s, _m and _l are mixtures that spend more bits on values, down projections and the LM head");
  arguments.option("--calibrate", "FILE", options.calibration_file,
                   "run the model over this UTF-8 text first, and let an error cost what the inputs of its column are "
                   "worth (an importance matrix)");
  arguments.option("--calibrate-tokens", "N", options.calibration_tokens,
                   "at most so many tokens of the text (default: 32k)");
  arguments.flag("--no-tokenizer", options.no_tokenizer, "leave the tokenizer out");
  arguments.flag("--force", options.force, "overwrite OUT");
  arguments.flag("--json", options.json, "the list of tensors as JSON");
  arguments.flag("-q,--quiet", options.quiet, "no list of tensors, only the sum");
  options.device.add_device(arguments);
  arguments.note(
      "Between the formats, rows of q and k are reordered where GGUF files have another order, and config.json and "
      "tokenizer.json become metadata or the other way round; what one cannot say of the other is refused "
      "by name. GGUF has no place for generation_config.json.");
  arguments.example("eadem convert path/to/model model.gguf", "a directory to GGUF");
  arguments.example("eadem convert path/to/model model.gguf --type q4_k_m", "quantized, to a third of 16 bits");
  arguments.example("eadem convert path/to/model model.gguf --type q3_k_m --calibrate text.txt",
                    "quantized so that a text like this one suffers least");
  arguments.example("eadem convert model.gguf path/to/model --type bf16", "GGUF to a directory, in 16 bits");
  arguments.example("eadem convert path/to/model path/to/small --type int4_g128",
                    "4 bits in groups of 128, as compressed-tensors lays them out");
  if (!arguments.parse(command_line)) return std::nullopt;
  while (options.out.size() > 1 && options.out.ends_with('/')) options.out.pop_back();
  if (options.json && options.quiet) throw UsageError("--json and --quiet: give one");
  if (options.calibration_tokens && !options.calibration_file)
    throw UsageError("--calibrate-tokens is for --calibrate");
  if (options.calibration_tokens && *options.calibration_tokens < 1)
    throw UsageError(fmt::format("--calibrate-tokens is {}; expected at least 1", *options.calibration_tokens));
  if (options.calibration_file && !is_quantized_type(options.type) && !is_layer_type(options.type))
    throw UsageError(fmt::format("--calibrate is for quantized types; --type is {}", options.type));
  if (!options.calibration_file && (options.device.device != "cpu" || !options.device.isa.empty()))
    throw UsageError("--device and --isa say what --calibrate runs on");
  if (is_layer_type(options.type) && options.to_gguf())
    throw UsageError(fmt::format("--type {} is for directories; {} is a GGUF file", options.type, options.out));
  return options;
}

// Whether there is a tokenizer to convert. Prints a note when there is none; throws Unsupported if it cannot be
// converted.
bool has_tokenizer(const models::Checkpoint& checkpoint, bool to_gguf) {
  const auto none = [&] {
    note("warning: {} has no tokenizer; none is written", checkpoint.path);
    return false;
  };
  if (const auto* gguf = dynamic_cast<const io::GgufFile*>(checkpoint.weights.get()))
    return to_gguf || gguf->find_metadata("tokenizer.ggml.model") != nullptr || none();
  const fs::path folder = fs::path(checkpoint.config_path).parent_path();
  if (!to_gguf || fs::exists(folder / "tokenizer.json")) return true;
  if (!fs::exists(folder / "vocab.json") && !fs::exists(folder / "tokenizer.model")) return none();
  throw Unsupported("{}: only tokenizer.json is converted to GGUF; --no-tokenizer leaves it out", folder.string());
}

// Prints the list of tensors to stdout, and the sum to stderr.
void print_result(const ConvertOptions& options, const std::vector<ConvertedTensor>& tensors) {
  const bool calibrated = options.calibration_file.has_value();
  int64_t bytes_before = 0, bytes_after = 0;
  double worst = 0;
  io::JsonValue list = io::JsonValue::array();
  std::string text = fmt::format("{:<44} {:<16} {:>10} {:>13} {:>14}{}  {}\n", "tensor", "type", "bytes",
                                 "largest error", "relative error", calibrated ? " error of output" : "", "from");
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
    // A tensor whose inputs the calibration did not see gets a dash.
    const std::string output = error.relative > 0 && error.relative_output == 0 ? "-" : number(error.relative_output);
    text += fmt::format("{:<44} {:<16} {:>10} {:>13} {:>14}{}  {}\n", tensor.to, change, bytes, number(error.largest),
                        number(error.relative), calibrated ? fmt::format(" {:>15}", output) : "", tensor.from);
    io::JsonValue entry = io::JsonValue::object();
    entry.set("name", json_text(tensor.to))
        .set("from", json_text(tensor.from))
        .set("type", std::string(tensor.type.name()))
        .set("bytes", bytes)
        .set("largest_error", error.largest)
        .set("relative_error", error.relative);
    if (calibrated && output != "-") entry.set("relative_output_error", error.relative_output);
    list.push_back(std::move(entry));
  }
  if (options.json)
    print(io::to_json(io::JsonValue::object().set("output", json_text(options.out)).set("tensors", std::move(list))) +
          "\n");
  else if (!options.quiet)
    print(text);
  note("{}: {} tensors, {} before, {} now, {}", options.out, tensors.size(),
       bytes_text(static_cast<double>(bytes_before)), bytes_text(static_cast<double>(bytes_after)),
       worst == 0 ? "exact" : fmt::format("largest relative error {:.3g}", worst));
}

}  // namespace

int convert(CommandLine command_line) {
  const std::optional<ConvertOptions> options = parse_convert(command_line);
  if (!options) return kOk;
  listen_for_interrupt();
  const std::string& out = options->out;
  const bool to_gguf = options->to_gguf();
  check_output(out, to_gguf, options->force);
  const models::Checkpoint checkpoint = models::open_checkpoint(resolve_model(options->in));
  if (checkpoint.model->config() == nullptr)
    throw Unsupported("{}: models of architecture '{}' are not converted", checkpoint.path,
                      checkpoint.model->info().architecture);
  const ModelConfig& config = *checkpoint.model->config();
  const bool with_tokenizer = !options->no_tokenizer && has_tokenizer(checkpoint, to_gguf);

  std::vector<ConvertedTensor> tensors = plan_weights(checkpoint, {to_gguf, options->type});
  std::optional<NewDirectory> directory;
  if (!to_gguf) directory.emplace(out);
  const std::unique_ptr<io::WeightWriter> writer =
      to_gguf ? begin_gguf_model(checkpoint, config, out, tensors, options->type, with_tokenizer)
              : begin_directory(checkpoint, config, directory->path(), tensors, with_tokenizer);
  std::optional<engine::Calibration> calibration;
  if (options->calibration_file)
    calibration = calibrate(checkpoint, *options->calibration_file,
                            options->calibration_tokens.value_or(kCalibrationTokens), options->device.open());
  {
    // Every thread computes, so that the pool is as large as prefill's.
    const DeviceOptions device = options->device.device_options();
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
  models::open_checkpoint(out);  // checks that the output can be read
  print_result(*options, tensors);
  return kOk;
}

}  // namespace eadem::cli
