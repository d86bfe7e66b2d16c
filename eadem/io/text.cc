// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/text.h"

#include <fmt/format.h>

namespace eadem::io {

size_t utf8_sequence_length(std::string_view text, size_t pos) {
  const auto byte = [&](size_t offset) -> uint8_t {
    return pos + offset < text.size() ? static_cast<uint8_t>(text[pos + offset]) : 0;
  };
  const auto is_continuation = [&](size_t offset) { return (byte(offset) & 0xc0) == 0x80; };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xc2) return 0;  // a continuation byte, or an overlong form of ASCII
  if (first < 0xe0) return is_continuation(1) ? 2 : 0;
  if (first < 0xf0) {
    if (first == 0xe0 && byte(1) < 0xa0) return 0;   // overlong
    if (first == 0xed && byte(1) >= 0xa0) return 0;  // surrogate
    return is_continuation(1) && is_continuation(2) ? 3 : 0;
  }
  if (first > 0xf4) return 0;
  if (first == 0xf0 && byte(1) < 0x90) return 0;   // overlong
  if (first == 0xf4 && byte(1) >= 0x90) return 0;  // above U+10FFFF
  return is_continuation(1) && is_continuation(2) && is_continuation(3) ? 4 : 0;
}

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
