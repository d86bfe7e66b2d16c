// SPDX-License-Identifier: Apache-2.0
//
// What Python's str does, on valid UTF-8. Case mappings are Unicode's simple ones and U+00DF to "SS"; Python also
// maps the rest of SpecialCasing.txt, for example U+FB01.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace eadem::io::chat {

// str.isspace of one code point.
bool is_python_space(char32_t value);

// The code point at `pos`, and where the next one begins.
struct CodePoint {
  char32_t value;
  size_t end;
};
CodePoint code_point_at(std::string_view text, size_t pos);
// The start of the code point that ends at `end`, which is not 0.
size_t code_point_before(std::string_view text, size_t end);
size_t count_code_points(std::string_view text);

std::string_view strip_left(std::string_view text);
std::string_view strip_right(std::string_view text);

std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);
// Maps each character to its title case, which Python gives to the first character of a word.
std::string to_title(std::string_view text);
bool is_upper_char(char32_t value);
bool is_lower_char(char32_t value);
bool is_cased_char(char32_t value);
bool is_letter(char32_t value);
bool is_decimal(char32_t value);
// Whether repr shows the code point as it is.
bool is_printable(char32_t value);

// repr of a float: the shortest digits that read back to the same value.
std::string float_repr(double value);

// The lines of a text without their ends, as byte ranges.
struct TextRange {
  size_t begin, end;
};
std::vector<TextRange> split_lines(std::string_view text);

}  // namespace eadem::io::chat
