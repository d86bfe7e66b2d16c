// SPDX-License-Identifier: Apache-2.0
//
// The values of a chat template: Python's, as far as templates see them, except that every text knows which of its
// bytes come from the conversation.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "eadem/core/error.h"
#include "eadem/io/template/chat_template.h"

namespace eadem::io::chat {

// Valid UTF-8 in runs of trusted and untrusted bytes.
class Text {
 public:
  struct Run {
    size_t end;
    bool trusted;
  };

  Text() = default;
  Text(std::string_view bytes, bool trusted) { append(bytes, trusted); }

  const std::string& bytes() const { return bytes_; }
  const std::vector<Run>& runs() const { return runs_; }
  size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }

  void append(std::string_view bytes, bool trusted);
  void append(const Text& other) { append(other, 0, other.size()); }
  void append(const Text& other, size_t begin, size_t end);  // a slice
  Text slice(size_t begin, size_t end) const {
    Text text;
    text.append(*this, begin, end);
    return text;
  }

  // Calls visit(bytes, trusted) for each run of [begin, end).
  template <typename Visit>
  void for_each_run(size_t begin, size_t end, Visit visit) const {
    size_t i = 0, past = runs_.size();
    while (i < past) {  // the first run that ends after `begin`
      const size_t middle = (i + past) / 2;
      if (runs_[middle].end <= begin) {
        i = middle + 1;
      } else {
        past = middle;
      }
    }
    for (; begin < end; ++i) {
      const size_t stop = std::min(end, runs_[i].end);
      visit(std::string_view(bytes_).substr(begin, stop - begin), runs_[i].trusted);
      begin = stop;
    }
  }
  // A text of the same runs, each one mapped to other bytes.
  template <typename Map>
  Text map_runs(Map map) const {
    Text text;
    for_each_run(0, size(), [&](std::string_view run, bool trusted) { text.append(map(run), trusted); });
    return text;
  }

 private:
  std::string bytes_;
  std::vector<Run> runs_;
};

class Value;
struct List;
struct Dict;
struct Space;
struct Macro;
struct Loop;

struct Undefined {
  std::string_view name;  // of a variable or an attribute, of the template; for messages
};
struct None {};
struct String {
  std::shared_ptr<const Text> text;
  bool markup = false;  // marked by `safe`: `+` escapes what is joined to it, as Markup does
};
// A function of the environment, or a method with its object.
struct Callable {
  std::string_view name;
  const Value* self = nullptr;
};

// Containers belong to the Heap of one rendering; values point to them.
class Value {
 public:
  using Data =
      std::variant<Undefined, None, bool, int64_t, double, String, List*, Dict*, Space*, Macro*, Loop*, Callable>;

  Value() : data_(Undefined{}) {}
  template <typename T>
  requires std::constructible_from<Data, T> Value(T value) : data_(std::move(value)) {}
  Value(const char*) = delete;

  template <typename T>
  const T* as() const {
    return std::get_if<T>(&data_);
  }
  template <typename T>
  bool is() const {
    return std::holds_alternative<T>(data_);
  }
  const Text* text() const { return is<String>() ? as<String>()->text.get() : nullptr; }
  List* list() const { return is<List*>() ? *as<List*>() : nullptr; }
  Dict* dict() const { return is<Dict*>() ? *as<Dict*>() : nullptr; }

 private:
  Data data_;
};

enum class ListKind : uint8_t { list, tuple, range, view, generator };

struct List {
  ListKind kind = ListKind::list;
  std::string_view view;  // of a view: dict_items, dict_keys or dict_values
  std::vector<Value> items;
};

// Keys in the order of insertion.
struct Dict {
  std::vector<std::pair<Value, Value>> entries;
  std::unordered_map<std::string_view, size_t> by_text;  // views into the keys
};

struct Space {  // namespace()
  Dict attributes;
};

// What one rendering may use. Every operation charges the values it makes and the bytes it writes.
class Heap {
 public:
  explicit Heap(const TemplateLimits& limits) : limits_(limits) {}

  // Throws InvalidArgument when the rendering has done more than its share.
  void charge(uint64_t work) {
    work_ += work;
    if (work_ > limits_.max_work) refuse();
  }

  Value text(Text text, bool markup = false);
  Value text(std::string_view bytes, bool trusted) { return this->text(Text(bytes, trusted)); }
  List* list(std::vector<Value> items, ListKind kind = ListKind::list);
  Dict* dict();
  Space* space();
  const Value* keep(Value value);  // a copy that lives as long as the heap

  const TemplateLimits& limits() const { return limits_; }

 private:
  [[noreturn]] void refuse() const;

  const TemplateLimits limits_;
  uint64_t work_ = 0;
  std::deque<List> lists_;
  std::deque<Dict> dicts_;
  std::deque<Space> spaces_;
  std::deque<Value> values_;
};

// Errors of rendering without their place, which the renderer adds.
class RenderError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

// --- what Python does with values; all throw RenderError where Python raises

const Value* find(Heap& heap, const Dict& dict, const Value& key);
const Value* find(const Dict& dict, std::string_view key);
void set(Heap& heap, Dict& dict, const Value& key, Value value);

// "str", "int", "NoneType" ... for messages.
std::string_view type_name(const Value& value);
bool truth(const Value& value);
bool equal(Heap& heap, const Value& a, const Value& b, int depth = 0);
bool less(Heap& heap, const Value& a, const Value& b, int depth = 0);
bool contains(Heap& heap, const Value& container, const Value& value);
bool is_number(const Value& value);    // int, float or bool
double as_double(const Value& value);  // of a number
const int64_t* as_integer(const Value& value);
int64_t length(const Value& value);

// What a for loop sees: items, keys, characters. Empties a generator.
std::vector<Value> iterate(Heap& heap, const Value& value);
std::vector<Value> characters(Heap& heap, const Text& text);

// str(value) and repr(value), appended.
void append_str(Heap& heap, Text& out, const Value& value);
void append_repr(Heap& heap, Text& out, const Value& value, int depth = 0);
Text to_text(Heap& heap, const Value& value);

Text escape_html(const Text& text);

}  // namespace eadem::io::chat
