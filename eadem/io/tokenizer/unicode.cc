// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/unicode.h"

#include <utf8proc.h>

#include <array>

#include "eadem/io/text.h"

namespace eadem::io {
namespace {

bool is_white_space(char32_t c) {
  if (c <= 0x20) return c == 0x20 || (c >= 0x09 && c <= 0x0D);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
         c == 0x202F || c == 0x205F || c == 0x3000;
}

CharClass unicode_class(char32_t c) {
  if (is_white_space(c)) return CharClass::kSpace;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO: return CharClass::kLetter;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO: return CharClass::kNumber;
    default: return CharClass::kOther;
  }
}

constexpr bool in_alphabet_as_itself(int byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

constexpr std::array<char16_t, 256> make_char_from_byte() {
  std::array<char16_t, 256> table{};
  char16_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    table[static_cast<size_t>(byte)] = in_alphabet_as_itself(byte) ? static_cast<char16_t>(byte) : next++;
  }
  return table;
}
constexpr std::array<char16_t, 256> kCharFromByte = make_char_from_byte();

constexpr std::array<int16_t, 0x144> make_byte_from_char() {
  std::array<int16_t, 0x144> table{};
  for (auto& entry : table) entry = -1;
  for (int16_t byte = 0; byte < 256; ++byte) table[kCharFromByte[static_cast<size_t>(byte)]] = byte;
  return table;
}
constexpr std::array<int16_t, 0x144> kByteFromChar = make_byte_from_char();

}  // namespace

Utf8Step next_utf8(std::string_view text, size_t pos) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(pos);
  if (first < 0x80) return {first, 1, Utf8Status::kValid};
  int length = 0;
  unsigned char low = 0x80, high = 0xBF;  // range of the second byte: excludes overlong forms, surrogates, > 10FFFF
  if (first >= 0xC2 && first <= 0xDF) {
    length = 2;
  } else if (first >= 0xE0 && first <= 0xEF) {
    length = 3;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
  } else if (first >= 0xF0 && first <= 0xF4) {
    length = 4;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  } else {
    return {0xFFFD, 1, Utf8Status::kInvalid};
  }
  for (int i = 1; i < length; ++i) {
    if (pos + static_cast<size_t>(i) >= text.size()) return {0xFFFD, i, Utf8Status::kTruncated};
    const unsigned char next = byte(pos + static_cast<size_t>(i));
    if (next < low || next > high) return {0xFFFD, i, Utf8Status::kInvalid};
    low = 0x80;
    high = 0xBF;
  }
  return decode_valid_utf8(text.data() + pos);
}

size_t find_invalid_utf8(std::string_view text) {
  for (size_t pos = 0; pos < text.size();) {
    if (static_cast<unsigned char>(text[pos]) < 0x80) {
      ++pos;
      continue;
    }
    const Utf8Step step = next_utf8(text, pos);
    if (step.status != Utf8Status::kValid) return pos;
    pos += static_cast<size_t>(step.length);
  }
  return std::string_view::npos;
}

void append_lossy_utf8(std::string& out, std::string_view text) {
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Step step = next_utf8(text, pos);
    if (step.status == Utf8Status::kValid) {
      out.append(text.substr(pos, static_cast<size_t>(step.length)));
    } else {
      out.append("\xEF\xBF\xBD");
    }
    pos += static_cast<size_t>(step.length);
  }
}

CharClass char_class(char32_t c) {
  if (c < 0x80) {
    if ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') return CharClass::kLetter;
    if (c >= '0' && c <= '9') return CharClass::kNumber;
    return is_white_space(c) ? CharClass::kSpace : CharClass::kOther;
  }
  return unicode_class(c);
}

bool is_punctuation(char32_t c) {
  if (c < 0x80) return c > 0x20 && c < 0x7F && char_class(c) == CharClass::kOther;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_PC:
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO: return true;
    default: return false;
  }
}

bool is_word(char32_t c) {
  if (char_class(c) == CharClass::kLetter) return true;
  if (c == 0x200C || c == 0x200D) return true;
  // Symbols that are Alphabetic: the circled, squared and negative Latin letters.
  if ((c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
      (c >= 0x1F170 && c <= 0x1F189)) {
    return true;
  }
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    default: return false;
  }
}

char32_t char_from_byte(uint8_t byte) { return kCharFromByte[byte]; }

int byte_from_char(char32_t c) { return c < kByteFromChar.size() ? kByteFromChar[c] : -1; }

bool bytes_from_alphabet(std::string& bytes, std::string_view text) {
  bytes.clear();
  for (size_t pos = 0; pos < text.size();) {
    if (const auto c = static_cast<unsigned char>(text[pos]); c < 0x80 && kByteFromChar[c] == c) {
      bytes.push_back(text[pos++]);
      continue;
    }
    const Utf8Step step = next_utf8(text, pos);
    const int byte = step.status == Utf8Status::kValid ? byte_from_char(step.value) : -1;
    if (byte < 0) return false;
    bytes.push_back(static_cast<char>(byte));
    pos += static_cast<size_t>(step.length);
  }
  return true;
}

std::string alphabet_from_bytes(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) append_utf8(text, char_from_byte(static_cast<uint8_t>(byte)));
  return text;
}

}  // namespace eadem::io
