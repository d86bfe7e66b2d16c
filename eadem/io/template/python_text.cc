// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/template/python_text.h"

#include <utf8proc.h>

#include <charconv>
#include <cmath>

#include "eadem/io/text.h"

namespace eadem::io::chat {
namespace {

utf8proc_category_t category(char32_t value) { return utf8proc_category(static_cast<utf8proc_int32_t>(value)); }

template <typename Map>
std::string map_case(std::string_view text, Map map) {
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const CodePoint c = code_point_at(text, pos);
    map(out, c.value);
    pos = c.end;
  }
  return out;
}

bool is_line_end(char32_t c) {
  return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

}  // namespace

bool is_python_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

CodePoint code_point_at(std::string_view text, size_t pos) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[pos + i]); };
  const auto tail = [&](size_t i) { return static_cast<char32_t>(byte(i) & 0x3F); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, pos + 1};
  if (lead < 0xE0) return {(lead & 0x1Fu) << 6 | tail(1), pos + 2};
  if (lead < 0xF0) return {(lead & 0x0Fu) << 12 | tail(1) << 6 | tail(2), pos + 3};
  return {(lead & 0x07u) << 18 | tail(1) << 12 | tail(2) << 6 | tail(3), pos + 4};
}

size_t code_point_before(std::string_view text, size_t end) {
  do --end;
  while ((static_cast<unsigned char>(text[end]) & 0xC0) == 0x80);
  return end;
}

size_t count_code_points(std::string_view text) {
  size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return count;
}

std::string_view strip_left(std::string_view text) {
  size_t pos = 0;
  while (pos < text.size()) {
    const CodePoint c = code_point_at(text, pos);
    if (!is_python_space(c.value)) break;
    pos = c.end;
  }
  return text.substr(pos);
}

std::string_view strip_right(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    const size_t begin = code_point_before(text, end);
    if (!is_python_space(code_point_at(text, begin).value)) break;
    end = begin;
  }
  return text.substr(0, end);
}

std::string to_upper(std::string_view text) {
  return map_case(text, [](std::string& out, char32_t c) {
    if (c == 0xDF) {
      out += "SS";
    } else {
      append_utf8(out, static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c))));
    }
  });
}

std::string to_title(std::string_view text) {
  return map_case(text, [](std::string& out, char32_t c) {
    if (c == 0xDF) {
      out += "Ss";
    } else {
      append_utf8(out, static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c))));
    }
  });
}

std::string to_lower(std::string_view text) {
  return map_case(text, [](std::string& out, char32_t c) {
    append_utf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
  });
}

bool is_upper_char(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LU; }
bool is_lower_char(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LL; }
bool is_cased_char(char32_t c) { return is_upper_char(c) || is_lower_char(c) || category(c) == UTF8PROC_CATEGORY_LT; }
bool is_letter(char32_t c) {
  const auto kind = category(c);
  return kind >= UTF8PROC_CATEGORY_LU && kind <= UTF8PROC_CATEGORY_LO;
}
bool is_decimal(char32_t c) { return category(c) == UTF8PROC_CATEGORY_ND; }

bool is_printable(char32_t c) {
  if (c == ' ') return true;
  switch (category(c)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS: return false;
    default: return true;
  }
}

std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const double magnitude = std::fabs(value);
  const bool scientific = magnitude != 0 && (magnitude < 1e-4 || magnitude >= 1e16);
  const auto format = scientific ? std::chars_format::scientific : std::chars_format::fixed;
  std::string text(buffer, std::to_chars(buffer, buffer + sizeof buffer, value, format).ptr);
  if (!scientific && text.find('.') == std::string::npos) text += ".0";
  return text;
}

std::vector<TextRange> split_lines(std::string_view text) {
  std::vector<TextRange> lines;
  size_t begin = 0;
  for (size_t pos = 0; pos < text.size();) {
    const CodePoint c = code_point_at(text, pos);
    if (!is_line_end(c.value)) {
      pos = c.end;
      continue;
    }
    lines.push_back({begin, pos});
    pos = c.end;
    if (c.value == '\r' && pos < text.size() && text[pos] == '\n') ++pos;
    begin = pos;
  }
  if (begin < text.size()) lines.push_back({begin, text.size()});
  return lines;
}

}  // namespace eadem::io::chat
