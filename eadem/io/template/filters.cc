// SPDX-License-Identifier: Apache-2.0
//
// The filters: names that may stand after `|`.
#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <optional>

#include "eadem/io/template/library.h"
#include "eadem/io/template/text_functions.h"

namespace eadem::io::chat {
namespace {

using Filter = Value (*)(Runtime&, const Value&, const CallArgs&);
struct FilterEntry {
  std::string_view name;
  Filter call;
};

bool given(const Value* argument) { return argument != nullptr && !argument->is<None>(); }
bool is_markup(const Value& value) { return value.is<String>() && value.as<String>()->markup; }

// --- text

Value filter_default(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("default", args, {"default_value", "boolean"});
  if (!value.is<Undefined>() && !(bound.flag(1, false) && !truth(value))) return value;
  return bound[0] == nullptr ? rt.heap.text("", true) : *bound[0];
}

// A method of str, called with the text of any value.
Value as_method(Runtime& rt, std::string_view name, const Value& value, const CallArgs& args) {
  return call_method(rt, name, rt.heap.text(to_text(rt.heap, value), is_markup(value)), args);
}
Value filter_trim(Runtime& rt, const Value& value, const CallArgs& args) { return as_method(rt, "strip", value, args); }
Value filter_upper(Runtime& rt, const Value& value, const CallArgs& args) {
  return as_method(rt, "upper", value, args);
}
Value filter_lower(Runtime& rt, const Value& value, const CallArgs& args) {
  return as_method(rt, "lower", value, args);
}
Value filter_capitalize(Runtime& rt, const Value& value, const CallArgs& args) {
  return as_method(rt, "capitalize", value, args);
}

// Unlike str.title: words begin after white space and -({[< only.
Value filter_title(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("title", args, {});
  bool in_word = false;
  Text text = to_text(rt.heap, value).map_runs([&](std::string_view run) {
    std::string out;
    for (size_t pos = 0; pos < run.size();) {
      const CodePoint c = code_point_at(run, pos);
      const std::string_view bytes = run.substr(pos, c.end - pos);
      out += in_word ? to_lower(bytes) : to_upper(bytes);
      in_word =
          !is_python_space(c.value) && (c.value >= 0x80 || std::string_view("-({[<").find(bytes) == std::string::npos);
      pos = c.end;
    }
    return out;
  });
  return rt.heap.text(std::move(text));
}

Value filter_replace(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("replace", args, {"old", "new", "count"}, 2);
  return rt.heap.text(replace_text(rt.heap, to_text(rt.heap, value), to_text(rt.heap, *bound[0]).bytes(),
                                   to_text(rt.heap, *bound[1]), bound.integer(2, -1)));
}

Value filter_string(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("string", args, {});
  return value.is<String>() ? value : rt.heap.text(to_text(rt.heap, value));
}
Value filter_safe(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("safe", args, {});
  return rt.heap.text(to_text(rt.heap, value), true);
}
Value filter_escape(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("escape", args, {});
  return is_markup(value) ? value : rt.heap.text(escape_html(to_text(rt.heap, value)), true);
}
Value filter_forceescape(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("forceescape", args, {});
  return rt.heap.text(escape_html(to_text(rt.heap, value)), true);
}

Value filter_indent(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("indent", args, {"width", "first", "blank"});
  if (!value.is<String>()) throw RenderError("indent needs a str, got {}", type_name(value));
  Text indent;
  if (bound[0] != nullptr && bound[0]->text() != nullptr) {
    indent = *bound[0]->text();
  } else {
    const int64_t width = bound.integer(0, 4);
    rt.heap.charge(static_cast<uint64_t>(std::max<int64_t>(width, 0)));
    indent.append(std::string(static_cast<size_t>(std::max<int64_t>(width, 0)), ' '), true);
  }
  Text text = *value.text();
  text.append("\n", true);
  Text out;
  bool first = true;
  for (const TextRange line : split_lines(text.bytes())) {
    rt.heap.charge(indent.size());
    if (!first) out.append("\n", true);
    if (first ? bound.flag(1, false) : bound.flag(2, false) || line.begin < line.end) out.append(indent);
    out.append(text, line.begin, line.end);
    first = false;
  }
  return rt.heap.text(std::move(out), is_markup(value));
}

Value filter_tojson(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ensure_ascii = bound.flag(0, false);
  style.sort_keys = bound.flag(3, false);
  if (given(bound[1])) {
    style.has_indent = true;
    style.item_separator = ",";
    style.indent = bound[1]->text() != nullptr
                       ? bound[1]->text()->bytes()
                       : std::string(static_cast<size_t>(std::clamp<int64_t>(bound.integer(1, 0), 0, 1000)), ' ');
  }
  if (given(bound[2])) {
    const std::vector<Value> pair = iterate(rt.heap, *bound[2]);
    if (pair.size() != 2 || pair[0].text() == nullptr || pair[1].text() == nullptr) {
      throw RenderError("tojson: separators must be two str");
    }
    style.item_separator = pair[0].text()->bytes();
    style.key_separator = pair[1].text()->bytes();
  }
  return rt.heap.text(dump_json(rt.heap, value, style));
}

Value filter_from_json(Runtime&, const Value&, const CallArgs&) {
  throw RenderError("the filter 'from_json' is not part of Jinja or of transformers");
}

// --- numbers

// A number as Python reads it, where underscores may stand between digits; null for what is none.
std::optional<std::string> without_underscores(std::string_view text) {
  std::string digits;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto is_digit = [&](size_t at) {
      return at < text.size() && std::isalnum(static_cast<unsigned char>(text[at]));
    };
    if (text[i] != '_')
      digits += text[i];
    else if (i == 0 || !is_digit(i - 1) || !is_digit(i + 1))
      return std::nullopt;
  }
  return digits;
}

std::optional<double> python_float(std::string_view text) {
  const auto digits = without_underscores(text);
  // C also reads hexadecimal numbers and nan(...).
  if (!digits || digits->empty() || digits->find_first_of("xX(") != std::string::npos) return std::nullopt;
  char* stop = nullptr;
  const double number = std::strtod(digits->c_str(), &stop);
  return stop == digits->c_str() + digits->size() ? std::optional(number) : std::nullopt;
}

// In the given base; 0 is the one that a prefix such as 0x names.
std::optional<int64_t> python_int(std::string_view text, int64_t base) {
  const bool negative = text.starts_with('-');
  if (negative || text.starts_with('+')) text.remove_prefix(1);
  for (const auto& [letter, named] : {std::pair('x', 16), {'o', 8}, {'b', 2}}) {
    if (text.size() < 3 || text[0] != '0' || (text[1] | 0x20) != letter || (base != 0 && base != named)) continue;
    base = named;
    text.remove_prefix(text[2] == '_' ? 3 : 2);
    break;
  }
  if (base == 0) base = 10;
  auto digits = without_underscores(text);
  if (!digits || digits->empty() || (*digits)[0] == '-' || base < 2 || base > 36) return std::nullopt;
  if (negative) digits->insert(0, "-");
  int64_t integer = 0;
  const auto [last, error] =
      std::from_chars(digits->data(), digits->data() + digits->size(), integer, static_cast<int>(base));
  return error == std::errc() && last == digits->data() + digits->size() ? std::optional(integer) : std::nullopt;
}

Value filter_int(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("int", args, {"default", "base"});
  const Value otherwise = bound[0] == nullptr ? Value(int64_t{0}) : *bound[0];
  if (const int64_t* integer = as_integer(value)) return *integer;
  double number = NAN;
  if (const Text* text = value.text()) {
    const std::string digits(strip_text(*text, nullptr, true, true).bytes());
    rt.heap.charge(digits.size());
    if (const auto integer = python_int(digits, bound.integer(1, 10))) return *integer;
    number = python_float(digits).value_or(NAN);
  } else if (is_number(value)) {
    number = as_double(value);
  }
  if (!std::isfinite(number)) return otherwise;
  if (std::fabs(number) >= 0x1p63) throw RenderError("int: {} does not fit 64 bits", number);
  return static_cast<int64_t>(number);
}

Value filter_float(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("float", args, {"default"});
  if (is_number(value)) return as_double(value);
  if (const Text* text = value.text()) {
    const std::string digits(strip_text(*text, nullptr, true, true).bytes());
    rt.heap.charge(digits.size());
    if (const auto number = python_float(digits)) return *number;
  }
  return bound[0] == nullptr ? Value(0.0) : *bound[0];
}

Value filter_abs(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("abs", args, {});
  if (const int64_t* integer = as_integer(value)) {
    return *integer < 0 ? arithmetic(rt.heap, '-', int64_t{0}, *integer) : Value(*integer);
  }
  return std::fabs(as_double(value));
}

Value filter_round(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("round", args, {"precision", "method"});
  const int64_t precision = bound.integer(0, 0);
  if (precision < -300 || precision > 300) throw RenderError("round: precision {} is out of range", precision);
  const std::string method = bound[1] == nullptr ? "common" : bound.text(1).bytes();
  const double number = as_double(value);
  if (method == "ceil" || method == "floor") {
    const double scale = std::pow(10.0, static_cast<double>(precision));
    return (method == "ceil" ? std::ceil(number * scale) : std::floor(number * scale)) / scale;
  }
  if (method != "common") throw RenderError("round: method must be common, ceil or floor");
  if (const int64_t* integer = as_integer(value)) {
    if (precision >= 0) return *integer;
    if (precision < -18) return int64_t{0};
    const auto scale = static_cast<int64_t>(std::pow(10.0, static_cast<double>(-precision)));
    return arithmetic(rt.heap, '*', static_cast<int64_t>(std::nearbyint(number / static_cast<double>(scale))), scale);
  }
  if (!std::isfinite(number)) return number;
  if (precision >= 0) return std::strtod(fmt::format("{:.{}f}", number, precision).c_str(), nullptr);
  const double scale = std::pow(10.0, static_cast<double>(-precision));
  return std::nearbyint(number / scale) * scale;
}

// --- sequences

// The attribute of an item by a dotted path, whose parts may be indices.
Value attribute_of(Runtime& rt, const Value& item, const Value& path) {
  if (path.text() == nullptr) return get_item(rt, item, path);
  Value value = item;
  const Text& text = *path.text();
  for (const TextRange part : split_at(text.bytes(), ".", -1, false)) {
    const Text name = text.slice(part.begin, part.end);
    int64_t index = 0;
    const char *begin = name.bytes().data(), *end = begin + name.size();
    const auto [last, error] = std::from_chars(begin, end, index);
    const bool is_index = error == std::errc() && last == end && index >= 0;
    value = get_item(rt, value, is_index ? Value(index) : rt.heap.text(name));
  }
  return value;
}

Value fold_case(Runtime& rt, const Value& value, bool case_sensitive) {
  if (case_sensitive || value.text() == nullptr) return value;
  return rt.heap.text(value.text()->map_runs(to_lower));
}

// The keys that sort, min, max and unique compare.
std::vector<Value> sort_keys(Runtime& rt, const std::vector<Value>& items, const Value* attribute, bool case_sensitive,
                             bool many) {
  std::vector<Value> keys;
  for (const Value& item : items) {
    if (!given(attribute)) {
      keys.push_back(fold_case(rt, item, case_sensitive));
    } else if (many && attribute->text() == nullptr) {
      keys.emplace_back(rt.heap.list({fold_case(rt, attribute_of(rt, item, *attribute), case_sensitive)}));
    } else if (many) {
      std::vector<Value> parts;
      for (const TextRange part : split_at(attribute->text()->bytes(), ",", -1, false)) {
        const Value path = rt.heap.text(attribute->text()->slice(part.begin, part.end));
        parts.push_back(fold_case(rt, attribute_of(rt, item, path), case_sensitive));
      }
      keys.emplace_back(rt.heap.list(std::move(parts)));
    } else {
      keys.push_back(fold_case(rt, attribute_of(rt, item, *attribute), case_sensitive));
    }
  }
  return keys;
}

std::vector<Value> sorted(Runtime& rt, const std::vector<Value>& items, const std::vector<Value>& keys, bool reverse) {
  std::vector<size_t> order(items.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return reverse ? less(rt.heap, keys[b], keys[a]) : less(rt.heap, keys[a], keys[b]);
  });
  std::vector<Value> result;
  for (const size_t i : order) result.push_back(items[i]);
  return result;
}

