// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include "eadem/core/error.h"
#include "eadem/io/json_dialect.h"
#include "eadem/io/text.h"

namespace eadem::io {

// ---- JsonValue -------------------------------------------------------------------------------------------------

namespace {

std::string_view kind_name(JsonValue::Kind kind) {
  switch (kind) {
    case JsonValue::Kind::null: return "null";
    case JsonValue::Kind::boolean: return "a boolean";
    case JsonValue::Kind::integer: return "an integer";
    case JsonValue::Kind::number: return "a number";
    case JsonValue::Kind::string: return "a string";
    case JsonValue::Kind::array: return "an array";
    case JsonValue::Kind::object: return "an object";
  }
  return "?";
}

}  // namespace

bool JsonValue::as_boolean() const {
  EADEM_CHECK(kind() == Kind::boolean, "JSON value is {}", kind_name(kind()));
  return std::get<bool>(data_);
}

int64_t JsonValue::as_integer() const {
  EADEM_CHECK(kind() == Kind::integer, "JSON value is {}", kind_name(kind()));
  return std::get<int64_t>(data_);
}

double JsonValue::as_number() const {
  if (kind() == Kind::integer) return static_cast<double>(std::get<int64_t>(data_));
  EADEM_CHECK(kind() == Kind::number, "JSON value is {}", kind_name(kind()));
  return std::get<double>(data_);
}

const std::string& JsonValue::as_string() const {
  EADEM_CHECK(kind() == Kind::string, "JSON value is {}", kind_name(kind()));
  return std::get<std::string>(data_);
}

const JsonValue::Array& JsonValue::as_array() const {
  EADEM_CHECK(kind() == Kind::array, "JSON value is {}", kind_name(kind()));
  return std::get<Array>(data_);
}

const JsonValue::Object& JsonValue::as_object() const {
  EADEM_CHECK(kind() == Kind::object, "JSON value is {}", kind_name(kind()));
  return std::get<Object>(data_);
}

const JsonValue* JsonValue::find(std::string_view key) const {
  for (const JsonMember& member : as_object())
    if (member.key == key) return &member.value;
  return nullptr;
}

JsonValue& JsonValue::set(std::string key, JsonValue value) {
  EADEM_CHECK(kind() == Kind::object, "member set on {}", kind_name(kind()));
  Object& members = std::get<Object>(data_);
  for (JsonMember& member : members) {
    if (member.key != key) continue;
    member.value = std::move(value);
    return *this;
  }
  members.push_back({std::move(key), std::move(value)});
  return *this;
}

JsonValue& JsonValue::push_back(JsonValue value) {
  EADEM_CHECK(kind() == Kind::array, "element appended to {}", kind_name(kind()));
  std::get<Array>(data_).push_back(std::move(value));
  return *this;
}

bool operator==(const JsonValue& a, const JsonValue& b) { return a.data_ == b.data_; }

// ---- Parser ----------------------------------------------------------------------------------------------------

namespace {

class Parser {
 public:
  Parser(std::string_view text, const std::string& file, const JsonLimits& limits, bool python = false)
      : text_(text), file_(file), limits_(limits), python_(python) {}

  JsonValue parse_document() {
    if (text_.size() > static_cast<size_t>(limits_.max_bytes))
      throw DataCorrupted("{}: {} bytes of JSON; at most {} are accepted", file_, text_.size(), limits_.max_bytes);
    if (text_.substr(0, 3) == "\xef\xbb\xbf") fail(0, "a byte order mark is not JSON");
    skip_whitespace();
    JsonValue value = parse_value(1);
    skip_whitespace();
    if (pos_ < text_.size()) fail(pos_, "text after the end of the document");
    return value;
  }

 private:
  [[noreturn]] void fail(size_t pos, std::string_view problem) const {
    const std::string_view before = text_.substr(0, pos);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const size_t line_begin = before.rfind('\n') + 1;  // npos + 1 == 0
    throw DataCorrupted("{}: byte {} (line {}, column {}): {}", file_, pos, line, pos - line_begin + 1, problem);
  }

