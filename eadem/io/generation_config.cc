// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/generation_config.h"

#include "eadem/io/files/mapped_file.h"
#include "eadem/io/json.h"

namespace eadem::io {

namespace {

constexpr int64_t kMaxConfigBytes = 1 << 20;
constexpr int64_t kMaxTokenId = INT32_MAX;

// A number in (0, max].
std::optional<double> optional_positive(const JsonReader& reader, const char* key, double max, const char* expected) {
  const std::optional<double> value = reader.optional_number(key);
  if (value && !(*value > 0 && *value <= max)) reader.fail(key, expected);
  return value;
}

}  // namespace

GenerationConfig parse_generation_config(std::string_view text, const std::string& file) {
  JsonLimits limits;
  limits.max_bytes = kMaxConfigBytes;
  const JsonReader reader = JsonReader::parse(text, file, limits);
  GenerationConfig config;
  config.do_sample = reader.optional_boolean("do_sample");
  config.temperature = reader.optional_number("temperature", 0);
  config.top_k = reader.optional_integer("top_k", 0);
  config.top_p = optional_positive(reader, "top_p", 1, "a number in (0, 1]");
  config.min_p = reader.optional_number("min_p", 0, 1);
  config.typical_p = optional_positive(reader, "typical_p", 1, "a number in (0, 1]");
  config.repetition_penalty = optional_positive(reader, "repetition_penalty", JsonReader::kMaxNumber, "a number > 0");
  config.max_new_tokens = reader.optional_integer("max_new_tokens", 1);
  config.min_new_tokens = reader.optional_integer("min_new_tokens", 0);
  config.max_length = reader.optional_integer("max_length", 1);
  config.min_length = reader.optional_integer("min_length", 0);
  config.bos_token_id = reader.optional_integer("bos_token_id", 0, kMaxTokenId);
  config.pad_token_id = reader.optional_integer("pad_token_id", -1, kMaxTokenId);
  if (config.pad_token_id == -1) config.pad_token_id.reset();
  if (reader.has("eos_token_id"))
    config.eos_token_ids = reader.integers("eos_token_id", 0, kMaxTokenId);
  else
    reader.ignore("eos_token_id");
  for (const char* note : {"transformers_version", "_from_model_config", "_commit_hash"}) reader.ignore(note);
  config.unknown_keys = reader.unread_keys();
  return config;
}

GenerationConfig read_generation_config(const std::string& path) {
  return parse_generation_config(read_file(path, kMaxConfigBytes), path);
}

}  // namespace eadem::io