Value filter_sort(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("sort", args, {"reverse", "case_sensitive", "attribute"});
  const std::vector<Value> items = iterate(rt.heap, value);
  const std::vector<Value> keys = sort_keys(rt, items, bound[2], bound.flag(1, false), true);
  return rt.heap.list(sorted(rt, items, keys, bound.flag(0, false)));
}

Value filter_dictsort(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("dictsort", args, {"case_sensitive", "by", "reverse"});
  if (value.dict() == nullptr) throw RenderError("dictsort needs a dict, got {}", type_name(value));
  const std::string by = bound[1] == nullptr ? "key" : bound.text(1).bytes();
  if (by != "key" && by != "value") throw RenderError("dictsort: by must be key or value");
  std::vector<Value> items, keys;
  for (const auto& [key, entry] : value.dict()->entries) {
    items.emplace_back(rt.heap.list({key, entry}, ListKind::tuple));
    keys.push_back(fold_case(rt, by == "key" ? key : entry, bound.flag(0, false)));
  }
  return rt.heap.list(sorted(rt, items, keys, bound.flag(2, false)));
}

template <bool kMax>
Value filter_extreme(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound(kMax ? "max" : "min", args, {"case_sensitive", "attribute"});
  const std::vector<Value> items = iterate(rt.heap, value);
  if (items.empty()) return {};
  const std::vector<Value> keys = sort_keys(rt, items, bound[1], bound.flag(0, false), false);
  size_t best = 0;
  for (size_t i = 1; i < items.size(); ++i) {
    if (kMax ? less(rt.heap, keys[best], keys[i]) : less(rt.heap, keys[i], keys[best])) best = i;
  }
  return items[best];
}

