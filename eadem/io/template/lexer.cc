// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/template/lexer.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "eadem/core/error.h"
#include "eadem/io/template/python_text.h"
#include "eadem/io/text.h"

namespace eadem::io::chat {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_char(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

// Every line ends with \n, and the last line break is dropped.
std::string normalize_lines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
      continue;
    }
    out += '\n';
    if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

class Lexer {
 public:
  Lexer(std::string_view source, const std::string& name) : source_(normalize_lines(source)), name_(name) {}

  std::vector<Token> run() {
    while (pos_ < source_.size()) read_data();
    push(TokenKind::end, "end of template");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(std::string_view what) const { throw DataCorrupted("{}:{}: {}", name_, line_, what); }

  std::string_view rest() const { return std::string_view(source_).substr(pos_); }
  bool at(std::string_view text) const { return rest().substr(0, text.size()) == text; }
  void advance_to(size_t pos) {
    for (; pos_ < pos; ++pos_) line_ += source_[pos_] == '\n';
  }
  void skip_space() {
    const size_t length = rest().size() - strip_left(rest()).size();
    advance_to(pos_ + length);
  }
  void push(TokenKind kind, std::string text) { tokens_.push_back({kind, line_, std::move(text), 0, 0}); }

  // Text up to the next tag, the tag's begin, and what the tag holds.
  void read_data() {
    size_t tag = pos_;
    for (;; ++tag) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos || tag + 1 == source_.size()) {
        push_data(rest());
        advance_to(source_.size());
        return;
      }
      const char next = source_[tag + 1];
      if (next == '%' || next == '{' || next == '#') break;
    }
    const char kind = source_[tag + 1];
    size_t after = tag + 2;
    const char sign = after < source_.size() && (source_[after] == '-' || source_[after] == '+') ? source_[after] : ' ';
    if (sign != ' ') ++after;
    push_data(stripped_before(rest().substr(0, tag - pos_), sign, kind != '{'));
    advance_to(after);
    if (kind == '#') {
      skip_comment();
    } else if (kind == '%' && raw_begins()) {
      read_raw();
    } else {
      push(kind == '%' ? TokenKind::block_begin : TokenKind::print_begin, "");
      read_tag(kind == '%');
    }
  }

  void push_data(std::string_view text) {
    if (!text.empty()) push(TokenKind::data, std::string(text));
  }

  // The text before a tag, without what the tag strips.
  std::string_view stripped_before(std::string_view text, char sign, bool lstrip_blocks) const {
    if (sign == '-') return strip_right(text);
    if (sign == '+' || !lstrip_blocks) return text;
    const size_t newline = text.rfind('\n');
    const size_t line_begin = newline == std::string_view::npos ? 0 : newline + 1;
    if (line_begin == 0 && !line_starting()) return text;
    return strip_left(text.substr(line_begin)).empty() ? text.substr(0, line_begin) : text;
  }
  // Whether what was read last ended a line.
  bool line_starting() const { return pos_ == 0 || source_[pos_ - 1] == '\n'; }

  // After the closing characters of a block or a comment, whose first one may be a sign.
  void after_block_end(char sign) {
    if (sign == '-') {
      skip_space();
    } else if (sign != '+' && at("\n")) {
      advance_to(pos_ + 1);
    }
  }

  void skip_comment() {
    const size_t end = source_.find("#}", pos_);
    if (end == std::string::npos) fail("missing end of comment tag");
    const char before = end > pos_ ? source_[end - 1] : ' ';
    advance_to(end + 2);
    after_block_end(before);
  }

  // Consumes "raw %}" if that is what stands here.
  bool raw_begins() {
    std::string_view text = strip_left(rest());
    if (text.substr(0, 3) != "raw") return false;
    text = strip_left(text.substr(3));
    const bool strips = text.substr(0, 3) == "-%}";
    if (!strips && text.substr(0, 2) != "%}") return false;
    advance_to(source_.size() - text.size() + (strips ? 3 : 2));
    if (strips) skip_space();
    return true;
  }

