// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/texts.h"

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/io/json.h"

namespace eadem::train {

namespace {

constexpr std::string_view kBlank = " \t\r\n";

using Document = std::function<void(std::string_view text, int64_t begin, int64_t end)>;

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

std::string text_of_line(const Texts& texts, std::string_view line, const std::string& place) {
  const io::JsonValue value = io::parse_json(line, place);
  if (!value.is_object()) throw DataCorrupted("{}: not a JSON object; expected {{\"{}\": …}}", place, texts.text_key);
  const io::JsonValue* text = value.find(texts.text_key);
  if (text == nullptr) throw DataCorrupted("{}: no key '{}' (data.text_key)", place, texts.text_key);
  if (!text->is_string())
    throw DataCorrupted("{}: '{}' is {}; expected a string", place, texts.text_key, io::to_compact_json(*text));
  return text->as_string();
}

void for_each_line(const Texts& texts, const std::string& path, std::string_view content, const Document& document) {
  int64_t number = 0;
  for (size_t begin = 0; begin < content.size();) {
    const size_t end = std::min(content.find('\n', begin), content.size());
    const std::string_view line = content.substr(begin, end - begin);
    ++number;
    if (!trimmed(line).empty()) {
      const std::string text = text_of_line(texts, line, fmt::format("{}:{}", path, number));
      if (!trimmed(text).empty())
        document(text, static_cast<int64_t>(begin), static_cast<int64_t>(std::min(end + 1, content.size())));
    }
    begin = end + 1;
  }
}

void for_each_separated(const Texts& texts, std::string_view content, const Document& document) {
  for (size_t begin = 0; begin < content.size();) {
    const size_t end = std::min(content.find(texts.separator, begin), content.size());
    const std::string_view text = trimmed(content.substr(begin, end - begin));
    const size_t next = std::min(end + texts.separator.size(), content.size());
    if (!text.empty()) document(text, static_cast<int64_t>(begin), static_cast<int64_t>(next));
    begin = next;
  }
}

}  // namespace

bool is_json_lines(const Texts& texts, std::string_view path) {
  if (texts.format != TextFormat::by_name) return texts.format == TextFormat::json_lines;
  return path.ends_with(".jsonl") || path.ends_with(".ndjson");
}

void for_each_document(const Texts& texts, const std::string& path, std::string_view content,
                       const Document& document) {
  if (is_json_lines(texts, path))
    for_each_line(texts, path, content, document);
  else
    for_each_separated(texts, content, document);
}

}  // namespace eadem::train
