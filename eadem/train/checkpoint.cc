// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "eadem/io/atomic_file.h"
#include "eadem/io/json.h"
#include "eadem/io/safetensors.h"

namespace eadem::train {

namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "step_";
constexpr const char* kUnfinished = ".unfinished_";

void make_directory(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) throw IoError("cannot make directory '{}': {}", path, error.message());
}

// A rename is only durable once the directory that holds the name is on the disk.
void flush_directory(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY);
  if (fd < 0) throw IoError("cannot open directory '{}': {}", path, std::strerror(errno));
  const int result = fsync(fd);
  const int code = errno;
  close(fd);
  if (result != 0) throw IoError("cannot flush directory '{}': {}", path, std::strerror(code));
}

std::vector<io::NamedTensor> named(const std::vector<std::pair<std::string, Tensor>>& tensors) {
  std::vector<io::NamedTensor> result;
  for (const auto& [name, tensor] : tensors) result.push_back({name, tensor.view});
  return result;
}

// Complete checkpoints below `root`, oldest first. Names are zero-padded, so their order is that of the steps.
std::vector<std::string> complete_checkpoints(const std::string& root) {
  std::vector<std::string> result;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(root, error))
    if (entry.is_directory() && entry.path().filename().string().starts_with(kPrefix))
      result.push_back(entry.path().string());
  std::sort(result.begin(), result.end());
  return result;
}

}  // namespace

void copy_tokenizer_files(const std::string& tokenizer_directory, const std::string& model_directory) {
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
    const fs::path from = fs::path(tokenizer_directory) / name;
    if (!fs::exists(from)) continue;
    const auto mapped = io::MappedFile::open(from.string());
    io::AtomicFile file((fs::path(model_directory) / name).string());
    file.write(mapped->bytes());
    file.commit();
  }
}

void write_model(const Trainer& trainer, const std::string& tokenizer_directory, const std::string& directory) {
  const fs::path folder(directory);
  const auto tensors = trainer.state_dict();
  io::write_safetensors((folder / "model.safetensors").string(), named(tensors), {{"format", "pt"}});
  io::JsonValue config = trainer.model().config_json();
  config.set("torch_dtype", tensors.front().second.dtype() == DType::bf16 ? "bfloat16" : "float32");
  io::write_file_atomically((folder / "config.json").string(), io::to_json(config));
  io::JsonValue generation = io::JsonValue::object();
  for (const char* key : {"bos_token_id", "eos_token_id"})
    if (const io::JsonValue* value = config.find(key)) generation.set(key, *value);
  io::write_file_atomically((folder / "generation_config.json").string(), io::to_json(generation));
  copy_tokenizer_files(tokenizer_directory, directory);
}

void save_checkpoint(const Trainer& trainer, const RunState& state, const std::string& tokenizer_directory,
                     const std::string& root, int64_t keep) {
  make_directory(root);
  const std::string name = fmt::format("{}{:08}", kPrefix, state.step);
  const fs::path unfinished = fs::path(root) / (kUnfinished + name), finished = fs::path(root) / name;
  std::error_code ignored;
  fs::remove_all(unfinished, ignored);
  make_directory(unfinished.string());
  try {
    write_model(trainer, tokenizer_directory, unfinished.string());
    const auto optimizer = trainer.optimizer_state();
    io::write_safetensors((unfinished / "optimizer.safetensors").string(), named(optimizer));
    io::JsonValue json = io::JsonValue::object();
    json.set("recipe_sha256", state.recipe_hash).set("step", state.step).set("tokens", state.tokens);
    json.set("epoch", state.cursor.epoch).set("document", state.cursor.document).set("offset", state.cursor.offset);
    io::write_file_atomically((unfinished / "trainer.json").string(), io::to_json(json));
    flush_directory(unfinished.string());
    if (fs::exists(finished)) fs::remove_all(finished);
    fs::rename(unfinished, finished);
    flush_directory(root);
  } catch (const fs::filesystem_error& error) {
    fs::remove_all(unfinished, ignored);
    throw IoError("cannot write checkpoint '{}': {}", finished.string(), error.code().message());
  } catch (...) {
    fs::remove_all(unfinished, ignored);
    throw;
  }
  std::vector<std::string> all = complete_checkpoints(root);
  while (static_cast<int64_t>(all.size()) > keep) {
    fs::remove_all(all.front(), ignored);
    all.erase(all.begin());
  }
}

std::optional<std::string> newest_checkpoint(const std::string& root) {
  const std::vector<std::string> all = complete_checkpoints(root);
  return all.empty() ? std::nullopt : std::optional(all.back());
}

RunState load_checkpoint(Trainer& trainer, const std::string& directory) {
  const fs::path folder(directory);
  const io::JsonReader json = io::JsonReader::read((folder / "trainer.json").string());
  RunState state;
  state.recipe_hash = json.string("recipe_sha256");
  state.step = json.integer("step", 0);
  state.tokens = json.integer("tokens", 0);
  state.cursor = {json.integer("epoch", 0), json.integer("document", 0), json.integer("offset", 0)};
  trainer.load(models::open_checkpoint(directory));
  trainer.load_optimizer_state(*io::open_weights((folder / "optimizer.safetensors").string()), state.step);
  return state;
}

}  // namespace eadem::train
