// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic, subscripts, attributes and the binding of arguments.
#include <algorithm>
#include <cmath>

#include "eadem/io/template/library.h"
#include "eadem/io/template/python_text.h"

namespace eadem::io::chat {
namespace {

[[noreturn]] void refuse(std::string_view op, const Value& a, const Value& b) {
  throw RenderError("unsupported operand types for {}: {} and {}", op, type_name(a), type_name(b));
}

template <typename T>
T in_64_bits(T value, bool overflow) {
  if (overflow) throw RenderError("an integer does not fit 64 bits");
  return value;
}

int64_t floor_divide(int64_t a, int64_t b) {
  if (b == 0) throw RenderError("integer division or modulo by zero");
  if (b == -1) return in_64_bits(static_cast<int64_t>(0 - static_cast<uint64_t>(a)), a == INT64_MIN);
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

Value integer_arithmetic(char op, int64_t a, int64_t b) {
  int64_t result = 0;
  switch (op) {
    case '-': {
      const bool overflow = __builtin_sub_overflow(a, b, &result);
      return in_64_bits(result, overflow);
    }
    case '*': {
      const bool overflow = __builtin_mul_overflow(a, b, &result);
      return in_64_bits(result, overflow);
    }
    case '/':
      if (b == 0) throw RenderError("division by zero");
      return static_cast<double>(a) / static_cast<double>(b);
    case 'f': return floor_divide(a, b);
    case '%': return b == -1 ? int64_t{0} : a - floor_divide(a, b) * b;
    default: break;
  }
  if (b < 0) {
    if (a == 0) throw RenderError("0 cannot be raised to a negative power");
    return std::pow(static_cast<double>(a), static_cast<double>(b));
  }
  result = 1;
  bool overflow = false;
  for (int64_t base = a; b > 0 && !overflow;) {
    if (b & 1) overflow = __builtin_mul_overflow(result, base, &result);
    b >>= 1;
    if (b > 0) overflow = overflow || __builtin_mul_overflow(base, base, &base);
  }
  return in_64_bits(result, overflow);
}

Value float_arithmetic(char op, double a, double b) {
  if ((op == '/' || op == 'f' || op == '%') && b == 0) throw RenderError("float division by zero");
  switch (op) {
    case '-': return a - b;
    case '*': return a * b;
    case '/': return a / b;
    case 'f':
    case '%': {
      // As in Python, the quotient is that of what divides without rest.
      double rest = std::fmod(a, b);
      double quotient = (a - rest) / b;
      if (rest != 0 && (rest < 0) != (b < 0)) {
        rest += b;
        quotient -= 1;
      }
      if (op == '%') return rest == 0 ? std::copysign(0.0, b) : rest;
      if (quotient == 0) return std::copysign(0.0, a / b);
      const double floor = std::floor(quotient);
      return quotient - floor > 0.5 ? floor + 1 : floor;
    }
    default: return std::pow(a, b);
  }
}

Value repeat(Heap& heap, const Value& value, int64_t count) {
  const auto times = static_cast<uint64_t>(std::max<int64_t>(count, 0));
  if (const Text* text = value.text()) {
    if (times > 0) heap.charge(text->size() > heap.limits().max_work / times ? heap.limits().max_work : 0);
    heap.charge(text->size() * times);
    Text out;
    if (!text->empty()) {
      for (uint64_t i = 0; i < times; ++i) out.append(*text);
    }
    return heap.text(std::move(out), value.as<String>()->markup);
  }
  const List& list = *value.list();
  if (times > 0) heap.charge(list.items.size() > heap.limits().max_work / times ? heap.limits().max_work : 0);
  heap.charge(4 * list.items.size() * times);
  std::vector<Value> items;
  if (!list.items.empty()) {
    for (uint64_t i = 0; i < times; ++i) items.insert(items.end(), list.items.begin(), list.items.end());
  }
  return heap.list(std::move(items), list.kind);
}

bool is_sequence(const Value& value) {
  const List* list = value.list();
  return value.is<String>() || (list != nullptr && (list->kind == ListKind::list || list->kind == ListKind::tuple));
}

// format % values, for %s, %r, %d and %%.
Value format_percent(Heap& heap, const Value& format, const Value& values) {
  std::vector<Value> items{values};
  if (const List* list = values.list(); list != nullptr && list->kind == ListKind::tuple) items = list->items;
  const Text& text = *format.text();
  Text out;
  size_t used = 0, done = 0;
  for (size_t at; (at = text.bytes().find('%', done)) != std::string::npos;) {
    out.append(text, done, at);
    const char kind = at + 1 < text.size() ? text.bytes()[at + 1] : '\0';
    done = at + 2;
    if (kind == '%') {
      out.append("%", true);
      continue;
    }
    if (kind != 's' && kind != 'r' && kind != 'd') throw RenderError("'%' supports only %s, %r, %d and %%");
    if (used == items.size()) throw RenderError("not enough arguments for the format string");
    const Value& item = items[used++];
    if (kind == 's') {
      if (item.is<Undefined>()) continue;
      append_str(heap, out, item);
    } else if (kind == 'r') {
      append_repr(heap, out, item);
    } else {
      if (!is_number(item)) throw RenderError("%d needs a number, not {}", type_name(item));
      const int64_t* integer = as_integer(item);
      out.append(integer != nullptr ? fmt::format("{}", *integer) : fmt::format("{:.0f}", std::trunc(as_double(item))),
                 true);
    }
  }
  out.append(text, done, text.size());
  if (used < items.size() && values.dict() == nullptr) throw RenderError("too many arguments for the format string");
  heap.charge(text.size());
  return heap.text(std::move(out));
}

// An index in 0 .. size, as a slice clips it.
int64_t clip(int64_t index, int64_t size, int64_t lowest, int64_t highest) {
  if (index < 0) index += size;
  return std::clamp(index, lowest, highest);
}

int64_t slice_index(const Value& value) {
  const int64_t* index = as_integer(value);
  if (index == nullptr) throw RenderError("slice indices must be integers, not {}", type_name(value));
  return *index;
}

}  // namespace

Value add(Heap& heap, const Value& a, const Value& b) {
  if (is_number(a) && is_number(b)) {
    const int64_t *left = as_integer(a), *right = as_integer(b);
    if (left == nullptr || right == nullptr) return as_double(a) + as_double(b);
    int64_t sum = 0;
    const bool overflow = __builtin_add_overflow(*left, *right, &sum);
    return in_64_bits(sum, overflow);
  }
  if (const Text* left = a.text(), *right = b.text(); left != nullptr && right != nullptr) {
    const bool left_markup = a.as<String>()->markup, right_markup = b.as<String>()->markup;
    heap.charge(left->size() + right->size());
    Text sum = right_markup && !left_markup ? escape_html(*left) : *left;
    sum.append(left_markup && !right_markup ? escape_html(*right) : *right);
    return heap.text(std::move(sum), left_markup || right_markup);
  }
  const List *left = a.list(), *right = b.list();
  if (left == nullptr || right == nullptr || left->kind != right->kind || !is_sequence(a)) refuse("+", a, b);
  std::vector<Value> items = left->items;
  items.insert(items.end(), right->items.begin(), right->items.end());
  return heap.list(std::move(items), left->kind);
}

Value arithmetic(Heap& heap, char op, const Value& a, const Value& b) {
  if (is_number(a) && is_number(b)) {
    const int64_t *left = as_integer(a), *right = as_integer(b);
    if (left != nullptr && right != nullptr) return integer_arithmetic(op, *left, *right);
    return float_arithmetic(op, as_double(a), as_double(b));
  }
  if (op == '%' && a.is<String>() && !b.is<Undefined>()) return format_percent(heap, a, b);
  if (op == '*' && is_sequence(a) && as_integer(b) != nullptr) return repeat(heap, a, *as_integer(b));
  if (op == '*' && is_sequence(b) && as_integer(a) != nullptr) return repeat(heap, b, *as_integer(a));
  refuse(op == 'f' ? "//" : op == 'p' ? "**" : std::string_view(&op, 1), a, b);
}

Value get_attribute(Runtime& rt, const Value& value, std::string_view name) {
  if (const Undefined* undefined = value.as<Undefined>()) {
    throw RenderError("'{}' is undefined, so it has no '{}'", undefined->name, name);
  }
  if (is_refused(value, name)) return Undefined{name};
  if (has_method(value, name)) return Callable{name, rt.heap.keep(value)};
  if (const Dict* dict = value.dict()) {
    const Value* found = find(*dict, name);
    return found == nullptr ? Value(Undefined{name}) : *found;
  }
  if (value.is<Space*>()) {
    const Value* found = find((*value.as<Space*>())->attributes, name);
    return found == nullptr ? Value(Undefined{name}) : *found;
  }
  if (value.is<Loop*>()) return loop_attribute(rt.heap, **value.as<Loop*>(), name);
  return Undefined{name};
}

Value get_item(Runtime& rt, const Value& value, const Value& key) {
  if (const Undefined* undefined = value.as<Undefined>()) {
    throw RenderError("'{}' is undefined, so it has no items", undefined->name);
  }
  if (const Dict* dict = value.dict()) {
    const bool hashable = key.dict() == nullptr && (key.list() == nullptr || key.list()->kind == ListKind::tuple);
    if (const Value* found = hashable ? find(rt.heap, *dict, key) : nullptr) return *found;
  } else if (const int64_t* index = as_integer(key)) {
    if (const List* list = value.list(); list != nullptr && list->kind <= ListKind::range) {
      const auto size = static_cast<int64_t>(list->items.size());
      const int64_t at = *index < 0 ? *index + size : *index;
      return at < 0 || at >= size ? Value() : list->items[static_cast<size_t>(at)];
    }
    if (const Text* text = value.text()) {
      rt.heap.charge(text->size());
      const auto size = static_cast<int64_t>(count_code_points(text->bytes()));
      int64_t at = *index < 0 ? *index + size : *index;
      if (at < 0 || at >= size) return {};
      size_t pos = 0;
      while (at-- > 0) pos = code_point_at(text->bytes(), pos).end;
      return rt.heap.text(text->slice(pos, code_point_at(text->bytes(), pos).end), value.as<String>()->markup);
    }
  }
  const Text* name = key.text();
  if (name == nullptr) return {};
  if (value.dict() != nullptr && !has_method(value, name->bytes())) return {};
  // The name of a method or an attribute lives as long as the text that spells it.
  const Value* kept = rt.heap.keep(key);
  return get_attribute(rt, value, kept->text()->bytes());
}

Value get_slice(Runtime& rt, const Value& value, const Value* begin, const Value* end, const Value* step) {
  const Text* text = value.text();
  const List* list = value.list();
  if (value.is<Undefined>()) throw RenderError("'{}' is undefined, so it has no items", value.as<Undefined>()->name);
  if (text == nullptr && (list == nullptr || list->kind > ListKind::range)) {
    throw RenderError("a {} cannot be sliced", type_name(value));
  }
  const auto given = [](const Value* index) { return index != nullptr && !index->is<None>(); };
  const int64_t by = given(step) ? slice_index(*step) : 1;
  if (by == 0) throw RenderError("slice step cannot be zero");
  rt.heap.charge(text != nullptr ? text->size() : list->items.size());
  const int64_t size = length(value);
  const int64_t lowest = by > 0 ? 0 : -1, highest = by > 0 ? size : size - 1;
  const int64_t first = given(begin) ? clip(slice_index(*begin), size, lowest, highest) : by > 0 ? lowest : highest;
  const int64_t past = given(end) ? clip(slice_index(*end), size, lowest, highest) : by > 0 ? highest : lowest;
  std::vector<int64_t> picks;
  if (text != nullptr) {
    std::vector<size_t> starts;
    for (size_t pos = 0; pos < text->size(); pos = code_point_at(text->bytes(), pos).end) starts.push_back(pos);
    starts.push_back(text->size());
    Text out;
    if (by == 1) {
      if (first < past) out = text->slice(starts[static_cast<size_t>(first)], starts[static_cast<size_t>(past)]);
    } else {
      for (int64_t i = first; by > 0 ? i < past : i > past;) {
        out.append(*text, starts[static_cast<size_t>(i)], starts[static_cast<size_t>(i) + 1]);
        if (__builtin_add_overflow(i, by, &i)) break;
      }
    }
    return rt.heap.text(std::move(out), value.as<String>()->markup);
  }
  std::vector<Value> items;
  for (int64_t i = first; by > 0 ? i < past : i > past;) {
    items.push_back(list->items[static_cast<size_t>(i)]);
    if (__builtin_add_overflow(i, by, &i)) break;
  }
  return rt.heap.list(std::move(items), list->kind);
}

Bound::Bound(std::string_view function, const CallArgs& args, std::initializer_list<std::string_view> params,
             size_t required)
    : function_(function), values_(params.size(), nullptr) {
  if (args.positional.size() > params.size()) {
    throw RenderError("{} takes at most {} arguments, got {}", function, params.size(), args.positional.size());
  }
  for (size_t i = 0; i < args.positional.size(); ++i) values_[i] = &args.positional[i];
  for (const auto& [name, value] : args.named) {
    const auto found = std::find(params.begin(), params.end(), name);
    if (found == params.end()) throw RenderError("{} has no argument '{}'", function, name);
    const Value*& slot = values_[static_cast<size_t>(found - params.begin())];
    if (slot != nullptr) throw RenderError("{} got the argument '{}' twice", function, name);
    slot = &value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (values_[i] == nullptr) throw RenderError("{} needs the argument '{}'", function, params.begin()[i]);
  }
}

int64_t Bound::integer(size_t i, int64_t otherwise) const {
  if (values_[i] == nullptr || values_[i]->is<None>()) return otherwise;
  const int64_t* integer = as_integer(*values_[i]);
  if (integer == nullptr) throw RenderError("{} needs an int, got {}", function_, type_name(*values_[i]));
  return *integer;
}

const Text& Bound::text(size_t i) const {
  if (values_[i] == nullptr || values_[i]->text() == nullptr) {
    throw RenderError("{} needs a str, got {}", function_,
                      values_[i] == nullptr ? std::string_view("nothing") : type_name(*values_[i]));
  }
  return *values_[i]->text();
}

}  // namespace eadem::io::chat
