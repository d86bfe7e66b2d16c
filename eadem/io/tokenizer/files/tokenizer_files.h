// SPDX-License-Identifier: Apache-2.0
//
// A tokenizer as files beside a model in Hugging Face layout, read from any format.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/tokenizer/tokenizer.h"

namespace eadem::io {

struct TokenizerFile {
  std::string name;  // "tokenizer.json"; a path below the folder
  std::string content;
};

// Returns the files of the tokenizer at `path`, which is a path that Tokenizer::from_file takes. Files of a directory
// are returned byte for byte; the metadata of a GGUF file becomes tokenizer.json and tokenizer_config.json. Throws
// NotFound, IoError, DataCorrupted, or Unsupported for a GGUF tokenizer that tokenizer.json cannot express.
std::vector<TokenizerFile> tokenizer_files(const std::string& path);
// Returns the files of the tokenizer in a GGUF file's metadata.
std::vector<TokenizerFile> tokenizer_files(const GgufFile& file);

// The files of chat templates that a folder has: chat_template.jinja and additional_chat_templates/NAME.jinja, as
// paths below the folder, by name.
std::vector<std::string> template_file_names(const std::string& folder);

// Writes each file into `directory`, which must exist, atomically.
void write_tokenizer_files(const std::vector<TokenizerFile>& files, const std::string& directory);

// Texts on which two tokenizers that differ noticeably would differ: words, numbers, spaces, cases, scripts, marks,
// control characters, and every token of the vocabulary.
std::vector<std::string> tokenizer_probes(const Tokenizer& tokenizer);
// Throws Unsupported when two tokenizers encode a probe of `from` differently. `format` names the format of `to` in the
// message.
void require_same_tokens(const Tokenizer& from, const Tokenizer& to, std::string_view format);

}  // namespace eadem::io
