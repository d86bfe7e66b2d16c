// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/template/renderer.h"

#include <algorithm>
#include <array>

#include "eadem/core/error.h"
#include "eadem/io/template/library.h"
#include "eadem/io/text.h"

namespace eadem::io::chat {

// The variables of a block, of one turn of a loop or of one call of a macro; what is not here is looked up in `parent`.
struct Scope {
  Scope* parent = nullptr;
  std::vector<std::pair<std::string_view, Value>> variables;
};

struct Macro {
  std::string_view name;
  const Stmt* definition;
  Scope* scope;  // where it was defined
};

struct Loop {
  const Stmt* statement;
  Scope* scope;  // around the loop
  std::vector<Value> items;
  size_t index = 0;
  int64_t depth = 0;
  std::optional<Value> changed;
};

namespace {

enum class Flow : uint8_t { normal, break_, continue_ };

// Roles that templates write into special tokens. Any other role is a text like the rest of the conversation.
constexpr auto kRoles = std::to_array<std::string_view>(
    {"assistant", "context", "developer", "documents", "environment", "function", "gpt", "human", "ipython", "model",
     "observation", "system", "tool", "tool_response", "tools", "user"});

class Importer {
 public:
  explicit Importer(Heap& heap) : heap_(heap) {}

  Value import(const JsonValue& value, bool trusted, int depth = 0) const {
    if (depth > 100) throw RenderError("the conversation is nested more than 100 deep");
    switch (value.kind()) {
      case JsonValue::Kind::null: return None{};
      case JsonValue::Kind::boolean: return value.as_boolean();
      case JsonValue::Kind::integer: return value.as_integer();
      case JsonValue::Kind::number: return value.as_number();
      case JsonValue::Kind::string: return text(value.as_string(), trusted);
      case JsonValue::Kind::array: {
        std::vector<Value> items;
        for (const JsonValue& item : value.as_array()) items.push_back(import(item, trusted, depth + 1));
        return heap_.list(std::move(items));
      }
      case JsonValue::Kind::object: break;
    }
    Dict* dict = heap_.dict();
    for (const JsonMember& member : value.as_object()) {
      set(heap_, *dict, text(member.key, trusted), import(member.value, trusted, depth + 1));
    }
    return dict;
  }

  Value import_messages(const JsonValue& messages) const {
    Value value = import(messages, false);
    if (value.list() == nullptr) return value;
    for (const Value& message : value.list()->items) {
      const Value* role = message.dict() == nullptr ? nullptr : find(*message.dict(), "role");
      if (role == nullptr || role->text() == nullptr) continue;
      const std::string& name = role->text()->bytes();
      if (std::find(kRoles.begin(), kRoles.end(), name) == kRoles.end()) continue;
      set(heap_, *message.dict(), heap_.text("role", false), heap_.text(name, true));
    }
    return value;
  }

 private:
  Value text(const std::string& bytes, bool trusted) const {
    if (!is_valid_utf8(bytes)) throw RenderError("{} is not UTF-8", quote(bytes));
    return heap_.text(bytes, trusted);
  }
  Heap& heap_;
};

class Renderer {
 public:
  Renderer(const TemplateInput& input, const TemplateLimits& limits)
      : heap_(limits), now_(input.now), runtime_{heap_, now_} {}

  Text run(const Body& body, const TemplateInput& input) {
    Scope* globals = open(nullptr);
    const Importer importer(heap_);
    for (const JsonMember& member : input.variables.as_object()) {
      assign(*globals, keep_name(member.key),
             member.key == "messages" ? importer.import_messages(member.value) : importer.import(member.value, false));
    }
    for (const JsonMember& member : input.trusted.as_object()) {
      assign(*globals, keep_name(member.key), importer.import(member.value, true));
    }
    Text text;
    out_ = &text;
    scope_ = open(globals);
    execute(body);
    return text;
  }

  int line() const { return line_; }

 private:
  class Depth {
   public:
    explicit Depth(Renderer& renderer) : renderer_(renderer) {
      if (++renderer_.depth_ > renderer_.heap_.limits().max_depth) {
        --renderer_.depth_;
        throw RenderError("the template nests calls and blocks more than {} deep", renderer_.heap_.limits().max_depth);
      }
    }
    ~Depth() { --renderer_.depth_; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;

   private:
    Renderer& renderer_;
  };

  // --- scopes

