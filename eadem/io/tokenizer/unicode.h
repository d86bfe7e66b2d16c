// SPDX-License-Identifier: Apache-2.0
//
// UTF-8 and the few Unicode properties that tokenizers ask for. Properties come from utf8proc
// (Unicode 15 as packaged); everything here is pure and safe to call from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace eadem::io {

enum class Utf8Status { kValid, kInvalid, kTruncated };

// One step of a UTF-8 scan at `pos` (< text.size()).
//   kValid      `length` bytes encode `value`
//   kInvalid    `length` bytes are a maximal ill-formed part (Unicode 15, section 3.9, table 3-8)
//   kTruncated  the text ends inside a sequence that is well-formed so far; `length` reaches the end
struct Utf8Step {
  char32_t value;
  int length;
  Utf8Status status;
};
Utf8Step next_utf8(std::string_view text, size_t pos);

// The byte offset of the first ill-formed sequence, or npos.
size_t find_invalid_utf8(std::string_view text);

// Appends `text` with every ill-formed part replaced by U+FFFD.
void append_lossy_utf8(std::string& out, std::string_view text);

// The code point at `p`, which must start a well-formed sequence. No checks: for text that was validated.
inline Utf8Step decode_valid_utf8(const char* p) {
  const auto b = [p](int i) { return static_cast<char32_t>(static_cast<unsigned char>(p[i])); };
  if (b(0) < 0x80) return {b(0), 1, Utf8Status::kValid};
  if (b(0) < 0xE0) return {(b(0) & 0x1F) << 6 | (b(1) & 0x3F), 2, Utf8Status::kValid};
  if (b(0) < 0xF0) return {(b(0) & 0x0F) << 12 | (b(1) & 0x3F) << 6 | (b(2) & 0x3F), 3, Utf8Status::kValid};
  return {(b(0) & 0x07) << 18 | (b(1) & 0x3F) << 12 | (b(2) & 0x3F) << 6 | (b(3) & 0x3F), 4, Utf8Status::kValid};
}

// Character classes of pre-tokenizer patterns; a code point has at most one.
enum class CharClass : uint8_t {
  kOther,
  kLetter,  // \p{L}
  kNumber,  // \p{N}
  kSpace,   // White_Space, which is \s of the Unicode-aware pattern engines
};
CharClass char_class(char32_t c);

bool is_punctuation(char32_t c);  // ASCII punctuation or \p{P}
bool is_word(char32_t c);         // \w: Alphabetic, marks, decimal digits, connectors, join controls

// The GPT-2 byte alphabet: every byte as one printable code point, bytes 33-126, 161-172 and 174-255 as
// themselves, the others as U+0100 upward in order. `byte_from_char` is -1 outside the alphabet.
char32_t char_from_byte(uint8_t byte);
int byte_from_char(char32_t c);

// `text` in the byte alphabet to the bytes it stands for. False if a character is outside the alphabet.
bool bytes_from_alphabet(std::string& bytes, std::string_view text);
// Converts bytes to the byte alphabet.
std::string alphabet_from_bytes(std::string_view bytes);

}  // namespace eadem::io