  void read_raw() {
    if (pos_ == source_.size()) return;  // Jinja takes a raw block that ends with the template as nothing
    for (size_t tag = pos_; (tag = source_.find("{%", tag)) != std::string::npos; ++tag) {
      std::string_view text = std::string_view(source_).substr(tag + 2);
      char sign = ' ';
      if (!text.empty() && (text[0] == '-' || text[0] == '+')) {
        sign = text[0];
        text.remove_prefix(1);
      }
      text = strip_left(text);
      if (text.substr(0, 6) != "endraw") continue;
      text = strip_left(text.substr(6));
      char end_sign = ' ';
      if (!text.empty() && (text[0] == '-' || text[0] == '+')) {
        end_sign = text[0];
        text.remove_prefix(1);
      }
      if (text.substr(0, 2) != "%}") continue;
      push_data(stripped_before(rest().substr(0, tag - pos_), sign, true));
      advance_to(source_.size() - text.size() + 2);
      after_block_end(end_sign);
      return;
    }
    fail("missing end of raw directive");
  }

  void read_tag(bool block) {
    const std::string_view close = block ? "%}" : "}}";
    std::string open;  // brackets that are not closed
    for (;;) {
      skip_space();
      if (pos_ == source_.size()) fail(block ? "missing %}" : "missing }}");
      if (open.empty()) {
        char sign = ' ';
        if (at("-") && rest().substr(1, 2) == close) sign = '-';
        if (block && at("+") && rest().substr(1, 2) == close) sign = '+';
        if (sign != ' ' || at(close)) {
          push(block ? TokenKind::block_end : TokenKind::print_end, "");
          advance_to(pos_ + (sign == ' ' ? 2 : 3));
          if (block) {
            after_block_end(sign);
          } else if (sign == '-') {
            skip_space();
          }
          return;
        }
      }
      read_token(open);
    }
  }

