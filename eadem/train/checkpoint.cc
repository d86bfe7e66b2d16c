// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>

#include "eadem/io/files/atomic_file.h"
#include "eadem/io/files/content_hash.h"
#include "eadem/io/json.h"
#include "eadem/io/safetensors.h"
#include "eadem/models/huggingface.h"
#include "eadem/train/rank_values.h"

namespace eadem::train {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step_";
constexpr const char* kStateFile = "trainer.json";
constexpr const char* kDamaged = "damaged_";
constexpr const char* kUnfinished = ".unfinished_";
constexpr int64_t kFormat = 2;  // format of trainer.json

// A rename is only durable once the directory that holds the name is on the disk.
void flush_directory(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY);
  if (fd < 0) throw IoError("cannot open directory '{}': {}", path, std::strerror(errno));
  const int result = fsync(fd);
  const int code = errno;
  close(fd);
  if (result != 0) throw IoError("cannot flush directory '{}': {}", path, std::strerror(code));
}

std::string hash_of(const std::string& path) { return io::content_hash(io::MappedFile::open(path)->bytes()).hex(); }

std::string hash_of(const io::JsonValue& json) {
  const std::string text = io::to_compact_json(json);
  return io::content_hash(std::as_bytes(std::span(text))).hex();
}

io::JsonValue json_of(const RunState& state, const std::string& directory) {
  io::JsonValue json = io::JsonValue::object(), recipe = io::JsonValue::object(), files = io::JsonValue::object();
  for (const auto& [key, value] : state.identity) recipe.set(key, value);
  std::vector<fs::path> paths;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  for (const fs::path& path : paths)
    files.set(path.filename().string(), io::JsonValue::object()
                                            .set("bytes", static_cast<int64_t>(fs::file_size(path)))
                                            .set("xxh3", hash_of(path.string())));
  json.set("format", kFormat).set("step", state.step).set("tokens", state.tokens);
  json.set("epoch", state.cursor.epoch).set("document", state.cursor.document).set("offset", state.cursor.offset);
  json.set("decay_steps", state.decay_steps).set("recipe", std::move(recipe)).set("files", std::move(files));
  const std::string hash = hash_of(json);
  json.set("xxh3", hash);
  return json;
}

// Exchanges two directories atomically; on file systems that cannot, one is renamed after the other.
void exchange(const fs::path& a, const fs::path& b) {
  if (renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno != EINVAL && errno != ENOSYS)
    throw IoError("cannot exchange '{}' and '{}': {}", a.string(), b.string(), std::strerror(errno));
  const fs::path aside = a.string() + "_aside";
  std::error_code ignored;
  fs::remove_all(aside, ignored);
  fs::rename(b, aside);
  fs::rename(a, b);
  fs::rename(aside, a);
}

}  // namespace

void make_directory(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) throw IoError("cannot make directory '{}': {}", path, error.message());
}

void write_directory(const std::string& directory, const std::function<void(const std::string& directory)>& fill) {
  fs::path finished(directory);
  if (finished.filename().empty()) finished = finished.parent_path();  // "out/"
  const std::string name = finished.filename().string();
  if (name.empty() || name == "." || name == "..")
    throw InvalidArgument("'{}' names no directory that could be replaced as a whole", directory);
  const fs::path parent = finished.parent_path().empty() ? fs::path(".") : finished.parent_path();
  const fs::path unfinished = parent / (kUnfinished + name);
  make_directory(parent.string());
  std::error_code ignored;
  fs::remove_all(unfinished, ignored);
  make_directory(unfinished.string());
  try {
    fill(unfinished.string());
    flush_directory(unfinished.string());
    if (fs::exists(finished))
      exchange(unfinished, finished);
    else
      fs::rename(unfinished, finished);
    flush_directory(parent.string());
    fs::remove_all(unfinished, ignored);  // the directory that was replaced
  } catch (const fs::filesystem_error& error) {
    fs::remove_all(unfinished, ignored);
    throw IoError("cannot write '{}': {}", finished.string(), error.code().message());
  } catch (...) {
    fs::remove_all(unfinished, ignored);
    throw;
  }
}

