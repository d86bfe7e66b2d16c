// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/template/expression_parser.h"

#include <algorithm>
#include <array>
#include <utility>

#include "eadem/io/template/library.h"

namespace eadem::io::chat {
namespace {

// Methods that Jinja or Python has and this interpreter lacks. Any other method that is called is looked up when it
// renders, because a template may have defined it.
constexpr auto kMissingMethods = std::to_array<std::string_view>(
    {"center",      "encode",    "expandtabs", "format",    "format_map", "isascii",          "isidentifier",
     "isprintable", "istitle",   "ljust",      "maketrans", "rjust",      "translate",        "zfill",
     "casefold",    "swapcase",  "fromkeys",   "bit_count", "bit_length", "as_integer_ratio", "is_integer",
     "hex",         "conjugate", "from_bytes", "fromhex",   "to_bytes"});
constexpr auto kMissingGlobals = std::to_array<std::string_view>({"cycler", "joiner", "lipsum"});

}  // namespace

ExprPtr ExpressionParser::make(ExprKind kind, int line) const {
  auto expr = std::make_unique<Expr>();
  expr->kind = kind;
  expr->line = line;
  return expr;
}

void ExpressionParser::deepen(Expr& expr, const ExprPtr& child) const {
  if (!child) return;
  expr.depth = std::max(expr.depth, child->depth + 1);
  if (expr.depth > kMaxDepth) fail(fmt::format("nested more than {} deep", kMaxDepth), expr.line);
}

void ExpressionParser::adopt(Expr& expr, ExprPtr child) const {
  deepen(expr, child);
  expr.children.push_back(std::move(child));
}

ExprPtr ExpressionParser::parse_tuple(bool with_condition, Names ends, bool in_parentheses) {
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

ExprPtr ExpressionParser::parse_expression() {
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

ExprPtr ExpressionParser::parse_or() {
  const Level level(*this);
  const int line = current().line;
  return parse_list(
      ExprKind::logical_or, line, [&] { return parse_and(); }, [&] { return skip_name("or"); });
}

ExprPtr ExpressionParser::parse_and() {
  const int line = current().line;
  return parse_list(
      ExprKind::logical_and, line, [&] { return parse_not(); }, [&] { return skip_name("and"); });
}

ExprPtr ExpressionParser::parse_concat() {
  const int line = current().line;
  return parse_list(
      ExprKind::concat, line, [&] { return parse_product(); }, [&] { return skip_op("~"); });
}

template <typename Parse, typename Skip>
ExprPtr ExpressionParser::parse_list(ExprKind kind, int line, Parse parse, Skip skip) {
  ExprPtr first = parse();
  if (!skip()) return first;
  ExprPtr expr = make(kind, line);
  adopt(*expr, std::move(first));
  do adopt(*expr, parse());
  while (skip());
  return expr;
}

ExprPtr ExpressionParser::parse_not() {
  if (!is_name("not")) return parse_compare();
  const Level level(*this);
  ExprPtr expr = make(ExprKind::logical_not, next().line);
  adopt(*expr, parse_not());
  return expr;
}

bool ExpressionParser::skip_any(std::initializer_list<OpName> names, Op& op) {
  for (const OpName& entry : names) {
    if (!skip_op(entry.name)) continue;
    op = entry.op;
    return true;
  }
  return false;
}

// operand (op operand)*
template <typename Parse, typename Skip>
ExprPtr ExpressionParser::parse_chain(ExprKind kind, Parse parse, Skip skip) {
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

ExprPtr ExpressionParser::parse_compare() {
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

ExprPtr ExpressionParser::parse_sum() {
  return parse_chain(
      ExprKind::chain, [&] { return parse_concat(); },
      [&](Op& op) {
        return skip_any({{"+", Op::add}, {"-", Op::subtract}}, op);
      });
}

ExprPtr ExpressionParser::parse_product() {
  return parse_chain(
      ExprKind::chain, [&] { return parse_power(); },
      [&](Op& op) {
        return skip_any({{"*", Op::multiply}, {"/", Op::divide}, {"//", Op::floor_divide}, {"%", Op::modulo}}, op);
      });
}

ExprPtr ExpressionParser::parse_power() {
  return parse_chain(
      ExprKind::chain, [&] { return parse_unary(true); },
      [&](Op& op) {
        return skip_any({{"**", Op::power}}, op);
      });
}

ExprPtr ExpressionParser::parse_unary(bool with_filter) {
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

ExprPtr ExpressionParser::parse_primary() {
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

ExprPtr ExpressionParser::parse_name() {
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

ExprPtr ExpressionParser::parse_list_literal() {
  ExprPtr expr = make(ExprKind::list, next().line);
  while (!is_op("]")) {
    if (!expr->children.empty()) expect_op(",");
    if (is_op("]")) break;
    adopt(*expr, parse_expression());
  }
  next();
  return expr;
}

ExprPtr ExpressionParser::parse_dict_literal() {
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

ExprPtr ExpressionParser::parse_postfix(ExprPtr expr) {
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

ExprPtr ExpressionParser::parse_attribute(ExprPtr base) {
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

ExprPtr ExpressionParser::parse_item(ExprPtr base) {
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

ExprPtr ExpressionParser::parse_call(ExprPtr callee) {
  ExprPtr expr = make(ExprKind::call, current().line);
  adopt(*expr, std::move(callee));
  parse_arguments(*expr);
  return expr;
}

void ExpressionParser::parse_arguments(Expr& expr) {
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

ExprPtr ExpressionParser::parse_filters_and_tests(ExprPtr expr) {
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

std::string ExpressionParser::dotted_name() {
  std::string name = expect_name();
  while (skip_op(".")) name += "." + expect_name();
  return name;
}

ExprPtr ExpressionParser::parse_filters(ExprPtr base, bool inline_first) {
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
void ExpressionParser::check_named_argument(const Expr& expr) const {
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

ExprPtr ExpressionParser::parse_test(ExprPtr base) {
  const int line = next().line;
  const bool negated = skip_name("not");
  ExprPtr expr = make(ExprKind::test, line);
  expr->text = dotted_name();
  if (!is_test(expr->text)) unsupported("test", expr->text, line);
  adopt(*expr, std::move(base));
  const Token& token = current();
  const bool operand = token.kind == TokenKind::name || token.kind == TokenKind::string ||
                       token.kind == TokenKind::integer || token.kind == TokenKind::number || is_op("[") || is_op("{");
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

}  // namespace eadem::io::chat
