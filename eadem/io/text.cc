// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/text.h"

#include <fmt/format.h>

namespace eadem::io {

bool is_valid_utf8(std::string_view text) {
  for (size_t pos = 0; pos < text.size();) {
    const size_t length = utf8_sequence_length(text, pos);
    if (length == 0) return false;
    pos += length;
  }
  return true;
}

void append_utf8(std::string& out, char32_t c) {
  const auto put = [&out](char32_t b) { out.push_back(static_cast<char>(static_cast<unsigned char>(b))); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6), put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18), put(0x80 | (c >> 12 & 0x3F)), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  }
}

std::string quote(std::string_view text) {
  constexpr size_t kMaxBytes = 120;
  std::string result = "'";
  size_t pos = 0;
  while (pos < text.size() && result.size() <= kMaxBytes) {
    const size_t length = utf8_sequence_length(text, pos);
    const auto byte = static_cast<uint8_t>(text[pos]);
    if (length == 0 || byte < 0x20 || byte == 0x7f) {
      result += fmt::format("\\x{:02x}", byte);
      ++pos;
    } else {
      result += text.substr(pos, length);
      pos += length;
    }
  }
  if (pos < text.size()) result += fmt::format("…({} bytes)", text.size());
  return result + "'";
}

}  // namespace eadem::io