namespace {

// Runs `write` on the first rank. All ranks get its failure: an error of the first rank, or one that says which.
void on_first_rank(const Trainer& trainer, const std::string& directory, const std::function<void()>& write,
                   const std::function<void()>& follow) {
  std::exception_ptr failure;
  try {
    if (is_first_rank(trainer.mesh())) write();
  } catch (const RankFailed&) {
    throw;
  } catch (...) {
    failure = std::current_exception();
  }
  follow();
  const bool written = value_of_first_rank(trainer.device(), trainer.mesh(), failure == nullptr ? 1 : 0) == 1;
  if (failure != nullptr) std::rethrow_exception(failure);
  if (!written) throw IoError("the first rank could not write '{}'", directory);
}

using Weights = std::vector<std::pair<std::string, Tensor>>;

void write_weights(const Trainer& trainer, const Weights& weights, const Companions& companions,
                   const std::string& directory) {
  models::save_huggingface(trainer.model(), weights, directory);
  io::write_tokenizer_files(companions, directory);
}

}  // namespace

void write_model(const Trainer& trainer, const Companions& companions, const std::string& directory) {
  trainer.require_all_loaded();
  const Weights weights = trainer.whole_state_dict();
  on_first_rank(
      trainer, directory, [&] { write_weights(trainer, weights, companions, directory); }, [] {});
}

void replace_model(const Trainer& trainer, const Companions& companions, const std::string& directory) {
  trainer.require_all_loaded();
  const Weights weights = trainer.whole_state_dict();
  const auto fill = [&](const std::string& folder) { write_weights(trainer, weights, companions, folder); };
  on_first_rank(
      trainer, directory, [&] { write_directory(directory, fill); }, [] {});
}

void write_checkpoint(const Trainer& trainer, const RunState& state, const Companions& companions,
                      const std::string& directory) {
  trainer.require_all_loaded();
  const auto shapes = trainer.optimizer_state_shapes();
  size_t gathered = 0;
  const auto next_state = [&] { return trainer.whole_optimizer_state(shapes[gathered++].first); };
  const Weights weights = trainer.whole_state_dict();
  const auto fill = [&](const std::string& folder) {
    write_weights(trainer, weights, companions, folder);
    std::vector<io::TensorHeader> headers;
    for (const auto& [name, shape] : shapes) headers.push_back({name, WeightType(DType::f32), shape});
    const auto file = io::begin_safetensors((fs::path(folder) / "optimizer.safetensors").string(), headers);
    while (gathered < shapes.size()) file->write(next_state().view);
    file->commit();
    io::write_file_atomically((fs::path(folder) / kStateFile).string(), io::to_json(json_of(state, folder)) + "\n");
  };
  const auto write = [&] {
    std::error_code ignored;
    if (fs::exists(directory, ignored) && !fs::exists(fs::path(directory) / kStateFile, ignored) &&
        !(fs::is_directory(directory, ignored) && fs::is_empty(directory, ignored)))
      throw InvalidArgument("'{}' exists and is no checkpoint; it is not overwritten", directory);
    write_directory(directory, fill);
  };
  // The others show their parts of what the first rank writes, and of what it no longer can.
  on_first_rank(trainer, directory, write, [&] {
    while (gathered < shapes.size()) next_state();
  });
}

void save_checkpoint(const Trainer& trainer, const RunState& state, const Companions& companions,
                     const std::string& root, int64_t keep) {
  const std::string written = checkpoint_directory(root, state.step);
  write_checkpoint(trainer, state, companions, written);
  if (!is_first_rank(trainer.mesh())) return;
  std::vector<std::string> others = list_checkpoints(root);
  std::erase(others, written);
  std::error_code ignored;
  for (int64_t i = 0; i + keep - 1 < std::ssize(others); ++i) fs::remove_all(others[static_cast<size_t>(i)], ignored);
}

RunState verify_checkpoint(const std::string& directory) {
  const std::string path = (fs::path(directory) / kStateFile).string();
  const io::JsonReader json = io::JsonReader::read(path);
  if (const auto format = json.optional_integer("format", 0).value_or(1); format != kFormat)
    throw DataCorrupted("{}: a checkpoint of format {}; this version reads format {}", path, format, kFormat);
  io::JsonValue unsigned_json = io::JsonValue::object();
  for (const io::JsonMember& member : json.value().as_object())
    if (member.key != "xxh3") unsigned_json.set(member.key, member.value);
  if (const std::string hash = hash_of(unsigned_json); hash != json.string("xxh3"))
    throw DataCorrupted("{}: its content has the hash {}; {} was written", path, hash, json.string("xxh3"));
  const io::JsonReader files = json.object("files");
  for (const std::string& name : files.keys()) {
    const io::JsonReader file = files.object(name);
    const std::string file_path = (fs::path(directory) / name).string();
    const auto mapped = io::MappedFile::open(file_path);
    if (const int64_t bytes = file.integer("bytes", 0); static_cast<int64_t>(mapped->size()) != bytes)
      throw DataCorrupted("{} has {} bytes; {} were written", file_path, mapped->size(), bytes);
    if (const std::string hash = io::content_hash(mapped->bytes()).hex(); hash != file.string("xxh3"))
      throw DataCorrupted("{} has the hash {}; {} was written", file_path, hash, file.string("xxh3"));
  }
  RunState state;
  const io::JsonReader recipe = json.object("recipe");
  for (const std::string& key : recipe.keys()) state.identity.emplace_back(key, recipe.string(key));
  state.step = json.integer("step", 0);
  state.tokens = json.integer("tokens", 0);
  state.cursor = {json.integer("epoch", 0), json.integer("document", 0), json.integer("offset", 0)};
  state.decay_steps = json.integer("decay_steps", 0);
  return state;
}

