// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/template/parser.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include "eadem/core/error.h"
#include "eadem/io/template/lexer.h"
#include "eadem/io/template/library.h"
#include "eadem/io/text.h"

namespace eadem::io::chat {
namespace {

constexpr int kMaxDepth = 200;

// What Jinja or Python has and this interpreter has not. Anything else that is called is looked up when it renders,
// because a template may have defined it.
constexpr auto kMissingMethods = std::to_array<std::string_view>(
    {"center", "encode", "expandtabs", "format", "format_map", "isidentifier", "ljust", "maketrans", "rjust",
     "translate", "zfill", "casefold", "swapcase", "fromkeys", "bit_length", "as_integer_ratio", "to_bytes"});
constexpr auto kMissingGlobals = std::to_array<std::string_view>({"cycler", "joiner", "lipsum"});
constexpr auto kMissingTags = std::to_array<std::string_view>(
    {"autoescape", "block", "debug", "do", "extends", "from", "import", "include", "pluralize", "print", "trans"});

template <typename List>
bool contains(const List& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

class Parser {
 public:
  Parser(std::string_view source, const std::string& name) : tokens_(tokenize_template(source, name)), name_(name) {}

  Body run() {
    Body body = parse_body({}, "");
    return body;
  }

 private:
  using Names = std::initializer_list<std::string_view>;

  // --- tokens

  const Token& current() const { return tokens_[pos_]; }
  const Token& next() { return tokens_[pos_ + 1 < tokens_.size() ? pos_++ : pos_]; }
  const Token& look() const { return tokens_[std::min(pos_ + 1, tokens_.size() - 1)]; }
  bool is_op(std::string_view op) const { return current().kind == TokenKind::op && current().text == op; }
  bool is_name(std::string_view name) const { return current().kind == TokenKind::name && current().text == name; }
  bool skip_op(std::string_view op) {
    const bool found = is_op(op);
    if (found) next();
    return found;
  }
  bool skip_name(std::string_view name) {
    const bool found = is_name(name);
    if (found) next();
    return found;
  }

  [[noreturn]] void fail(std::string_view what, int line) const { throw DataCorrupted("{}:{}: {}", name_, line, what); }
  [[noreturn]] void fail(std::string_view what) const { fail(what, current().line); }
  [[noreturn]] void unsupported(std::string_view what, std::string_view construct, int line) const {
    throw Unsupported("{}:{}: {} {} is not supported in chat templates", name_, line, what, quote(construct));
  }
  std::string describe() const {
    switch (current().kind) {
      case TokenKind::block_end: return "end of statement block";
      case TokenKind::print_end: return "end of print statement";
      case TokenKind::end: return "end of template";
      default: return quote(current().text);
    }
  }
  void expect_op(std::string_view op) {
    if (!skip_op(op)) fail(fmt::format("expected '{}', got {}", op, describe()));
  }
  std::string expect_name() {
    if (current().kind != TokenKind::name) fail(fmt::format("expected a name, got {}", describe()));
    return next().text;
  }
  void expect(TokenKind kind, std::string_view what) {
    if (current().kind != kind) fail(fmt::format("expected {}, got {}", what, describe()));
    next();
  }

  // Counts one level of nesting while it lives.
  class Level {
   public:
    explicit Level(Parser& parser) : parser_(parser) {
      if (++parser_.depth_ > kMaxDepth) parser_.fail(fmt::format("nested more than {} deep", kMaxDepth));
    }
    ~Level() { --parser_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Parser& parser_;
  };

  // --- statements

  // Statements up to one of the tags `ends`, whose name is left as the current token.
  Body parse_body(Names ends, std::string_view opened, int opened_line = 0) {
    const Level level(*this);
    Body body;
    for (;;) {
      const Token& token = current();
      switch (token.kind) {
        case TokenKind::data:
          body.push_back(statement(StmtKind::text, token.line));
          body.back().text = next().text;
          break;
        case TokenKind::print_begin:
          next();
          body.push_back(statement(StmtKind::print, token.line));
          body.back().exprs.push_back(parse_tuple(true, {}));
          expect(TokenKind::print_end, "}}");
          break;
        case TokenKind::block_begin:
          next();
          if (current().kind == TokenKind::name && std::find(ends.begin(), ends.end(), current().text) != ends.end()) {
            return body;
          }
          parse_tag(body);
          expect(TokenKind::block_end, "%}");
          break;
        default:
          if (ends.size() != 0) fail(fmt::format("{{% {} %}} of line {} does not end", opened, opened_line));
          return body;
      }
    }
  }

  static Stmt statement(StmtKind kind, int line) {
    Stmt stmt;
    stmt.kind = kind;
    stmt.line = line;
    return stmt;
  }

  void end_tag() { expect(TokenKind::block_end, "%}"); }

  // A body that ends with the tag `end`, whose name is consumed.
  Body parse_until(std::string_view end, std::string_view opened, int line) {
    end_tag();
    Body body = parse_body({end}, opened, line);
    next();
    return body;
  }

  void parse_tag(Body& body) {
    const int line = current().line;
    const std::string tag = expect_name();
    if (tag == "if") {
      body.push_back(parse_if(line));
    } else if (tag == "for") {
      body.push_back(parse_for(line));
    } else if (tag == "set") {
      body.push_back(parse_set(line));
    } else if (tag == "macro") {
      body.push_back(parse_macro(line));
    } else if (tag == "call") {
      body.push_back(parse_call_block(line));
    } else if (tag == "filter") {
      Stmt stmt = statement(StmtKind::filter_block, line);
      stmt.exprs.push_back(parse_filters(nullptr, true));
      stmt.bodies.push_back(parse_until("endfilter", tag, line));
      body.push_back(std::move(stmt));
    } else if (tag == "with") {
      body.push_back(parse_with(line));
    } else if (tag == "generation") {
      Stmt stmt = statement(StmtKind::generation, line);
      stmt.bodies.push_back(outside_loops([&] { return parse_until("endgeneration", tag, line); }));
      body.push_back(std::move(stmt));
    } else if (tag == "break" || tag == "continue") {
      if (loops_ == 0) fail(fmt::format("{{% {} %}} stands outside of a loop", tag), line);
      body.push_back(statement(tag == "break" ? StmtKind::break_ : StmtKind::continue_, line));
    } else if (contains(kMissingTags, tag)) {
      unsupported("tag", tag, line);
    } else {
      throw Unsupported("{}:{}: unknown tag {}", name_, line, quote(tag));
    }
  }

  template <typename Parse>
  Body outside_loops(Parse parse) {
    const int loops = std::exchange(loops_, 0);
    Body result = parse();
    loops_ = loops;
    return result;
  }

  Stmt parse_if(int line) {
    Stmt stmt = statement(StmtKind::branch, line);
    for (;;) {
      stmt.exprs.push_back(parse_tuple(false, {}));
      end_tag();
      stmt.bodies.push_back(parse_body({"elif", "else", "endif"}, "if", line));
      const std::string tag = next().text;
      if (tag == "elif") continue;
      if (tag == "else") stmt.bodies.push_back(parse_until("endif", "if", line));
      return stmt;
    }
  }

  Stmt parse_for(int line) {
    Stmt stmt = statement(StmtKind::loop, line);
    stmt.target = parse_target(false);
    if (stmt.target.name == "loop") fail("the name 'loop' cannot be assigned in a loop", line);
    if (!skip_name("in")) fail(fmt::format("expected 'in', got {}", describe()));
    stmt.exprs.push_back(parse_tuple(false, {"recursive"}));
    stmt.exprs.push_back(skip_name("if") ? parse_expression() : nullptr);
    stmt.recursive = skip_name("recursive");
    end_tag();
    ++loops_;
    stmt.bodies.push_back(parse_body({"endfor", "else"}, "for", line));
    --loops_;
    if (next().text == "else") stmt.bodies.push_back(parse_until("endfor", "for", line));
    return stmt;
  }

  Stmt parse_set(int line) {
    Stmt stmt = statement(StmtKind::set, line);
    stmt.target = parse_target(true);
    if (skip_op("=")) {
      stmt.exprs.push_back(parse_tuple(true, {}));
      return stmt;
    }
    stmt.kind = StmtKind::set_block;
    if (!stmt.target.many.empty()) fail("a set block has one target", line);
    stmt.exprs.push_back(parse_filters(nullptr, false));
    stmt.bodies.push_back(parse_until("endset", "set", line));
    return stmt;
  }

  void parse_signature(std::vector<Param>& params) {
    expect_op("(");
    while (!is_op(")")) {
      if (!params.empty()) expect_op(",");
      Param param;
      param.name = assignable(expect_name());
      if (skip_op("=")) {
        param.value = parse_expression();
      } else if (!params.empty() && params.back().value) {
        fail("a parameter without a default follows one with a default");
      }
      params.push_back(std::move(param));
    }
    next();
  }

  Stmt parse_macro(int line) {
    Stmt stmt = statement(StmtKind::macro, line);
    stmt.text = assignable(expect_name());
    parse_macro_body(stmt, "endmacro", "macro");
    return stmt;
  }

  // The parameters of a macro and its body, and which of the implicit names they mention.
  void parse_macro_body(Stmt& stmt, std::string_view end, std::string_view tag) {
    const auto outer = std::exchange(mentioned_, {});
    if (tag == "macro") parse_signature(stmt.params);
    stmt.bodies.push_back(outside_loops([&] { return parse_until(end, tag, stmt.line); }));
    stmt.uses_caller = mentioned_.caller;
    stmt.uses_varargs = mentioned_.varargs;
    stmt.uses_kwargs = mentioned_.kwargs;
    mentioned_ = outer;
  }

  Stmt parse_call_block(int line) {
    Stmt stmt = statement(StmtKind::call_block, line);
    if (is_op("(")) parse_signature(stmt.params);
    stmt.exprs.push_back(parse_expression());
    if (stmt.exprs[0]->kind != ExprKind::call) fail("a call block needs a call", line);
    parse_macro_body(stmt, "endcall", "call");
    return stmt;
  }

  Stmt parse_with(int line) {
    Stmt stmt = statement(StmtKind::with, line);
    while (current().kind != TokenKind::block_end) {
      if (!stmt.params.empty()) expect_op(",");
      Param param;
      param.name = assignable(expect_name());
      expect_op("=");
      param.value = parse_expression();
      stmt.params.push_back(std::move(param));
    }
    stmt.bodies.push_back(parse_until("endwith", "with", line));
    return stmt;
  }

  std::string assignable(const std::string& name) const {
    if (contains(std::array<std::string_view, 6>{"true", "false", "none", "True", "False", "None"}, name)) {
      fail(fmt::format("{} cannot be assigned", quote(name)));
    }
    return name;
  }

  Target parse_target(bool with_namespace) {
    const Level level(*this);
    std::vector<Target> targets;
    bool many = false;
    for (;;) {
      if (is_op("(")) {
        next();
        targets.push_back(parse_target(with_namespace));
        expect_op(")");
      } else {
        Target target;
        target.name = assignable(expect_name());
        if (with_namespace && skip_op(".")) target.attribute = expect_name();
        targets.push_back(std::move(target));
      }
      if (!skip_op(",")) break;
      many = true;
      if (is_op("=") || is_op(")") || is_name("in") || current().kind == TokenKind::block_end) break;
    }
    if (!many) return std::move(targets[0]);
    Target target;
    target.many = std::move(targets);
    return target;
  }

  // --- expressions

  ExprPtr make(ExprKind kind, int line) const {
    auto expr = std::make_unique<Expr>();
    expr->kind = kind;
    expr->line = line;
    return expr;
  }
  void deepen(Expr& expr, const ExprPtr& child) const {
    if (!child) return;
    expr.depth = std::max(expr.depth, child->depth + 1);
    if (expr.depth > kMaxDepth) fail(fmt::format("nested more than {} deep", kMaxDepth), expr.line);
  }
  void adopt(Expr& expr, ExprPtr child) const {
    deepen(expr, child);
    expr.children.push_back(std::move(child));
  }

  ExprPtr parse_tuple(bool with_condition, Names ends, bool in_parentheses = false) {
    const int line = current().line;
    std::vector<ExprPtr> items;
    bool is_tuple = false;
    for (;;) {
      if (!items.empty()) expect_op(",");
      if (current().kind == TokenKind::print_end || current().kind == TokenKind::block_end || is_op(")")) break;
      if (std::any_of(ends.begin(), ends.end(), [&](std::string_view end) { return is_name(end); })) break;
      items.push_back(with_condition ? parse_expression() : parse_or());
      if (!is_op(",")) break;
      is_tuple = true;
    }
    if (!is_tuple && !items.empty()) return std::move(items[0]);
    if (!is_tuple && !in_parentheses) fail(fmt::format("expected an expression, got {}", describe()));
    ExprPtr tuple = make(ExprKind::tuple, line);
    for (ExprPtr& item : items) adopt(*tuple, std::move(item));
    return tuple;
  }

  ExprPtr parse_expression() {
    const Level level(*this);
    const int line = current().line;
    ExprPtr value = parse_or();
    while (skip_name("if")) {
      ExprPtr expr = make(ExprKind::conditional, line);
      adopt(*expr, parse_or());
      adopt(*expr, std::move(value));
      adopt(*expr, skip_name("else") ? parse_expression() : make(ExprKind::undefined, line));
      value = std::move(expr);
    }
    return value;
  }

  ExprPtr parse_or() {
    const Level level(*this);
    const int line = current().line;
    return parse_list(
        ExprKind::logical_or, line, [&] { return parse_and(); }, [&] { return skip_name("or"); });
  }
  ExprPtr parse_and() {
    const int line = current().line;
    return parse_list(
        ExprKind::logical_and, line, [&] { return parse_not(); }, [&] { return skip_name("and"); });
  }
  ExprPtr parse_concat() {
    const int line = current().line;
    return parse_list(
        ExprKind::concat, line, [&] { return parse_product(); }, [&] { return skip_op("~"); });
  }

  template <typename Parse, typename Skip>
  ExprPtr parse_list(ExprKind kind, int line, Parse parse, Skip skip) {
    ExprPtr first = parse();
    if (!skip()) return first;
    ExprPtr expr = make(kind, line);
    adopt(*expr, std::move(first));
    do adopt(*expr, parse());
    while (skip());
    return expr;
  }

  ExprPtr parse_not() {
    if (!is_name("not")) return parse_compare();
    const Level level(*this);
    ExprPtr expr = make(ExprKind::logical_not, next().line);
    adopt(*expr, parse_not());
    return expr;
  }

  struct OpName {
    std::string_view name;
    Op op;
  };

  bool skip_any(std::initializer_list<OpName> names, Op& op) {
    for (const OpName& entry : names) {
      if (!skip_op(entry.name)) continue;
      op = entry.op;
      return true;
    }
    return false;
  }

  // operand (op operand)*
  template <typename Parse, typename Skip>
  ExprPtr parse_chain(ExprKind kind, Parse parse, Skip skip) {
    const int line = current().line;
    ExprPtr first = parse();
    Op op;
    if (!skip(op)) return first;
    ExprPtr expr = make(kind, line);
    adopt(*expr, std::move(first));
    do {
      expr->ops.push_back(op);
      adopt(*expr, parse());
    } while (skip(op));
    return expr;
  }

  ExprPtr parse_compare() {
    return parse_chain(
        ExprKind::compare, [&] { return parse_sum(); },
        [&](Op& op) {
          if (skip_name("in")) {
            op = Op::in;
            return true;
          }
          if (is_name("not") && look().kind == TokenKind::name && look().text == "in") {
            next(), next();
            op = Op::not_in;
            return true;
          }
          return skip_any({{"==", Op::equal},
                           {"!=", Op::not_equal},
                           {"<", Op::less},
                           {"<=", Op::less_equal},
                           {">", Op::greater},
                           {">=", Op::greater_equal}},
                          op);
        });
  }
  ExprPtr parse_sum() {
    return parse_chain(
        ExprKind::chain, [&] { return parse_concat(); },
        [&](Op& op) {
          return skip_any({{"+", Op::add}, {"-", Op::subtract}}, op);
        });
  }
  ExprPtr parse_product() {
    return parse_chain(
        ExprKind::chain, [&] { return parse_power(); },
        [&](Op& op) {
          return skip_any({{"*", Op::multiply}, {"/", Op::divide}, {"//", Op::floor_divide}, {"%", Op::modulo}}, op);
        });
  }
  ExprPtr parse_power() {
    return parse_chain(
        ExprKind::chain, [&] { return parse_unary(true); },
        [&](Op& op) {
          return skip_any({{"**", Op::power}}, op);
        });
  }

  ExprPtr parse_unary(bool with_filter) {
    const Level level(*this);
    const int line = current().line;
    ExprPtr expr;
    if (is_op("-") || is_op("+")) {
      expr = make(is_op("-") ? ExprKind::negate : ExprKind::plus, line);
      next();
      adopt(*expr, parse_unary(false));
    } else {
      expr = parse_primary();
    }
    expr = parse_postfix(std::move(expr));
    return with_filter ? parse_filters_and_tests(std::move(expr)) : std::move(expr);
  }

  ExprPtr parse_primary() {
    const Token& token = current();
    switch (token.kind) {
      case TokenKind::name: return parse_name();
      case TokenKind::string: {
        ExprPtr expr = make(ExprKind::string, token.line);
        while (current().kind == TokenKind::string) expr->text += next().text;
        return expr;
      }
      case TokenKind::integer: {
        ExprPtr expr = make(ExprKind::integer, token.line);
        expr->integer = next().integer;
        return expr;
      }
      case TokenKind::number: {
        ExprPtr expr = make(ExprKind::number, token.line);
        expr->number = next().number;
        return expr;
      }
      default: break;
    }
    if (skip_op("(")) {
      ExprPtr expr = parse_tuple(true, {}, true);
      expect_op(")");
      return expr;
    }
    if (is_op("[")) return parse_list_literal();
    if (is_op("{")) return parse_dict_literal();
    fail(fmt::format("expected an expression, got {}", describe()));
  }

  ExprPtr parse_name() {
    const Token& token = next();
    const std::string& name = token.text;
    if (name == "true" || name == "True" || name == "false" || name == "False") {
      ExprPtr expr = make(ExprKind::boolean, token.line);
      expr->integer = name == "true" || name == "True";
      return expr;
    }
    if (name == "none" || name == "None") return make(ExprKind::none, token.line);
    if (contains(kMissingGlobals, name) && is_op("(")) unsupported("function", name, token.line);
    mentioned_.caller |= name == "caller";
    mentioned_.varargs |= name == "varargs";
    mentioned_.kwargs |= name == "kwargs";
    ExprPtr expr = make(ExprKind::name, token.line);
    expr->text = name;
    return expr;
  }

  ExprPtr parse_list_literal() {
    ExprPtr expr = make(ExprKind::list, next().line);
    while (!is_op("]")) {
      if (!expr->children.empty()) expect_op(",");
      if (is_op("]")) break;
      adopt(*expr, parse_expression());
    }
    next();
    return expr;
  }

  ExprPtr parse_dict_literal() {
    ExprPtr expr = make(ExprKind::dict, next().line);
    while (!is_op("}")) {
      if (!expr->children.empty()) expect_op(",");
      if (is_op("}")) break;
      adopt(*expr, parse_expression());
      expect_op(":");
      adopt(*expr, parse_expression());
    }
    next();
    return expr;
  }

  ExprPtr parse_postfix(ExprPtr expr) {
    for (;;) {
      if (is_op(".")) {
        expr = parse_attribute(std::move(expr));
      } else if (is_op("[")) {
        expr = parse_item(std::move(expr));
      } else if (is_op("(")) {
        expr = parse_call(std::move(expr));
      } else {
        return expr;
      }
    }
  }

  ExprPtr parse_attribute(ExprPtr base) {
    const int line = next().line;
    if (current().kind == TokenKind::integer) {
      ExprPtr index = parse_primary();
      ExprPtr expr = make(ExprKind::item, line);
      adopt(*expr, std::move(base));
      adopt(*expr, std::move(index));
      return expr;
    }
    ExprPtr expr = make(ExprKind::attribute, line);
    expr->text = expect_name();
    if (is_op("(") && contains(kMissingMethods, expr->text)) unsupported("method", expr->text, line);
    adopt(*expr, std::move(base));
    return expr;
  }

  ExprPtr parse_item(ExprPtr base) {
    const int line = next().line;
    ExprPtr first = is_op(":") ? nullptr : parse_expression();
    ExprPtr expr = make(ExprKind::item, line);
    adopt(*expr, std::move(base));
    adopt(*expr, std::move(first));
    if (skip_op(":")) {
      expr->kind = ExprKind::slice;
      adopt(*expr, is_op(":") || is_op("]") ? nullptr : parse_expression());
      adopt(*expr, !skip_op(":") || is_op("]") ? nullptr : parse_expression());
    }
    if (is_op(",")) unsupported("subscript with", ",", line);
    expect_op("]");
    return expr;
  }

  ExprPtr parse_call(ExprPtr callee) {
    ExprPtr expr = make(ExprKind::call, current().line);
    adopt(*expr, std::move(callee));
    parse_arguments(*expr);
    return expr;
  }

  void parse_arguments(Expr& expr) {
    expect_op("(");
    bool first = true;
    while (!is_op(")")) {
      if (!first) expect_op(",");
      if (is_op(")")) break;
      first = false;
      if (is_op("*") || is_op("**")) unsupported("argument", current().text, current().line);
      if (current().kind == TokenKind::name && look().kind == TokenKind::op && look().text == "=") {
        const std::string name = next().text;
        next();
        ExprPtr value = parse_expression();
        deepen(expr, value);
        for (const auto& [known, _] : expr.args.named) {
          if (known == name) fail(fmt::format("argument {} is given twice", quote(name)));
        }
        expr.args.named.emplace_back(name, std::move(value));
      } else {
        if (!expr.args.named.empty()) fail("a positional argument follows a named one");
        ExprPtr value = parse_expression();
        deepen(expr, value);
        expr.args.positional.push_back(std::move(value));
      }
    }
    next();
  }

  ExprPtr parse_filters_and_tests(ExprPtr expr) {
    for (;;) {
      if (is_op("|")) {
        expr = parse_filters(std::move(expr), false);
      } else if (is_name("is")) {
        expr = parse_test(std::move(expr));
      } else if (is_op("(")) {
        expr = parse_call(std::move(expr));
      } else {
        return expr;
      }
    }
  }

  std::string dotted_name() {
    std::string name = expect_name();
    while (skip_op(".")) name += "." + expect_name();
    return name;
  }

  // Filters after `|`; the first one without it when `inline_first`. Without a base the text of a block is filtered.
  ExprPtr parse_filters(ExprPtr base, bool inline_first) {
    while (is_op("|") || inline_first) {
      if (!inline_first) next();
      inline_first = false;
      ExprPtr expr = make(ExprKind::filter, current().line);
      expr->text = dotted_name();
      if (!is_filter(expr->text)) unsupported("filter", expr->text, expr->line);
      adopt(*expr, std::move(base));
      if (is_op("(")) parse_arguments(*expr);
      check_named_argument(*expr);
      base = std::move(expr);
    }
    return base;
  }

  // map, select and reject take the name of a filter or a test as their argument.
  void check_named_argument(const Expr& expr) const {
    const auto& args = expr.args.positional;
    const bool by_attribute = expr.text == "selectattr" || expr.text == "rejectattr";
    const size_t at = by_attribute ? 1 : 0;
    if (at >= args.size() || args[at]->kind != ExprKind::string) return;
    const std::string& name = args[at]->text;
    if (expr.text == "map" && !is_filter(name)) unsupported("filter", name, expr.line);
    if ((by_attribute || expr.text == "select" || expr.text == "reject") && !is_test(name)) {
      unsupported("test", name, expr.line);
    }
  }

  ExprPtr parse_test(ExprPtr base) {
    const int line = next().line;
    const bool negated = skip_name("not");
    ExprPtr expr = make(ExprKind::test, line);
    expr->text = dotted_name();
    if (!is_test(expr->text)) unsupported("test", expr->text, line);
    adopt(*expr, std::move(base));
    const Token& token = current();
    const bool operand = token.kind == TokenKind::name || token.kind == TokenKind::string ||
                         token.kind == TokenKind::integer || token.kind == TokenKind::number || is_op("[") ||
                         is_op("{");
    if (is_op("(")) {
      parse_arguments(*expr);
    } else if (operand && !is_name("else") && !is_name("or") && !is_name("and")) {
      if (is_name("is")) fail("tests cannot be chained with 'is'");
      if (!is_name("if") && !is_name("not") && !is_name("in") && !is_name("recursive")) {
        ExprPtr argument = parse_postfix(parse_primary());
        deepen(*expr, argument);
        expr->args.positional.push_back(std::move(argument));
      }
    }
    if (!negated) return expr;
    ExprPtr inverse = make(ExprKind::logical_not, line);
    adopt(*inverse, std::move(expr));
    return inverse;
  }

  std::vector<Token> tokens_;
  const std::string& name_;
  size_t pos_ = 0;
  int depth_ = 0;
  int loops_ = 0;
  struct {
    bool caller = false, varargs = false, kwargs = false;
  } mentioned_;  // in the macro being read
};

}  // namespace

Body parse_template(std::string_view source, const std::string& name) { return Parser(source, name).run(); }

}  // namespace eadem::io::chat
