// SPDX-License-Identifier: Apache-2.0
//
// Committed data: the files that tests/data/tokenizer/make_small_goldens.py writes, and small tokenizers.
#pragma once

#include <string>
#include <vector>

#include "eadem/io/json.h"
#include "eadem/io/tokenizer/tokenizer.h"

namespace eadem::io {

inline JsonReader read_golden(const std::string& name) {
  return JsonReader::read(std::string(EADEM_SOURCE_DIR) + "/tests/data/tokenizer/" + name);
}

inline std::vector<int32_t> ids_of(const JsonValue& list) {
  std::vector<int32_t> ids;
  for (const JsonValue& id : list.as_array()) ids.push_back(static_cast<int32_t>(id.as_integer()));
  return ids;
}

// The vocabulary of pre_types.json that is called `kind`, as a GGUF file of model "gpt2" would hold it.
inline GgufTokenizerData small_gguf(const JsonReader& pre_types, const std::string& kind, const std::string& pre) {
  const JsonReader vocabulary = pre_types.object(kind);
  GgufTokenizerData data;
  data.source = "small.gguf";
  data.model = "gpt2";
  data.pre = pre;
  data.tokens = vocabulary.strings("tokens");
  data.merges = vocabulary.strings("merges");
  return data;
}

// The SentencePiece vocabulary of tests/data/stories260K.
inline Tokenizer stories_tokenizer() {
  return Tokenizer::from_file(std::string(EADEM_SOURCE_DIR) + "/tests/data/stories260K/stories260K.gguf");
}

}  // namespace eadem::io
