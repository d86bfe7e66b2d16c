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

// A list of lists of token ids, none of them empty.
std::vector<std::vector<int64_t>> optional_words(const JsonReader& reader, const char* key, int64_t most) {
  constexpr const char* kExpected = "a list of lists of token ids, none of them empty";
  std::vector<std::vector<int64_t>> words;
  const JsonValue* const value = reader.raw(key);
  if (value == nullptr || value->is_null()) return words;
  if (!value->is_array()) reader.fail(key, kExpected);
  for (const JsonValue& each : value->as_array()) {
    if (!each.is_array() || each.as_array().empty()) reader.fail(key, kExpected);
    std::vector<int64_t>& word = words.emplace_back();
    for (const JsonValue& token : each.as_array()) {
      if (token.kind() != JsonValue::Kind::integer || token.as_integer() < 0 || token.as_integer() > most)
        reader.fail(key, kExpected);
      word.push_back(token.as_integer());
    }
  }
  return words;
}

// A text, or a list of texts, none of them empty.
std::vector<std::string> optional_texts(const JsonReader& reader, const char* key) {
  const JsonValue* const value = reader.raw(key);
  if (value == nullptr || value->is_null()) return {};
  std::vector<std::string> texts;
  if (value->is_string())
    texts.push_back(value->as_string());
  else
    texts = reader.strings(key);
  for (const std::string& text : texts)
    if (text.empty()) reader.fail(key, "a text or texts that are not empty");
  return texts;
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
  config.bad_words_ids = optional_words(reader, "bad_words_ids", kMaxTokenId);
  if (reader.has("suppress_tokens"))
    config.suppress_tokens = reader.integers("suppress_tokens", 0, kMaxTokenId);
  else
    reader.ignore("suppress_tokens");
  config.stop_strings = optional_texts(reader, "stop_strings");
  config.num_return_sequences = reader.optional_integer("num_return_sequences", 1);
  config.num_beams = reader.optional_integer("num_beams", 1);
  config.length_penalty = reader.optional_number("length_penalty");
  if (const JsonValue* value = reader.raw("early_stopping"); value != nullptr && !value->is_null()) {
    if (value->kind() == JsonValue::Kind::boolean)
      config.early_stopping = value->as_boolean() ? "true" : "false";
    else if (value->is_string() && value->as_string() == "never")
      config.early_stopping = "never";
    else
      reader.fail("early_stopping", "true, false or \"never\"");
  }
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