  bool at_end() const { return pos_ >= text_.size(); }
  char peek() const { return text_[pos_]; }

  void skip_whitespace() {
    while (!at_end() && (peek() == ' ' || peek() == '\n' || peek() == '\r' || peek() == '\t')) ++pos_;
  }

  void expect(char wanted, std::string_view place) {
    if (at_end()) fail(pos_, fmt::format("the text ends; expected '{}' {}", wanted, place));
    if (peek() != wanted) fail(pos_, fmt::format("found {}; expected '{}' {}", found(), wanted, place));
    ++pos_;
  }

  std::string found() const {
    return quote(text_.substr(pos_, std::max<size_t>(1, utf8_sequence_length(text_, pos_))));
  }

  // Recursion is bounded by max_depth.
  JsonValue parse_value(int depth) {
    if (at_end()) fail(pos_, "the text ends; expected a value");
    if (++num_values_ > limits_.max_values)
      fail(pos_, fmt::format("more than {} values are not accepted", limits_.max_values));
    switch (peek()) {
      case '{':
      case '[':
        if (depth > limits_.max_depth) fail(pos_, fmt::format("nested deeper than {} levels", limits_.max_depth));
        return peek() == '{' ? parse_object(depth) : parse_array(depth);
      case '"': return JsonValue(parse_string());
      case 't': return parse_word("true", JsonValue(true));
      case 'f': return parse_word("false", JsonValue(false));
      case 'n': return parse_word("null", JsonValue());
      case 'I':
        if (python_) return parse_word("Infinity", JsonValue::object().set("__float__", "Infinity"));
        return parse_number();
      default: return parse_number();
    }
  }

  JsonValue parse_word(std::string_view word, JsonValue value) {
    if (text_.substr(pos_, word.size()) != word) fail(pos_, fmt::format("expected '{}'", word));
    pos_ += word.size();
    return value;
  }

  JsonValue parse_array(int depth) {
    JsonValue::Array elements;
    ++pos_;
    skip_whitespace();
    if (!at_end() && peek() == ']') return ++pos_, JsonValue(std::move(elements));
    for (;;) {
      elements.push_back(parse_value(depth + 1));
      skip_whitespace();
      if (at_end() || peek() != ',') break;
      ++pos_;
      skip_whitespace();
    }
    expect(']', "or ',' in an array");
    return JsonValue(std::move(elements));
  }

  JsonValue parse_object(int depth) {
    JsonValue::Object members;
    std::vector<size_t> key_positions;
    ++pos_;
    skip_whitespace();
    if (!at_end() && peek() == '}') return ++pos_, JsonValue(std::move(members));
    for (;;) {
      if (at_end() || peek() != '"') expect('"', "of a key");
      key_positions.push_back(pos_);
      std::string key = parse_string();
      skip_whitespace();
      expect(':', "after a key");
      skip_whitespace();
      JsonValue value = parse_value(depth + 1);
      members.push_back({std::move(key), std::move(value)});
      skip_whitespace();
      if (at_end() || peek() != ',') break;
      ++pos_;
      skip_whitespace();
    }
    expect('}', "or ',' in an object");
    refuse_duplicates(members, key_positions);
    return JsonValue(std::move(members));
  }

  void refuse_duplicates(const JsonValue::Object& members, const std::vector<size_t>& key_positions) const {
    std::vector<size_t> order(members.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return members[a].key < members[b].key; });
    for (size_t i = 1; i < order.size(); ++i)
      if (members[order[i]].key == members[order[i - 1]].key)
        fail(key_positions[order[i]], fmt::format("the key {} appears twice in one object (first at byte {})",
                                                  quote(members[order[i]].key), key_positions[order[i - 1]]));
  }

