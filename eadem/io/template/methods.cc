// SPDX-License-Identifier: Apache-2.0
//
// Methods of str, dict and list.
#include <algorithm>
#include <array>
#include <optional>

#include "eadem/io/template/library.h"
#include "eadem/io/template/python_text.h"
#include "eadem/io/template/text_functions.h"

namespace eadem::io::chat {
namespace {

using Method = Value (*)(Runtime&, const Value& self, const CallArgs&);
struct MethodEntry {
  std::string_view name;
  Method call;
};

const Text& text_of(const Value& self) { return *self.text(); }
bool markup_of(const Value& self) { return self.as<String>()->markup; }
Value result(Runtime& rt, const Value& self, Text text) { return rt.heap.text(std::move(text), markup_of(self)); }

// The characters to strip: white space if the argument is missing or none.
template <bool kLeft, bool kRight>
Value strip(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("strip", args, {"chars"});
  const Text& text = text_of(self);
  if (bound[0] == nullptr || bound[0]->is<None>()) return result(rt, self, strip_text(text, nullptr, kLeft, kRight));
  rt.heap.charge(text.size() * bound.text(0).size());
  return result(rt, self, strip_text(text, &bound.text(0).bytes(), kLeft, kRight));
}

template <bool kFromRight>
Value split(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("split", args, {"sep", "maxsplit"});
  const int64_t limit = bound.integer(1, -1);
  const Text& text = text_of(self);
  const bool by_space = bound[0] == nullptr || bound[0]->is<None>();
  if (!by_space && bound.text(0).empty()) throw RenderError("split: empty separator");
  const std::vector<TextRange> parts = by_space ? split_at_space(text.bytes(), limit, kFromRight)
                                                : split_at(text.bytes(), bound.text(0).bytes(), limit, kFromRight);
  std::vector<Value> items;
  for (const TextRange part : parts) items.push_back(result(rt, self, text.slice(part.begin, part.end)));
  return rt.heap.list(std::move(items));
}

Value splitlines(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("splitlines", args, {"keepends"});
  const Text& text = text_of(self);
  const std::vector<TextRange> lines = split_lines(text.bytes());
  std::vector<Value> items;
  for (size_t i = 0; i < lines.size(); ++i) {
    size_t end = lines[i].end;
    if (bound.flag(0, false)) end = i + 1 < lines.size() ? lines[i + 1].begin : text.size();
    items.push_back(result(rt, self, text.slice(lines[i].begin, end)));
  }
  return rt.heap.list(std::move(items));
}

Value replace(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("replace", args, {"old", "new", "count"}, 2);
  const Text& to = bound.text(1);
  return result(rt, self,
                replace_text(rt.heap, text_of(self), bound.text(0).bytes(),
                             markup_of(self) && !markup_of(*bound[1]) ? escape_html(to) : to, bound.integer(2, -1)));
}

Value upper(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("upper", args, {});
  return result(rt, self, text_of(self).map_runs(to_upper));
}
Value lower(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("lower", args, {});
  return result(rt, self, text_of(self).map_runs(to_lower));
}
Value title(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("title", args, {});
  return result(rt, self, title_text(text_of(self)));
}
Value capitalize(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("capitalize", args, {});
  return result(rt, self, capitalize_text(text_of(self)));
}

// The part of `text` from the code point that argument `at` gives to the one that `at + 1` gives, counted as by slices
// of Python. Null if the part would begin behind its end.
std::optional<TextRange> bounded(Runtime& rt, const Bound& bound, size_t at, std::string_view text) {
  const auto given = [&](size_t i) { return bound[i] != nullptr && !bound[i]->is<None>(); };
  if (!given(at) && !given(at + 1)) return TextRange{0, text.size()};
  rt.heap.charge(text.size());
  const auto length = static_cast<int64_t>(count_code_points(text));
  const auto place = [&](size_t i, int64_t otherwise) {
    const int64_t value = given(i) ? bound.integer(i, 0) : otherwise;
    return value < 0 ? std::max<int64_t>(value + length, 0) : value;
  };
  const int64_t begin = place(at, 0), end = std::min(place(at + 1, length), length);
  if (begin > end) return std::nullopt;
  TextRange range{0, 0};
  for (int64_t i = 0; i < end; ++i) {
    range.end = code_point_at(text, range.end).end;
    if (i + 1 == begin) range.begin = range.end;
  }
  return range;
}

// startswith and endswith; the argument may be a tuple of texts.
template <bool kAtEnd>
Value has_affix(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound(kAtEnd ? "endswith" : "startswith", args, {"affix", "start", "end"}, 1);
  const auto range = bounded(rt, bound, 1, text_of(self).bytes());
  const std::string_view text =
      range ? std::string_view(text_of(self).bytes()).substr(range->begin, range->end - range->begin)
            : std::string_view();
  const auto matches = [&](const Value& affix) {
    if (affix.text() == nullptr) throw RenderError("startswith and endswith need a str, not {}", type_name(affix));
    const std::string& part = affix.text()->bytes();
    rt.heap.charge(part.size());
    return range && part.size() <= text.size() &&
           text.compare(kAtEnd ? text.size() - part.size() : 0, part.size(), part) == 0;
  };
  if (const List* list = bound[0]->list(); list != nullptr && list->kind == ListKind::tuple) {
    return std::any_of(list->items.begin(), list->items.end(), matches);
  }
  return matches(*bound[0]);
}

template <bool kPrefix>
Value remove_affix(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("removeprefix", args, {"affix"}, 1);
  const Text& text = text_of(self);
  const std::string& part = bound.text(0).bytes();
  if (part.size() > text.size()) return self;
  const size_t rest = text.size() - part.size();
  if (text.bytes().compare(kPrefix ? 0 : rest, part.size(), part) != 0) return self;
  return result(rt, self, kPrefix ? text.slice(part.size(), text.size()) : text.slice(0, rest));
}

// find, rfind, index and rindex, in code points.
template <bool kFromRight, bool kRequired>
Value find_part(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("find", args, {"sub", "start", "end"}, 1);
  const std::string_view text = text_of(self).bytes();
  rt.heap.charge(text.size());
  const std::string& part = bound.text(0).bytes();
  size_t at = std::string::npos;
  if (const auto range = bounded(rt, bound, 1, text)) {
    const std::string_view inside = text.substr(range->begin, range->end - range->begin);
    at = kFromRight ? inside.rfind(part) : inside.find(part);
    if (at != std::string::npos) at += range->begin;
  }
  if (at == std::string::npos) {
    if (kRequired) throw RenderError("substring not found");
    return int64_t{-1};
  }
  return static_cast<int64_t>(count_code_points(text.substr(0, at)));
}

Value count_part(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("count", args, {"sub", "start", "end"}, 1);
  const std::string& part = bound.text(0).bytes();
  const auto range = bounded(rt, bound, 1, text_of(self).bytes());
  if (!range) return int64_t{0};
  const std::string_view text = std::string_view(text_of(self).bytes()).substr(range->begin, range->end - range->begin);
  rt.heap.charge(text.size());
  if (part.empty()) return static_cast<int64_t>(count_code_points(text) + 1);
  return static_cast<int64_t>(split_at(text, part, -1, false).size() - 1);
}

template <bool kFromRight>
Value partition(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("partition", args, {"sep"}, 1);
  const Text& text = text_of(self);
  const std::string& part = bound.text(0).bytes();
  if (part.empty()) throw RenderError("partition: empty separator");
  size_t at = kFromRight ? text.bytes().rfind(part) : text.bytes().find(part);
  size_t end = at + part.size();
  if (at == std::string::npos) at = end = kFromRight ? 0 : text.size();
  return rt.heap.list({result(rt, self, text.slice(0, at)), result(rt, self, text.slice(at, end)),
                       result(rt, self, text.slice(end, text.size()))},
                      ListKind::tuple);
}

Value join(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("join", args, {"iterable"}, 1);
  Text text;
  bool first = true;
  for (const Value& item : iterate(rt.heap, *bound[0])) {
    if (item.text() == nullptr) throw RenderError("join: expected str, got {}", type_name(item));
    if (!first) append_str(rt.heap, text, self);
    first = false;
    if (markup_of(self) && !markup_of(item)) {
      text.append(escape_html(*item.text()));
    } else {
      append_str(rt.heap, text, item);
    }
  }
  return result(rt, self, std::move(text));
}

// isdigit and its kin: every character, and at least one.
template <bool (*kIs)(char32_t)>
Value all_chars(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("is...", args, {});
  const std::string& text = text_of(self).bytes();
  rt.heap.charge(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const CodePoint c = code_point_at(text, pos);
    if (!kIs(c.value)) return false;
    pos = c.end;
  }
  return !text.empty();
}
bool is_alnum(char32_t c) { return is_letter(c) || is_decimal(c); }

template <bool kUpper>
Value has_case(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("is...", args, {});
  rt.heap.charge(text_of(self).size());
  return text_has_case(text_of(self).bytes(), kUpper);
}

constexpr auto kStringMethods = std::to_array<MethodEntry>({
    {"strip", strip<true, true>},
    {"lstrip", strip<true, false>},
    {"rstrip", strip<false, true>},
    {"split", split<false>},
    {"rsplit", split<true>},
    {"splitlines", splitlines},
    {"replace", replace},
    {"upper", upper},
    {"lower", lower},
    {"title", title},
    {"capitalize", capitalize},
    {"startswith", has_affix<false>},
    {"endswith", has_affix<true>},
    {"removeprefix", remove_affix<true>},
    {"removesuffix", remove_affix<false>},
    {"find", find_part<false, false>},
    {"rfind", find_part<true, false>},
    {"index", find_part<false, true>},
    {"rindex", find_part<true, true>},
    {"count", count_part},
    {"partition", partition<false>},
    {"rpartition", partition<true>},
    {"join", join},
    {"isdigit", all_chars<is_decimal>},
    {"isdecimal", all_chars<is_decimal>},
    {"isnumeric", all_chars<is_decimal>},
    {"isalpha", all_chars<is_letter>},
    {"isalnum", all_chars<is_alnum>},
    {"isspace", all_chars<is_python_space>},
    {"isupper", has_case<true>},
    {"islower", has_case<false>},
});

Value dict_get(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("get", args, {"key", "default"}, 1);
  if (const Value* value = find(rt.heap, *self.dict(), *bound[0])) return *value;
  return bound[1] == nullptr ? Value(None{}) : *bound[1];
}
Value dict_view(Runtime& rt, const CallArgs& args, std::vector<Value> items, std::string_view name) {
  const Bound bound(name, args, {});
  List* list = rt.heap.list(std::move(items), ListKind::view);
  list->view = name;
  return list;
}
Value dict_items(Runtime& rt, const Value& self, const CallArgs& args) {
  std::vector<Value> items;
  for (const auto& [key, value] : self.dict()->entries) items.push_back(rt.heap.list({key, value}, ListKind::tuple));
  return dict_view(rt, args, std::move(items), "dict_items");
}
Value dict_keys(Runtime& rt, const Value& self, const CallArgs& args) {
  return dict_view(rt, args, iterate(rt.heap, self), "dict_keys");
}
Value dict_values(Runtime& rt, const Value& self, const CallArgs& args) {
  std::vector<Value> items;
  for (const auto& [_, value] : self.dict()->entries) items.push_back(value);
  return dict_view(rt, args, std::move(items), "dict_values");
}
Value dict_copy(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("copy", args, {});
  Dict* copy = rt.heap.dict();
  for (const auto& [key, value] : self.dict()->entries) set(rt.heap, *copy, key, value);
  return copy;
}

// Methods that change a value: the sandbox refuses them.
Value refuse(Runtime&, const Value& self, const CallArgs&) {
  throw RenderError("a template must not change a {}", type_name(self));
}

constexpr auto kDictMethods = std::to_array<MethodEntry>({
    {"get", dict_get},
    {"items", dict_items},
    {"keys", dict_keys},
    {"values", dict_values},
    {"copy", dict_copy},
    {"clear", refuse},
    {"pop", refuse},
    {"popitem", refuse},
    {"setdefault", refuse},
    {"update", refuse},
});

Value list_count(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("count", args, {"value"}, 1);
  const auto& items = self.list()->items;
  return static_cast<int64_t>(
      std::count_if(items.begin(), items.end(), [&](const Value& item) { return equal(rt.heap, item, *bound[0]); }));
}
Value list_index(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("index", args, {"value"}, 1);
  const auto& items = self.list()->items;
  for (size_t i = 0; i < items.size(); ++i) {
    if (equal(rt.heap, items[i], *bound[0])) return static_cast<int64_t>(i);
  }
  throw RenderError("index: the value is not in the list");
}
Value list_copy(Runtime& rt, const Value& self, const CallArgs& args) {
  const Bound bound("copy", args, {});
  return rt.heap.list(self.list()->items);
}

constexpr auto kListMethods = std::to_array<MethodEntry>({
    {"count", list_count},
    {"index", list_index},
    {"copy", list_copy},
    {"append", refuse},
    {"clear", refuse},
    {"extend", refuse},
    {"insert", refuse},
    {"pop", refuse},
    {"remove", refuse},
    {"reverse", refuse},
    {"sort", refuse},
});

template <typename Table>
Method method_named(const Table& table, std::string_view name) {
  for (const MethodEntry& entry : table) {
    if (entry.name == name) return entry.call;
  }
  return nullptr;
}

Method find_method(const Value& self, std::string_view name) {
  if (self.is<String>()) return method_named(kStringMethods, name);
  if (self.dict() != nullptr) return method_named(kDictMethods, name);
  if (const List* list = self.list()) {
    if (list->kind == ListKind::list) return method_named(kListMethods, name);
    if (list->kind == ListKind::tuple && (name == "count" || name == "index")) return method_named(kListMethods, name);
  }
  return nullptr;
}

}  // namespace

bool has_method(const Value& self, std::string_view name) { return find_method(self, name) != nullptr; }
bool is_refused(const Value& self, std::string_view name) { return find_method(self, name) == refuse; }

Value call_method(Runtime& runtime, std::string_view name, const Value& self, const CallArgs& args) {
  return find_method(self, name)(runtime, self, args);
}

}  // namespace eadem::io::chat
