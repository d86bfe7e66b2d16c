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
