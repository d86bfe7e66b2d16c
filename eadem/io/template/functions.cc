// SPDX-License-Identifier: Apache-2.0
//
// The functions that a template can call by name.
#include <ctime>

#include "eadem/io/template/library.h"

namespace eadem::io::chat {
namespace {

Value call_range(Runtime& rt, const CallArgs& args) {
  const Bound bound("range", args, {"start", "stop", "step"}, 1);
  for (size_t i = 0; i < 3; ++i) {
    if (bound[i] != nullptr && as_integer(*bound[i]) == nullptr) {
      throw RenderError("range needs int, got {}", type_name(*bound[i]));
    }
  }
  const int64_t first = bound[1] == nullptr ? 0 : bound.integer(0, 0);
  const int64_t past = bound[1] == nullptr ? bound.integer(0, 0) : bound.integer(1, 0);
  const int64_t step = bound.integer(2, 1);
  if (step == 0) throw RenderError("range: the step must not be 0");
  std::vector<Value> items;
  for (int64_t i = first; step > 0 ? i < past : i > past;) {
    if (static_cast<int64_t>(items.size()) == rt.heap.limits().max_range) {
      throw RenderError("range has more than {} numbers", rt.heap.limits().max_range);
    }
    items.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return rt.heap.list(std::move(items), ListKind::range);
}

// The entries that dict() and namespace() take: a dict or pairs, then named arguments.
void fill(Runtime& rt, Dict& dict, const CallArgs& args) {
  if (args.positional.size() > 1) throw RenderError("dict takes at most 1 positional argument");
  for (const Value& from : args.positional) {
    if (from.dict() != nullptr) {
      for (const auto& [key, value] : from.dict()->entries) set(rt.heap, dict, key, value);
      continue;
    }
    for (const Value& item : iterate(rt.heap, from)) {
      const std::vector<Value> pair = iterate(rt.heap, item);
      if (pair.size() != 2) throw RenderError("dict needs pairs, got {} values", pair.size());
      set(rt.heap, dict, pair[0], pair[1]);
    }
  }
  for (const auto& [name, value] : args.named) set(rt.heap, dict, rt.heap.text(name, true), value);
}

Value call_dict(Runtime& rt, const CallArgs& args) {
  Dict* dict = rt.heap.dict();
  fill(rt, *dict, args);
  return dict;
}

Value call_namespace(Runtime& rt, const CallArgs& args) {
  Space* space = rt.heap.space();
  fill(rt, space->attributes, args);
  for (const auto& [key, _] : space->attributes.entries) {
    if (key.text() != nullptr && key.text()->bytes().starts_with('_')) {
      throw RenderError("a namespace cannot hold '{}', which begins with _", key.text()->bytes());
    }
  }
  return space;
}

Value call_raise(Runtime& rt, const CallArgs& args) {
  const Bound bound("raise_exception", args, {"message"}, 1);
  throw RenderError("{}", to_text(rt.heap, *bound[0]).bytes());
}

Value call_strftime(Runtime& rt, const CallArgs& args) {
  const Bound bound("strftime_now", args, {"format"}, 1);
  const Text& format = bound.text(0);
  if (format.empty()) return rt.heap.text("", true);
  char buffer[1024];
  const size_t size = std::strftime(buffer, sizeof buffer, format.bytes().c_str(), &rt.now);
  if (size == 0) throw RenderError("strftime_now: the date has more than {} bytes", sizeof buffer);
  return rt.heap.text(std::string_view(buffer, size), format.runs().size() == 1 && format.runs()[0].trusted);
}

using Function = Value (*)(Runtime&, const CallArgs&);
Function find_function(std::string_view name) {
  if (name == "range") return call_range;
  if (name == "dict") return call_dict;
  if (name == "namespace") return call_namespace;
  if (name == "raise_exception") return call_raise;
  if (name == "strftime_now") return call_strftime;
  return nullptr;
}

}  // namespace

bool is_function(std::string_view name) { return find_function(name) != nullptr; }
Value call_function(Runtime& runtime, std::string_view name, const CallArgs& args) {
  return find_function(name)(runtime, args);
}

}  // namespace eadem::io::chat