Value filter_unique(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("unique", args, {"case_sensitive", "attribute"});
  const std::vector<Value> items = iterate(rt.heap, value);
  const std::vector<Value> keys = sort_keys(rt, items, bound[1], bound.flag(0, false), false);
  Dict* seen = rt.heap.dict();
  std::vector<Value> result;
  for (size_t i = 0; i < items.size(); ++i) {
    if (find(rt.heap, *seen, keys[i]) != nullptr) continue;
    set(rt.heap, *seen, keys[i], true);
    result.push_back(items[i]);
  }
  return rt.heap.list(std::move(result), ListKind::generator);
}

Value filter_length(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("length", args, {});
  if (value.text() != nullptr) rt.heap.charge(value.text()->size());
  return length(value);
}
Value filter_list(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("list", args, {});
  return rt.heap.list(iterate(rt.heap, value));
}
Value filter_first(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("first", args, {});
  const std::vector<Value> items = iterate(rt.heap, value);
  return items.empty() ? Value() : items.front();
}
Value filter_last(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("last", args, {});
  if (value.list() != nullptr && value.list()->kind == ListKind::generator) {
    throw RenderError("a generator cannot be reversed");
  }
  const std::vector<Value> items = iterate(rt.heap, value);
  return items.empty() ? Value() : items.back();
}
Value filter_reverse(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("reverse", args, {});
  std::vector<Value> items = iterate(rt.heap, value);
  std::reverse(items.begin(), items.end());
  if (!value.is<String>()) return rt.heap.list(std::move(items), ListKind::generator);
  Text text;
  for (const Value& item : items) text.append(*item.text());
  return rt.heap.text(std::move(text));
}
Value filter_items(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("items", args, {});
  if (!value.is<Undefined>() && value.dict() == nullptr) {
    throw RenderError("items needs a dict, got {}", type_name(value));
  }
  std::vector<Value> items;
  if (const Dict* dict = value.dict()) {
    for (const auto& [key, entry] : dict->entries) items.emplace_back(rt.heap.list({key, entry}, ListKind::tuple));
  }
  return rt.heap.list(std::move(items), ListKind::generator);
}