  std::string parse_string() {
    const size_t begin = pos_++;
    std::string result;
    for (;;) {
      // Copy a run of ordinary characters at once.
      const size_t run = pos_;
      while (!at_end() && static_cast<uint8_t>(peek()) >= 0x20 && static_cast<uint8_t>(peek()) < 0x80 &&
             peek() != '"' && peek() != '\\')
        ++pos_;
      result.append(text_, run, pos_ - run);
      if (at_end()) fail(begin, "this string does not end");
      const auto byte = static_cast<uint8_t>(peek());
      if (byte == '"') return ++pos_, result;
      if (byte == '\\') {
        parse_escape(result);
      } else if (byte < 0x20) {
        fail(pos_, fmt::format("control character \\x{:02x} in a string must be escaped", byte));
      } else {
        const size_t length = utf8_sequence_length(text_, pos_);
        if (length == 0) fail(pos_, fmt::format("byte \\x{:02x} is not valid UTF-8", byte));
        result.append(text_, pos_, length);
        pos_ += length;
      }
    }
  }

  void parse_escape(std::string& result) {
    const size_t begin = pos_++;
    if (at_end()) fail(begin, "the text ends in an escape");
    switch (text_[pos_++]) {
      case '"': result += '"'; return;
      case '\\': result += '\\'; return;
      case '/': result += '/'; return;
      case 'b': result += '\b'; return;
      case 'f': result += '\f'; return;
      case 'n': result += '\n'; return;
      case 'r': result += '\r'; return;
      case 't': result += '\t'; return;
      case 'u': break;
      default: fail(begin, "unknown escape in a string");
    }
    uint32_t code_point = parse_hex4(begin);
    if (code_point >= 0xd800 && code_point < 0xe000) {
      const bool low_follows = code_point < 0xdc00 && text_.substr(pos_, 2) == "\\u";
      if (low_follows) pos_ += 2;
      const uint32_t low = low_follows ? parse_hex4(begin) : 0;
      if (low < 0xdc00 || low >= 0xe000) fail(begin, "a surrogate escape without its other half");
      code_point = 0x10000 + ((code_point - 0xd800) << 10) + (low - 0xdc00);
    }
    append_utf8(result, code_point);
  }

  uint32_t parse_hex4(size_t escape_begin) {
    uint32_t value = 0;
    const std::string_view digits = text_.substr(std::min(pos_, text_.size()), 4);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (digits.size() < 4 || error != std::errc() || end != digits.data() + 4)
      fail(escape_begin, "\\u needs four hexadecimal digits");
    pos_ += 4;
    return value;
  }

  bool skip_digits() {
    const size_t begin = pos_;
    while (!at_end() && peek() >= '0' && peek() <= '9') ++pos_;
    return pos_ > begin;
  }

  JsonValue parse_number() {
    const size_t begin = pos_;
    if (peek() == '-') ++pos_;
    const size_t first_digit = pos_;
    if (!skip_digits()) {
      pos_ = begin;
      fail(begin, fmt::format("found {}; expected a value", found()));
    }
    if (text_[first_digit] == '0' && pos_ > first_digit + 1) fail(begin, "a number with a leading zero");
    bool is_integer = true;
    if (!at_end() && peek() == '.') {
      ++pos_;
      is_integer = false;
      if (!skip_digits()) fail(begin, "a number without digits after its point");
    }
    if (!at_end() && (peek() == 'e' || peek() == 'E')) {
      ++pos_;
      is_integer = false;
      if (!at_end() && (peek() == '+' || peek() == '-')) ++pos_;
      if (!skip_digits()) fail(begin, "a number without digits in its exponent");
    }
    const char* first = text_.data() + begin;
    const char* last = text_.data() + pos_;
    if (is_integer) {
      int64_t integer = 0;
      if (std::from_chars(first, last, integer).ec == std::errc()) return JsonValue(integer);
    }
    double number = 0;
    if (std::from_chars(first, last, number).ec != std::errc())
      fail(begin,
           fmt::format("the number {} is outside of the range of a double", quote(text_.substr(begin, pos_ - begin))));
    return JsonValue(number);
  }

