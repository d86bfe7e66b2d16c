// SPDX-License-Identifier: Apache-2.0
//
// Chooses the reader for a path.
#include <filesystem>

#include "eadem/core/error.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/gguf.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/files/readers.h"

namespace eadem::io {
namespace {

namespace fs = std::filesystem;

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

// The pattern of the tokenizer classes whose files say no more than vocab.json and merges.txt.
KnownPattern pattern_of_class(const JsonReader& config) {
  const auto name = config.optional_string("tokenizer_class");
  if (name == "GPT2Tokenizer" || name == "GPT2TokenizerFast") return KnownPattern::kGpt2;
  if (name == "Qwen2Tokenizer" || name == "Qwen2TokenizerFast") return KnownPattern::kQwen2;
  throw Unsupported("{}: tokenizer_class {} with vocab.json and merges.txt; GPT2Tokenizer and Qwen2Tokenizer are known",
                    config.file(), name ? quote(*name) : "(none)");
}

// A tokenizer.model or tiktoken.model, by whichever library.
TokenizerSpec spec_from_model_file(const fs::path& path, const std::optional<JsonReader>& config,
                                   const std::atomic<bool>* cancel) {
  const std::string content = read_file(path.string(), kMaxTokenizerFileBytes);
  const bool has_ranks = path.filename() == "tiktoken.model" || !is_sentencepiece(content);
  if (!has_ranks) return spec_from_sentencepiece(content, path.string(), cancel);
  return spec_from_tiktoken(content, path.string(), config ? &*config : nullptr, cancel);
}

}  // namespace

TokenizerSpec spec_from_path(const std::string& name, const std::atomic<bool>* cancel) {
  const fs::path path = name;
  std::error_code ignored;
  const bool directory = fs::is_directory(path, ignored);
  const fs::path folder = directory ? path : path.parent_path();
  const fs::path json = directory ? path / "tokenizer.json" : path;
  const fs::path config_path = folder / "tokenizer_config.json";
  std::optional<JsonReader> config;
  if (is_file(config_path)) config = JsonReader::read(config_path.string());

  TokenizerSpec spec;
  if (path.extension() == ".model") {
    spec = spec_from_model_file(path, config, cancel);
  } else if (!directory || is_file(json)) {
    spec = spec_from_json(read_file(json.string(), kMaxTokenizerFileBytes), json.string());
  } else if (is_file(path / "vocab.json") && is_file(path / "merges.txt")) {
    if (!config) {
      throw Unsupported(
          "{}: vocab.json and merges.txt without tokenizer_config.json: nothing says which pre-tokenizer "
          "they were trained with",
          path.string());
    }
    spec = spec_from_vocab_and_merges((path / "vocab.json").string(), (path / "merges.txt").string(),
                                      pattern_of_class(*config));
  } else if (is_file(path / "tokenizer.model")) {
    spec = spec_from_model_file(path / "tokenizer.model", config, cancel);
  } else if (is_file(path / "tiktoken.model")) {
    spec = spec_from_model_file(path / "tiktoken.model", config, cancel);
  } else {
    throw NotFound("{}: no tokenizer.json, no vocab.json with merges.txt, no tokenizer.model and no tiktoken.model",
                   path.string());
  }
  if (config) apply_tokenizer_config(*config, spec);
  if (auto templates = folder_chat_templates(folder.string()); !templates.empty())
    spec.chat_templates = std::move(templates);
  return spec;
}

Tokenizer Tokenizer::from_file(const std::string& path, const std::atomic<bool>* cancel) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) throw NotFound("{}: no such file or directory", path);
  if (is_gguf_file(path)) return tokenizer_from_gguf(*GgufFile::open(path), cancel);
  return Tokenizer(spec_from_path(path, cancel), cancel);
}

Tokenizer Tokenizer::from_json(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                               const std::string& source) {
  TokenizerSpec spec = spec_from_json(tokenizer_json, source);
  if (!tokenizer_config_json.empty()) {
    apply_tokenizer_config(JsonReader::parse(tokenizer_config_json, source + " (tokenizer_config.json)"), spec);
  }
  return Tokenizer(spec);
}

Tokenizer Tokenizer::from_vocab_and_merges(const std::string& vocab_path, const std::string& merges_path,
                                           KnownPattern pattern) {
  return Tokenizer(spec_from_vocab_and_merges(vocab_path, merges_path, pattern));
}

Tokenizer Tokenizer::from_gguf(const GgufTokenizerData& data, const std::atomic<bool>* cancel) {
  return Tokenizer(spec_from_gguf(data, cancel), cancel);
}

Tokenizer tokenizer_from_gguf(const GgufFile& file, const std::atomic<bool>* cancel) {
  return Tokenizer::from_gguf(gguf_tokenizer_data(file), cancel);
}

GgufTokenizerData gguf_tokenizer_data(const GgufFile& file) {
  GgufTokenizerData data;
  data.source = file.path();
  data.name = file.optional_string("general.name").value_or("");
  data.model = file.string("tokenizer.ggml.model");
  data.pre = file.optional_string("tokenizer.ggml.pre").value_or("");
  data.tokens = file.strings("tokenizer.ggml.tokens");
  if (file.find_metadata("tokenizer.ggml.scores") != nullptr) data.scores = file.numbers("tokenizer.ggml.scores");
  if (file.find_metadata("tokenizer.ggml.token_type") != nullptr) {
    for (const int64_t type : file.integers("tokenizer.ggml.token_type", INT32_MIN, INT32_MAX)) {
      data.token_types.push_back(static_cast<int32_t>(type));
    }
  }
  if (file.find_metadata("tokenizer.ggml.merges") != nullptr) data.merges = file.strings("tokenizer.ggml.merges");
  const auto id = [&](std::string_view key) { return file.optional_integer(key, INT64_MIN, INT64_MAX); };
  data.bos = id("tokenizer.ggml.bos_token_id");
  data.eos = id("tokenizer.ggml.eos_token_id");
  data.unk = id("tokenizer.ggml.unknown_token_id");
  data.pad = id("tokenizer.ggml.padding_token_id");
  data.add_bos = file.optional_boolean("tokenizer.ggml.add_bos_token");
  data.add_eos = file.optional_boolean("tokenizer.ggml.add_eos_token");
  data.add_space_prefix = file.optional_boolean("tokenizer.ggml.add_space_prefix");
  data.remove_extra_whitespaces = file.optional_boolean("tokenizer.ggml.remove_extra_whitespaces").value_or(false);
  if (file.find_metadata("tokenizer.ggml.precompiled_charsmap") != nullptr) {
    for (const int64_t byte : file.integers("tokenizer.ggml.precompiled_charsmap", INT8_MIN, UINT8_MAX))
      data.precompiled_charsmap += static_cast<char>(byte);
  }
  data.eot = id("tokenizer.ggml.eot_token_id");
  data.eom = id("tokenizer.ggml.eom_token_id");
  if (file.find_metadata("tokenizer.ggml.eos_token_ids") != nullptr)
    data.eos_ids = file.integers("tokenizer.ggml.eos_token_ids", INT64_MIN, INT64_MAX);
  data.chat_templates = gguf_chat_templates(file);
  return data;
}

}  // namespace eadem::io
