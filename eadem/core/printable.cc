// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/printable.h"

#include <fmt/format.h>

#include <cstdint>
#include <iterator>

namespace eadem {

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

std::string printable(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const size_t length = utf8_sequence_length(text, pos);
    const auto first = static_cast<uint8_t>(text[pos]);
    const bool c0 = (first < 0x20 && first != '\n' && first != '\t') || first == 0x7f;
    if (length == 0 || c0) {
      result += fmt::format("\\x{:02x}", first);
    } else if (first == 0xc2 && static_cast<uint8_t>(text[pos + 1]) < 0xa0) {  // U+0080 to U+009F
      result += fmt::format("\\u00{:02x}", static_cast<uint8_t>(text[pos + 1]));
    } else {
      result += text.substr(pos, length);
    }
    pos += length == 0 ? 1 : length;
  }
  return result;
}

std::string bytes_text(double bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB"};
  size_t unit = 0;
  while (unit + 1 < std::size(kUnits) && bytes >= 999.5) {
    bytes /= 1000;
    ++unit;
  }
  return unit == 0 || bytes >= 99.95 ? fmt::format("{:.0f} {}", bytes, kUnits[unit])
                                     : fmt::format("{:.{}f} {}", bytes, bytes < 9.995 ? 2 : 1, kUnits[unit]);
}

}  // namespace eadem
