// SPDX-License-Identifier: Apache-2.0
//
// The tests: names that may stand after `is`.
#include <array>

#include "eadem/io/template/library.h"
#include "eadem/io/template/text_functions.h"

namespace eadem::io::chat {
namespace {

using Test = bool (*)(Runtime&, const Value&, const CallArgs&);
struct TestEntry {
  std::string_view name;
  Test call;
};

// The one argument of a test that needs one, or none for a test that takes none.
const Value& argument(const CallArgs& args) {
  if (args.positional.size() != 1 || !args.named.empty()) throw RenderError("the test needs one argument");
  return args.positional[0];
}
void no_argument(const CallArgs& args) {
  if (!args.positional.empty() || !args.named.empty()) throw RenderError("the test takes no argument");
}

template <bool (*kTest)(const Value&)>
bool plain(Runtime&, const Value& value, const CallArgs& args) {
  no_argument(args);
  return kTest(value);
}

bool is_defined(const Value& value) { return !value.is<Undefined>(); }
bool is_undefined(const Value& value) { return value.is<Undefined>(); }
bool is_none(const Value& value) { return value.is<None>(); }
bool is_boolean(const Value& value) { return value.is<bool>(); }
bool is_true(const Value& value) { return value.is<bool>() && *value.as<bool>(); }
bool is_false(const Value& value) { return value.is<bool>() && !*value.as<bool>(); }
bool is_integer(const Value& value) { return value.is<int64_t>(); }
bool is_float(const Value& value) { return value.is<double>(); }
bool is_string(const Value& value) { return value.is<String>(); }
bool is_mapping(const Value& value) { return value.is<Dict*>(); }
bool is_iterable(const Value& value) {
  return value.is<Undefined>() || value.is<String>() || value.is<List*>() || value.is<Dict*>() || value.is<Loop*>();
}
bool is_iterable_sequence(const Value& value) {
  if (const List* list = value.list()) return list->kind <= ListKind::range;
  return value.is<Undefined>() || value.is<String>() || value.is<Dict*>();
}
bool is_callable(const Value& value) {
  return value.is<Callable>() || value.is<Macro*>() || value.is<Loop*>() || value.is<Undefined>();
}
bool is_escaped(const Value& value) { return value.is<String>() && value.as<String>()->markup; }

int64_t remainder(Runtime& rt, const Value& value, int64_t by) {
  const Value rest = arithmetic(rt.heap, '%', value, by);
  if (const int64_t* integer = rest.as<int64_t>()) return *integer;
  return as_double(rest) == 0 ? 0 : as_double(rest) == 1 ? 1 : 2;
}
bool is_odd(Runtime& rt, const Value& value, const CallArgs& args) {
  no_argument(args);
  return remainder(rt, value, 2) == 1;
}
bool is_even(Runtime& rt, const Value& value, const CallArgs& args) {
  no_argument(args);
  return remainder(rt, value, 2) == 0;
}
bool is_divisible(Runtime& rt, const Value& value, const CallArgs& args) {
  const Value rest = arithmetic(rt.heap, '%', value, argument(args));
  return !truth(rest);
}
template <bool kUpper>
bool has_case(Runtime& rt, const Value& value, const CallArgs& args) {
  no_argument(args);
  return text_has_case(to_text(rt.heap, value).bytes(), kUpper);
}
bool is_in(Runtime& rt, const Value& value, const CallArgs& args) { return contains(rt.heap, argument(args), value); }
bool is_same(Runtime& rt, const Value& value, const CallArgs& args) {
  const Value& other = argument(args);
  if (type_name(value) != type_name(other)) return false;
  if (value.list() != nullptr) return value.list() == other.list();
  if (value.dict() != nullptr) return value.dict() == other.dict();
  return equal(rt.heap, value, other);
}
bool names_filter(Runtime&, const Value& value, const CallArgs& args) {
  no_argument(args);
  return value.text() != nullptr && is_filter(value.text()->bytes());
}
bool names_test(Runtime&, const Value& value, const CallArgs& args) {
  no_argument(args);
  return value.text() != nullptr && is_test(value.text()->bytes());
}

bool eq(Runtime& rt, const Value& a, const CallArgs& args) { return equal(rt.heap, a, argument(args)); }
bool ne(Runtime& rt, const Value& a, const CallArgs& args) { return !equal(rt.heap, a, argument(args)); }
bool lt(Runtime& rt, const Value& a, const CallArgs& args) { return less(rt.heap, a, argument(args)); }
bool gt(Runtime& rt, const Value& a, const CallArgs& args) { return less(rt.heap, argument(args), a); }
bool le(Runtime& rt, const Value& a, const CallArgs& args) { return eq(rt, a, args) || lt(rt, a, args); }
bool ge(Runtime& rt, const Value& a, const CallArgs& args) { return eq(rt, a, args) || gt(rt, a, args); }

constexpr auto kTests = std::to_array<TestEntry>({
    {"defined", plain<is_defined>},
    {"undefined", plain<is_undefined>},
    {"none", plain<is_none>},
    {"boolean", plain<is_boolean>},
    {"true", plain<is_true>},
    {"false", plain<is_false>},
    {"integer", plain<is_integer>},
    {"float", plain<is_float>},
    {"number", plain<is_number>},
    {"string", plain<is_string>},
    {"mapping", plain<is_mapping>},
    {"iterable", plain<is_iterable>},
    {"sequence", plain<is_iterable_sequence>},
    {"callable", plain<is_callable>},
    {"escaped", plain<is_escaped>},
    {"odd", is_odd},
    {"even", is_even},
    {"divisibleby", is_divisible},
    {"lower", has_case<false>},
    {"upper", has_case<true>},
    {"in", is_in},
    {"sameas", is_same},
    {"filter", names_filter},
    {"test", names_test},
    {"eq", eq},
    {"equalto", eq},
    {"==", eq},
    {"ne", ne},
    {"!=", ne},
    {"lt", lt},
    {"lessthan", lt},
    {"<", lt},
    {"gt", gt},
    {"greaterthan", gt},
    {">", gt},
    {"le", le},
    {"<=", le},
    {"ge", ge},
    {">=", ge},
});

Test test_named(std::string_view name) {
  for (const TestEntry& entry : kTests) {
    if (entry.name == name) return entry.call;
  }
  return nullptr;
}

}  // namespace

bool is_test(std::string_view name) { return test_named(name) != nullptr; }

bool apply_test(Runtime& runtime, std::string_view name, const Value& value, const CallArgs& args) {
  const Test test = test_named(name);
  if (test == nullptr) throw RenderError("no test named '{}'", name);
  return test(runtime, value, args);
}

}  // namespace eadem::io::chat
