// SPDX-License-Identifier: Apache-2.0
//
// Training texts: their files, and how files hold documents.
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
  text,        // UTF-8; documents are the texts between separators, without surrounding white space
  json_lines,  // one JSON object a line; its member `text_key` is the document, unchanged
};

struct Texts {
  std::vector<std::string> files;
  TextFormat format = TextFormat::by_name;
  std::string separator = "<|endoftext|>";
  std::string text_key = "text";
  // Whether special tokens such as <|im_start|> in a document become those tokens. Off: they are ordinary text.
  bool parse_special = false;
};

// Whether `path` is a file of JSON lines.
bool is_json_lines(const Texts& texts, std::string_view path);

// Calls `document(text, begin, end)` for each document of one file that is not blank. `content` is the content of the
// file; its bytes [begin, end) hold the document and its separator. Throws DataCorrupted, naming the file and the line,
// if a line is no JSON object with that key.
void for_each_document(const Texts& texts, const std::string& path, std::string_view content,
                       const std::function<void(std::string_view text, int64_t begin, int64_t end)>& document);

}  // namespace eadem::train