  std::string_view text_;
  const std::string& file_;
  const JsonLimits& limits_;
  const bool python_;  // Infinity is taken
  size_t pos_ = 0;
  int64_t num_values_ = 0;
};

// ---- Writer ----------------------------------------------------------------------------------------------------

class Writer {
 public:
  explicit Writer(bool pretty) : pretty_(pretty) {}

  void write(const JsonValue& value, int depth) {
    switch (value.kind()) {
      case JsonValue::Kind::null: text_ += "null"; return;
      case JsonValue::Kind::boolean: text_ += value.as_boolean() ? "true" : "false"; return;
      case JsonValue::Kind::integer: text_ += fmt::format("{}", value.as_integer()); return;
      case JsonValue::Kind::number: write_number(value.as_number()); return;
      case JsonValue::Kind::string: write_string(value.as_string()); return;
      case JsonValue::Kind::array: write_array(value.as_array(), depth); return;
      case JsonValue::Kind::object: write_object(value.as_object(), depth); return;
    }
  }

  std::string take() { return std::move(text_); }

 private:
  void new_line(int depth) {
    if (!pretty_) return;
    text_ += '\n';
    text_.append(static_cast<size_t>(2 * depth), ' ');
  }

  void write_number(double number) {
    if (!std::isfinite(number)) throw InvalidArgument("JSON cannot hold the number {}", number);
    char digits[32];
    const char* end = std::to_chars(digits, digits + sizeof digits, number).ptr;  // shortest that parses back
    const std::string_view written(digits, static_cast<size_t>(end - digits));
    text_ += written;
    if (written.find_first_of(".e") == std::string_view::npos) text_ += ".0";
  }

  void write_string(std::string_view string) {
    if (!is_valid_utf8(string)) throw InvalidArgument("JSON cannot hold malformed UTF-8: {}", quote(string));
    text_ += '"';
    for (const char c : string) {
      switch (c) {
        case '"': text_ += "\\\""; break;
        case '\\': text_ += "\\\\"; break;
        case '\n': text_ += "\\n"; break;
        case '\r': text_ += "\\r"; break;
        case '\t': text_ += "\\t"; break;
        default:
          if (static_cast<uint8_t>(c) < 0x20)
            text_ += fmt::format("\\u{:04x}", static_cast<uint8_t>(c));
          else
            text_ += c;
      }
    }
    text_ += '"';
  }

  void write_array(const JsonValue::Array& elements, int depth) {
    text_ += '[';
    // Scalars stay on one line: arrays of ids and shapes read better so.
    const bool one_line = std::none_of(elements.begin(), elements.end(), [](const JsonValue& element) {
      return element.is_array() || element.is_object();
    });
    for (size_t i = 0; i < elements.size(); ++i) {
      if (i > 0) text_ += one_line && pretty_ ? ", " : ",";
      if (!one_line) new_line(depth + 1);
      write(elements[i], depth + 1);
    }
    if (!one_line) new_line(depth);
    text_ += ']';
  }

  void write_object(const JsonValue::Object& members, int depth) {
    text_ += '{';
    for (size_t i = 0; i < members.size(); ++i) {
      if (i > 0) text_ += ',';
      new_line(depth + 1);
      write_string(members[i].key);
      text_ += pretty_ ? ": " : ":";
      write(members[i].value, depth + 1);
    }
    if (!members.empty()) new_line(depth);
    text_ += '}';
  }

  bool pretty_;
  std::string text_;
};

}  // namespace

JsonValue parse_json(std::string_view text, const std::string& file, const JsonLimits& limits) {
  return Parser(text, file, limits).parse_document();
}

JsonValue parse_python_json(std::string_view text, const std::string& file, const JsonLimits& limits) {
  return Parser(text, file, limits, /*python=*/true).parse_document();
}

std::string to_json(const JsonValue& value) {
  Writer writer(/*pretty=*/true);
  writer.write(value, 0);
  return writer.take() + "\n";
}

std::string to_compact_json(const JsonValue& value) {
  Writer writer(/*pretty=*/false);
  writer.write(value, 0);
  return writer.take();
}

}  // namespace eadem::io