Value filter_join(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("join", args, {"d", "attribute"});
  const Text separator = bound[0] == nullptr ? Text() : to_text(rt.heap, *bound[0]);
  Text text;
  bool first = true;
  for (const Value& item : iterate(rt.heap, value)) {
    rt.heap.charge(separator.size());
    if (!first) text.append(separator);
    first = false;
    append_str(rt.heap, text, given(bound[1]) ? attribute_of(rt, item, *bound[1]) : item);
  }
  return rt.heap.text(std::move(text));
}

Value filter_sum(Runtime& rt, const Value& value, const CallArgs& args) {
  const Bound bound("sum", args, {"attribute", "start"});
  Value total = bound[1] == nullptr ? Value(int64_t{0}) : *bound[1];
  if (total.is<String>()) throw RenderError("sum cannot add str");
  for (const Value& item : iterate(rt.heap, value)) {
    total = add(rt.heap, total, given(bound[0]) ? attribute_of(rt, item, *bound[0]) : item);
  }
  return total;
}

// The arguments after the first `count`, for a filter or test that another one calls.
CallArgs rest_of(const CallArgs& args, size_t count) {
  CallArgs rest;
  rest.positional.assign(args.positional.begin() + static_cast<ptrdiff_t>(count), args.positional.end());
  rest.named = args.named;
  return rest;
}

