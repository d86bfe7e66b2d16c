// SPDX-License-Identifier: Apache-2.0
//
// JSON from files that may be hostile: strict RFC 8259, bounded depth and size, no duplicate keys, valid UTF-8.
//
//   JsonValue   a value: what the parser makes and the writer takes
//   JsonReader  typed, checked access to a document; its errors name the file and the path of the value, and it
//               knows which keys nobody has read, so that a config can refuse what it does not honour
//
// The parser is our own. simdjson's DOM and nlohmann-json do not refuse duplicate keys or bound the number of values,
// simdjson's DOM does not tell where an error is and refuses integers beyond 64 bits, and a second parser that explains
// refusals would be as long as this one. simdjson would save 100 of 180 ms on a tokenizer.json of 11 MB (200,000 tokens
// and 300,000 merges on a shared EPYC core), which is read while weights load. JSONTestSuite proves the grammar.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace eadem::io {

class JsonValue;

// A template only because JsonValue, which holds vectors of members, is not complete yet here.
template <typename Value>
struct JsonMemberOf {
  std::string key;
  Value value;
  friend bool operator==(const JsonMemberOf& a, const JsonMemberOf& b) = default;
};
using JsonMember = JsonMemberOf<JsonValue>;

class JsonValue {
 public:
  // `integer` is a number written without fraction and exponent that fits int64_t; every other is `number`.
  enum class Kind : uint8_t { null, boolean, integer, number, string, array, object };
  using Array = std::vector<JsonValue>;
  using Object = std::vector<JsonMember>;  // members keep the order of the document or of insertion

  JsonValue() = default;  // null
  JsonValue(std::nullptr_t) {}
  JsonValue(std::same_as<bool> auto value) : data_(value) {}
  JsonValue(std::signed_integral auto value) : data_(static_cast<int64_t>(value)) {}
  JsonValue(double value) : data_(value) {}
  JsonValue(std::string value) : data_(std::move(value)) {}
  JsonValue(std::string_view value) : data_(std::string(value)) {}
  JsonValue(const char* value) : data_(std::string(value)) {}
  JsonValue(Array value) : data_(std::move(value)) {}
  JsonValue(Object value) : data_(std::move(value)) {}
  static JsonValue array() { return JsonValue(Array{}); }
  static JsonValue object() { return JsonValue(Object{}); }

  Kind kind() const { return static_cast<Kind>(data_.index()); }
  bool is_null() const { return kind() == Kind::null; }
  bool is_string() const { return kind() == Kind::string; }
  bool is_array() const { return kind() == Kind::array; }
  bool is_object() const { return kind() == Kind::object; }

  // The content. Asking for another kind is a bug of the caller; as_number also takes an integer.
  bool as_boolean() const;
  int64_t as_integer() const;
  double as_number() const;
  const std::string& as_string() const;
  const Array& as_array() const;
  const Object& as_object() const;

  // The member of that key of an object, or null. Linear in the number of members.
  const JsonValue* find(std::string_view key) const;

  // Builders, chainable: sets a member of an object (replacing one of the same key), appends to an array.
  JsonValue& set(std::string key, JsonValue value);
  JsonValue& push_back(JsonValue value);

  friend bool operator==(const JsonValue& a, const JsonValue& b);

 private:
  std::variant<std::monostate, bool, int64_t, double, std::string, Array, Object> data_;
};

struct JsonLimits {
  int64_t max_bytes = 256 << 20;
  int64_t max_values = 16 << 20;  // bounds memory: a parsed value takes about 40 bytes
  int max_depth = 64;
};

// Parses one document. `file` is for messages only. Throws DataCorrupted naming file, byte offset, line and column.
JsonValue parse_json(std::string_view text, const std::string& file, const JsonLimits& limits = {});

// Members in order, two-space indentation; or on one line without spaces. Numbers of kind `number` keep a
// fraction or an exponent, so that parsing gives an equal value. Throws InvalidArgument for NaN, infinities and
// malformed UTF-8, which JSON cannot hold.
std::string to_json(const JsonValue& value);
std::string to_compact_json(const JsonValue& value);

