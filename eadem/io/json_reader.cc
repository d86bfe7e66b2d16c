// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "eadem/core/error.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/json.h"
#include "eadem/io/json_dialect.h"
#include "eadem/io/text.h"

namespace eadem::io {

namespace {

// The value for a message: short ones as written, long ones by kind.
std::string described(const JsonValue& value) {
  if (value.is_object()) return fmt::format("an object of {} members", value.as_object().size());
  if (value.is_string() && value.as_string().size() > 100) return quote(value.as_string());
  const std::string text = to_compact_json(value);
  if (value.is_array() && text.size() > 100) return fmt::format("an array of {} values", value.as_array().size());
  return text;
}

std::string integer_range(int64_t min, int64_t max) {
  if (max == JsonReader::kMaxInteger) return fmt::format("an integer >= {}", min);
  return fmt::format("an integer in [{}, {}]", min, max);
}

std::string number_range(double min, double max) {
  if (min == -JsonReader::kMaxNumber && max == JsonReader::kMaxNumber) return "a number";
  if (max == JsonReader::kMaxNumber) return fmt::format("a number >= {}", min);
  return fmt::format("a number in [{}, {}]", min, max);
}

bool integer_in(const JsonValue& value, int64_t min, int64_t max) {
  return value.kind() == JsonValue::Kind::integer && value.as_integer() >= min && value.as_integer() <= max;
}

bool number_in(const JsonValue& value, double min, double max) {
  return (value.kind() == JsonValue::Kind::integer || value.kind() == JsonValue::Kind::number) &&
         value.as_number() >= min && value.as_number() <= max;
}

}  // namespace

struct JsonReader::Document {
  std::string file;
  JsonValue root;
  std::unordered_set<const JsonValue*> read;        // the value of a key was read
  std::unordered_set<const JsonValue*> read_whole;  // with everything below it
  std::vector<Ignored> ignored;

  void add_ignored(std::string path, std::string reason) {
    const auto is_listed = [&](const Ignored& entry) { return entry.path == path; };
    if (std::none_of(ignored.begin(), ignored.end(), is_listed))
      ignored.push_back({std::move(path), std::move(reason)});
  }
};

JsonReader::JsonReader(std::shared_ptr<Document> document, const JsonValue* value, std::string path)
    : document_(std::move(document)), value_(value), path_(std::move(path)) {}

JsonReader JsonReader::parse(std::string_view text, const std::string& file, const JsonLimits& limits) {
  auto document = std::make_shared<Document>();
  document->file = file;
  document->root = parse_python_json(text, file, limits);
  const JsonValue* root = &document->root;
  return JsonReader(std::move(document), root, "");
}

JsonReader JsonReader::read(const std::string& path, const JsonLimits& limits) {
  return parse(read_file(path, limits.max_bytes), path, limits);
}

const std::string& JsonReader::file() const { return document_->file; }

std::string JsonReader::path_of(std::string_view key) const {
  return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
}

JsonReader JsonReader::child(std::string_view key, const JsonValue* value) const {
  return JsonReader(document_, value, path_of(key));
}

const JsonValue* JsonReader::find_and_mark(std::string_view key) const {
  if (!value_->is_object())
    throw DataCorrupted("{}: {} is {}; expected an object", file(), path_.empty() ? "the document" : quote(path_),
                        described(*value_));
  const JsonValue* found = value_->find(key);
  if (found != nullptr) document_->read.insert(found);
  return found;
}

void JsonReader::fail(std::string_view key, std::string_view expected) const {
  const JsonValue* found = find_and_mark(key);
  const std::string path = quote(path_of(key));
  if (found == nullptr) throw DataCorrupted("{}: {} is missing; expected {}", file(), path, expected);
  throw DataCorrupted("{}: {} is {}; expected {}", file(), path, described(*found), expected);
}

bool JsonReader::has(std::string_view key) const {
  if (!value_->is_object()) return false;
  const JsonValue* found = value_->find(key);
  return found != nullptr && !found->is_null();
}

int64_t JsonReader::integer(std::string_view key, int64_t min, int64_t max) const {
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr || !integer_in(*found, min, max)) fail(key, integer_range(min, max));
  return found->as_integer();
}

std::optional<int64_t> JsonReader::optional_integer(std::string_view key, int64_t min, int64_t max) const {
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr || found->is_null()) return std::nullopt;
  return integer(key, min, max);
}

double JsonReader::number(std::string_view key, double min, double max) const {
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr || !number_in(*found, min, max)) fail(key, number_range(min, max));
  return found->as_number();
}

std::optional<double> JsonReader::optional_number(std::string_view key, double min, double max) const {
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr || found->is_null()) return std::nullopt;
  return number(key, min, max);
}

bool JsonReader::boolean(std::string_view key) const {
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr || found->kind() != JsonValue::Kind::boolean) fail(key, "true or false");
  return found->as_boolean();
}

