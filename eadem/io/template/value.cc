// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/template/value.h"

#include <algorithm>
#include <cmath>

#include "eadem/io/template/python_text.h"
#include "eadem/io/text.h"

namespace eadem::io::chat {
namespace {

constexpr int kMaxNesting = 200;  // of values in values; a namespace can even hold itself

void check_nesting(int depth) {
  if (depth > kMaxNesting) throw RenderError("values are nested more than {} deep", kMaxNesting);
}

std::string_view quotes_of(std::string_view text) {
  return text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos ? "\"" : "'";
}

std::string repr_run(std::string_view text, char delimiter) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    const CodePoint c = code_point_at(text, pos);
    if (c.value == static_cast<unsigned char>(delimiter) || c.value == '\\') {
      out += '\\';
      out += static_cast<char>(c.value);
    } else if (c.value == '\n') {
      out += "\\n";
    } else if (c.value == '\r') {
      out += "\\r";
    } else if (c.value == '\t') {
      out += "\\t";
    } else if (is_printable(c.value)) {
      out += text.substr(pos, c.end - pos);
    } else if (c.value < 0x100) {
      out += fmt::format("\\x{:02x}", static_cast<uint32_t>(c.value));
    } else if (c.value < 0x10000) {
      out += fmt::format("\\u{:04x}", static_cast<uint32_t>(c.value));
    } else {
      out += fmt::format("\\U{:08x}", static_cast<uint32_t>(c.value));
    }
    pos = c.end;
  }
  return out;
}

}  // namespace

void Text::append(std::string_view bytes, bool trusted) {
  if (bytes.empty()) return;
  bytes_ += bytes;
  if (!runs_.empty() && runs_.back().trusted == trusted) {
    runs_.back().end = bytes_.size();
  } else {
    runs_.push_back({bytes_.size(), trusted});
  }
}

void Text::append(const Text& other, size_t begin, size_t end) {
  other.for_each_run(begin, end, [&](std::string_view run, bool trusted) { append(run, trusted); });
}

Value Heap::text(Text text, bool markup) {
  charge(text.size() + 1);
  return String{std::make_shared<const Text>(std::move(text)), markup};
}
List* Heap::list(std::vector<Value> items, ListKind kind) {
  charge(4 * items.size() + 4);
  return &lists_.emplace_back(List{kind, {}, std::move(items)});
}
Dict* Heap::dict() {
  charge(16);
  return &dicts_.emplace_back();
}
Space* Heap::space() {
  charge(16);
  return &spaces_.emplace_back();
}
const Value* Heap::keep(Value value) {
  charge(4);
  return &values_.emplace_back(std::move(value));
}
void Heap::refuse() const { throw RenderError("the template takes more than {} steps", limits_.max_work); }

const Value* find(const Dict& dict, std::string_view key) {
  const auto found = dict.by_text.find(key);
  return found == dict.by_text.end() ? nullptr : &dict.entries[found->second].second;
}

const Value* find(Heap& heap, const Dict& dict, const Value& key) {
  if (key.list() != nullptr && key.list()->kind != ListKind::tuple) {
    throw RenderError("{} is not hashable", type_name(key));
  }
  if (key.dict() != nullptr) throw RenderError("dict is not hashable");
  if (const Text* text = key.text()) return find(dict, text->bytes());
  heap.charge(dict.entries.size());
  for (const auto& [known, value] : dict.entries) {
    if (equal(heap, known, key)) return &value;
  }
  return nullptr;
}

void set(Heap& heap, Dict& dict, const Value& key, Value value) {
  if (const Value* known = find(heap, dict, key)) {
    *const_cast<Value*>(known) = std::move(value);
    return;
  }
  heap.charge(8);
  dict.entries.emplace_back(key, std::move(value));
  if (const Text* text = key.text()) dict.by_text.emplace(text->bytes(), dict.entries.size() - 1);
}

std::string_view type_name(const Value& value) {
  if (const List* list = value.list()) {
    switch (list->kind) {
      case ListKind::list: return "list";
      case ListKind::tuple: return "tuple";
      case ListKind::range: return "range";
      case ListKind::view: return list->view;
      case ListKind::generator: return "generator";
    }
  }
  if (value.is<Undefined>()) return "Undefined";
  if (value.is<None>()) return "NoneType";
  if (value.is<bool>()) return "bool";
  if (value.is<int64_t>()) return "int";
  if (value.is<double>()) return "float";
  if (value.is<String>()) return "str";
  if (value.is<Dict*>()) return "dict";
  if (value.is<Space*>()) return "Namespace";
  if (value.is<Macro*>()) return "Macro";
  if (value.is<Loop*>()) return "LoopContext";
  return "function";
}

