// SPDX-License-Identifier: Apache-2.0
//
// The filters, tests, methods and functions of chat templates.
#pragma once

#include <ctime>
#include <initializer_list>
#include <string_view>
#include <utility>
#include <vector>

#include "eadem/io/template/value.h"

namespace eadem::io::chat {

struct CallArgs {
  std::vector<Value> positional;
  std::vector<std::pair<std::string_view, Value>> named;
};

// The part of a rendering that library code uses.
struct Runtime {
  Heap& heap;
  const std::tm& now;
};

// Arguments by parameter. Throws RenderError for one too many or of an unknown name.
class Bound {
 public:
  Bound(std::string_view function, const CallArgs& args, std::initializer_list<std::string_view> params,
        size_t required = 0);
  // The argument, or null if it was not given.
  const Value* operator[](size_t i) const { return values_[i]; }
  bool flag(size_t i, bool otherwise) const { return values_[i] == nullptr ? otherwise : truth(*values_[i]); }
  int64_t integer(size_t i, int64_t otherwise) const;
  const Text& text(size_t i) const;  // of a required str

 private:
  std::string_view function_;
  std::vector<const Value*> values_;
};

bool is_filter(std::string_view name);
bool is_test(std::string_view name);
// `name` must be one: the parser has looked it up.
Value apply_filter(Runtime& runtime, std::string_view name, const Value& value, const CallArgs& args);
bool apply_test(Runtime& runtime, std::string_view name, const Value& value, const CallArgs& args);

// Whether `self` has a method of that name, and whether it is one that would change `self`: the sandbox hides those.
bool has_method(const Value& self, std::string_view name);
bool is_refused(const Value& self, std::string_view name);
Value call_method(Runtime& runtime, std::string_view name, const Value& self, const CallArgs& args);

// range, dict, namespace, raise_exception, strftime_now.
bool is_function(std::string_view name);
Value call_function(Runtime& runtime, std::string_view name, const CallArgs& args);

// value[key] and value.key; undefined where there is nothing.
Value get_item(Runtime& runtime, const Value& value, const Value& key);
Value get_attribute(Runtime& runtime, const Value& value, std::string_view name);
Value get_slice(Runtime& runtime, const Value& value, const Value* begin, const Value* end, const Value* step);

// loop.name of a running loop; see renderer.cc.
Value loop_attribute(Heap& heap, const Loop& loop, std::string_view name);

// Python's json.dumps.
struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  bool has_indent = false;
  std::string indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
Text dump_json(Heap& heap, const Value& value, const JsonStyle& style);

// a op b for arithmetic.
Value add(Heap& heap, const Value& a, const Value& b);
Value arithmetic(Heap& heap, char op, const Value& a, const Value& b);  // - * / f % p; f is //, p is **

}  // namespace eadem::io::chat