Value filter_map(Runtime& rt, const Value& value, const CallArgs& args) {
  std::vector<Value> result;
  if (!truth(value)) return rt.heap.list({}, ListKind::generator);  // none, too, as in Jinja
  if (args.positional.empty()) {
    const Bound bound("map", args, {"attribute", "default"}, 1);
    for (const Value& item : iterate(rt.heap, value)) {
      const Value mapped = attribute_of(rt, item, *bound[0]);
      result.push_back(mapped.is<Undefined>() && bound[1] != nullptr ? *bound[1] : mapped);
    }
    return rt.heap.list(std::move(result), ListKind::generator);
  }
  const Text* name = args.positional[0].text();
  if (name == nullptr || !is_filter(name->bytes())) throw RenderError("map needs the name of a filter");
  const CallArgs rest = rest_of(args, 1);
  for (const Value& item : iterate(rt.heap, value)) result.push_back(apply_filter(rt, name->bytes(), item, rest));
  return rt.heap.list(std::move(result), ListKind::generator);
}

template <bool kKeep, bool kAttribute>
Value filter_select(Runtime& rt, const Value& value, const CallArgs& args) {
  const size_t at = kAttribute ? 1 : 0;
  if (args.positional.size() < at) throw RenderError("selectattr and rejectattr need an attribute");
  const Text* name = args.positional.size() > at ? args.positional[at].text() : nullptr;
  if (args.positional.size() > at && (name == nullptr || !is_test(name->bytes()))) {
    throw RenderError("select and reject need the name of a test");
  }
  const CallArgs rest = rest_of(args, std::min(args.positional.size(), at + 1));
  std::vector<Value> result;
  if (!truth(value)) return rt.heap.list({}, ListKind::generator);  // none, too, as in Jinja
  for (const Value& item : iterate(rt.heap, value)) {
    const Value tested = kAttribute ? attribute_of(rt, item, args.positional[0]) : item;
    const bool holds = name == nullptr ? truth(tested) : apply_test(rt, name->bytes(), tested, rest);
    if (holds == kKeep) result.push_back(item);
  }
  return rt.heap.list(std::move(result), ListKind::generator);
}

constexpr auto kFilters = std::to_array<FilterEntry>({
    {"default", filter_default},
    {"d", filter_default},
    {"trim", filter_trim},
    {"upper", filter_upper},
    {"lower", filter_lower},
    {"capitalize", filter_capitalize},
    {"title", filter_title},
    {"replace", filter_replace},
    {"string", filter_string},
    {"safe", filter_safe},
    {"escape", filter_escape},
    {"e", filter_escape},
    {"forceescape", filter_forceescape},
    {"indent", filter_indent},
    {"tojson", filter_tojson},
    {"from_json", filter_from_json},
    {"int", filter_int},
    {"float", filter_float},
    {"abs", filter_abs},
    {"round", filter_round},
    {"sort", filter_sort},
    {"dictsort", filter_dictsort},
    {"min", filter_extreme<false>},
    {"max", filter_extreme<true>},
    {"unique", filter_unique},
    {"length", filter_length},
    {"count", filter_length},
    {"list", filter_list},
    {"first", filter_first},
    {"last", filter_last},
    {"reverse", filter_reverse},
    {"items", filter_items},
    {"join", filter_join},
    {"sum", filter_sum},
    {"map", filter_map},
    {"select", filter_select<true, false>},
    {"reject", filter_select<false, false>},
    {"selectattr", filter_select<true, true>},
    {"rejectattr", filter_select<false, true>},
});

Filter filter_named(std::string_view name) {
  for (const FilterEntry& entry : kFilters) {
    if (entry.name == name) return entry.call;
  }
  return nullptr;
}

}  // namespace

bool is_filter(std::string_view name) { return filter_named(name) != nullptr; }

Value apply_filter(Runtime& runtime, std::string_view name, const Value& value, const CallArgs& args) {
  return filter_named(name)(runtime, value, args);
}

}  // namespace eadem::io::chat