bool truth(const Value& value) {
  if (value.is<Undefined>() || value.is<None>()) return false;
  if (const bool* flag = value.as<bool>()) return *flag;
  if (const int64_t* integer = value.as<int64_t>()) return *integer != 0;
  if (const double* number = value.as<double>()) return *number != 0;
  if (const Text* text = value.text()) return !text->empty();
  if (const List* list = value.list()) return list->kind == ListKind::generator || !list->items.empty();
  if (const Dict* dict = value.dict()) return !dict->entries.empty();
  return true;
}

bool is_number(const Value& value) { return value.is<bool>() || value.is<int64_t>() || value.is<double>(); }

double as_double(const Value& value) {
  if (const bool* flag = value.as<bool>()) return *flag;
  if (const int64_t* integer = value.as<int64_t>()) return static_cast<double>(*integer);
  if (const double* number = value.as<double>()) return *number;
  throw RenderError("expected a number, got {}", type_name(value));
}

const int64_t* as_integer(const Value& value) {
  static constexpr int64_t kBools[] = {0, 1};
  if (const bool* flag = value.as<bool>()) return &kBools[*flag];
  return value.as<int64_t>();
}

bool equal(Heap& heap, const Value& a, const Value& b, int depth) {
  check_nesting(depth);
  heap.charge(1);
  if (is_number(a) && is_number(b)) {
    const int64_t *left = as_integer(a), *right = as_integer(b);
    return left != nullptr && right != nullptr ? *left == *right : as_double(a) == as_double(b);
  }
  if (const Text* left = a.text(), *right = b.text(); left != nullptr && right != nullptr) {
    heap.charge(std::min(left->size(), right->size()));
    return left->bytes() == right->bytes();
  }
  if (a.is<Undefined>()) return b.is<Undefined>();
  if (a.is<None>()) return b.is<None>();
  if (const List* left = a.list(), *right = b.list(); left != nullptr && right != nullptr) {
    if (left == right) return true;
    if (left->kind != right->kind || left->items.size() != right->items.size()) return false;
    if (left->kind == ListKind::generator) return false;
    for (size_t i = 0; i < left->items.size(); ++i) {
      if (!equal(heap, left->items[i], right->items[i], depth + 1)) return false;
    }
    return true;
  }
  if (const Dict* left = a.dict(), *right = b.dict(); left != nullptr && right != nullptr) {
    if (left->entries.size() != right->entries.size()) return false;
    for (const auto& [key, value] : left->entries) {
      const Value* other = find(heap, *right, key);
      if (other == nullptr || !equal(heap, value, *other, depth + 1)) return false;
    }
    return true;
  }
  if (a.is<Space*>() && b.is<Space*>()) return *a.as<Space*>() == *b.as<Space*>();
  if (a.is<Macro*>() && b.is<Macro*>()) return *a.as<Macro*>() == *b.as<Macro*>();
  return false;
}

bool less(Heap& heap, const Value& a, const Value& b, int depth) {
  check_nesting(depth);
  heap.charge(1);
  if (is_number(a) && is_number(b)) {
    const int64_t *left = as_integer(a), *right = as_integer(b);
    return left != nullptr && right != nullptr ? *left < *right : as_double(a) < as_double(b);
  }
  if (const Text* left = a.text(), *right = b.text(); left != nullptr && right != nullptr) {
    heap.charge(std::min(left->size(), right->size()));
    return left->bytes() < right->bytes();  // the order of UTF-8 is that of code points
  }
  if (const List* left = a.list(), *right = b.list(); left != nullptr && right != nullptr &&
                                                      left->kind == right->kind &&
                                                      (left->kind == ListKind::list || left->kind == ListKind::tuple)) {
    for (size_t i = 0; i < std::min(left->items.size(), right->items.size()); ++i) {
      if (!equal(heap, left->items[i], right->items[i], depth + 1)) {
        return less(heap, left->items[i], right->items[i], depth + 1);
      }
    }
    return left->items.size() < right->items.size();
  }
  throw RenderError("{} and {} have no order", type_name(a), type_name(b));
}

bool contains(Heap& heap, const Value& container, const Value& value) {
  if (const Text* text = container.text()) {
    const Text* part = value.text();
    if (part == nullptr) throw RenderError("'in' needs a str on the left of a str, not {}", type_name(value));
    heap.charge(text->size());
    return text->bytes().find(part->bytes()) != std::string::npos;
  }
  if (const Dict* dict = container.dict()) return find(heap, *dict, value) != nullptr;
  if (const List* list = container.list()) {
    return std::any_of(list->items.begin(), list->items.end(),
                       [&](const Value& item) { return equal(heap, item, value); });
  }
  if (container.is<Undefined>()) return false;
  throw RenderError("{} is not iterable", type_name(container));
}