  Scope* open(Scope* parent) {
    heap_.charge(8);
    return &scopes_.emplace_back(Scope{parent, {}});
  }
  std::string_view keep_name(const std::string& name) { return heap_.keep(heap_.text(name, false))->text()->bytes(); }

  static void assign(Scope& scope, std::string_view name, Value value) {
    for (auto& [known, slot] : scope.variables) {
      if (known == name) {
        slot = std::move(value);
        return;
      }
    }
    scope.variables.emplace_back(name, std::move(value));
  }

  Value lookup(std::string_view name) {
    for (const Scope* scope = scope_; scope != nullptr; scope = scope->parent) {
      heap_.charge(1 + scope->variables.size() / 8);
      for (const auto& [known, value] : scope->variables) {
        if (known == name) return value;
      }
    }
    if (is_function(name)) return Callable{name, nullptr};
    return Undefined{name};
  }

  // Runs `work` in `scope`, its text going to `out` if not null.
  template <typename Work>
  auto within(Scope* scope, Text* out, Work work) {
    Scope* const outer_scope = std::exchange(scope_, scope);
    Text* const outer_out = std::exchange(out_, out == nullptr ? out_ : out);
    auto result = work();
    scope_ = outer_scope;
    out_ = outer_out;
    return result;
  }

  void write(const Value& value) {
    append_str(heap_, *out_, value);
    check_output();
  }
  void check_output() const {
    if (out_->size() > heap_.limits().max_output) {
      throw RenderError("the text has more than {} bytes", heap_.limits().max_output);
    }
  }

  // --- statements

  Flow execute(const Body& body) {
    const Depth depth(*this);
    for (const Stmt& stmt : body) {
      if (const Flow flow = execute(stmt); flow != Flow::normal) return flow;
    }
    return Flow::normal;
  }

  Flow execute(const Stmt& stmt) {
    heap_.charge(1);
    line_ = stmt.line;
    switch (stmt.kind) {
      case StmtKind::text:
        heap_.charge(stmt.text.size());
        out_->append(stmt.text, true);
        check_output();
        return Flow::normal;
      case StmtKind::print: write(evaluate(*stmt.exprs[0])); return Flow::normal;
      case StmtKind::branch:
        for (size_t i = 0; i < stmt.exprs.size(); ++i) {
          if (truth(evaluate(*stmt.exprs[i]))) return execute(stmt.bodies[i]);
        }
        return stmt.bodies.size() > stmt.exprs.size() ? execute(stmt.bodies.back()) : Flow::normal;
      case StmtKind::loop: run_loop(stmt, evaluate(*stmt.exprs[0]), scope_, 0); return Flow::normal;
      case StmtKind::set: assign(stmt.target, evaluate(*stmt.exprs[0])); return Flow::normal;
      case StmtKind::set_block: {
        Text text;
        const Flow flow = run_inner(stmt.bodies[0], &text);
        Value value = heap_.text(std::move(text));
        if (stmt.exprs[0]) value = filter(*stmt.exprs[0], value);
        assign(stmt.target, std::move(value));
        return flow;
      }
      case StmtKind::macro:
        assign(*scope_, stmt.text, Value(&macros_.emplace_back(Macro{stmt.text, &stmt, scope_})));
        return Flow::normal;
      case StmtKind::call_block: {
        Macro* caller = &macros_.emplace_back(Macro{"caller", &stmt, scope_});
        write(call(*stmt.exprs[0], caller));
        return Flow::normal;
      }
      case StmtKind::filter_block: {
        Text text;
        const Flow flow = run_inner(stmt.bodies[0], &text);
        write(filter(*stmt.exprs[0], heap_.text(std::move(text))));
        return flow;
      }
      case StmtKind::with: {
        Scope* scope = open(scope_);
        for (const Param& param : stmt.params) assign(*scope, param.name, evaluate(*param.value));
        return within(scope, nullptr, [&] { return execute(stmt.bodies[0]); });
      }
      case StmtKind::generation: return run_inner(stmt.bodies[0], nullptr);
      case StmtKind::break_: return Flow::break_;
      case StmtKind::continue_: return Flow::continue_;
    }
    return Flow::normal;
  }

  Flow run_inner(const Body& body, Text* out) {
    return within(open(scope_), out, [&] { return execute(body); });
  }

