// SPDX-License-Identifier: Apache-2.0
//
// Texts to train on: which files, and how they hold documents.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace eadem::train {

// How a file holds documents.
enum class TextFormat : uint8_t {
  by_name,     // files called *.jsonl or *.ndjson are JSON lines, others plain text
  text,        // UTF-8; documents are what stands between separators, without the white space around them
  json_lines,  // one JSON object a line, whose member `text_key` is the document as it is
};

struct Texts {
  std::vector<std::string> files;
  TextFormat format = TextFormat::by_name;
  std::string separator = "<|endoftext|>";
  std::string text_key = "text";
  // Whether special tokens such as <|im_start|> in a document become those tokens. Off: they are ordinary text.
  bool parse_special = false;
};

// Whether the file of that name holds JSON lines.
bool is_json_lines(const Texts& texts, std::string_view path);

// Calls `document(text, begin, end)` for each document of one file that is not blank: `content` is the file's, and
// bytes [begin, end) of it hold the document and what ends it. Throws DataCorrupted naming the file and the line of
// what is no JSON object with that key.
void for_each_document(const Texts& texts, const std::string& path, std::string_view content,
                       const std::function<void(std::string_view text, int64_t begin, int64_t end)>& document);

}  // namespace eadem::train