  void read_token(std::string& open) {
    const char c = source_[pos_];
    if (is_digit(c)) return read_number();
    if (is_name_char(c)) {
      size_t end = pos_;
      while (end < source_.size() && is_name_char(source_[end])) ++end;
      push(TokenKind::name, source_.substr(pos_, end - pos_));
      advance_to(end);
      return;
    }
    if (c == '\'' || c == '"') return read_string(c);
    for (const std::string_view two : {"//", "**", "==", "!=", ">=", "<="}) {
      if (!at(two)) continue;
      push(TokenKind::op, std::string(two));
      advance_to(pos_ + 2);
      return;
    }
    if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == std::string_view::npos) {
      fail(fmt::format("unexpected character {}", quote(std::string_view(&c, 1))));
    }
    if (c == '(' || c == '[' || c == '{') open += c == '(' ? ')' : c == '[' ? ']' : '}';
    if (c == ')' || c == ']' || c == '}') {
      if (open.empty()) fail(fmt::format("unexpected '{}'", c));
      if (open.back() != c) fail(fmt::format("unexpected '{}', expected '{}'", c, open.back()));
      open.pop_back();
    }
    push(TokenKind::op, std::string(1, c));
    advance_to(pos_ + 1);
  }

  // Digits with single underscores between them; returns the end, or `begin` if there are none.
  size_t digits_end(size_t begin, std::string_view allowed) const {
    const auto ok = [&](size_t i) { return i < source_.size() && allowed.find(source_[i]) != std::string_view::npos; };
    size_t end = begin;
    while (ok(end) || (end > begin && end < source_.size() && source_[end] == '_' && ok(end + 1))) ++end;
    return end;
  }

  void read_number() {
    constexpr std::string_view kDecimal = "0123456789";
    const size_t whole = digits_end(pos_, kDecimal);
    size_t end = whole;
    if (end + 1 < source_.size() && source_[end] == '.' && is_digit(source_[end + 1])) {
      end = digits_end(end + 1, kDecimal);
    }
    if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      size_t exponent = end + 1;
      if (exponent < source_.size() && (source_[exponent] == '+' || source_[exponent] == '-')) ++exponent;
      if (const size_t exponent_end = digits_end(exponent, kDecimal); exponent_end > exponent) end = exponent_end;
    }
    // In `a.0.1` the digits after a dot are an index.
    const bool index = pos_ > 0 && source_[pos_ - 1] == '.';
    Token token{TokenKind::integer, line_, {}, 0, 0};
    if (end > whole && !index) {
      for (const char c : source_.substr(pos_, end - pos_)) {
        if (c != '_') token.text += c;
      }
      token.kind = TokenKind::number;
      token.number = std::strtod(token.text.c_str(), nullptr);
    } else {
      end = read_integer(token, whole);
    }
    advance_to(end);
    tokens_.push_back(std::move(token));
  }

  size_t read_integer(Token& token, size_t end) const {
    int base = 10;
    size_t begin = pos_;
    if (source_[pos_] == '0' && pos_ + 1 < source_.size()) {
      const char kind = static_cast<char>(source_[pos_ + 1] | 0x20);
      const int other = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 0;
      const std::string_view allowed = std::string_view("0123456789abcdefABCDEF").substr(0, other == 16 ? 22 : other);
      const size_t skip = pos_ + 2 < source_.size() && source_[pos_ + 2] == '_' ? 3 : 2;
      if (other != 0 && digits_end(pos_ + skip, allowed) > pos_ + skip) {
        base = other;
        begin = pos_ + skip;
        end = digits_end(begin, allowed);
      }
    }
    std::string digits;
    for (const char c : source_.substr(begin, end - begin)) {
      if (c != '_') digits += c;
    }
    if (base == 10 && digits.size() > 1 && digits[0] == '0' && digits.find_first_not_of('0') != std::string::npos) {
      fail(fmt::format("integer {} begins with 0", digits));
    }
    const auto [last, error] = std::from_chars(digits.data(), digits.data() + digits.size(), token.integer, base);
    if (error != std::errc() || last != digits.data() + digits.size()) {
      fail(fmt::format("integer {} does not fit 64 bits", digits));
    }
    token.text = digits;
    return end;
  }

  void read_string(char delimiter) {
    Token token{TokenKind::string, line_, {}, 0, 0};
    size_t i = pos_ + 1;
    for (;; ++i) {
      if (i >= source_.size()) fail("a string does not end");
      if (source_[i] == delimiter) break;
      if (source_[i] == '\\') {
        i = read_escape(i, token.text);
      } else {
        token.text += source_[i];
      }
    }
    advance_to(i + 1);
    tokens_.push_back(std::move(token));
  }

  // The escape at `i`; returns its last byte.
  size_t read_escape(size_t i, std::string& out) const {
    if (i + 1 >= source_.size()) fail("a string does not end");
    const char c = source_[++i];
    constexpr std::string_view kNames = "abfnrtv\\'\"";
    if (const size_t at = kNames.find(c); at != std::string_view::npos) {
      out += "\a\b\f\n\r\t\v\\'\""[at];
      return i;
    }
    if (c == '\n') return i;
    if (c >= '0' && c <= '7') {
      uint32_t value = 0;
      size_t end = i;
      while (end < i + 3 && end < source_.size() && source_[end] >= '0' && source_[end] <= '7') {
        value = value * 8 + static_cast<uint32_t>(source_[end++] - '0');
      }
      append_utf8(out, value);
      return end - 1;
    }
    const size_t length = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (c == 'N') fail("\\N{...} escapes are not supported");
    if (length == 0) {  // not an escape: the backslash stays
      out += '\\';
      out += c;
      return i;
    }
    uint32_t value = 0;
    const char* begin = source_.data() + i + 1;
    const size_t available = std::min(length, source_.size() - i - 1);
    const auto [last, error] = std::from_chars(begin, begin + available, value, 16);
    if (error != std::errc() || last != begin + length || value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
      fail(fmt::format("\\{} needs {} digits of a code point", c, length));
    }
    append_utf8(out, value);
    return i + length;
  }

  const std::string source_;
  const std::string& name_;
  size_t pos_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize_template(std::string_view source, const std::string& name) {
  return Lexer(source, name).run();
}

}  // namespace eadem::io::chat
