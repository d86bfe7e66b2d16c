// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "eadem/io/template/library.h"
#include "eadem/io/template/python_text.h"

namespace eadem::io::chat {
namespace {

std::string escape_run(std::string_view text, bool ensure_ascii) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    const CodePoint c = code_point_at(text, pos);
    switch (c.value) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      case '\b': out += "\\b"; break;
      case '\f': out += "\\f"; break;
      default:
        if (c.value >= 0x10000 && ensure_ascii) {
          const uint32_t rest = static_cast<uint32_t>(c.value) - 0x10000;
          out += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + (rest >> 10), 0xDC00 + (rest & 0x3FF));
        } else if (c.value < 0x20 || (ensure_ascii && c.value >= 0x7F)) {
          out += fmt::format("\\u{:04x}", static_cast<uint32_t>(c.value));
        } else {
          out += text.substr(pos, c.end - pos);
        }
    }
    pos = c.end;
  }
  return out;
}

std::string json_number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return float_repr(value);
}

class Dumper {
 public:
  Dumper(Heap& heap, const JsonStyle& style) : heap_(heap), style_(style) {}

  Text run(const Value& value) {
    write(value, 0);
    return std::move(out_);
  }

 private:
  void put(std::string_view text) {
    heap_.charge(text.size());
    out_.append(text, true);
  }
  void put_text(const Text& text) {
    put("\"");
    heap_.charge(text.size());
    out_.append(text.map_runs([&](std::string_view run) { return escape_run(run, style_.ensure_ascii); }));
    put("\"");
  }
  void new_line(int depth) {
    if (!style_.has_indent) return;
    put("\n");
    for (int i = 0; i < depth; ++i) put(style_.indent);
  }

  void write(const Value& value, int depth) {
    if (depth > 200) throw RenderError("tojson: values are nested more than 200 deep");
    heap_.charge(1);
    if (const Text* text = value.text()) {
      put_text(*text);
    } else if (const List* list = value.list();
               list != nullptr && (list->kind == ListKind::list || list->kind == ListKind::tuple)) {
      write_items('[', ']', list->items.size(), depth, [&](size_t i) { write(list->items[i], depth + 1); });
    } else if (const Dict* dict = value.dict()) {
      write_dict(*dict, depth);
    } else if (value.is<None>()) {
      put("null");
    } else if (const bool* flag = value.as<bool>()) {
      put(*flag ? "true" : "false");
    } else if (const int64_t* integer = value.as<int64_t>()) {
      put(fmt::format("{}", *integer));
    } else if (const double* number = value.as<double>()) {
      put(json_number(*number));
    } else {
      throw RenderError("tojson: {} is not JSON serializable", type_name(value));
    }
  }

  template <typename Write>
  void write_items(char open, char close, size_t count, int depth, Write write_item) {
    put(std::string_view(&open, 1));
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) put(style_.item_separator);
      new_line(depth + 1);
      write_item(i);
    }
    if (count > 0) new_line(depth);
    put(std::string_view(&close, 1));
  }

  void write_dict(const Dict& dict, int depth) {
    std::vector<const std::pair<Value, Value>*> entries;
    for (const auto& entry : dict.entries) entries.push_back(&entry);
    if (style_.sort_keys) {
      std::stable_sort(entries.begin(), entries.end(),
                       [&](const auto* a, const auto* b) { return less(heap_, a->first, b->first); });
    }
    write_items('{', '}', entries.size(), depth, [&](size_t i) {
      const Value& key = entries[i]->first;
      if (const Text* text = key.text()) {
        put_text(*text);
      } else if (is_number(key) || key.is<None>()) {
        put("\"");
        write(key, depth + 1);
        put("\"");
      } else {
        throw RenderError("tojson: keys must be str, int, float, bool or None, not {}", type_name(key));
      }
      put(style_.key_separator);
      write(entries[i]->second, depth + 1);
    });
  }

  Heap& heap_;
  const JsonStyle& style_;
  Text out_;
};

}  // namespace

Text dump_json(Heap& heap, const Value& value, const JsonStyle& style) { return Dumper(heap, style).run(value); }

}  // namespace eadem::io::chat