int64_t length(const Value& value) {
  if (const Text* text = value.text()) return static_cast<int64_t>(count_code_points(text->bytes()));
  if (const List* list = value.list(); list != nullptr && list->kind != ListKind::generator) {
    return static_cast<int64_t>(list->items.size());
  }
  if (const Dict* dict = value.dict()) return static_cast<int64_t>(dict->entries.size());
  if (value.is<Undefined>()) return 0;
  throw RenderError("{} has no length", type_name(value));
}

std::vector<Value> characters(Heap& heap, const Text& text) {
  std::vector<Value> items;
  for (size_t pos = 0; pos < text.size();) {
    const size_t end = code_point_at(text.bytes(), pos).end;
    heap.charge(16);
    items.push_back(heap.text(text.slice(pos, end)));
    pos = end;
  }
  return items;
}

std::vector<Value> iterate(Heap& heap, const Value& value) {
  if (List* list = value.list()) {
    heap.charge(list->items.size());
    if (list->kind == ListKind::generator) return std::exchange(list->items, {});
    return list->items;
  }
  if (const Dict* dict = value.dict()) {
    heap.charge(dict->entries.size());
    std::vector<Value> keys;
    for (const auto& [key, _] : dict->entries) keys.push_back(key);
    return keys;
  }
  if (const Text* text = value.text()) return characters(heap, *text);
  if (value.is<Undefined>()) return {};
  throw RenderError("{} is not iterable", type_name(value));
}

void append_str(Heap& heap, Text& out, const Value& value) {
  if (const Text* text = value.text()) {
    heap.charge(text->size());
    out.append(*text);
  } else if (!value.is<Undefined>()) {
    append_repr(heap, out, value);
  }
}

Text to_text(Heap& heap, const Value& value) {
  Text text;
  append_str(heap, text, value);
  return text;
}

void append_repr(Heap& heap, Text& out, const Value& value, int depth) {
  check_nesting(depth);
  heap.charge(8);
  if (const Text* text = value.text()) {
    heap.charge(text->size());
    const std::string_view quotes = quotes_of(text->bytes());
    const bool markup = value.as<String>()->markup;
    if (markup) out.append("Markup(", true);
    out.append(quotes, true);
    out.append(text->map_runs([&](std::string_view run) { return repr_run(run, quotes[0]); }));
    out.append(quotes, true);
    if (markup) out.append(")", true);
    return;
  }
  if (const List* list = value.list()) {
    if (list->kind == ListKind::generator) throw RenderError("a generator is not text; use the filter list");
    if (list->kind == ListKind::range) throw RenderError("a range is not text; use the filter list");
    const bool view = list->kind == ListKind::view;
    const bool tuple = list->kind == ListKind::tuple;
    if (view) out.append(fmt::format("{}(", list->view), true);
    out.append(tuple ? "(" : "[", true);
    for (size_t i = 0; i < list->items.size(); ++i) {
      if (i > 0) out.append(", ", true);
      append_repr(heap, out, list->items[i], depth + 1);
    }
    if (tuple && list->items.size() == 1) out.append(",", true);
    out.append(tuple ? ")" : "]", true);
    if (view) out.append(")", true);
    return;
  }
  const Dict* dict = value.is<Space*>() ? &(*value.as<Space*>())->attributes : value.dict();
  if (dict != nullptr) {
    if (value.is<Space*>()) out.append("<Namespace ", true);
    out.append("{", true);
    for (size_t i = 0; i < dict->entries.size(); ++i) {
      if (i > 0) out.append(", ", true);
      append_repr(heap, out, dict->entries[i].first, depth + 1);
      out.append(": ", true);
      append_repr(heap, out, dict->entries[i].second, depth + 1);
    }
    out.append("}", true);
    if (value.is<Space*>()) out.append(">", true);
    return;
  }
  if (value.is<Undefined>()) {
    out.append("Undefined", true);
  } else if (value.is<None>()) {
    out.append("None", true);
  } else if (const bool* flag = value.as<bool>()) {
    out.append(*flag ? "True" : "False", true);
  } else if (const int64_t* integer = value.as<int64_t>()) {
    out.append(fmt::format("{}", *integer), true);
  } else if (const double* number = value.as<double>()) {
    out.append(float_repr(*number), true);
  } else {
    throw RenderError("a {} is not text", type_name(value));
  }
}

Text escape_html(const Text& text) {
  return text.map_runs([](std::string_view run) {
    std::string out;
    for (const char c : run) {
      switch (c) {
        case '&': out += "&amp;"; break;
        case '<': out += "&lt;"; break;
        case '>': out += "&gt;"; break;
        case '\'': out += "&#39;"; break;
        case '"': out += "&#34;"; break;
        default: out += c;
      }
    }
    return out;
  });
}

}  // namespace eadem::io::chat