  void assign(const Target& target, Value value) {
    if (!target.many.empty()) {
      const std::vector<Value> items = iterate(heap_, value);
      if (items.size() != target.many.size()) {
        throw RenderError("{} values cannot be unpacked to {} names", items.size(), target.many.size());
      }
      for (size_t i = 0; i < items.size(); ++i) assign(target.many[i], items[i]);
    } else if (target.attribute.empty()) {
      assign(*scope_, target.name, std::move(value));
    } else {
      const Value space = lookup(target.name);
      if (!space.is<Space*>()) throw RenderError("'{}' is not a namespace", target.name);
      set_attribute(**space.as<Space*>(), heap_.text(target.attribute, true), std::move(value));
    }
  }

  void set_attribute(Space& space, const Value& name, Value value) {
    if (name.text() != nullptr && !name.text()->empty() && name.text()->bytes()[0] == '_') {
      throw RenderError("a namespace cannot hold '{}', which begins with _", name.text()->bytes());
    }
    set(heap_, space.attributes, name, std::move(value));
  }

  void run_loop(const Stmt& stmt, const Value& values, Scope* around, int64_t depth) {
    const Depth guard(*this);
    Loop& loop = loops_.emplace_back(Loop{&stmt, around, {}, 0, depth, std::nullopt});
    for (Value& item : iterate(heap_, values)) {
      if (!stmt.exprs[1]) {
        loop.items.push_back(std::move(item));
        continue;
      }
      const bool taken = within(open(around), nullptr, [&] {
        assign(stmt.target, item);
        return truth(evaluate(*stmt.exprs[1]));
      });
      if (taken) loop.items.push_back(std::move(item));
    }
    bool completed = false;  // some iteration reached the end of the body
    for (; loop.index < loop.items.size(); ++loop.index) {
      const Flow flow = within(open(around), nullptr, [&] {
        assign(*scope_, "loop", Value(&loop));
        assign(stmt.target, loop.items[loop.index]);
        return execute(stmt.bodies[0]);
      });
      if (flow == Flow::break_) break;
      completed = completed || flow == Flow::normal;
    }
    // Jinja notes at the end of the body that there was an iteration, so one that breaks off does not count.
    if (!completed && stmt.bodies.size() > 1) {
      within(open(around), nullptr, [&] { return execute(stmt.bodies[1]); });
    }
  }

  // --- expressions

  Value evaluate(const Expr& expr) {
    const Depth depth(*this);
    heap_.charge(1);
    line_ = expr.line;
    const auto child = [&](size_t i) { return evaluate(*expr.children[i]); };
    switch (expr.kind) {
      case ExprKind::undefined: return Undefined{"the inline if without else"};
      case ExprKind::none: return None{};
      case ExprKind::boolean: return expr.integer != 0;
      case ExprKind::integer: return expr.integer;
      case ExprKind::number: return expr.number;
      case ExprKind::string: return heap_.text(expr.text, true);
      case ExprKind::name: return lookup(expr.text);
      case ExprKind::list:
      case ExprKind::tuple: {
        std::vector<Value> items;
        for (const ExprPtr& item : expr.children) items.push_back(evaluate(*item));
        return heap_.list(std::move(items), expr.kind == ExprKind::list ? ListKind::list : ListKind::tuple);
      }
      case ExprKind::dict: {
        Dict* dict = heap_.dict();
        for (size_t i = 0; i < expr.children.size(); i += 2) {
          const Value key = child(i);
          set(heap_, *dict, key, child(i + 1));
        }
        return dict;
      }
      case ExprKind::attribute: return get_attribute(runtime_, child(0), expr.text);
      case ExprKind::item: {
        const Value base = child(0);
        return get_item(runtime_, base, child(1));
      }
      case ExprKind::slice: {
        const Value base = child(0);
        std::optional<Value> bounds[3];
        for (size_t i = 0; i < 3; ++i) {
          if (expr.children[i + 1]) bounds[i] = child(i + 1);
        }
        const auto bound = [&](size_t i) { return bounds[i] ? &*bounds[i] : nullptr; };
        return get_slice(runtime_, base, bound(0), bound(1), bound(2));
      }
      case ExprKind::call: return call(expr, nullptr);
      case ExprKind::filter: {
        const Value base = child(0);
        return apply_filter(runtime_, expr.text, base, arguments(expr.args));
      }
      case ExprKind::test: {
        const Value base = child(0);
        return apply_test(runtime_, expr.text, base, arguments(expr.args));
      }
      case ExprKind::chain: return chain(expr);
      case ExprKind::concat: {
        Text text;
        for (const ExprPtr& part : expr.children) append_str(heap_, text, evaluate(*part));
        return heap_.text(std::move(text));
      }
      case ExprKind::compare: return compare(expr);
      case ExprKind::logical_and:
      case ExprKind::logical_or: {
        Value value = child(0);
        for (size_t i = 1; i < expr.children.size() && truth(value) == (expr.kind == ExprKind::logical_and); ++i) {
          value = child(i);
        }
        return value;
      }
      case ExprKind::logical_not: return !truth(child(0));
      case ExprKind::negate: {
        const Value value = child(0);
        if (const double* number = value.as<double>()) return -*number;
        return arithmetic(heap_, '-', int64_t{0}, value);
      }
      case ExprKind::plus: {
        const Value value = child(0);
        if (const int64_t* integer = as_integer(value)) return *integer;
        return as_double(value);
      }
      case ExprKind::conditional: return truth(child(0)) ? child(1) : child(2);
    }
    return {};
  }