void load_checkpoint(Trainer& trainer, const std::string& directory, const RunState& state) {
  models::Checkpoint checkpoint;
  std::shared_ptr<const io::WeightSource> optimizer;
  std::exception_ptr failure;
  try {
    checkpoint = models::open_checkpoint(directory);
    optimizer = io::open_weights((fs::path(directory) / "optimizer.safetensors").string());
    const io::JsonValue saved = checkpoint.model->config_json(), own = trainer.model().config_json();
    for (const io::JsonMember& member : own.as_object()) {
      const io::JsonValue* value = saved.find(member.key);
      if (member.key != "torch_dtype" && (value == nullptr || !(*value == member.value)))
        throw InvalidArgument("{}: '{}' is {}; the trainer's model has {}", checkpoint.config_path, member.key,
                              value == nullptr ? "not there" : io::to_compact_json(*value),
                              io::to_compact_json(member.value));
    }
    trainer.check_optimizer_state(*optimizer);
  } catch (...) {
    failure = std::current_exception();
  }
  const bool fits = true_on_all_ranks(trainer.device(), trainer.mesh(), failure == nullptr);
  if (failure != nullptr) std::rethrow_exception(failure);
  if (!fits) throw InvalidArgument("'{}' cannot be loaded by another rank; this one has not changed", directory);
  trainer.load(checkpoint);
  trainer.load_optimizer_state(*optimizer, state.step);
}

std::string checkpoint_directory(const std::string& root, int64_t step) {
  return (fs::path(root) / fmt::format("{}{:08}", kPrefix, step)).string();
}

std::vector<std::string> list_checkpoints(const std::string& root) {
  std::vector<std::pair<int64_t, std::string>> found;  // by step
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(root, error)) {
    const std::string name = entry.path().filename().string();
    if (!entry.is_directory() || !name.starts_with(kPrefix)) continue;
    // A copy that somebody made beside them, such as step_best, is left alone.
    const std::string_view digits = std::string_view(name).substr(kPrefix.size());
    int64_t step = 0;
    const auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
    if (failure != std::errc() || end != digits.data() + digits.size() || step < 0) continue;
    if (checkpoint_directory(root, step) == (fs::path(root) / name).string())
      found.emplace_back(step, entry.path().string());
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> result;
  for (auto& [step, directory] : found) result.push_back(std::move(directory));
  return result;
}

std::optional<FoundCheckpoint> newest_checkpoint(const std::string& root, const Logger& log) {
  std::vector<std::string> all = list_checkpoints(root);
  std::vector<std::pair<std::string, std::string>> damaged;  // directory, what is wrong
  for (; !all.empty(); all.pop_back()) {
    FoundCheckpoint found{all.back(), {}};
    try {
      found.state = verify_checkpoint(found.directory);
    } catch (const Error& error) {
      damaged.emplace_back(found.directory, error.what());
      continue;
    }
    for (const auto& [directory, reason] : damaged) {
      const fs::path path(directory);
      fs::path renamed = path.parent_path() / (kDamaged + path.filename().string());
      std::error_code error;
      fs::remove_all(renamed, error);
      fs::rename(path, renamed, error);
      if (error) throw IoError("cannot rename '{}' to '{}': {}", directory, renamed.string(), error.message());
      log.log(LogLevel::warning, "{} is damaged ({}); it is now {}, and {} is used instead", directory, reason,
              renamed.filename().string(), found.directory);
    }
    return found;
  }
  if (damaged.empty()) return std::nullopt;
  std::string reasons;
  for (const auto& [directory, reason] : damaged) reasons += (reasons.empty() ? "" : "; ") + reason;
  throw DataCorrupted("{}: no checkpoint is whole: {}", root, reasons);
}

void remove_unfinished(const std::string& directory) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, ignored))
    if (entry.path().filename().string().starts_with(kUnfinished)) fs::remove_all(entry.path(), ignored);
}

}  // namespace eadem::train
