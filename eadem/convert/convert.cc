// SPDX-License-Identifier: Apache-2.0
#include "eadem/convert/convert.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "eadem/convert/layers.h"
#include "eadem/convert/tokenizer.h"
#include "eadem/convert/types.h"
#include "eadem/core/machine/thread_pool.h"
#include "eadem/core/printable.h"
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

namespace eadem::convert {

namespace {

namespace fs = std::filesystem;
using io::GgufMetadata;
using io::GgufValue;
using models::ModelConfig;
using Note = std::function<void(const std::string&)>;

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;

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

// A tensor of the converted file that the configuration holds.
ConvertedTensor constant_of(std::string_view name, const std::vector<double>& values) {
  Tensor tensor = Tensor::on_host(DType::f32, Shape{static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) tensor.view.as<float>()[i] = static_cast<float>(values[i]);
  return {.from = "(rope scaling)",
          .to = std::string(name),
          .before = DType::f32,
          .type = DType::f32,
          .shape = tensor.shape(),
          .constant = tensor};
}

// Takes layers behind the last one, which predict further tokens and are not converted, out of what counts layers or
// has an entry for each.
void leave_further_layers_out(GgufMetadata& metadata, const io::GgufFile& file, int64_t layers) {
  const std::string prefix = file.string("general.architecture") + ".", count_key = prefix + "block_count";
  const auto count = static_cast<size_t>(file.integer(count_key, 1, UINT32_MAX)), kept = static_cast<size_t>(layers);
  if (count == kept) return;
  std::erase_if(metadata, [&](const auto& entry) { return entry.first == prefix + "nextn_predict_layers"; });
  for (auto& [key, value] : metadata) {
    if (key == count_key) value = GgufValue::scalar(static_cast<uint32_t>(layers));
    auto* array = std::get_if<io::GgufArray>(&value.data);
    if (array == nullptr || !key.starts_with(prefix) || array->size() != count) continue;
    array->scalars.resize(array->scalars.size() / count * kept);
    if (!array->strings.empty()) array->strings.resize(kept);
    if (!array->arrays.empty()) array->arrays.resize(kept);
  }
}

// The header of the converted GGUF file. Adds the tensors of rope scaling, if the model has them.
std::unique_ptr<io::WeightWriter> begin_gguf_model(const models::Checkpoint& checkpoint, const ModelConfig& config,
                                                   const std::string& out, std::vector<ConvertedTensor>& tensors,
                                                   const std::string& type, bool with_tokenizer, const Note& note) {
  const uint32_t file_type = gguf_file_type(type, most_common_type(tensors));
  const std::vector<double> divisors = models::gguf_divisors(config);
  GgufMetadata metadata;
  if (const auto* gguf = dynamic_cast<const io::GgufFile*>(checkpoint.weights.get())) {
    metadata = gguf->metadata();  // only types change, and layers that are not computed are left out
    leave_further_layers_out(metadata, *gguf, config.num_hidden_layers);
    for (auto& [key, value] : metadata)
      if (key == "general.file_type") value = GgufValue::scalar(file_type);
  } else {
    const fs::path folder = fs::path(checkpoint.config_path).parent_path();
    metadata = config.to_gguf();
    const std::string name = fs::absolute(folder).lexically_normal().filename().string();
    metadata.insert(metadata.begin() + 1,
                    {{"general.name", GgufValue::string(name)}, {"general.file_type", GgufValue::scalar(file_type)}});
    if (with_tokenizer) {
      GgufMetadata tokenizer = gguf_tokenizer_of(folder.empty() ? "." : folder.string(), name, config.vocab_size, note);
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
      note(fmt::format("warning: of {} end-of-text tokens in the config, GGUF names the first only",
                       config.eos_token_id.size()));
    const models::ModelFamily& family = config.family();
    if (const std::string notice = family.gguf_notice == nullptr ? "" : family.gguf_notice(config); !notice.empty())
      note("warning: " + notice);
  }
  if (!divisors.empty()) tensors.push_back(constant_of("rope_freqs.weight", divisors));
  if (config.rope_scaling.kind == modules::RopeScaling::Kind::longrope)
    for (const auto& [name, factors] : {std::pair{models::kLongFactors, &config.rope_scaling.long_factor},
                                        {models::kShortFactors, &config.rope_scaling.short_factor}})
      tensors.push_back(constant_of(name, *factors));
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
    for (const char* name :
         {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model", "tiktoken.model",
          "tokenization_kimi.py", "tokenization_moonshot.py", "special_tokens_map.json", "generation_config.json"})
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
  check_output_name(out);
  std::error_code error;
  const fs::file_status status = fs::status(out, error);
  if (status.type() == fs::file_type::not_found) return;
  if (error) throw IoError("{}: {}", out, error.message());
  const bool is_directory = fs::is_directory(status);
  if (is_directory == is_gguf)
    throw InvalidArgument("{} is {}; expected {}", out, is_gguf ? "a directory" : "no directory",
                          is_gguf ? "a file" : "a directory");
  if (!force && !(is_directory && fs::is_empty(out)))
    throw InvalidArgument("{} exists{}; --force (in Python, force) overwrites it", out,
                          is_directory ? " and is not empty" : "");
}

void check_options(const ConvertOptions& options, bool to_gguf, const std::string& out) {
  const std::vector<std::string> types = all_type_names();
  if (options.type != kAsIs && std::find(types.begin(), types.end(), options.type) == types.end())
    throw InvalidArgument("the type is '{}'; known are {}, {}", printable(options.type), kAsIs, fmt::join(types, ", "));
  if (is_layer_type(options.type) && to_gguf)
    throw InvalidArgument("the type {} is for directories; {} is a GGUF file", options.type, out);
  if (!options.calibration_file) return;
  if (!is_quantized_type(options.type) && !is_layer_type(options.type))
    throw InvalidArgument("calibration is for quantized types; the type is {}", options.type);
  if (options.calibration_tokens < 1)
    throw InvalidArgument("calibration with {} tokens; expected at least 1", options.calibration_tokens);
}

// Measures the inputs of the model's matrices on the text of the calibration file.
engine::Calibration calibrate(const models::Checkpoint& checkpoint, const ConvertOptions& options,
                              const ConvertEvents& events, const Note& note) {
  const std::string& file = *options.calibration_file;
  const std::string text = io::read_file(file, kMaxTextBytes);
  const io::Tokenizer tokenizer = engine::open_tokenizer(checkpoint);
  std::vector<int32_t> ids;
  try {
    ids = tokenizer.encode(text, {.add_special_tokens = false, .parse_special = false, .cancel = events.cancel});
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("{}: {}", file, error.what());
  }
  if (ids.empty()) throw InvalidArgument("{} has no tokens to calibrate with", file);
  engine::CalibrationOptions settings{.max_tokens = options.calibration_tokens, .cancel = events.cancel};
  if (!tokenizer.prefix_ids().empty() && tokenizer.prefix_ids()[0] == tokenizer.bos()) settings.bos = tokenizer.bos();
  auto calibration = engine::Calibration::run(checkpoint, options.device, ids, settings,
                                              [&](std::string_view stage, int64_t done, int64_t total) {
                                                if (events.progress) events.progress(stage, done, total, "");
                                              });
  note(fmt::format("{}: calibrated with {} tokens of {}", file, calibration.tokens(), ids.size()));
  return calibration;
}

// Whether there is a tokenizer to convert. Says so when there is none.
bool has_tokenizer(const models::Checkpoint& checkpoint, bool to_gguf, const Note& note) {
  const auto none = [&] {
    note(fmt::format("warning: {} has no tokenizer; none is written", checkpoint.path));
    return false;
  };
  if (const auto* gguf = dynamic_cast<const io::GgufFile*>(checkpoint.weights.get()))
    return to_gguf || gguf->find_metadata("tokenizer.ggml.model") != nullptr || none();
  const fs::path folder = fs::path(checkpoint.config_path).parent_path();
  if (!to_gguf) return true;
  for (const char* name : {"tokenizer.json", "vocab.json", "tokenizer.model", "tiktoken.model"})
    if (fs::exists(folder / name)) return true;
  return none();
}

}  // namespace

bool is_gguf_name(std::string_view out) { return out.ends_with(".gguf"); }

void check_output_name(const std::string& out) {
  const std::string extension = fs::path(out).extension().string();
  for (std::string_view other : {".bin", ".safetensors", ".pt", ".pth", ".onnx", ".ggml", ".json", ".index"})
    if (extension == other)
      throw InvalidArgument(
          "OUT is {}: {} files are not written; OUT is a .gguf file, or a directory, in which model.safetensors is "
          "made",
          out, extension);
}

std::vector<ConvertedTensor> convert_model(const std::string& path, const std::string& out,
                                           const ConvertOptions& options, const ConvertEvents& events) {
  const Note note = [&](const std::string& text) {
    if (events.note) events.note(text);
  };
  const bool to_gguf = is_gguf_name(out);
  check_options(options, to_gguf, out);
  check_output(out, to_gguf, options.force);
  const models::Checkpoint checkpoint = models::open_checkpoint(path);
  if (checkpoint.model->config() == nullptr)
    throw Unsupported("{}: models of architecture '{}' are not converted", checkpoint.path,
                      checkpoint.model->info().architecture);
  if (!checkpoint.notice.empty()) note(fmt::format("{}: {}", checkpoint.path, checkpoint.notice));
  const ModelConfig& config = *checkpoint.model->config();
  // What such a file cannot state is refused before its tensors are named.
  if (to_gguf && dynamic_cast<const io::GgufFile*>(checkpoint.weights.get()) == nullptr) config.to_gguf();
  const bool with_tokenizer = options.tokenizer && has_tokenizer(checkpoint, to_gguf, note);

  std::vector<ConvertedTensor> tensors = plan_weights(checkpoint, {to_gguf, options.type});
  if (is_layer_type(options.type) && !quantization_config_of(tensors))
    note(fmt::format("warning: no layer is stored in {}: rows are no whole groups, or experts lie in one tensor",
                     options.type));
  std::optional<NewDirectory> directory;
  if (!to_gguf) directory.emplace(out);
  const std::unique_ptr<io::WeightWriter> writer =
      to_gguf ? begin_gguf_model(checkpoint, config, out, tensors, options.type, with_tokenizer, note)
              : begin_directory(checkpoint, config, directory->path(), tensors, with_tokenizer);
  std::optional<engine::Calibration> calibration;
  if (options.calibration_file) calibration = calibrate(checkpoint, options, events, note);
  ThreadPool pool(options.threads, options.pin);
  convert_weights(tensors, checkpoint, calibration ? &*calibration : nullptr, pool, *writer,
                  [&](int64_t done, int64_t total, const std::string& name) {
                    if (events.progress) events.progress("", done, total, name);
                  });
  writer->commit();
  if (directory) directory->commit();
  models::open_checkpoint(out);  // checks that the output can be read
  return tensors;
}

}  // namespace eadem::convert