  // Filters on the text of a block, which stands where the innermost filter has no base.
  Value filter(const Expr& expr, const Value& base) {
    const Depth depth(*this);
    const Value value = expr.children[0] ? filter(*expr.children[0], base) : base;
    return apply_filter(runtime_, expr.text, value, arguments(expr.args));
  }

  Value chain(const Expr& expr) {
    Value value = evaluate(*expr.children[0]);
    for (size_t i = 0; i < expr.ops.size(); ++i) {
      const Value right = evaluate(*expr.children[i + 1]);
      switch (expr.ops[i]) {
        case Op::add: value = add(heap_, value, right); break;
        case Op::subtract: value = arithmetic(heap_, '-', value, right); break;
        case Op::multiply: value = arithmetic(heap_, '*', value, right); break;
        case Op::divide: value = arithmetic(heap_, '/', value, right); break;
        case Op::floor_divide: value = arithmetic(heap_, 'f', value, right); break;
        case Op::modulo: value = arithmetic(heap_, '%', value, right); break;
        default: value = arithmetic(heap_, 'p', value, right); break;
      }
    }
    return value;
  }

  bool compare(const Expr& expr) {
    Value left = evaluate(*expr.children[0]);
    for (size_t i = 0; i < expr.ops.size(); ++i) {
      Value right = evaluate(*expr.children[i + 1]);
      if (!holds(expr.ops[i], left, right)) return false;
      left = std::move(right);
    }
    return true;
  }
  bool holds(Op op, const Value& a, const Value& b) {
    switch (op) {
      case Op::equal: return equal(heap_, a, b);
      case Op::not_equal: return !equal(heap_, a, b);
      case Op::less: return less(heap_, a, b);
      case Op::less_equal: return less(heap_, a, b) || equal(heap_, a, b);
      case Op::greater: return less(heap_, b, a);
      case Op::greater_equal: return less(heap_, b, a) || equal(heap_, a, b);
      case Op::in: return contains(heap_, b, a);
      default: return !contains(heap_, b, a);
    }
  }

  CallArgs arguments(const Arguments& args) {
    CallArgs values;
    for (const ExprPtr& arg : args.positional) values.positional.push_back(evaluate(*arg));
    for (const auto& [name, arg] : args.named) values.named.emplace_back(name, evaluate(*arg));
    return values;
  }

  Value call(const Expr& expr, Macro* caller) {
    const Value callee = evaluate(*expr.children[0]);
    CallArgs args = arguments(expr.args);
    line_ = expr.line;
    if (caller != nullptr) args.named.emplace_back("caller", Value(caller));
    if (callee.is<Macro*>()) return call_macro(**callee.as<Macro*>(), args);
    if (callee.is<Loop*>()) return call_loop(**callee.as<Loop*>(), args);
    if (const Callable* callable = callee.as<Callable>()) {
      if (callable->self == nullptr) return call_function(runtime_, callable->name, args);
      if (callable->self->is<Loop*>()) return call_loop_method(**callable->self->as<Loop*>(), callable->name, args);
      return call_method(runtime_, callable->name, *callable->self, args);
    }
    if (const Undefined* undefined = callee.as<Undefined>()) {
      throw RenderError("'{}' is undefined or must not be called", undefined->name);
    }
    throw RenderError("{} is not callable", type_name(callee));
  }