// A place in a document. Copies are cheap and share the document and its record of what was read, so a reader
// and its copies belong to one thread.
//
// A document may have Python's Infinity, which is no JSON: it is taken for the object that transformers 5 writes in its
// place, {"__float__": "Infinity"}.
//
// Keyed access needs an object. Each call marks its key as read. The plain form needs the key; the optional form
// takes an absent key or null for nothing. All throw DataCorrupted, for example
//   config.json: 'rope_scaling.factor' is "abc"; expected a number in [1, 1e+06]
class JsonReader {
 public:
  static JsonReader parse(std::string_view text, const std::string& file, const JsonLimits& limits = {});
  // Throws NotFound or IoError as well.
  static JsonReader read(const std::string& path, const JsonLimits& limits = {});

  const std::string& file() const;
  const JsonValue& value() const { return *value_; }  // does not mark anything

  static constexpr int64_t kMaxInteger = std::numeric_limits<int64_t>::max();
  static constexpr double kMaxNumber = std::numeric_limits<double>::max();

  // Whether the key is there and not null. Does not mark it.
  bool has(std::string_view key) const;

  int64_t integer(std::string_view key, int64_t min, int64_t max = kMaxInteger) const;
  std::optional<int64_t> optional_integer(std::string_view key, int64_t min, int64_t max = kMaxInteger) const;
  double number(std::string_view key, double min = -kMaxNumber, double max = kMaxNumber) const;
  std::optional<double> optional_number(std::string_view key, double min = -kMaxNumber, double max = kMaxNumber) const;
  bool boolean(std::string_view key) const;
  std::optional<bool> optional_boolean(std::string_view key) const;
  // Returns `if_absent` for a key that is not there, and false for null, which Python reads as None.
  bool boolean_or(std::string_view key, bool if_absent) const;
  const std::string& string(std::string_view key) const;
  std::optional<std::string> optional_string(std::string_view key) const;
  JsonReader object(std::string_view key) const;
  std::optional<JsonReader> optional_object(std::string_view key) const;

  // Every member of this object by its key, in order; each must be an object itself. Takes linear time, where object()
  // for each of the keys would not.
  std::vector<std::pair<std::string, JsonReader>> members() const;

  // Arrays. `integers` also takes one bare integer, as Hugging Face configs write `eos_token_id`.
  std::vector<JsonReader> elements(std::string_view key) const;
  std::vector<int64_t> integers(std::string_view key, int64_t min, int64_t max = kMaxInteger) const;
  std::vector<double> numbers(std::string_view key, double min = -kMaxNumber, double max = kMaxNumber) const;
  std::vector<std::string> strings(std::string_view key) const;

  // The value of a key with everything below it, or null when absent: marks the whole subtree.
  const JsonValue* raw(std::string_view key) const;
  // States that a key has no meaning here and may hold anything, or be absent. With a reason, a key that is there is
  // listed by ignored().
  void ignore(std::string_view key, std::string_view reason = {}) const;

  // The keys of the document that were ignored for a reason, each once, in the order of reading.
  struct Ignored {
    std::string path;
    std::string reason;
  };
  const std::vector<Ignored>& ignored() const;
  // Adds to ignored() what another document ignored that was made from the value of `key`.
  void adopt_ignored(std::string_view key, const JsonReader& other) const;

  // Refuses the value of `key` (which may be absent) by `expected`, in the form above.
  [[noreturn]] void fail(std::string_view key, std::string_view expected) const;

  std::vector<std::string> keys() const;
  // The paths below this place that nothing has read, in document order; an unread object is one path.
  std::vector<std::string> unread_keys() const;

 private:
  struct Document;
  JsonReader(std::shared_ptr<Document> document, const JsonValue* value, std::string path);

  const JsonValue* find_and_mark(std::string_view key) const;
  std::string path_of(std::string_view key) const;
  JsonReader child(std::string_view key, const JsonValue* value) const;

  std::shared_ptr<Document> document_;
  const JsonValue* value_;
  std::string path_;  // "" for the root, else "rope_scaling" or "layers[3].kind"
};

}  // namespace eadem::io
