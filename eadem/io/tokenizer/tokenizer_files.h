// SPDX-License-Identifier: Apache-2.0
//
// A tokenizer as the files that stand beside a model in Hugging Face layout, wherever it comes from.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/tokenizer/tokenizer.h"

namespace eadem::io {

struct TokenizerFile {
  std::string name;  // "tokenizer.json"
  std::string content;
};

// The files of the tokenizer at `path`, which is what Tokenizer::from_file takes. Those of a directory come back byte
// for byte; the metadata of a GGUF file becomes tokenizer.json and tokenizer_config.json. Throws NotFound, IoError,
// DataCorrupted, or Unsupported for a GGUF tokenizer that tokenizer.json cannot express.
std::vector<TokenizerFile> tokenizer_files(const std::string& path);
// The same from the metadata of a GGUF file.
std::vector<TokenizerFile> tokenizer_files(const GgufFile& file);

// Writes each file into `directory`, which must exist, atomically.
void write_tokenizer_files(const std::vector<TokenizerFile>& files, const std::string& directory);

// Throws Unsupported when two tokenizers read one of some telling texts differently: words, numbers, spaces, scripts,
// control characters, and every token of the vocabulary. `format` is what `to` was converted to, for the message.
void require_same_tokens(const Tokenizer& from, const Tokenizer& to, std::string_view format);

}  // namespace eadem::io