  Value call_macro(const Macro& macro, const CallArgs& args) {
    const Stmt& definition = *macro.definition;
    const std::vector<Param>& params = definition.params;
    Scope* scope = open(macro.scope);
    std::vector<bool> bound(params.size());
    for (size_t i = 0; i < std::min(params.size(), args.positional.size()); ++i) {
      assign(*scope, params[i].name, args.positional[i]);
      bound[i] = true;
    }
    std::vector<Value> varargs;
    for (size_t i = params.size(); i < args.positional.size(); ++i) varargs.push_back(args.positional[i]);
    if (!varargs.empty() && !definition.uses_varargs) {
      throw RenderError("macro '{}' takes at most {} arguments, got {}", macro.name, params.size(),
                        args.positional.size());
    }
    Dict* kwargs = heap_.dict();
    Value caller = Undefined{"caller"};
    for (const auto& [name, value] : args.named) {
      size_t i = 0;
      while (i < params.size() && params[i].name != name) ++i;
      if (i < params.size()) {
        if (bound[i]) throw RenderError("macro '{}' got '{}' twice", macro.name, name);
        assign(*scope, params[i].name, value);
        bound[i] = true;
      } else if (name == "caller" && definition.uses_caller) {
        caller = value;
      } else if (definition.uses_kwargs) {
        set(heap_, *kwargs, heap_.text(name, true), value);
      } else {
        throw RenderError("macro '{}' has no argument '{}'", macro.name, name);
      }
    }
    if (definition.uses_caller && definition.kind == StmtKind::macro) assign(*scope, "caller", caller);
    if (definition.uses_varargs) assign(*scope, "varargs", heap_.list(std::move(varargs), ListKind::tuple));
    if (definition.uses_kwargs) assign(*scope, "kwargs", Value(kwargs));
    Text text;
    within(scope, &text, [&] {
      for (size_t i = 0; i < params.size(); ++i) {
        if (bound[i]) continue;
        assign(*scope_, params[i].name,
               params[i].value ? evaluate(*params[i].value) : Value(Undefined{params[i].name}));
      }
      return execute(definition.bodies[0]);
    });
    return heap_.text(std::move(text));
  }

  Value call_loop(Loop& loop, const CallArgs& args) {
    const Bound bound("loop", args, {"iterable"}, 1);
    if (!loop.statement->recursive) throw RenderError("only a loop marked 'recursive' can be called");
    Text text;
    within(loop.scope, &text, [&] {
      run_loop(*loop.statement, *bound[0], loop.scope, loop.depth + 1);
      return true;
    });
    return heap_.text(std::move(text));
  }

  Value call_loop_method(Loop& loop, std::string_view name, const CallArgs& args) {
    if (name == "cycle") {
      if (args.positional.empty()) throw RenderError("loop.cycle needs items");
      return args.positional[loop.index % args.positional.size()];
    }
    const Value values = heap_.list(args.positional, ListKind::tuple);
    const bool changed = !loop.changed || !equal(heap_, *loop.changed, values);
    loop.changed = values;
    return changed;
  }

  Heap heap_;
  const std::tm now_;
  Runtime runtime_;
  std::deque<Scope> scopes_;
  std::deque<Macro> macros_;
  std::deque<Loop> loops_;
  Scope* scope_ = nullptr;
  Text* out_ = nullptr;
  int line_ = 1;
  int depth_ = 0;
};

}  // namespace

Value loop_attribute(Heap& heap, const Loop& loop, std::string_view name) {
  const auto index = static_cast<int64_t>(loop.index);
  const auto count = static_cast<int64_t>(loop.items.size());
  if (name == "index") return index + 1;
  if (name == "index0") return index;
  if (name == "revindex") return count - index;
  if (name == "revindex0") return count - index - 1;
  if (name == "first") return index == 0;
  if (name == "last") return index + 1 == count;
  if (name == "length") return count;
  if (name == "depth") return loop.depth + 1;
  if (name == "depth0") return loop.depth;
  if (name == "previtem") return index == 0 ? Value(Undefined{name}) : loop.items[loop.index - 1];
  if (name == "nextitem") return index + 1 == count ? Value(Undefined{name}) : loop.items[loop.index + 1];
  if (name == "cycle" || name == "changed") return Callable{name, heap.keep(const_cast<Loop*>(&loop))};
  return Undefined{name};
}

Text render_template(const Body& body, const std::string& name, const TemplateInput& input,
                     const TemplateLimits& limits) {
  Renderer renderer(input, limits);
  try {
    return renderer.run(body, input);
  } catch (const RenderError& error) {
    throw InvalidArgument("{}:{}: {}", name, renderer.line(), error.what());
  }
}

}  // namespace eadem::io::chat