std::optional<bool> JsonReader::optional_boolean(std::string_view key) const {
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr || found->is_null()) return std::nullopt;
  return boolean(key);
}

bool JsonReader::boolean_or(std::string_view key, bool if_absent) const {
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr) return if_absent;
  return !found->is_null() && boolean(key);
}

const std::string& JsonReader::string(std::string_view key) const {
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr || !found->is_string()) fail(key, "a string");
  return found->as_string();
}

std::optional<std::string> JsonReader::optional_string(std::string_view key) const {
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr || found->is_null()) return std::nullopt;
  return string(key);
}

JsonReader JsonReader::object(std::string_view key) const {
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr || !found->is_object()) fail(key, "an object");
  return child(key, found);
}

std::optional<JsonReader> JsonReader::optional_object(std::string_view key) const {
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr || found->is_null()) return std::nullopt;
  return object(key);
}

std::vector<std::pair<std::string, JsonReader>> JsonReader::members() const {
  std::vector<std::pair<std::string, JsonReader>> readers;
  for (const JsonMember& member : value_->as_object()) {
    if (!member.value.is_object()) fail(member.key, "an object");
    document_->read.insert(&member.value);
    readers.emplace_back(member.key, child(member.key, &member.value));
  }
  return readers;
}

std::vector<JsonReader> JsonReader::elements(std::string_view key) const {
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr || !found->is_array()) fail(key, "an array");
  std::vector<JsonReader> readers;
  for (const JsonValue& element : found->as_array())
    readers.push_back(child(fmt::format("{}[{}]", key, readers.size()), &element));
  return readers;
}

std::vector<int64_t> JsonReader::integers(std::string_view key, int64_t min, int64_t max) const {
  const JsonValue* found = find_and_mark(key);
  if (found != nullptr && integer_in(*found, min, max)) return {found->as_integer()};
  const std::string expected = fmt::format("{} or an array of such", integer_range(min, max));
  if (found == nullptr || !found->is_array()) fail(key, expected);
  std::vector<int64_t> result;
  for (const JsonValue& element : found->as_array()) {
    if (!integer_in(element, min, max)) fail(key, expected);
    result.push_back(element.as_integer());
  }
  return result;
}

std::vector<double> JsonReader::numbers(std::string_view key, double min, double max) const {
  const std::string expected = fmt::format("an array in which each is {}", number_range(min, max));
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr || !found->is_array()) fail(key, expected);
  std::vector<double> result;
  for (const JsonValue& element : found->as_array()) {
    if (!number_in(element, min, max)) fail(key, expected);
    result.push_back(element.as_number());
  }
  return result;
}

std::vector<std::string> JsonReader::strings(std::string_view key) const {
  const JsonValue* found = find_and_mark(key);
  if (found == nullptr || !found->is_array()) fail(key, "an array of strings");
  std::vector<std::string> result;
  for (const JsonValue& element : found->as_array()) {
    if (!element.is_string()) fail(key, "an array of strings");
    result.push_back(element.as_string());
  }
  return result;
}

const JsonValue* JsonReader::raw(std::string_view key) const {
  const JsonValue* found = find_and_mark(key);
  if (found != nullptr) document_->read_whole.insert(found);
  return found;
}

void JsonReader::ignore(std::string_view key, std::string_view reason) const {
  if (raw(key) != nullptr && !reason.empty()) document_->add_ignored(path_of(key), std::string(reason));
}

const std::vector<JsonReader::Ignored>& JsonReader::ignored() const { return document_->ignored; }

void JsonReader::adopt_ignored(std::string_view key, const JsonReader& other) const {
  for (const Ignored& entry : other.ignored())
    document_->add_ignored(fmt::format("{}.{}", path_of(key), entry.path), entry.reason);
}

std::vector<std::string> JsonReader::keys() const {
  std::vector<std::string> result;
  if (value_->is_object())
    for (const JsonMember& member : value_->as_object()) result.push_back(member.key);
  return result;
}

// Bounded by the parser's depth limit.
std::vector<std::string> JsonReader::unread_keys() const {
  std::vector<std::string> result;
  const auto append = [&](const JsonReader& below) {
    for (std::string& path : below.unread_keys()) result.push_back(std::move(path));
  };
  if (value_->is_object()) {
    for (const JsonMember& member : value_->as_object()) {
      if (document_->read_whole.contains(&member.value)) continue;
      if (document_->read.contains(&member.value))
        append(child(member.key, &member.value));
      else
        result.push_back(path_of(member.key));
    }
  } else if (value_->is_array()) {
    for (size_t i = 0; i < value_->as_array().size(); ++i)
      append(JsonReader(document_, &value_->as_array()[i], fmt::format("{}[{}]", path_, i)));
  }
  return result;
}

}  // namespace eadem::io
